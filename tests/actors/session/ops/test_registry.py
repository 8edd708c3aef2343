"""What holds for the handlers of all ops."""

from typing import Any

import pytest
from msgspec import inspect
from msgspec.structs import replace

from ramify.actors.calls.toolbox import Toolbox
from ramify.actors.kit.memory import NUMBER
from ramify.actors.session.branches.tasks import FrameRun
from ramify.actors.session.ops import AT_ONCE, HANDLERS, op_bytes, op_entries
from ramify.protocol.wire import (
    Append,
    Cancel,
    ChatMessage,
    CloseSession,
    Drop,
    Export,
    Fork,
    Generate,
    Join,
    Op,
    Open,
    Prune,
    Rollback,
    Select,
    Set,
    Tree,
)

OPS: list[tuple[Op, int]] = [
    (Append(id=1, text="x"), 1),
    (Append(id=1, branch=["a", "b"], text="x"), 2),
    (Generate(id=1), 1),
    (Generate(id=1, branch=["a", "b", "c"]), 3),
    (Generate(id=1, n=2), 3),  # the children, and the fork that makes them
    (Generate(id=1, n=1, as_=["a"]), 2),
    (Select(id=1, branch=["a", "b"], choices=["x"]), 2),
    (Fork(id=1, as_=["a", "b"]), 1),
    (Fork(id=1, branch=None, as_=["a"]), 1),
    (Rollback(id=1, to=0), 1),
    (Set(id=1), 1),
    (Drop(id=1, branch=["a", "b"]), 2),
    (Join(id=1, from_=["a", "b"]), 1),
    (Prune(id=1, from_=["a", "b"]), 1),
]


@pytest.mark.parametrize(("op", "count"), OPS)
def test_an_op_has_as_many_tasks_as_are_counted_before_they_are_made(op: Op, count: int) -> None:
    handler = HANDLERS[type(op)]
    tasks = handler.tasks(op, FrameRun(Open(client="c"), lambda: Toolbox(None)))
    assert len(tasks) == handler.task_count(op) == count
    assert all(task.op is op for task in tasks)


def test_every_op_has_one_handler() -> None:
    handled = {type(op) for op, _ in OPS}
    assert handled == set(HANDLERS)
    assert not handled & set(AT_ONCE)
    assert handled | set(AT_ONCE) == {
        kind for kind in Op.__subclasses__() if kind.__subclasses__() == []
    }


PLAIN: list[Op] = [*{type(op): op for op, _ in reversed(OPS)}.values(), Cancel(id=1, branch="a")]
MANY = 100
SHORT = (Append, "tokens"), (Generate, "stop_token_ids"), (Generate, "stop")  # lists that no check reads


def item(kind: inspect.Type, i: int) -> Any:
    """The `i`th valid entry of a list."""
    match kind:
        case inspect.StrType():
            return f"b{i}"
        case inspect.IntType():
            return i + 1
        case inspect.BytesType():
            return bytes(256)
    return ChatMessage(role="user", content="")


def lists() -> list[tuple[Op, str, list[Any]]]:
    """Each list field of each op, with its op and a long value."""
    found = []
    for op in PLAIN:
        info = inspect.type_info(type(op))
        assert isinstance(info, inspect.StructType)
        for field in info.fields:
            kinds = field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,)
            for kind in kinds:
                if isinstance(kind, inspect.ListType):
                    most = min(MANY, kind.max_length or MANY)
                    values = [item(kind.item_type, i) for i in range(most)]
                    found.append((op, field.name, values))
    return found


@pytest.mark.parametrize(
    ("op", "field", "values"), lists(), ids=[f"{type(op).__name__}.{field}" for op, field, _ in lists()]
)
def test_each_list_of_an_op_counts(op: Op, field: str, values: list[Any]) -> None:
    """A new op with a list that its file does not declare fails here."""
    long, more = replace(op, **{field: values}), len(values) - 2
    size = 1 if (type(op), field) == (Generate, "stop") else NUMBER
    assert op_bytes(long) - op_bytes(op) >= size * more
    if (type(op), field) not in SHORT:
        assert op_entries(long) - op_entries(op) >= more


def test_every_op_is_among_the_plain_ones_or_has_no_list() -> None:
    assert {type(op) for op in PLAIN} | {CloseSession, Export, Tree} == set(HANDLERS) | set(AT_ONCE)
