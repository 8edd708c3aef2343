"""Which prompt tokens a step takes: beside decodes, ahead of time, in a hurry."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from ramify.actors.scheduler.prompts import Prompts
from ramify.protocol.config import ScheduleConfig


@pytest.fixture
def prompts():
    """Steps of 100 tokens, 60 beside decodes, 20 with tokens that nobody waits for."""
    config = ScheduleConfig(mixed_tokens=60, ahead_tokens=20)
    return Prompts(SimpleNamespace(step_tokens=100), config)


class FakeRun(SimpleNamespace):
    """Told apart by identity, as runs are."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def run(prompt, *, ahead=False, filled=0):
    return FakeRun(prompt=prompt, filled=filled, ahead=ahead)


def taken(prompts, decodes=0):
    return [(run, end - start) for run, start, end in prompts.take(decodes)]


def test_prompts_go_in_order_and_in_chunks(prompts):
    one, two = run(70, filled=10), run(90)
    prompts.add(one)
    prompts.add(two)
    assert prompts.take(0) == [(one, 10, 70), (two, 0, 40)]
    assert prompts.take(0) == [(two, 40, 90)]
    assert prompts.take(0) == []
    assert prompts.lacking(0) == (300, 60)


@pytest.mark.parametrize(("decodes", "room"), [(0, 100), (1, 60), (40, 60), (41, 59), (99, 1), (100, 0)])
def test_fewer_beside_decodes(prompts, decodes, room):
    prompts.add(run(500))
    assert sum(size for _, size in taken(prompts, decodes)) == room
    assert prompts.lacking(decodes)[0] == 3 * room - 500 + room


def test_what_nobody_waits_for_comes_last_and_makes_no_step_longer(prompts):
    early, short, long = run(50, ahead=True), run(15), run(110)
    prompts.add(early)
    assert taken(prompts) == [(early, 20)]
    prompts.add(short)
    assert prompts.lacking(0) == (285, 30)
    assert taken(prompts, decodes=9) == [(short, 15), (early, 5)]
    prompts.add(long)
    assert taken(prompts) == [(long, 100)]
    assert taken(prompts) == [(long, 10), (early, 10)]
    assert taken(prompts) == [(early, 15)]


def test_who_is_waited_for_hurries(prompts):
    first, second = run(50, ahead=True), run(70, ahead=True)
    for ahead in (first, second):
        prompts.add(ahead)
    prompts.take(0)
    prompts.hurry(second)
    prompts.hurry(second)
    assert prompts.lacking(0) == (230, 30)
    assert taken(prompts) == [(second, 70)]
    assert taken(prompts) == [(first, 20)]
    prompts.hurry(second)  # all of it is on the way
    assert taken(prompts) == [(first, 10)]
    assert prompts.lacking(0) == (300, 60)


def test_who_has_ended_is_not_kept(prompts):
    """Behind one that has no turn yet there may be thousands that were appended and taken back."""
    first, late = run(50, ahead=True), [run(30, ahead=True) for _ in range(3)]
    prompts.add(first)
    for gone in late:
        prompts.add(gone)
        prompts.forget(gone)
    refs = [weakref.ref(each) for each in late]
    del gone, late
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert taken(prompts) == [(first, 20)]


def test_who_has_ended_is_skipped(prompts):
    gone, ahead, left = run(30), run(30, ahead=True), run(30)
    for each in (gone, ahead, left):
        prompts.add(each)
    for each in (gone, ahead):
        prompts.forget(each)
    assert prompts.lacking(0) == (270, 60)
    assert taken(prompts) == [(left, 30)]
