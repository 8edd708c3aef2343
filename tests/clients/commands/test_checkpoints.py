"""`--model`: folders, and names of the hub that are looked up in a cache made here."""

import json
from pathlib import Path

import pytest

from ramify.clients.commands.checkpoints import find_model
from ramify.protocol.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HF_HUB_OFFLINE=1, which is read at import."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def cached(cache: Path, name: str, files: dict[str, str]) -> Path:
    """A model as the hub's cache has it."""
    root = cache / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for file, text in files.items():
        (snapshot / file).write_text(text)
    return snapshot


SMALL = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": ""}


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert find_model(str(tmp_path)) == (tmp_path, None)
    missing = tmp_path / "nothing"
    assert find_model(str(missing)) == (missing, None)  # the loader says what it lacks
    assert find_model("model") == (Path("model"), None)


def test_a_name_in_the_cache(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "some-one/model.1", SMALL)
    assert find_model("some-one/model.1", tmp_path) == (snapshot, "some-one/model.1")
    assert find_model(f"some-one/model.1@{COMMIT}", tmp_path) == (snapshot, "some-one/model.1")


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}", "model.safetensors": ""},
        {"config.json": "{}", "tokenizer.json": "{}"},
        {
            "config.json": "{}",
            "tokenizer.json": "{}",
            "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors"}}),
        },
    ],
)
def test_a_download_that_was_broken_off_is_not_taken(tmp_path: Path, files: dict[str, str]) -> None:
    cached(tmp_path, "some/model", files)
    with pytest.raises(ConfigError, match="some/model is no folder here"):
        find_model("some/model", tmp_path)


def test_a_name_that_is_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no/where is no folder"):
        find_model("no/where", tmp_path)


def test_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model-Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert find_model(str(file)) == (file, "model-Q8_0")


def test_a_gguf_file_in_the_cache_by_its_type(tmp_path: Path) -> None:
    files = dict.fromkeys(
        ["m-q4_k_m.gguf", "m-Q4_K_S.gguf", "m-Q4_K.gguf", "mmproj-Q8_0.gguf", "x.txt"], ""
    )
    snapshot = cached(tmp_path, "some/model", files)
    for kind, file in (
        ("Q4_K_M", "m-q4_k_m.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("Q4_K", "m-Q4_K.gguf"),
    ):
        assert find_model(f"some/model:{kind}", tmp_path) == (snapshot / file, f"some/model:{kind}")
    for kind in ("Q8_0", "Q4", "K_M", "IQ1_S"):
        with pytest.raises(ConfigError, match=f"no GGUF file with {kind}"):
            find_model(f"some/model:{kind}", tmp_path)
    with pytest.raises(ConfigError, match="not complete"):
        find_model("some/model", tmp_path)
