"""Runs a model's chat template, as `transformers` runs it, without importing it.

A template is Jinja2 source from a model folder. It runs in Jinja's sandbox: it sees plain JSON values,
can change none of them, and has a bounded number of steps, because what a template repeats is up to
the conversation that it is given. What is here equals `transformers.utils.chat_template_utils`: trimmed
blocks, `break` and `continue`, `{% generation %}` blocks, `raise_exception`, `strftime_now`, and a
`tojson` that escapes nothing. Tests compare the two.

This file does not know tokens or turns.
"""

import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MOST_STEPS = 1_000_000  # of one rendering: about a second. A turn of a loop is one
_CALL = 4  # steps of a call: of a macro, a method
MOST_CHARACTERS = 1 << 26  # of one rendering, and of a text that `*` makes
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names for one thing, the usual one first


class ChatTemplates:
    """A model's chat templates: one, or several by name. Thread-safe; compiled when first used."""

    def __init__(
        self, templates: str | Mapping[str, str] | None, special_tokens: Mapping[str, str]
    ) -> None:
        """`special_tokens`: what templates read as `bos_token` and so on."""
        named = {"default": templates} if isinstance(templates, str) else templates
        self._sources = {name: source for name, source in (named or {}).items() if source}
        self._special = dict(special_tokens)
        self._compiled: dict[str, Template] = {}

    @property
    def source(self) -> str:
        """All that is written in them; "" if there is none."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        generate: bool,
        effort: str | None = None,
    ) -> str:
        """The text of a conversation of plain JSON values.

        `generate`: with what stands before an answer; `effort`: the variable `reasoning_effort`, if it
        is set. Raises what the template's expressions raise.
        """
        if not messages:
            raise TemplateError("there is no message")
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        source = self._sources.get(name)
        if source is None:
            raise TemplateError(f"none of {sorted(self._sources)} is named default")
        template = self._compiled.get(name)
        if template is None:
            template = self._compiled[name] = _Environment().from_string(source)
        pieces = template.generate(
            self._special,
            messages=[_with_thought(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=generate,
            **({} if effort is None else {"reasoning_effort": effort}),
        )
        environment = template.environment
        assert isinstance(environment, _Environment)
        return environment.bounded(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2 as chat templates expect it, with a bound on their steps."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._run = threading.local()  # .steps: what this thread's rendering has left
        self.filters |= {"tojson": _tojson, "_counted": self._counted}
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def bounded(self, pieces: Iterable[str]) -> str:
        """The text of a rendering. Raises TemplateError if it takes too many steps or grows too long."""
        self._run.steps = MOST_STEPS
        text: list[str] = []
        size = 0
        for piece in pieces:
            text.append(piece)
            size += len(piece)
            if size > MOST_CHARACTERS:
                raise TemplateError(f"it writes more than {MOST_CHARACTERS} characters")
        return "".join(text)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
        return tree

    def _spend(self, steps: int) -> None:
        self._run.steps -= steps
        if self._run.steps < 0:
            raise TemplateError(f"it takes more than {MOST_STEPS} steps")

    @pass_context  # it counts when a template runs, not when constants are folded
    def _counted(self, context: Context, items: Any) -> Any:
        """What a loop goes over, each item of it a step."""
        if isinstance(items, Sized):
            self._spend(len(items))
            return items
        return self._one_by_one(items)

    def _one_by_one(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._spend(1)
            yield item

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls of templates: macros may call themselves."""
        self._spend(_CALL)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Products and powers, where they stay small."""
        if operator == "**":
            if any(isinstance(side, int) and abs(side) > 1024 for side in (left, right)):
                raise TemplateError("it raises to a power that is too large")
        else:
            for many, times in ((left, right), (right, left)):
                repeated = isinstance(many, (str, list, tuple)) and isinstance(times, int)
                if repeated and len(many) * times > MOST_CHARACTERS:
                    raise TemplateError(f"it repeats more than {MOST_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` blocks. They mark for training what a model writes, and show what they hold."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_shown"), [], [], inside).set_lineno(line)

    def _shown(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` for templates: not the class, through which other classes are found."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` for templates, without names that Python uses for itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As Jinja's own: `self` is no parameter, so that it can be a name of the namespace.
        given = dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no name that begins with an underscore, as {name!r} does")


def _with_thought(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was thought, under each name that templates read it by."""
    thought = next((message[name] for name in _THOUGHTS if message.get(name) is not None), None)
    if thought is None:
        return message
    return {"thinking": thought, **message, "reasoning_content": thought}


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
