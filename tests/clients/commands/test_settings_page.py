"""docs/settings.md says what the declarations say."""

import re
from pathlib import Path

from ramify.clients.commands.settings import SERVER
from ramify.clients.commands.settings_page import page
from ramify.protocol.settings import declared

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/settings.md"


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


def test_every_variable_that_the_server_reads_has_a_row() -> None:
    """RAMIFY_KERNEL_CACHE had none."""
    sources = [path.read_text() for part in ("actors", "gpu") for path in (ROOT / part).rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"environ[^\n]*\"(RAMIFY_\w+)\"", text)}
    assert "RAMIFY_KERNEL_CACHE" in read
    text = page()
    assert [name for name in sorted(read) if f"| `{name}` |" not in text] == []
