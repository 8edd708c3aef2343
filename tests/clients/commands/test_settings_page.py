"""docs/settings.md says what the declarations say."""

from pathlib import Path

from ramify.clients.commands.settings import SERVER
from ramify.clients.commands.settings_page import page
from ramify.protocol.settings import declared

PAGE = Path(__file__).parents[3] / "docs/settings.md"


def test_the_page_is_current() -> None:
    """If not: python -m ramify.clients.commands.settings_page > docs/settings.md"""
    assert PAGE.read_text() == page()


def test_every_flag_and_variable_has_a_row() -> None:
    text = page()
    for each in (each for kind in SERVER for each in declared(kind)):
        if each.flag is not None:
            assert f"`{each.flag}`" in text
        if each.setting.environment:
            assert f"| `{each.setting.environment}` |" in text
