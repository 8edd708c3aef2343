"""Which attention kernels are chosen, and what is said where they cannot be had."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.gpu.attention import registry
from ramify.gpu.attention.registry import KernelChoice, choose
from ramify.gpu.attention.spec import AttentionShape, AttentionSpec
from ramify.protocol.errors import ModelError

SHAPE = AttentionShape(4, 2, 128, torch.bfloat16, (AttentionSpec(128**-0.5),))
CPU = torch.device("cpu")


def test_a_choice_says_why() -> None:
    choice = choose("auto", [SHAPE], CPU)
    assert (choice.name, choice.reason) == ("torch", "the device is a CPU")
    assert choose("torch", [SHAPE], CPU).name == "torch"
    assert KernelChoice("fa3", "triton", "").name == "flashinfer prefill fa3 + triton decode"


def test_what_cannot_be_had_is_an_error_that_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ModelError, match=r"--attention flashinfer: it runs on CUDA.*--attention triton"):
        choose("flashinfer", [SHAPE], CPU)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ModelError, match=r"TRITON_INTERPRET=1.*; give --attention torch"):
        choose("triton", [SHAPE], CPU)


PLAIN = AttentionSpec(128**-0.5)
FEATURES: dict[str, list[AttentionShape]] = {
    "sliding windows": [dataclasses.replace(SHAPE, specs=(dataclasses.replace(PLAIN, window=9),))],
    "of these the last tokens alone kept": [SHAPE, dataclasses.replace(SHAPE, windowed=True)],
    "sinks, soft caps, scales of their own": [
        dataclasses.replace(SHAPE, specs=(PLAIN, dataclasses.replace(PLAIN, softcap=30.0)))
    ],
    "heads of several sizes": [SHAPE, dataclasses.replace(SHAPE, head_dim=256)],
    "keys and values in fp8": [dataclasses.replace(SHAPE, codes=True)],
    "latents": [dataclasses.replace(SHAPE, head_dim=576, value_dim=512, kv_heads=1)],
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_of_the_internals_says_what_is_served(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns of Triton and FlashInfer; a GPU of its kind and the package are made up."""
    page = Path(__file__).parents[3] / "docs" / "internals" / "model.md"
    (row,) = [line for line in page.read_text().splitlines() if line.startswith(f"| {feature} |")]
    _, triton, deterministic, flashinfer, _ = [cell.strip() for cell in row.split("|")[2:-1]]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: name)
    for name in ("_import_fault", "_load_fault"):
        monkeypatch.setattr(registry, name, lambda *about: None)
    monkeypatch.setattr(registry, "_kernels", lambda *about: [])

    def served(asked: str, **more: bool) -> str:
        try:
            choose(asked, FEATURES[feature], torch.device("cuda"), **more)
        except ModelError:
            return "no"
        return "yes"

    assert (served("triton"), served("auto", deterministic=True)) == (triton, deterministic)
    assert served("flashinfer") == flashinfer


def test_heads_of_512_are_served_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    wide = dataclasses.replace(SHAPE, head_dim=512)
    assert choose("triton", [SHAPE, wide], CPU).name == "triton"
    with pytest.raises(ModelError, match=r"float32: give --dtype bfloat16; give --attention torch"):
        choose("triton", [SHAPE, dataclasses.replace(wide, dtype=torch.float32)], CPU)
    assert choose("auto", [SHAPE, wide], CPU, deterministic=True).deterministic


class Machine:
    """A GPU and a FlashInfer that are not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:

        self.capability, self.installed, self.built, self.compiler = (9, 0), True, True, False
        self.missing = ""  # a module of FlashInfer's that cannot be imported
        self.sources = True
        self.loaded: list[Any] = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(registry.importlib.util, "find_spec", self.find)
        monkeypatch.setattr(registry, "import_module", self.imported)
        monkeypatch.setattr(registry, "_is_built", lambda module: self.built)
        monkeypatch.setattr(registry, "_can_build", lambda: self.compiler)

    def find(self, name: str) -> object:
        return object() if name != "flashinfer" or self.installed else None

    def imported(self, name: str) -> "Machine":
        if name == self.missing:
            raise FileNotFoundError(f"no {name}")
        return self

    def get_batch_prefill_module(self, *args: Any) -> None:
        if not self.sources:
            raise FileNotFoundError("batch_prefill_customize_config.jinja")
        self.loaded.append(args)

    get_batch_decode_module = get_batch_prefill_module

    def choose(self, asked: str, spec: dict[str, Any] | None = None, **sizes: Any) -> KernelChoice:
        shape = dataclasses.replace(SHAPE, **sizes)
        specs = (AttentionSpec(**({"scale": shape.head_dim**-0.5} | (spec or {}))),)
        return choose(asked, [dataclasses.replace(shape, specs=specs)], torch.device("cuda"))


@pytest.mark.parametrize(
    ("machine", "call", "extend", "reason"),
    [
        ({}, {}, "fa3", "Hopper"),
        ({"installed": False}, {}, "triton", "not installed"),
        ({"capability": (8, 0)}, {}, "triton", "FA2 is no faster"),
        ({"capability": (7, 5)}, {}, "triton", "8.0 or more"),
        ({"built": False, "compiler": True}, {}, "triton", "not compiled"),
        ({}, {"dtype": torch.float32}, "triton", "float32"),
        ({}, {"head_dim": 32}, "triton", "not 32"),
        ({}, {"head_dim": 80}, "torch", "not 80"),
        ({}, {"spec": {"softcap": 30.0}}, "triton", "soft-capped scores"),
        ({}, {"spec": {"scale": 0.5}}, "triton", "another scale"),
        ({}, {"heads": 71, "kv_heads": 1}, "torch", "not 71"),
        ({}, {"windowed": True}, "triton", "keep the last tokens in pages of their own"),
    ],
)
def test_auto_takes_fa3_where_it_is_at_hand(
    machine: dict[str, Any], call: dict[str, Any], extend: str, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    there = Machine(monkeypatch)
    vars(there).update(machine)
    choice = there.choose("auto", **call)
    assert choice.extend == extend
    assert choice.decode == ("torch" if extend == "torch" else "triton")
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("machine", "call", "mend"),
    [
        ({"installed": False}, {}, "pip install flashinfer-python"),
        ({"built": False}, {}, "install flashinfer-jit-cache"),
        ({}, {"dtype": torch.float32}, "--dtype bfloat16"),
        ({}, {"head_dim": 32}, "--attention triton"),
        ({}, {"spec": {"softcap": 30.0}}, "soft-capped scores.*--attention triton"),
        ({}, {"spec": {"sinks": torch.zeros(4)}}, "sinks.*--attention triton"),
        ({}, {"windowed": True}, "pages of their own.*--attention triton"),
    ],
)
def test_flashinfer_is_refused_with_a_mend(
    machine: dict[str, Any], call: dict[str, Any], mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Machine(monkeypatch)
    vars(there).update(machine)
    with pytest.raises(ModelError, match=mend):
        there.choose("flashinfer", **call)


def test_flashinfer_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Machine(monkeypatch)
    assert there.choose("flashinfer").name == "flashinfer prefill fa3 + flashinfer decode"
    there.capability, there.built, there.compiler = (8, 9), False, True
    choice = there.choose("flashinfer")
    assert (choice.extend, choice.compiles) == ("fa2", True)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"sources": False}, "cannot be loaded.*batch_prefill_customize_config.jinja"),
        ({"missing": "flashinfer"}, "flashinfer cannot be imported"),
        ({"missing": "flashinfer.jit.env"}, "flashinfer.jit.env cannot be imported"),
        ({"missing": "flashinfer.prefill"}, "flashinfer.prefill cannot be imported"),
    ],
)
def test_a_damaged_flashinfer_leaves_the_work_to_triton(
    damage: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its sources are read even for compiled kernels: it imports, and fails at the first step."""
    there = Machine(monkeypatch)
    vars(there).update(damage)
    choice = there.choose("auto")
    assert choice.name == "triton"
    assert re.search(told, choice.reason)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.search(f"{told}.*install flashinfer-python again", caplog.text)
    with pytest.raises(ModelError, match=f"{told}.*--attention triton"):
        there.choose("flashinfer")


def test_kernels_are_loaded_where_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments of FlashInfer's own `plan`, so that they are loaded once."""
    there = Machine(monkeypatch)
    common = (*[torch.bfloat16] * 3, torch.int32, 128, 128, 0, False, False)
    there.choose("auto")
    assert there.loaded == [("fa3", *common, False)]
    there.loaded.clear()
    there.choose("flashinfer")
    assert there.loaded == [("fa3", *common, False), ("fa2", *common, False), common]
    there.loaded.clear()
    there.built = False
    there.choose("auto")
    assert there.loaded == []
