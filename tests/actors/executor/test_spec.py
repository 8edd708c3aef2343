"""Torch is imported without what its tracers alone need, and that is there when it is asked for."""

import subprocess
import sys

import pytest

from ramify.actors.executor.spec import UntilRead

_PROGRAM = """
import sys
from ramify.actors.executor.spec import _TRACING, _import_torch
_import_torch()
assert "torch" in sys.modules
assert _TRACING not in sys.modules, "torch reads it while it is imported: nothing is gained"
import torch
assert not hasattr(torch, "_meta_registrations")
from torch._meta_registrations import meta_index_Tensor
assert sys.modules[_TRACING].__file__ and torch.ones(3, device="meta").sum().shape == ()
"""


def test_torch_without_its_tracers_until_they_are_asked_for() -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert not found.returncode, found.stderr


def test_a_module_that_is_left_out_comes_when_a_name_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "colorsys", UntilRead("colorsys"))
    from colorsys import rgb_to_hsv

    assert rgb_to_hsv(0.0, 0.0, 0.0) == (0.0, 0.0, 0.0)
    assert not isinstance(sys.modules["colorsys"], UntilRead)
