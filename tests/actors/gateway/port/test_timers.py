"""Timers against a dictionary."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.actors.gateway.port.timers import Timers

OPS = st.lists(
    st.tuples(st.sampled_from(["schedule", "forget", "due"]), st.integers(0, 5), st.integers(0, 20)),
    max_size=80,
)


@given(OPS)
@settings(derandomize=True, deadline=None)
def test_against_a_model(ops: list[tuple[str, int, int]]) -> None:
    timers, model = Timers(), {}
    for name, key, when in ops:
        if name == "schedule":
            timers.schedule(key, when)
            model[key] = min(when, model.get(key, when))
        elif name == "forget":
            timers.forget(key)
            model.pop(key, None)
        else:
            due = timers.due(when)
            assert len(due) == len(set(due))
            assert {key for key, at in model.items() if at <= when} == set(due)
            times = [model.pop(key) for key in due]
            assert times == sorted(times)
        assert len(timers) == len(model)
