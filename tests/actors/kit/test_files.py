"""The limit of open files, on a stand-in: the real one belongs to the test run."""

import resource

import pytest

from ramify.actors.kit.files import OTHERS, allow_files


@pytest.mark.parametrize(
    ("soft", "hard", "becomes", "warns"),
    [
        (1024, 1 << 20, 10_000 + OTHERS, False),
        (1024, 4096, 4096, True),
        (1 << 20, 1 << 20, 1 << 20, False),
        (1024, resource.RLIM_INFINITY, 10_000 + OTHERS, False),
    ],
)
def test_the_limit_is_raised_as_far_as_it_goes(
    soft: int,
    hard: int,
    becomes: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert allow_files(10_000) == becomes
    assert asked == ([] if becomes == soft else [(becomes, hard)])
    assert bool(caplog.records) == warns


def test_a_system_that_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(kind: int, limits: tuple[int, int]) -> None:
        raise ValueError("not permitted")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert allow_files(10_000) == 256
    assert len(caplog.records) == 1
