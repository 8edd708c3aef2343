"""Shared inputs: a small tokenizer with a chat template, and model folders around it."""

import atexit
import gc
import json
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.amount import ALL
from tests.forked_children import forked_children
from tests.servers import Server, emptied, running_postgres, running_redis

if not os.path.exists("/dev/nvidiactl"):  # before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

# however slow the machine is; the same examples each time, but in a campaign
settings.register_profile(
    "ramify", deadline=None, derandomize=not ALL, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ramify")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog. Capital of France? Paris. And Spain? Madrid.",
    "user assistant system tool hello world one two three four five six seven eight nine ten",
    "Plan a 1-day trip. Merge the best parts. Äpfel, naïve, café, 東京, 🙂 and so on.",
]


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector never looks at it again.

    Torch and thousands of tests are millions of objects: without this, each `gc.collect()` takes half a
    second, and each engine that a test starts in this process makes one.
    """
    if hasattr(session.config, "workerinput"):  # of xdist, which has told all when it ends
        atexit.register(os._exit, 0)  # last of all: to take a million objects down takes 2 s
    _share_rewriting(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # tests make few rings


def _share_rewriting(config: pytest.Config) -> None:
    """Each process of a whole run begins with other files, and finds the rest rewritten by the others.

    Rewriting assertions takes longer than all imports, and all of them come to a file at once otherwise.
    """
    about = getattr(config, "workerinput", None)
    if about is None or config.args != config.getini("testpaths"):
        return
    files = sorted(
        str(path)
        for path in Path(__file__).parent.rglob("test_*.py")
        if "node_modules" not in path.parts
    )
    first = len(files) * int(about["workerid"].removeprefix("gw")) // about["workercount"]
    config.args = files[first:] + files[:first]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In one order in all processes, and those marked "slow" first.

    So no process waits for another one's long test at the end of a run.
    """
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, item.path))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """At its end a process gives all of it back, or the system takes it (see `pytest_collection`)."""
    if not hasattr(session.config, "workerinput"):
        gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers that tests start with a port of their own save sessions here, not in the user's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def children_are_forked() -> Iterator[None]:
    """For folders whose tests run engines: see `tests/forked_children.py`."""
    with pytest.MonkeyPatch.context() as patch, forked_children(patch):
        yield


@pytest.fixture(scope="session")
def caches_are_checked() -> Iterator[None]:
    """From here on in this process: see `tests/actors/cache/integrity.py`."""
    from tests.actors.cache.integrity import checked_when_idle

    with checked_when_idle():
        yield


def write_tokenizer(folder: Path, vocab_size: int = 384) -> None:
    """A byte-level BPE tokenizer with ChatML turns; ids 0, 1, 2 are the special tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2, "vocab_size": 384}))


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and no weights: what an engine with a fake executor needs."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def greedy(folder: Path, place: Path) -> Path:
    """A copy in `place` whose model chooses greedily by default: programs say the same each time."""
    copy = place / "model"
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text('{"do_sample": false}')
    return copy


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A PostgreSQL of our own."""
    with running_postgres() as server:
        yield server or pytest.skip("this machine has no PostgreSQL server")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    """A Redis or Valkey of our own."""
    with running_redis() as server:
        yield server or pytest.skip("this machine has neither Redis nor Valkey")


@pytest.fixture
def postgres_url(postgres_server: Server) -> str:
    """Of a database without a store."""
    return emptied(postgres_server)


@pytest.fixture
def redis_url(redis_server: Server) -> str:
    """Likewise."""
    return emptied(redis_server)
