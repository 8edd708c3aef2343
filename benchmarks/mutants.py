"""One-place changes of a source file: what they are, and which were judged to change nothing.

A change turns a comparison, adds one to a number, takes `and` for `or`, negates a condition, swaps `+`
and `-`, `min` and `max`, `True` and `False`, or leaves out a statement. Logging, assertions, texts and
what declares (annotations, decorators, a class's keywords) are left alone. This file knows no tests.
"""

import ast
import copy
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
REMOVED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)
LOGGERS = frozenset({"log", "logger", "logging", "_log"})
SKIPPED_FUNCTIONS = frozenset({"__repr__", "__str__"})
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
DECLARED = frozenset({"annotation", "returns", "decorator_list", "type_params"})
LEFT_OUT = "(left out)"

Edit = Callable[[Any], ast.AST]


@dataclass(frozen=True)
class Change:
    """One change. `nth`: of those in the same place with the same texts, which."""

    line: int
    lines: range  # from the begin of its statement to its own end
    within: str  # the class and function it is in; "" for the module
    before: str
    after: str
    nth: int
    in_function: bool  # its code runs when a function is called, not when the module is imported

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What finds it again after other lines of the file have moved."""
        return (self.within, self.before, self.after, self.nth)


class Changes:
    """All changes of one file, in the order of its text."""

    def __init__(self, source: str) -> None:
        self.tree = ast.parse(source)
        self.all: list[Change] = []
        self._edits: list[tuple[ast.AST, Edit]] = []
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._collect(self.tree, (), False, 0)

    def __len__(self) -> int:
        return len(self.all)

    def apply(self, index: int) -> ast.Module:
        """A copy of the tree with one change."""
        node, edit = self._edits[index]
        memo: dict[int, Any] = {}
        tree = copy.deepcopy(self.tree, memo)
        twin = memo[id(node)]
        changed = edit(twin)
        if changed is not twin:
            _Replace(twin, changed).visit(tree)
        return ast.fix_missing_locations(tree)

    def _add(
        self, node: ast.AST, edit: Edit, path: tuple[str, ...], in_function: bool, begin: int
    ) -> None:
        before = ast.unparse(node)
        changed = edit(copy.deepcopy(node))
        after = LEFT_OUT if isinstance(changed, ast.Pass) else ast.unparse(changed)
        where = (".".join(path), before, after)
        line = getattr(node, "lineno", 0)
        lines = range(begin or line, (getattr(node, "end_lineno", None) or line) + 1)
        self.all.append(Change(line, lines, *where, self._seen[where], in_function))
        self._seen[where] += 1
        self._edits.append((node, edit))

    def _collect(self, node: ast.AST, path: tuple[str, ...], in_function: bool, begin: int) -> None:
        if _left_alone(node):
            return
        if isinstance(node, ast.stmt):
            begin = node.lineno
        elif isinstance(node, ast.match_case):
            begin = node.pattern.lineno
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            path = (*path, node.name)
        for edited, edit in _edits(node):
            self._add(edited, edit, path, in_function, begin)
        for name, value in ast.iter_fields(node):
            if name in DECLARED or (isinstance(node, ast.ClassDef) and name == "keywords"):
                continue
            inside = in_function or (isinstance(node, FUNCTIONS) and name == "body")
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self._collect(child, path, inside, begin)


def _edits(node: ast.AST) -> Iterator[tuple[ast.AST, Edit]]:
    """What may be changed at a node: the part that is changed, and how."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPS:
            yield node, _flip
        case ast.BoolOp():
            yield node, _other_bool
        case ast.BinOp(op=op) if type(op) in SWAPS and not _is_text(node):
            yield node, _other_operator
        case ast.Constant(value=bool() | int() | float()):
            yield node, _other_constant
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not _negated(test):
            yield node.test, _negate
        case ast.Call(func=ast.Name(id="min" | "max")):
            yield node.func, _other_end
        case ast.UnaryOp(op=ast.Not()):
            yield node, lambda n: n.operand
    if isinstance(node, REMOVED) and not _is_docstring(node):
        yield node, lambda n: ast.copy_location(ast.Pass(), n)


def _left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.FunctionDef(name=name) if name in SKIPPED_FUNCTIONS:
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in LOGGERS
        case ast.If(body=body, orelse=[]) if all(map(_left_alone, body)):
            return True  # it decides what is logged
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name in LOGGERS or name == "__slots__"
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.keyword(arg="strict"):  # of `zip`: an assertion
            return True
        case _:
            return False


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)


def _flip(node: ast.Compare) -> ast.AST:
    node.ops = [FLIPS[type(node.ops[0])]()]
    return node


def _other_bool(node: ast.BoolOp) -> ast.AST:
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _other_operator(node: ast.BinOp) -> ast.AST:
    node.op = SWAPS[type(node.op)]()
    return node


def _other_constant(node: ast.Constant) -> ast.AST:
    node.value = not node.value if isinstance(node.value, bool) else node.value + 1  # type: ignore[operator]
    return node


def _other_end(node: ast.Name) -> ast.AST:
    node.id = "max" if node.id == "min" else "min"
    return node


def _negate(node: ast.expr) -> ast.AST:
    return ast.copy_location(ast.UnaryOp(ast.Not(), node), node)


def _negated(test: ast.expr) -> bool:
    """Whether another change of this condition is its opposite already."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Compare(ops=[op]):
            return isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn | ast.Eq | ast.NotEq)
    return False


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(node: ast.BinOp) -> bool:
    """`a | b` of types, `"x" * 3`."""
    sides = (node.left, node.right)
    return any(isinstance(s, ast.Constant) and isinstance(s.value, str | None) for s in sides)


# --- the judged ones ----------------------------------------------------------------------------------


class Stale(Exception):
    """An entry of the list of judged changes that is no longer true."""


class Judged:
    """Changes that nobody can notice, each with the reason: what a person found who looked at it.

    They are run and counted like all others. `check` raises Stale if an entry names no change of its
    file: the code has changed, so somebody must look again.
    """

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self._reasons: dict[tuple[str, tuple[str, str, str, int]], str] = {}
        for entry in entries:
            unknown = entry.keys() - {"file", "within", "before", "after", "nth", "reason"}
            if unknown or not entry.get("reason", "").strip():
                raise Stale(f"an entry needs a reason and known keys: {entry}")
            key = (entry.get("within", ""), entry["before"], entry["after"], entry.get("nth", 0))
            if (entry["file"], key) in self._reasons:
                raise Stale(f"listed twice: {entry}")
            self._reasons[entry["file"], key] = entry["reason"]

    @classmethod
    def read(cls, path: Path) -> "Judged":
        """From a TOML file of `[[judged]]` tables."""
        return cls(tomllib.loads(path.read_text(encoding="utf-8")).get("judged", []))

    def check(self, root: Path) -> None:
        """Raise Stale unless each entry names a change that its file still has."""
        for name in dict.fromkeys(name for name, _ in self._reasons):
            if not (root / name).is_file():
                raise Stale(f"there is no file {name}")
            keys = {change.key for change in Changes((root / name).read_text(encoding="utf-8")).all}
            for file, key in self._reasons:
                if file == name and key not in keys:
                    raise Stale(f"{name} has no such change any more: {key}")

    def reason(self, file: str, change: Change) -> str | None:
        """Why nobody can notice this change; None if it is not listed."""
        return self._reasons.get((file, change.key))
