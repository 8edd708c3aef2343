"""Files that hold secrets."""

from pathlib import Path

import pytest

from ramify.actors.kit.files import read_secret_file, warn_of_readers
from ramify.protocol.errors import ConfigError


@pytest.mark.parametrize(("mode", "told"), [(0o600, 0), (0o400, 0), (0o640, 2), (0o604, 2)])
def test_it_is_told_who_may_read_it(
    mode: int, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"secret")
    path.chmod(mode)
    assert read_secret_file(path, 6, "a file") == b"secret"
    warn_of_readers(path)
    assert len(caplog.records) == told
    assert all("chmod 600" in record.getMessage() for record in caplog.records)


def test_no_more_is_read_than_asked_for() -> None:
    with pytest.raises(ConfigError, match=r"^the key file /dev/zero has more than 100 bytes$"):
        read_secret_file(Path("/dev/zero"), 100, "the key file")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="/none cannot be read: No such file"):
        read_secret_file(tmp_path / "none", 1, "--flag", FileExistsError)
