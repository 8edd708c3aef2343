"""Drafts of models with fixed states: what stands behind the last accepted one is the row's state."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ramify.gpu.drafting.base import Guesses
from ramify.gpu.kv.states import StateLayout, StatePool
from ramify.protocol.plan import ExtendRow, StepPlan, pack, unpack
from tests.gpu.drafting.conftest import write_folder
from tests.gpu.drafting.test_jump_forward import SAMPLINGS, generate
from tests.gpu.models.families.test_families import prompts
from tests.gpu.models.families.test_hybrids import save

DRAFTS = 3
PROMPT = 21


class Script:
    """Guesses what it is told."""

    def __init__(self) -> None:
        self.guesses: dict[int, list[int]] = {}

    def propose(self, rows: Any, most: Any) -> Guesses:
        found = [self.guesses.get(row, [])[:count] for row, count in zip(rows, most, strict=True)]
        tokens = np.array([token for guess in found for token in guess], dtype=np.int32)
        return Guesses(np.array([len(guess) for guess in found]), tokens)

    def __getattr__(self, name: str) -> Any:
        return lambda *about: ()


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[StatePool]:
    """Those that are made."""
    made: list[StatePool] = []
    allocate = StateLayout.allocate
    monkeypatch.setattr(
        StateLayout, "allocate", lambda *about: made.append(allocate(*about)) or made[-1]
    )
    return made


def states(pool: StatePool, slot: int) -> list[torch.Tensor]:
    return [part[slot].clone() for layer in pool.layers for part in layer]


def sampled(d: Any, plan: StepPlan) -> dict[int, list[int]]:
    result = d.executor.launch(plan).result()
    tokens, found = list(unpack(result.tokens)), {}
    rows = unpack(result.rows)
    for row, count in zip(rows, unpack(result.counts) or [1] * len(rows), strict=True):
        found[row], tokens = tokens[:count], tokens[count:]
    return found


@pytest.mark.parametrize("case", ["qwen3_5", "lfm2", "granite4"])
def test_refused_at_each_position(case: str, tmp_path: Path, drive: Any, pools: list[StatePool]) -> None:
    """Rows with right and wrong drafts beside each other; a fork at once, and one from before."""
    save(tmp_path, case)
    prompt = prompts()[0][:PROMPT]
    d = drive(tmp_path, draft="ngram", max_rows=20)
    script = d.executor.drafts.drafter = Script()
    d.step(opens=[d.open(0, d.pages(0, 64))])
    wanted = [d.prefill(0, 0, prompt)[0]]
    after, table = [], d.executor.rows
    for _ in range(DRAFTS + 4):
        wanted.append(d.step(decodes=[0])[0])
        after.append(states(pools[0], d.states[0]))
    opens = [d.open(row, d.pages(256 * row, 64)) for row in range(1, 6)]
    extends = [ExtendRow(row, 0, pack(prompt), True) for row in range(1, 6)]
    assert set(d.step(opens=opens, extends=extends).values()) == {wanted[0]}
    source = dict(d.states)
    wrong = (wanted[1] + 1) % 50 + 2
    script.guesses = {
        row: [*wanted[1 : 1 + right], *[wrong] * (DRAFTS - right)] for row, right in zip(
            (1, 2, 3, 4), range(DRAFTS + 1), strict=True)
    }  # fmt: skip
    asked = pack([DRAFTS] * 4 + [0])
    found = sampled(d, d.plan(decodes=[1, 2, 3, 4, 5], drafts=asked))
    for row, right in zip((1, 2, 3, 4, 5), (0, 1, 2, 3, 0), strict=True):
        assert found[row] == wanted[1 : 2 + right]
        for own, plain in zip(states(pools[0], d.states[row]), after[right], strict=True):
            torch.testing.assert_close(own, plain, atol=1e-3, rtol=1e-2)
    script.guesses = {}
    # a fork of row 2 right behind its refused draft, and the slot from before the step, which is whole
    shared = list(table.pages[2, : PROMPT + 2])
    opens = [d.open(6, [*shared, *d.pages(2000, 20)], cached=PROMPT + 2),
             d.open(7, [*shared[:PROMPT], *d.pages(2100, 20)], cached=PROMPT)]  # fmt: skip
    forked, old = d.states[2], source[2]
    extends = [ExtendRow(6, PROMPT + 2, pack([wanted[2]]), True),
               ExtendRow(7, PROMPT, pack([wanted[0]]), True)]  # fmt: skip
    pairs = pack([forked, 19, old, 22])
    first = d.step(opens=opens, extends=extends, states=pairs)
    assert (first[6], first[7]) == (wanted[3], wanted[1])
    outputs = {row: found[row] for row in (1, 2, 3, 4, 5)}
    while min(map(len, outputs.values())) < DRAFTS + 3:
        for row, tokens in sampled(d, d.plan(decodes=[1, 2, 3, 4, 5])).items():
            outputs[row] += tokens
    for output in outputs.values():
        assert output[: DRAFTS + 3] == wanted[1 : DRAFTS + 4]


def test_a_draft_model_beside_states(tmp_path: Path, drive: Any) -> None:
    import transformers

    save(tmp_path, "lfm2")
    vocabulary = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    folder = write_folder(tmp_path / "draft", vocab_size=vocabulary)
    sizes = json.loads((folder / "config.json").read_text())
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    shutil.copy(folder / "tokenizer.json", tmp_path)
    prompt = prompts()[0][:PROMPT]
    wanted = drive(tmp_path).generate(0, prompt, 12, list(range(64)))
    d = drive(tmp_path, draft=str(folder), max_rows=8)
    opens = [d.open(0, d.pages(0, 64), history=pack(prompt))]
    output = [*d.step(opens=opens, extends=[ExtendRow(0, 0, pack(prompt), True)]).values()]
    while len(output) < 12:
        output += sampled(d, d.plan(decodes=[0], drafts=pack([3])))[0]
    assert output[:12] == wanted
    assert d.executor.drafts.drafted


def test_nothing_behind_an_end_is_accepted(tmp_path: Path, drive: Any) -> None:
    """So the state at the end of a turn is the row's."""
    save(tmp_path, "lfm2")
    prompt = prompts()[0][:PROMPT]
    wanted = drive(tmp_path).generate(0, prompt, 5, list(range(64)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": wanted[2]}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    d = drive(tmp_path, draft="ngram", max_rows=8)
    script = d.executor.drafts.drafter = Script()
    script.guesses = {0: wanted[1:5]}
    d.step(opens=[d.open(0, d.pages(0, 64))])
    d.prefill(0, 0, prompt)
    assert sampled(d, d.plan(decodes=[0], drafts=pack([4])))[0] == wanted[1:3]


def test_what_a_constraint_forces_is_drafted(
    tmp_path: Path, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are slots for the states of drafts; outputs are those of single steps."""
    save(tmp_path, "lfm2")
    d = drive(tmp_path, draft="ngram", max_rows=32, kv_tokens=512)
    assert d.executor.info.max_forced > 0
    launch = d.executor.launch

    def launched(plan: StepPlan) -> Any:
        parts = {"opens": plan.opens, "extends": plan.extends, "decodes": list(unpack(plan.decodes))}
        return launch(msgspec.structs.replace(plan, states=d.plan(**parts).states))

    def with_states(plan: StepPlan) -> Any:
        if plan.extends:  # rows may sit out behind one token alone
            ahead = [ExtendRow(each.row, 0, each.tokens[:-4], False) for each in plan.extends]
            launched(msgspec.structs.replace(plan, extends=ahead)).result()
            last = [
                ExtendRow(each.row, len(each.tokens) // 4 - 1, each.tokens[-4:], True)
                for each in plan.extends
            ]
            plan = msgspec.structs.replace(plan, opens=[], closes=b"", extends=last)
        return launched(plan)

    monkeypatch.setattr(d.executor, "launch", with_states)
    plain, _, steps, forced = generate(d, jumps=False)
    jumped, _, fewer, forced_too = generate(d, jumps=True)
    late, *_ = generate(d, jumps=True, slow="masks")  # rows sit steps out
    free = len(SAMPLINGS)  # ran as long as the others did
    assert jumped.pop(free) == plain.pop(free)[: min(20, fewer)]
    del late[free]
    assert jumped == plain == late
    assert forced_too == forced
    assert fewer < 0.75 * steps
