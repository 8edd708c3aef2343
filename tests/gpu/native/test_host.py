"""Which instructions are used on which CPU."""

import platform
import sys

import pytest
from llvmlite import binding

from ramify.gpu.native import host
from ramify.gpu.native.host import host_isa, isa_of

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl"}


@pytest.mark.parametrize(
    ("architecture", "features", "dot"),
    [
        ("x86_64", AVX512 | {"avx512vnni", "avxvnni"}, "vnni512"),
        ("x86_64", AVX512, "madd256"),
        ("x86_64", AVX2 | {"avxvnni"}, "vnni256"),
        ("x86_64", AVX2, "madd256"),
        ("aarch64", {"dotprod"}, "sdot"),
        ("arm64", {"neon"}, "plain"),
    ],
)
def test_the_fastest_dot_product_is_used(architecture: str, features: set[str], dot: str) -> None:
    isa = isa_of(architecture, features)
    assert isa is not None
    assert isa.dot == dot
    assert isa.offset == (128 if "vnni" in dot else 0)
    assert isa.code_offset == (128 if architecture == "x86_64" else 0)


@pytest.mark.parametrize(
    ("architecture", "features"), [("x86_64", {"avx"}), ("x86_64", {"avx2", "fma"}), ("riscv64", set())]
)
def test_a_cpu_without_them_has_none(architecture: str, features: set[str]) -> None:
    assert isa_of(architecture, features) is None


@pytest.mark.parametrize(("hwcap", "known"), [(1 << 20, True), (~(1 << 20) & 0xFFFF_FFFF, False)])
def test_linux_is_asked_about_arm_s_dot_products(
    monkeypatch: pytest.MonkeyPatch, hwcap: int, known: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(host, "_auxiliary", lambda kind: hwcap)
    monkeypatch.setattr(binding, "get_default_triple", lambda: "aarch64-unknown-linux-gnu")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"neon": True})
    isa = host_isa()
    assert isa is not None
    assert isa.dot == ("sdot" if known else "plain")
