"""Which instructions are used on which CPU."""

import pytest

from ramify.gpu.native.host import isa_of

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
    assert isa.offset == (128 if architecture == "x86_64" else 0)


@pytest.mark.parametrize(
    ("architecture", "features"), [("x86_64", {"avx"}), ("x86_64", {"avx2", "fma"}), ("riscv64", set())]
)
def test_a_cpu_without_them_has_none(architecture: str, features: set[str]) -> None:
    assert isa_of(architecture, features) is None
