"""Appends: tokenized like the whole, once per op, and only if it can fit."""

from collections.abc import Callable
from typing import Any

import pytest

from ramify.actors.session.chat_messages import as_dicts
from ramify.actors.tokenizer import Tokenizer
from ramify.protocol import wire as w
from tests.actors.session.test_conversations import STRIPS, Chat, bytewise, user
from tests.actors.test_tokenizer import sentencepiece

# The user's turn begins with a space, as in many Llama-2 chats; the answer ends with </s>.
SPACED = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
TOUCHING = SPACED.replace("' [INST] '", "'[INST] '")
BOS_EACH = SPACED.replace("{{ bos_token }}", "").replace("' [INST] '", "bos_token + ' [INST] '")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("source", [SPACED, TOUCHING, BOS_EACH], ids=["spaced", "touching", "bos each"])
@pytest.mark.parametrize("scheme", ["prepend", "first", "always", "never"])
def test_every_turn_of_a_sentencepiece_chat_is_tokenized_like_the_whole(
    scheme: str, source: str, strict: bool
) -> None:
    """Behind </s> such a tokenizer puts one more space, which a suffix on its own does not show."""
    fast = sentencepiece(scheme)
    fast.chat_template = source
    chat = Chat(fast, strict=strict)
    for number in range(6):
        chat.say(user(f"hello world {number}"))
        expected = fast.apply_chat_template(as_dicts(chat.messages), tokenize=True, return_dict=False)
        assert list(chat.branch.tokens()) == expected
        said = f"how are you {number}"
        if strict:
            chat.answer(said)
        else:  # the template's space is the model's
            chat.answer(f" {said}")
            chat.messages[-1] = w.ChatMessage(role="assistant", content=said)


def test_a_token_that_swallows_the_space_behind_it_does_so_across_appends() -> None:
    from tokenizers import AddedToken

    fast = sentencepiece("never")
    fast.backend_tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    tokenizer = Tokenizer(fast)
    end = fast.convert_tokens_to_ids("<|end|>")
    whole = fast("hello<|end|>\n world", add_special_tokens=False).input_ids
    at = whole.index(end)
    assert tokenizer.encode_chat("\n world", after=end) == whole[at + 1 :]
    assert tokenizer.encode_chat("\n world") != whole[at + 1 :]


# --- once per op --------------------------------------------------------------------------------


class Counting:
    """Counts what is rendered and tokenized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
        self.texts: list[str] = []
        encode = tokenizer._ids

        def count(backend: Any, text: str) -> list[int]:
            self.texts.append(text)
            return encode(backend, text)

        monkeypatch.setattr(tokenizer, "_ids", count)


@pytest.mark.parametrize("size", [20, 6000], ids=["on the loop", "in a thread"])
@pytest.mark.parametrize("kind", ["text", "messages"])
def test_one_text_for_many_branches_is_tokenized_once(
    sim: Callable[..., Any],
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    size: int,
) -> None:
    engine = sim(context=8192, pages=1 << 16)
    engine.integrity = False
    client = engine.session()
    children = [f"b{number}" for number in range(50)]
    client.send(w.Append(id=1, messages=[user("Hi")]), w.Fork(id=2, as_=children))
    engine.pump()
    counting = Counting(monkeypatch, tokenizer)
    text = "word " * (size // 5)
    fields: dict[str, Any] = {"text": text} if kind == "text" else {"messages": [user(text)]}
    client.send(w.Append(id=3, branch=children, **fields))
    engine.pump()
    assert {type(reply) for reply in client.replies[3]} == {w.Ok}
    assert len(client.replies[3]) == 50
    assert sum("word" in text for text in counting.texts) == 1
    branches = engine.cores[1].state.branches
    assert len({id(branches[name].segments[-1].tokens) for name in children}) == 1  # memory, too


def test_branches_that_end_differently_get_what_each_needs(sim: Callable[..., Any]) -> None:
    engine = sim(eos_every=7)
    client = engine.session()
    client.send(
        w.Fork(id=1, branch=None, as_=["a", "b", "c"]),
        w.Append(id=2, branch=["a", "b"], messages=[user("One")]),
        w.Generate(id=3, branch="b", temperature=0, max_tokens=40),
        w.Append(id=4, branch=["a", "b", "c"], messages=[user("Two")]),
    )
    engine.pump()
    state = engine.cores[1].state
    for name in "abc":
        text = state.decode(state.branches[name].tokens())
        assert text.count("Two") == 1
    alone = sim(eos_every=7)
    other = alone.session()
    other.send(
        w.Append(id=1, messages=[user("One")]),
        w.Generate(id=2, temperature=0, max_tokens=40),
        w.Append(id=3, messages=[user("Two")]),
    )
    alone.pump()
    assert state.branches["b"].tokens() == alone.cores[1].state.branches["main"].tokens()


@pytest.mark.parametrize("targets", [1, 60])
def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    sim: Callable[..., Any], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, targets: int
) -> None:
    engine = sim(context=256)
    client = engine.session()
    names = [f"b{number}" for number in range(targets)]
    client.send(w.Fork(id=1, branch=None, as_=names))
    engine.pump()
    counting = Counting(monkeypatch, tokenizer)
    client.send(w.Append(id=2, branch=names, text="x" * 900_000))
    engine.pump()
    assert counting.texts == []
    assert {reply.code for reply in client.replies[2]} == {"too_long"}
    assert len(client.replies[2]) == targets
    details = client.replies[2][0].details
    assert (details["max"], details["position"]) == (256, 0)
    assert details["tokens"] > 256


def test_what_fits_nearly_is_counted_exactly(sim: Callable[..., Any]) -> None:
    engine = sim(context=256)
    client = engine.session()
    client.send(w.Append(id=1, text="\x01" * 255))  # a token each
    client.send(w.Append(id=2, text="\x01" * 2))
    client.send(w.Append(id=3, text="\x01"))
    engine.pump()
    assert [type(client.replies[i][0]) for i in (1, 2, 3)] == [w.Ok, w.Error, w.Ok]


def test_many_middling_texts_of_one_frame_do_not_hold_the_loop(sim: Callable[..., Any]) -> None:
    engine = sim(context=8192)
    client = engine.session()
    engine.pump()
    core = engine.cores[1]
    ops = [w.Append(id=i, text="word " * 200) for i in range(1, 11)]
    client.send(*ops)
    core.frame(client.socket, ops, engine.now)
    assert sum(len(segment.text) for segment in core.state.branches["main"].segments) <= 4096
    assert core.state.out.encode != []


# --- ids that the model does not have -----------------------------------------------------------


def lacking(sim: Callable[..., Any], tokenizer: Tokenizer) -> Any:
    """An engine whose model lacks the tokenizer's last ids; the first of them is a usual word's."""
    ids = range(tokenizer.vocab_size - 1, 3, -1)
    return sim(
        context=8192, vocab=next(i for i in ids if tokenizer.encode(tokenizer.decode([i])) == [i])
    )


def test_ids_that_the_model_does_not_have_are_refused(
    sim: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    engine = lacking(sim, tokenizer)
    client = engine.session()
    last = engine.vocab
    spelt = tokenizer.beyond(last)[last]
    text = tokenizer.decode([last])
    client.send(w.Append(id=1, tokens=[5, last]))
    client.send(w.Append(id=2, text=text))
    client.send(w.Append(id=3, messages=[user(text)]))
    client.send(w.Append(id=4, text="fine"), w.Generate(id=5, stop_token_ids=[3, last], max_tokens=1))
    client.send(w.Append(id=6, text=text * 5000))  # off the loop
    engine.pump()
    for ident in (1, 2, 3, 5, 6):
        error = client.replies[ident][0]
        assert error.code == "bad_request", ident
        assert error.details == {"token": last, "vocab": last}
    assert "tokens[1]" in client.replies[1][0].message
    assert "stop_token_ids[1]" in client.replies[5][0].message
    assert repr(spelt) in client.replies[2][0].message
    assert "embedding was resized" in client.replies[2][0].message
    assert isinstance(client.replies[4][0], w.Ok)
    assert all(token < last for token in engine.cores[1].state.branches["main"].tokens())


def test_a_generation_prompt_or_an_end_of_turn_that_the_model_does_not_have() -> None:
    """The one is refused with the append or the generation; the other leaves the turn open."""
    fast = bytewise(STRIPS)
    chat = Chat(fast)
    last = fast.convert_tokens_to_ids("<|im_start|>")
    chat.say(user("Hi"))
    position = chat.branch.position
    chat.writer._unknown = {last: "<|im_start|>"}
    chat.state.vocab = last
    with pytest.raises(Exception, match=r"'<\|im_start\|>' is token"):
        chat.say(user("More"))
    assert chat.branch.position == position
    chat.writer._unknown = {fast.convert_tokens_to_ids("<|im_end|>"): "<|im_end|>"}
    chat.writer.close_turn(chat.branch)
    assert chat.branch.position == position


def test_text_that_the_model_said_never_becomes_ids_it_does_not_have() -> None:
    chat = Chat(sentencepiece("never"))
    known = chat.tokenizer.encode("hello")
    chat.writer._unknown = {known[0]: "x"}
    assert known[0] not in chat.writer.continue_output(chat.branch, "hello")


def test_a_text_begins_with_the_start_token_only_at_position_0(
    sim: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a token comes first in a branch decides it, not whether it is the first text."""
    engine = sim()
    monkeypatch.setattr(engine.tokenizer, "start_ids", [7])
    client = engine.session()
    client.send(w.Append(id=1, text="a"), w.Append(id=2, text="a"), w.Rollback(id=3, to=1))
    client.send(w.Append(id=4, text="a"), w.Rollback(id=5, to=0), w.Append(id=6, text="a"))
    engine.pump()
    letter = engine.tokenizer.encode("a")
    positions = [client.replies[ident][0].position for ident in (1, 2, 4, 6)]
    assert positions == [2, 3, 2, 2]
    assert list(engine.cores[1].state.branches["main"].tokens()) == [7, *letter]
