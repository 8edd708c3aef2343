"""A tenant's home is small, grows with its load, and hardly changes when replicas come and go."""

import numpy as np

from ramify.actors.routing.tenancy import LEAST, MOST_TENANTS, Tenancy

IDS = np.arange(1, 101, dtype=np.uint64)


def home(tenancy: Tenancy, name: str, ids: "np.ndarray[tuple[int], np.dtype[np.uint64]]" = IDS,
         version: int = 1, now: float = 0.0) -> set[int]:  # fmt: skip
    strangers = tenancy.strangers(name, ids, version, 1000.0, now)
    return set(ids.tolist()) - set(() if strangers is None else ids[strangers].tolist())


def test_few_and_the_same_and_not_those_of_others() -> None:
    tenancy = Tenancy()
    homes = [home(tenancy, f"t{i}") for i in range(50)]
    assert {len(each) for each in homes} == {LEAST}
    assert homes == [home(tenancy, f"t{i}") for i in range(50)]
    assert len(set().union(*homes)) > 50


def test_grows_with_its_load_and_shrinks_again() -> None:
    tenancy = Tenancy()
    for second in range(200):
        tenancy.computes("a", 10_000, second)  # what 10 replicas compute
    grown = home(tenancy, "a", now=200.0)
    assert 15 <= len(grown) <= 25
    assert home(tenancy, "b", now=200.0) != grown
    assert home(tenancy, "a", now=600.0) < grown
    for second in range(200):
        tenancy.computes("a", 200_000, 600.0 + second)
    assert len(home(tenancy, "a", now=800.0)) == 100
    assert tenancy.strangers("a", IDS, 1, 1000.0, 800.0) is None


def test_who_comes_or_goes_moves_nobody_else() -> None:
    tenancy = Tenancy()
    for i in range(50):
        before = home(tenancy, f"t{i}")
        fewer = IDS[IDS != 7]
        after = home(tenancy, f"t{i}", fewer, 2)
        assert before - {7} <= after
        assert home(tenancy, f"t{i}", IDS, 3) == before


def test_tenants_are_forgotten() -> None:
    tenancy = Tenancy()
    for i in range(2 * MOST_TENANTS):
        tenancy.computes(str(i), 1.0, 0.0)
    assert len(tenancy._tenants) == MOST_TENANTS
