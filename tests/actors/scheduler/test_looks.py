"""Prompts wait for the tower beside the steps; the tower and its memory are checked by the fake one."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from ramify.actors.scheduler.looks import (
    PLAN_BYTES,
    PLAN_PICTURES,
    TOWER_BYTES,
    TOWER_PICTURES,
    PictureLooks,
)
from ramify.actors.scheduler.request import Account, RequestState, Tenant
from ramify.gpu.executors.fake_tower import FakeTower
from ramify.protocol.pictures import Picture, PlacedPicture
from ramify.protocol.plan import PicturesSeen, StepPlan

TOKENS = 8  # of a picture
EACH = 2  # bytes that are kept of one


def picture(name: str, size: int = 3, pixels: bool = True) -> PlacedPicture:
    placed = PlacedPicture(0, 2, TOKENS // 2, name.encode(), Picture(1, 1, bytes(size)))
    return placed if pixels else placed.without_pixels()


class Run(SimpleNamespace):
    __hash__, __eq__ = object.__hash__, object.__eq__  # type: ignore[assignment]


def run(*names: str | PlacedPicture, tenant: Tenant | None = None, level: Any = (True, 0)) -> Any:
    found = [picture(each) if isinstance(each, str) else each for each in names]
    account = Account(1, tenant or Tenant())
    return Run(pictures=found, shows=frozenset(), waiters=[], account=account, level=level)


class Prompts:
    """What was admitted, in order, and what was hurried."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.hurried: list[Any] = []

    def add(self, run: Any) -> None:
        self.added.append(run)

    def hurry(self, run: Any, level: Any) -> None:
        self.hurried.append((run, level))


class World:
    """Looks with room for so many pictures, and a tower that is ready when it is asked."""

    def __init__(self, room: int = 4, rows: int = 64, device: str = "cuda") -> None:
        info: Any = SimpleNamespace(
            picture_bytes=EACH, picture_room=room * TOKENS * EACH, max_rows=rows, device=device
        )
        self.prompts = Prompts()
        self.looks = PictureLooks(info, self.prompts)  # type: ignore[arg-type]
        self.tower = FakeTower(0.0)
        self.steps = 0

    def waits(self, run: Any) -> bool:
        waits = self.looks.waits(run)
        assert all(each.picture is None for each in run.pictures)  # pixels go by themselves
        return waits

    def send(self) -> list[str]:
        """A plan: what it has the tower look at."""
        looks, unseen = self.looks.plan()
        self.steps += 1
        self.tower.take(StepPlan(self.steps, looks=looks, unseen=unseen))
        return [look.key.decode() for look in looks]

    def see(self) -> list[Any]:
        """The tower's news. Returns the runs that it failed."""
        seen = self.tower.seen()
        return [] if seen is None else self.looks.seen(seen)

    def go(self) -> list[Any]:
        self.send()
        return self.see()


def test_a_picture_is_looked_at_once_for_all_who_show_it() -> None:
    world = World()
    both, *others = runs = [run("a", "b"), *(run("a") for _ in range(20))]
    assert all(world.waits(each) for each in runs)
    assert world.looks.due
    assert world.send() == ["a", "b"]
    assert not world.looks.due
    assert world.looks.under_way
    world.looks.seen(PicturesSeen([b"a"]))
    assert world.prompts.added == others
    assert world.looks.looking(both)
    world.looks.seen(PicturesSeen([b"b"]))
    assert world.prompts.added == [*others, both]
    assert not world.looks.under_way
    assert not world.waits(run("a"))  # it is kept
    assert not world.waits(run(picture("z", pixels=False)))  # its KV is there
    assert world.send() == []


def test_what_is_not_needed_goes_when_there_is_no_room() -> None:
    world = World(room=2)
    first, second = run("a"), run("b")
    for each in (first, second):
        world.waits(each)
    world.go()
    third = run("c")
    assert world.waits(third)
    assert world.send() == []  # both are needed
    world.looks.leave(second)
    world.looks.leave(first)
    assert world.send() == ["c"]  # and b is forgotten, which was left first
    world.see()
    assert third in world.prompts.added
    assert not world.waits(run("a"))
    assert world.waits(run("b"))
    assert world.send() == []


def test_one_may_show_more_than_there_is_room_for_when_it_is_alone() -> None:
    world = World(room=2)
    small, large, last = run("a"), run("b", "c", "d"), run("e")
    for each in (small, large, last):
        assert world.waits(each)
    assert world.send() == ["a"]
    world.see()
    world.looks.leave(small)
    assert world.send() == ["b", "c", "d"]
    world.see()
    assert world.prompts.added == [small, large]
    world.looks.leave(large)
    world.go()
    assert world.prompts.added[-1] is last


def test_who_has_ended_is_not_looked_for() -> None:
    world = World()
    one, two = run("a", "b"), run("b", "c")
    for each in (one, two):
        world.waits(each)
    world.looks.leave(one)
    assert world.send() == ["b", "c"]
    world.looks.leave(two)
    world.see()  # it was under way
    assert world.prompts.added == []
    assert not world.waits(run("b"))


def test_a_tower_that_fails_ends_those_who_wanted_the_picture() -> None:
    world = World(room=2)
    one, two, queued, other = run("a"), run("a", "b"), run("a", "c", "d"), run("e")
    for each in (one, two, queued, other):
        world.waits(each)
    world.send()
    world.tower.faults = 1  # the first, which is a
    assert world.see() == [one, two, queued]
    assert world.prompts.added == []
    world.go()
    assert world.prompts.added == [other]
    again = run("a")
    assert world.waits(again)
    world.looks.leave(other)
    world.go()
    assert world.prompts.added == [other, again]


def test_pixels_of_a_plan_are_bounded() -> None:
    world = World()
    half = PLAN_BYTES // 2 + 1
    world.waits(run(picture("a", half), picture("b", half), picture("c", 2 * PLAN_BYTES)))
    assert world.send() == ["a"]
    assert world.looks.due
    assert world.send() == ["b"]
    assert world.send() == ["c"]  # one goes in any case
    assert not world.looks.due


def test_pictures_of_a_plan_are_bounded() -> None:
    """Small ones, of which many have room in its bytes: the next plan brings the others."""
    world = World(room=64)
    assert world.waits(run(*(f"p{each}" for each in range(PLAN_PICTURES + 2))))
    assert len(world.looks.plan()[0]) == PLAN_PICTURES
    assert world.looks.due
    assert len(world.looks.plan()[0]) == 2
    assert not world.looks.due


def test_some_rows_are_left_for_those_without_pictures() -> None:
    world = World(rows=4)
    runs = [run("a"), run("b")]
    for each in runs:
        world.waits(each)
    assert world.looks.full
    requests: list[Any] = [parked_request(Tenant()) for _ in range(3)]
    world.looks.parked.extend(requests)
    assert world.looks.unparked() == []
    requests[0].state = RequestState.ENDED
    world.looks.leave(runs[0])
    assert world.looks.unparked() == [requests[1]]
    world.looks.leave(runs[1])
    assert world.looks.unparked() == [requests[2]]


def parked_request(tenant: Tenant, ahead: bool = False) -> Any:
    level = (not ahead, 0)
    return SimpleNamespace(state=RequestState.PARKED, level=level, account=Account(1, tenant))


def test_what_is_cancelled_is_not_run_in_vain() -> None:
    """But for the few that the tower has already."""
    world = World(room=64, device="cpu")
    gone = [run(*(f"{number}{each}" for each in range(8))) for number in range(6)]
    for each in gone:
        world.waits(each)
        world.send()
        world.looks.leave(each)
    wanted = run("wanted")
    assert world.waits(wanted)
    assert world.tower.looks == TOWER_PICTURES
    while wanted not in world.prompts.added:
        world.see()
        assert world.looks.due
        world.send()
        world.see()
    assert world.tower.looks == TOWER_PICTURES + 1


def test_the_tower_of_a_gpu_is_given_what_it_runs_together() -> None:
    world = World()
    half = PLAN_BYTES // 2
    world.waits(run(*(picture(f"{number}", half) for number in range(99))))
    sent = [world.send() for _ in range(20)]
    assert sum(map(len, sent)) * half == TOWER_BYTES
    assert not world.looks.due
    world.looks.seen(PicturesSeen([b"0", b"1", b"2"]))
    assert world.looks.due
    assert len(world.send()) == 2


def test_the_highest_level_is_looked_for_first_and_tenants_take_turns() -> None:
    world = World(room=99, device="cpu")
    many, one = Tenant(), Tenant()
    for level, names in (((False, 0), "abc"), ((True, 0), "defg")):
        world.waits(run(*names, tenant=many, level=level))
    world.waits(run("x", "y", tenant=one))
    sent: list[str] = []
    for _ in range(9):
        sent += world.send()
        world.see()
    assert "".join(sent) == "dxeyfgabc"


def test_who_is_granted_again_first_is_chosen_so_too() -> None:
    world = World(rows=4)
    many, one = Tenant(looked=7), Tenant(looked=3)
    runs = [run("a"), run("b")]
    for each in runs:
        world.waits(each)
    requests = [parked_request(one, ahead=True), parked_request(many), parked_request(one)]
    world.looks.parked.extend(requests)
    world.looks.leave(runs[0])
    assert world.looks.unparked() == [requests[2]]
    world.looks.leave(runs[1])
    assert world.looks.unparked() == [requests[1], requests[0]]


def test_room_goes_to_the_tenant_that_has_least_of_it() -> None:
    """Not to who came first; a large one is not kept out by the small ones of others."""
    world = World(room=3)
    many, one, small = (Tenant() for _ in range(3))
    runs = [run(each, tenant=many) for each in "abcdef"]
    for each in runs:
        world.waits(each)
    large = run("x", "y", "z", tenant=one)
    world.waits(large)
    world.go()
    assert world.prompts.added == runs[:3]
    assert (many.shown, one.shown) == (3 * TOKENS * EACH, 0)
    world.looks.leave(runs[0])
    late = [run(each, tenant=Tenant()) for each in "klm"]
    for each in late:
        world.waits(each)
    assert world.send() == []  # there is room for one of them, and the large one comes first
    world.looks.leave(runs[1])
    urgent = run("u", tenant=small, level=(True, 1))
    world.waits(urgent)
    world.looks.leave(runs[2])
    assert world.send() == ["u"]
    world.see()
    world.looks.leave(urgent)
    assert world.send() == ["x", "y", "z"]
    world.see()
    world.looks.leave(large)
    assert sorted(world.send()) == ["d", "k", "l"]  # the first of those who have none
    for each in late:
        world.looks.leave(each)
    world.see()
    for each in runs:
        world.looks.leave(each)
    assert many.shown == one.shown == small.shown == world.looks.held == 0


def test_a_prompt_that_others_wait_for_has_their_level() -> None:
    world = World()
    hurried = run("a")
    world.waits(hurried)
    hurried.waiters.append(SimpleNamespace(level=(True, 3)))
    world.go()
    assert world.prompts.hurried == [(hurried, (True, 3))]


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed: int) -> None:
    """Every run is admitted, fails or ends; its pictures are kept while it needs them; nothing else is
    counted; an executor that is lost takes all along."""
    dice = random.Random(seed)
    world = World(room=dice.choice([1, 3, 6]), device=dice.choice(["cpu", "cuda"]))
    waiting: list[Any] = []
    ready: list[Any] = []
    for _ in range(300):
        match dice.randrange(6):
            case 0 | 1:
                new = run(*dice.sample("abcdefgh", dice.choice([1, 1, 2, 3])))
                (waiting if world.waits(new) else ready).append(new)
            case 2:
                world.send()
            case 3:
                world.tower.faults = dice.random() < 0.1
                for failed in world.see():
                    waiting.remove(failed)
                world.tower.faults = 0
            case 4 if waiting or ready:
                gone = dice.choice(waiting + ready)
                (waiting if gone in waiting else ready).remove(gone)
                world.looks.leave(gone)
            case 5 if dice.random() < 0.05:
                for each in waiting + ready:
                    world.looks.leave(each)
                world.looks.clear()
                waiting, ready, world.tower = [], [], FakeTower(0.0)
        for each in world.prompts.added:
            if each in waiting:
                waiting.remove(each)
                ready.append(each)
        world.prompts.added.clear()
        kept = world.tower.kept
        assert all(key in kept for each in ready for key in each.shows)
        held = {key for each in ready + waiting for key in each.shows}
        assert len(kept) <= max(6, len(held) + 8)
    for each in ready:
        world.looks.leave(each)
    for _ in range(1000):
        for failed in world.go():
            waiting.remove(failed)
        for each in world.prompts.added:
            waiting.remove(each)
            world.looks.leave(each)
        world.prompts.added.clear()
    assert not waiting
    assert not world.looks.due
    assert len(world.tower.kept) * TOKENS * EACH <= max(TOKENS * EACH, world.looks.room)
    assert world.looks.held == 0
