"""Random sessions whose generations have constraints: forks, roll backs, cancels, pauses, too few pages.

Whatever happens in the midst of an output: each op ends once, and an output that ended by itself obeys,
by Python's `re` and by `jsonschema`, with and without guessed tokens. On the CPU's executor with a real
drafter, outputs are besides those of a server that guesses nothing and is left in peace.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import msgspec
import pytest
import torch

from ramify.actors.scheduler.speculation import Speculation
from ramify.actors.session.branches.segments import OutputSegment
from ramify.gpu.startup.load import load_executor
from ramify.protocol import wire as w
from ramify.protocol.config import ModelConfig
from ramify.protocol.wire import Constraint
from tests.amount import ALL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    },
    "required": ["kind", "tags", "age"],
    "additionalProperties": False,
}
# what is kept different by what a row has written
NAMES: dict[str, Any] = {
    "type": "object",
    "patternProperties": {"^[ab]{1,2}$": {"enum": [1, 2, 12]}},
    "additionalProperties": False,
    "minProperties": 2,
    "maxProperties": 3,
}
NUMBERS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 21},
    "uniqueItems": True,
    "minItems": 2,
    "maxItems": 5,
}
GRAMMAR = 'start: "(" start ")" | /[a-z]{1,3}/'
CONSTRAINTS = [
    Constraint(regex=r"[0-9]{3}-[0-9]{4}"),
    Constraint(regex=r"(no|none)"),
    Constraint(regex=r"(a|bc){0,20}d"),
    Constraint(choices=["yes", "no", "yes and no"]),
    Constraint(json_schema=SCHEMA),
    Constraint(json_schema={"enum": [1, 12, "x"]}),
    Constraint(json_schema=NAMES),
    Constraint(json_schema=NUMBERS),
    Constraint(grammar=GRAMMAR),
]


def obeys(constraint: Constraint, text: str) -> bool:
    if constraint.regex is not None:
        return re.fullmatch(constraint.regex, text, re.A) is not None
    if constraint.choices is not None:
        return text in constraint.choices
    if constraint.grammar is not None:
        inner = text.strip("()")
        depth = (len(text) - len(inner)) // 2
        return (
            text == "(" * depth + inner + ")" * depth and re.fullmatch("[a-z]{1,3}", inner) is not None
        )
    assert constraint.json_schema is not None
    try:
        jsonschema.validate(json.loads(text), constraint.json_schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


class Program:
    """One client's random ops, and what became of its generations."""

    def __init__(self, engine: Any, name: str, rng: random.Random) -> None:
        self.client = engine.session(name, detach="pause")
        self.rng = rng
        self.ids = iter(range(2, 10_000))
        self.branches = ["main"]
        self.asked: dict[int, Constraint] = {}
        self.ops: dict[int, w.Generate] = {}
        self.away = False
        self.client.send(w.Append(id=1, text="hello"))

    def act(self) -> None:
        rng, ident, branch = self.rng, next(self.ids), self.rng.choice(self.branches)
        kind = rng.choice(["generate", "generate", "generate", "fork", "rollback", "cancel", "leave"])
        if self.away and kind != "leave":
            return
        if kind == "generate":
            self.asked[ident] = constraint = rng.choice(CONSTRAINTS)
            names = [f"b{ident}", f"c{ident}"] if rng.random() < 0.2 else []
            many: dict[str, Any] = {"n": 2, "as_": names} if names else {}
            self.branches += names
            self.ops[ident] = w.Generate(
                id=ident,
                branch=branch,
                constraint=constraint,
                quiet=True,
                seed=ident,
                max_tokens=rng.choice([5, 90, 90]),
                temperature=rng.choice([0.0, 1.0]),
                **many,
            )
            self.client.send(self.ops[ident])
        elif kind == "fork":
            self.branches.append(f"f{ident}")
            self.client.send(w.Fork(id=ident, branch=branch, as_=[f"f{ident}"]))
        elif kind == "rollback":
            self.client.send(w.Rollback(id=ident, branch=branch, to=1))
        elif kind == "cancel":
            self.client.send(w.Cancel(id=ident, branch=branch))
        else:
            self.away = not self.away
            if self.away:
                self.client.drop()
            else:
                self.client.connect()

    def check(self) -> int:
        """How many outputs ended by themselves; they all obey."""
        stopped = 0
        for ident, constraint in self.asked.items():
            dones = [end for end in self.client.replies[ident] if isinstance(end, w.Done)]
            assert len({done.branch for done in dones}) == len(dones)
            for done in dones:
                if done.reason == "stop":
                    assert obeys(constraint, done.text or ""), (constraint, done.text)
                    stopped += 1
                else:
                    assert done.reason in ("cancelled", "length"), done
        return stopped


def played(engine: Any, rng: random.Random, names: str) -> list[Program]:
    """Programs of three clients, side by side, to their ends."""
    programs = [Program(engine, name, rng) for name in names]
    for _ in range(40):
        rng.choice(programs).act()
        engine.pump(rng.randrange(12))
    for program in programs:
        if program.away:
            program.client.connect()
    engine.pump()
    return programs


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_sessions(sim: Callable[..., Any], seed: int, drafts: int) -> None:
    rng = random.Random(seed)
    engine = sim(
        seed=seed,
        pages=rng.choice([160, 4000]),
        context=120,
        drafts=drafts,
        max_rows=rng.choice([3, 16]),
        constraints=rng.choice([2, 512]),
    )
    programs = played(engine, rng, "abc")
    assert sum(program.check() for program in programs) > 1
    assert not engine.executor.constraints._of
    assert engine.executor.corruptions == 0


# --- with a real drafter ------------------------------------------------------------------------------


class Output(NamedTuple):
    """What a generation left on a branch."""

    before: list[int]  # all tokens of its branch up to it
    op: w.Generate
    tokens: list[int]


def outputs(program: Program) -> Iterator[Output]:
    """Of the generations that are still on a branch."""
    number = program.client.number
    for branch in program.client.engine.cores[number].state.branches.values():
        tokens: list[int] = []
        for segment in branch.segments:
            if isinstance(segment, OutputSegment):
                yield Output(list(tokens), program.ops[segment.op or 0], list(segment.tokens))
            tokens += segment.tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A random model of two layers, with the sessions' tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 384, "hidden_size": 64, "eos_token_id": 2,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 256,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def real(sim: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes engines with the CPU's executor: `real("ngram", kv_tokens=..., quantization=...)`.

    How many drafts each row has is left to chance: what pays depends on how fast the machine is.
    """
    rng = random.Random(1)

    def some(self: Speculation, records: Any, room: int, *, changed: bool) -> list[int] | None:
        most = min(self._most, room // max(1, len(records)))
        return [rng.randint(0, most) if record is not None else 0 for record in records]

    monkeypatch.setattr(Speculation, "choose", some)

    def make(draft: str, kv_tokens: int, quantization: str) -> Any:
        torch.manual_seed(0)
        settings = ModelConfig(
            path=folder, device="cpu", quantization=quantization, load_format="dummy", context=120,
            threads=1, kv_tokens=kv_tokens, max_rows=16, step_tokens=64, draft=draft,
        )  # fmt: skip
        engine = sim(context=120)
        engine._make_executor = lambda: load_executor(settings, lambda what, share: None)
        engine._start()
        return engine

    return make


def undisturbed(engine: Any, output: Output) -> list[Any]:
    """Sessions that ask for the same and do nothing else, one for each seed that it may have had."""
    clients = [engine.session("alone") for _ in range(output.op.n)]
    for index, client in enumerate(clients):
        seed = (output.op.seed or 0) + index
        client.send(
            w.Append(id=1, tokens=output.before),
            msgspec.structs.replace(output.op, id=2, branch="main", n=1, as_=None, seed=seed),
        )
    return clients


@pytest.mark.parametrize("seed", range(40) if ALL else [25, 39])
@pytest.mark.parametrize(
    ("draft", "quantization"), [("ngram", "auto"), ("model", "auto"), ("model", "none")]
)
def test_a_drafter_changes_no_output(
    real: Callable[..., Any], folder: Path, seed: int, draft: str, quantization: Any
) -> None:
    """Greedy or seeded, forked, paused, cancelled, retracted: each output obeys, and its tokens are
    those of an engine that guesses nothing and that nobody disturbs. 40 programs: `tests.amount`.
    """
    engine = real(str(folder) if draft == "model" else draft, 160, quantization)
    programs = played(engine, random.Random(seed), "abc")
    assert sum(program.check() for program in programs) > 0
    found = [output for program in programs for output in outputs(program)]
    plain = real("none", 4096, quantization)
    alone = [undisturbed(plain, output) for output in found]
    plain.pump()
    for output, clients in zip(found, alone, strict=True):
        segments = [plain.cores[client.number].state.branches["main"].segments[-1] for client in clients]
        assert output.tokens in [list(segment.tokens)[: len(output.tokens)] for segment in segments]
