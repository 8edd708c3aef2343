"""What `--store` names, and that no password is shown."""

from pathlib import Path

import pytest

from ramify.protocol.errors import ConfigError
from ramify.protocol.store_url import kind_of, shown


@pytest.mark.parametrize(
    ("store", "kind"),
    [
        ("s.db", "file"),
        ("/a/b:c.db", "file"),
        (Path("a://b"), "file"),
        ("postgresql://h/db", "postgres"),
        ("postgres://", "postgres"),
        ("redis://h", "redis"),
        ("rediss://h", "redis"),
        ("valkey://h", "redis"),
        ("valkeys://h", "redis"),
    ],
)
def test_kinds(store: str | Path, kind: str) -> None:
    assert kind_of(store) == kind


def test_other_urls_are_refused() -> None:
    with pytest.raises(ConfigError, match="postgresql://") as error:
        kind_of("mysql://u:secret@h/db")
    assert "secret" not in error.value.message


@pytest.mark.parametrize(
    ("store", "text"),
    [
        ("postgresql://u:secret@h:5/db?password=secret", "postgresql://h:5/db"),
        ("redis://:se/cret@h:6379/0", "redis://h:6379/0"),
        ("redis://:se@cret@h", "redis://h"),
        ("redis://h/1", "redis://h/1"),
        ("dir/s.db", "dir/s.db"),
        (Path("s@b"), "s@b"),
    ],
)
def test_what_is_shown(store: str | Path, text: str) -> None:
    assert shown(store) == text
