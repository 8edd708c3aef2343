"""Appends: tokenized like the whole, once per op, and only if it can fit."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ramify.actors.calls.templates import Asked, as_dicts
from ramify.actors.kit.memory import SEGMENT, TOKEN, json_size
from ramify.actors.kit.turns import at_once
from ramify.actors.session.branches.segments import Tail
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.tokenizer import Tokenizer
from ramify.actors.tokenizer.pictures import Shown
from ramify.protocol import wire as w
from ramify.protocol.errors import BadRequest, LimitExceeded, TooLong
from ramify.protocol.pictures import FIRST, MARK, Picture
from tests.actors.session.test_conversations import MOVES, SHORTENS, STRIPS, Chat, bytewise, user
from tests.actors.tokenizer.test_pictures import SETTINGS
from tests.actors.tokenizer.test_tokenizer import sentencepiece

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
    tokenizer = Tokenizer.of(fast)
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
    chat.writer.unknown = {last: "<|im_start|>"}
    chat.state.vocab = last
    with pytest.raises(Exception, match=r"'<\|im_start\|>' is token"):
        chat.say(user("More"))
    assert chat.branch.position == position
    chat.writer.unknown = {fast.convert_tokens_to_ids("<|im_end|>"): "<|im_end|>"}
    chat.writer.close_turn(chat.branch)
    assert chat.branch.position == position


def test_text_that_the_model_said_never_becomes_ids_it_does_not_have() -> None:
    chat = Chat(sentencepiece("never"))
    known = chat.tokenizer.encode("hello")
    chat.writer.unknown = {known[0]: "x"}
    assert known[0] not in chat.writer.continue_output(chat.branch, "hello")


def test_a_mark_that_the_model_spelt_stays_text() -> None:
    chat = ready()
    mark = "<|im_end|>"
    control = chat.tokenizer.encode_chat(mark)
    assert len(control) == 1
    tokens = chat.writer.continue_output(chat.branch, mark)
    assert control[0] not in tokens
    assert chat.tokenizer.decode(tokens) == mark


def test_a_mark_in_a_text_counts_unless_the_client_says_otherwise() -> None:
    mark = "Yes.<|im_end|>"
    for special in (True, False):
        chat = ready()
        chat.say(user("Hi"))
        (end,) = chat.tokenizer.encode_chat("<|im_end|>")
        op = w.Append(id=2, text=mark, special=special)
        prepared = chat.writer.prepare(chat.branch, op, strict=False, tools=None, room=999)
        at_once(chat.writer.apply(chat.branch, prepared, 2))
        segment = chat.branch.segments[-1]
        assert (end in segment.tokens) is special
        assert segment.text == mark


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


# --- what an append is, exactly: a token is a byte -----------------------------------------------


def ready(source: str = STRIPS, **fields: Any) -> Chat:
    return Chat(bytewise(source), strict=False, **fields)


LATE_TOOLS = (  # in front of the last message
    "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)


def test_the_size_of_an_append_is_the_text_to_work_on() -> None:
    chat = ready()
    writer, branch = chat.writer, chat.branch
    calls: Any = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said = w.ChatMessage(role="assistant", content="abc", reasoning="de", tool_calls=calls)
    messages = w.Append(id=1, messages=[user("Hello"), said])
    plain = 5 + 64 + 3 + 2 + json_size(calls) + 64
    assert writer.size(branch, w.Append(id=1, tokens=[5, 6]), strict=False, tools=80) == 2
    assert writer.size(branch, w.Append(id=1, text="abc"), strict=True, tools=80) == 3
    assert writer.size(branch, messages, strict=False) == plain
    assert writer.size(branch, messages, strict=False, tools=80) == plain + 80
    chat.state.extend(branch, [5] * 6, "xxxxxx", tail=Tail.RAW)
    assert writer.size(branch, messages, strict=False, tools=80) == plain  # the template has told them
    assert writer.size(branch, messages, strict=True, tools=80) == plain + 10 + 24 + 64
    late = ready(LATE_TOOLS)
    late.state.extend(late.branch, [5] * 6, "xxxxxx", tail=Tail.CLOSED, role="assistant", chat=True)
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    late.writer.prepare(
        late.branch, w.Append(id=1, messages=[user("?")]), strict=False, tools=tools, room=99
    )
    assert late.writer.size(late.branch, messages, strict=False, tools=80) == plain + 10


def test_the_room_is_that_of_the_shortest_branch_without_its_prompt() -> None:
    chat = ready()
    state, writer = chat.state, chat.writer
    assert writer.room(["nobody"]) == state.context
    long, asked = state.root("long"), state.root("asked")
    state.extend(long, [5] * 9, "x" * 9, tail=Tail.RAW)
    state.extend(asked, [5] * 4, "x" * 4, tail=Tail.CLOSED, role="user")
    assert writer.room(["long", "nobody"]) == state.context - 9
    assert writer.room(["long", "asked"]) == state.context - 4
    state.extend(asked, [5] * 7, "x" * 7, tail=Tail.PROMPT, role="assistant")
    assert writer.room(["long", "asked"]) == state.context - 4


def test_branches_in_one_situation_share_their_tokens() -> None:
    chat = ready()
    writer, branch = chat.writer, chat.branch
    text, messages = w.Append(id=1, text="a"), w.Append(id=1, messages=[user("a")])
    assert writer.situation(branch, text, strict=True) == (
        *(Tail.RAW, None, False, "", True, None),
        Asked(),
    )
    assert writer.situation(branch, messages, strict=True) is None
    chat.say(user("Hi"))
    turn, prompt = branch.segments
    assert (turn.turn, prompt.turn, prompt.tail) == (1, 0, Tail.PROMPT)
    assert writer.situation(branch, messages, strict=True) is branch.segments.top
    assert writer.situation(branch, messages, strict=False)[:5] == (  # type: ignore[index]
        Tail.CLOSED,
        "user",
        True,
        "",
        False,
    )
    assert writer.situation(branch, text, strict=False)[:5] == (  # type: ignore[index]
        Tail.OPEN,
        "assistant",
        False,
        "",
        False,
    )


def test_text_is_one_turn_and_stands_in_no_chat() -> None:
    chat = ready()
    for op, text in ((w.Append(id=4, text="ab"), "ab"), (w.Append(id=5, tokens=[70, 71]), None)):
        prepared = chat.writer.prepare(chat.branch, op, strict=False, tools=None, room=99)
        assert prepared.pending.start is (text is not None)
        assert at_once(chat.writer.apply(chat.branch, prepared, op.id)) is None
        segment = chat.branch.segments[-1]
        assert (segment.turn, segment.op, segment.tail, segment.role) == (1, op.id, Tail.RAW, None)
        assert not segment.chat  # type: ignore[union-attr]
    assert chat.branch.position == 4


def test_text_behind_a_turn_without_a_prompt_is_the_assistants() -> None:
    chat = ready(MOVES)
    chat.say(user("Hi"))
    (turn,) = chat.branch.segments
    prepared = chat.writer.prepare(
        chat.branch, w.Append(id=2, text="Yes"), strict=False, tools=None, room=999
    )
    assert at_once(chat.writer.apply(chat.branch, prepared, 2)) is None
    assert chat.branch.segments[0] is turn
    assert (chat.branch.tail, chat.branch.role, len(chat.branch.segments)) == (Tail.OPEN, "assistant", 2)


def test_a_prompt_that_is_all_there_is_has_nothing_before_it() -> None:
    prompt = SimpleNamespace(tail=Tail.PROMPT, role="assistant")
    branch: Any = SimpleNamespace(tail=Tail.PROMPT, role="assistant", segments=[prompt])
    op = w.Append(id=1, messages=[w.ChatMessage(role="user", content="a")])
    writer: Any = None  # it is not asked
    assert BranchWriter._end(writer, branch, op) == (Tail.RAW, None, True)
    branch.segments.insert(0, SimpleNamespace(tail=Tail.CLOSED, role="user"))
    assert BranchWriter._end(writer, branch, op) == (Tail.CLOSED, "user", True)


def test_a_prompt_that_nobody_answered_is_taken_back_with_its_room() -> None:
    chat = ready()
    chat.say(user("Hi"))
    branch, prompt = chat.branch, chat.branch.segments[-1]
    op = w.Append(id=3, messages=[user("More")])
    prepared = chat.writer.prepare(branch, op, strict=False, tools=None, room=999)
    assert prepared.encoded is not None
    count = sum(len(each.tokens) for each in prepared.encoded)
    chat.state.context = prompt.start + count
    assert at_once(chat.writer.apply(branch, prepared, 3)) == prompt.start
    assert branch.position == chat.state.context
    assert branch.text().count("assistant") == 1


def test_an_append_needs_memory_for_all_that_is_kept_of_it() -> None:
    chat = ready()
    meter = chat.state.meter
    messages = [w.ChatMessage(role="assistant", content="abc", reasoning="de"), user("Hello")]
    prepared = chat.writer.prepare(
        chat.branch, w.Append(id=1, messages=messages), strict=False, tools=None, room=999
    )
    assert prepared.encoded is not None
    count = sum(len(each.tokens) for each in prepared.encoded)
    texts = sum(len(part.text) for part in prepared.pending.parts)
    need = SEGMENT * 3 + TOKEN * count + 2 * texts + 3 + 2 + 5
    meter.most = meter.held + need - 1
    with pytest.raises(LimitExceeded):
        at_once(chat.writer.apply(chat.branch, prepared, 1))
    assert chat.branch.position == 0
    meter.most += 1
    assert at_once(chat.writer.apply(chat.branch, prepared, 1)) is None
    assert chat.branch.position == count


def test_text_that_certainly_has_no_room_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ready()
    monkeypatch.setattr(chat.tokenizer, "least_tokens", len)
    op = w.Append(id=1, text="x" * 50)
    prepared = chat.writer.prepare(chat.branch, op, strict=False, tools=None, room=49)
    assert (prepared.encoded, prepared.pending.least) == (None, 50)
    chat.state.context = 49
    with pytest.raises(TooLong, match="at least 50") as error:
        at_once(chat.writer.apply(chat.branch, prepared, 1))
    assert error.value.details == {"max": 49, "position": 0, "tokens": 50}
    chat.state.context = 50  # it has become longer meanwhile
    with pytest.raises(TooLong, match="send it again"):
        at_once(chat.writer.apply(chat.branch, prepared, 1))
    exact = chat.writer.prepare(chat.branch, op, strict=False, tools=None, room=50)
    assert at_once(chat.writer.apply(chat.branch, exact, 1)) is None


def test_a_strict_append_that_changes_nothing_before_it_moves_nothing_back() -> None:
    chat = Chat(bytewise(STRIPS))
    writer, branch = chat.writer, chat.branch
    op = w.Append(id=1, messages=[user("Hi")])
    prepared = writer.prepare(branch, op, strict=True, tools=None, room=999)
    assert (prepared.pending.start, prepared.pending.cut) == (True, 0)
    assert at_once(writer.apply(branch, prepared, 1)) is None
    turn, prompt = branch.segments
    assert (turn.turn, prompt.turn, turn.role, prompt.role) == (1, 0, "user", "assistant")
    assert (turn.history, prompt.history, turn.op) == (None, None, 1)
    more = writer.prepare(
        branch, w.Append(id=2, messages=[user("More")]), strict=True, tools=None, room=999
    )
    assert not more.pending.start
    at = at_once(writer.apply(branch, more, 2))
    assert at is not None
    assert prompt.start <= at <= prompt.end
    assert [segment.turn for segment in branch.segments if segment.turn] == [1, 1]


def opened(chat: Chat, **fields: Any) -> w.Open:
    return w.Open(client="c", **fields)


def test_a_turn_opens_with_a_prompt_and_what_it_has_to_begin_with() -> None:
    chat = ready()
    chat.state.extend(chat.branch, [5] * 4, "xxxx", tail=Tail.CLOSED, role="user")
    prompt = len("<|im_start|>assistant\n") - len("<|im_start|>") + 1
    chat.state.context = 4 + prompt + 3
    with pytest.raises(TooLong) as error:  # and one token of an answer
        chat.writer.open_turn(chat.branch, opened(chat), "Yes")
    assert error.value.details == {"max": 4 + prompt + 3, "position": 4, "tokens": prompt + 4}
    assert chat.branch.position == 4
    chat.state.context += 1
    assert chat.writer.open_turn(chat.branch, opened(chat), "Yes") == 4 + prompt
    turn, said = chat.branch.segments[1:]
    assert (turn.tail, turn.role, turn.text) == (Tail.PROMPT, "assistant", "<|im_start|>assistant\n")
    assert (said.tail, said.role, said.text, said.turn) == (Tail.OPEN, "assistant", "Yes", 0)
    assert chat.writer.open_turn(chat.branch, opened(chat)) is None  # it is open
    assert len(chat.branch.segments) == 3


def test_an_opening_stands_behind_the_prompts_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = ready()
    chat.state.extend(chat.branch, [65, 66], "ab", tail=Tail.CLOSED, role="user")
    behind: list[int | None] = []
    encode = chat.tokenizer.encode_chat

    def noting(text: str, **fields: Any) -> list[int]:
        behind.append(fields.get("after"))
        return encode(text)

    monkeypatch.setattr(chat.tokenizer, "context", lambda token: token)
    monkeypatch.setattr(chat.tokenizer, "encode_chat", noting)
    chat.writer.open_turn(chat.branch, opened(chat), "Yes")
    last = chat.branch.segments[-2].tokens[-1]
    assert behind == [66, last]
    chat.writer.open_turn(chat.branch, opened(chat), "No")
    assert behind[2:] == [chat.branch.segments[-2].tokens[-1]]


def test_prompts_of_whole_conversations_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat(bytewise(SHORTENS))
    chat.say(user("hm"))
    branch = chat.branch
    chat.state.truncate(branch, branch.segments[-1].start)  # without its prompt
    twin = branch.twin("twin", 99)
    calls: list[int] = []
    strict = chat.template.strict

    def counting(*fields: Any) -> str:
        calls.append(1)
        return strict(*fields)

    monkeypatch.setattr(chat.template, "strict", counting)
    known: dict[Any, str] = {}
    for each in (branch, twin):
        chat.writer.open_turn(each, opened(chat, template="strict"), known=known)
        assert each.text().endswith("<|im_start|>assistant\nhm ")
    assert len(calls) == 2
    assert list(known.values()) == ["<|im_start|>assistant\nhm "]


def test_a_turn_is_closed_as_far_as_there_is_room() -> None:
    chat = ready()
    chat.state.extend(chat.branch, [65], "a", tail=Tail.OPEN, role="assistant")
    chat.state.context = 2
    chat.writer.close_turn(chat.branch)  # the template's end is <|im_end|> and a line break
    assert (chat.branch.position, chat.branch.tail) == (1, Tail.OPEN)
    chat.state.context = 3
    chat.writer.close_turn(chat.branch)
    assert (chat.branch.position, chat.branch.tail) == (3, Tail.CLOSED)
    closed: Any = chat.branch.segments[-1]
    assert (closed.role, closed.chat, closed.text, closed.turn) == (
        "assistant",
        True,
        "<|im_end|>\n",
        0,
    )


def test_the_end_of_a_message_is_its_last_words_and_the_templates() -> None:
    writer = ready().writer
    content = "0123456789" * 5
    messages = [user(f" {content} \n"), user(" "), user("ab")]
    assert [writer.strict.end_of(messages, index) for index in (0, 1, 2)] == [
        content[-32:] + "<|im_end|>\n",
        "",
        "ab<|im_end|>\n",
    ]


# Ends an unanswered conversation in a way of its own, which the generation prompt replaces.
ENDS = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '(end)' }}"""


def test_a_strict_turn_ends_where_the_generation_prompt_begins() -> None:
    chat = Chat(bytewise(ENDS))
    op = w.Append(id=1, messages=[user("Hi")])
    prepared = chat.writer.prepare(chat.branch, op, strict=True, tools=None, room=999)
    turn, prompt = prepared.pending.parts
    assert (turn.text, turn.tail) == ("<|im_start|>user\nHi<|im_end|>\n", Tail.CLOSED)
    assert (prompt.text, prompt.tail) == ("<|im_start|>assistant\n", Tail.PROMPT)


def test_an_answer_begins_with_no_token_that_the_model_does_not_have() -> None:
    chat = ready()
    chat.state.extend(chat.branch, [5] * 4, "xxxx", tail=Tail.OPEN, role="assistant")
    unknown = max(chat.tokenizer.encode("Yes"))
    chat.writer.unknown = {unknown: "s"}
    chat.state.vocab = unknown
    with pytest.raises(BadRequest) as error:
        chat.writer.open_turn(chat.branch, opened(chat), "Yes")
    assert error.value.details == {"token": unknown, "vocab": unknown}
    assert chat.branch.position == 4


# --- ends that depend on what follows --------------------------------------------------------------

LAST_DIFFERS = (
    "{% for m in messages %}{{ '<' + m.role[0] + '>' + m.content }}"
    "{% if loop.last and m.role == 'tool' %}{{ '</tools>' }}"
    "{% elif loop.last and m.role == 'assistant' %}{{ '</last>' }}{% else %}{{ '</s>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def test_an_end_that_depends_on_what_follows_is_taken_back() -> None:
    """Such a turn had two ends: that of a last turn, and the one of what followed."""
    chat = ready(LAST_DIFFERS)
    chat.say(user("Q"))
    chat.say(w.ChatMessage(role="assistant", content="A"))
    assert chat.branch.text() == "<u>Q</s><a>A</last>"
    chat.say(user("R"))
    assert chat.branch.text() == "<u>Q</s><a>A</s><u>R</s><a>"
    chat.say(w.ChatMessage(role="assistant", content="B"), w.ChatMessage(role="tool", content="5"))
    assert chat.branch.text() == "<u>Q</s><a>A</s><u>R</s><a>B</s><t>5</tools><a>"
    chat.say(w.ChatMessage(role="assistant", content="C"))
    assert chat.branch.text().endswith("<t>5</s><a>C</last>")


def test_a_generation_behind_a_turn_without_its_end_begins_with_that() -> None:
    """A fork or a rollback may end there."""
    chat = ready(LAST_DIFFERS)
    chat.say(user("Q"))
    chat.say(w.ChatMessage(role="assistant", content="A"))
    end = chat.branch.segments[-1].start
    chat.writer.open_turn(chat.branch, opened(chat))
    assert chat.branch.text() == "<u>Q</s><a>A</last><a>"
    chat.state.truncate(chat.branch, end)
    assert chat.branch.tail is Tail.PENDING
    chat.writer.open_turn(chat.branch, opened(chat))
    assert chat.branch.text() == "<u>Q</s><a>A</last><a>"


def test_pictures_in_a_conversation_that_is_rendered_anew() -> None:
    """They stay where they are while the template writes their turns as before; else that is refused."""
    shown = Shown(Picture(64, 64, bytes(3 * 64 * 64)), array("i", [5, *range(FIRST, FIRST + 9), 6]))

    def said(chat: Chat, number: int, text: str, *images: bytes) -> Any:
        op = w.Append(id=number, messages=[user(text)], images=list(images))
        prepared = chat.writer.prepare(chat.branch, op, strict=True, tools=None, room=9999)
        at_once(chat.writer.apply(chat.branch, prepared, number))
        return prepared

    each = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</s>' }}{% endfor %}"
    each += "{% if add_generation_prompt %}<assistant>{% endif %}"
    chat = Chat(bytewise(each), strict=True)
    chat.state.pictures = cast(
        "Any", SimpleNamespace(settings=SETTINGS, each=lambda images, _: iter([shown] * len(images)))
    )
    said(chat, 1, f"a{MARK}b", b"1")
    before = list(chat.branch.tokens())
    assert before[before.index(5) : before.index(5) + 11] == list(shown.tokens)
    chat.answer("c")
    whole = list(chat.branch.tokens())
    prepared = said(chat, 2, f"{MARK}?", b"2")
    assert prepared.pending.cut >= len(whole) - 1
    said(chat, 3, "so?")
    found = list(chat.branch.tokens())
    assert found[: len(before)] == before
    assert [part.picture is not None for part in chat.branch.segments].count(True) == 2
    with pytest.raises(BadRequest, match="shows 2 of 1"):
        said(chat, 4, f"{MARK} and {MARK}", b"2")
    again = Chat(
        bytewise(each.replace("m.role +", "m.role + ('' if loop.last else ' before') +")), strict=True
    )
    again.state.pictures = chat.state.pictures
    said(again, 1, f"a{MARK}b", b"1")
    tokens = list(again.branch.tokens())
    with pytest.raises(BadRequest, match='rule "append"'):
        said(again, 2, "so?")
    assert list(again.branch.tokens()) == tokens
