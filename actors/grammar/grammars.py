"""Grammars for llguidance, checked. Pure.

It does not follow a grammar here, only see to it that it is one: the executor does, with the model's
tokens (`gpu/constraints/grammar.py`).
"""

import importlib
from typing import Any

from ramify.protocol.errors import ConstraintError

llguidance: Any
try:
    llguidance = importlib.import_module("llguidance")
except ImportError:  # it has no wheel for this machine
    llguidance = None

Checked = tuple[str, tuple[str, ...]]  # a grammar as llguidance reads it, and notes


def lark_grammar(text: str) -> Checked:
    """A grammar in Lark's form, as llguidance extends it. Raises ConstraintError."""
    return _checked(_installed().LLMatcher.grammar_from_lark(text))


def schema_grammar(schema: Any, *, spaced: bool) -> Checked:
    """The grammar of a JSON Schema. Raises ConstraintError for what llguidance cannot express."""
    space = " " if spaced else ""
    found = _installed().LLMatcher.grammar_from_json_schema(
        schema if isinstance(schema, dict) else {"allOf": [schema]},
        overrides={
            "whitespace_flexible": False,
            "item_separator": f",{space}",
            "key_separator": f":{space}",
            "lenient": False,
            "coerce_one_of": False,
        },
    )
    return _checked(found)


def _installed() -> Any:
    if llguidance is None:
        raise ConstraintError("this server has no llguidance, which grammars need: install it there")
    return llguidance


def _checked(grammar: str) -> Checked:
    wrong, messages = _installed().LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        raise ConstraintError(f"the grammar is not accepted: {' '.join(messages[0].split())}")
    return grammar, tuple(messages)
