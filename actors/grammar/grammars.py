"""Grammars for llguidance, checked. Pure.

Here a grammar is only begun, with a byte as each token, to see that an output can have a first byte: the
executor follows it, with the model's tokens (`gpu/constraints/grammar.py`).
"""

import importlib
import re
from functools import cache
from typing import Any

from ramify.actors.grammar.outlines import rewritten
from ramify.actors.grammar.schema.limits import MAX_NOTES
from ramify.actors.grammar.unproductive_rules import endless_rules
from ramify.protocol.errors import ConstraintError, brief

llguidance: Any
try:
    llguidance = importlib.import_module("llguidance")
except ImportError:  # it has no wheel for this machine
    llguidance = None

Checked = tuple[str, tuple[str, ...]]  # a grammar as llguidance reads it, and notes


# in Lark's form: comments, texts, patterns; and llguidance's marks for tokens: <|name|>, <name>, <[12]>
_LARK = re.compile(r'(?://|#)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(<)')


def lark_grammar(text: str) -> Checked:
    """A grammar in Lark's form, as llguidance extends it, without marks for tokens: an output is text.

    Raises ConstraintError.
    """
    for found in _LARK.finditer(text):
        if found[1]:
            raise ConstraintError(
                f"the grammar names a token by `<` (character {found.start()}): give its text in quotes"
            )
    checked = _checked(_installed().LLMatcher.grammar_from_lark(text))
    for name, at in endless_rules(text):
        raise ConstraintError(
            f"the rule `{name}` can never end: each way through it needs a rule that cannot; give it "
            "one that can, or leave the rule out",
            position=at,
        )
    return checked


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


def regex_grammar(pattern: str) -> Checked | None:
    """The grammar of a regex that no table holds; None if llguidance cannot follow it either."""
    if llguidance is None:
        return None
    try:
        return _checked(llguidance.LLMatcher.grammar_from_regex(rewritten(pattern)))
    except (ConstraintError, ValueError):
        return None


def _installed() -> Any:
    if llguidance is None:
        raise ConstraintError("this server has no llguidance, which grammars need: install it there")
    return llguidance


def _checked(grammar: str) -> Checked:
    wrong, messages = _installed().LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        raise ConstraintError(f"the grammar is not accepted: {brief(messages[0])}")
    begun = _installed().LLMatcher(_bytes(), grammar, log_level=0)
    if not begun.is_error():
        begun.compute_bitmask()
    if not begun.is_error() and (forced := begun.compute_ff_bytes()):
        begun.consume_token(forced[0])  # past its limits where the forced text does not end
    if begun.is_error():
        reason = (begun.get_error().splitlines() or ["unknown"])[0]
        if reason == "NoExtensionBias":  # llguidance's word for an empty mask
            reason = "no output can begin with it: its rules need themselves first, or allow no text"
        raise ConstraintError(f"the grammar cannot be followed: {brief(reason)}")
    return grammar, tuple(map(brief, messages[:MAX_NOTES]))


@cache
def _bytes() -> Any:
    """llguidance's own vocabulary: each byte is a token."""
    return _installed().LLTokenizer("byte")
