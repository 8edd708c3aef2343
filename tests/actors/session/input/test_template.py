"""Turns as differences: `first` and deltas against rendering the whole conversation.

The templates have the shape (and the quirks) of those that models of these families ship.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ramify.actors.calls.templates import as_dicts
from ramify.actors.kit.turns import at_once
from ramify.actors.session.branches.segments import OutputSegment
from ramify.actors.session.branches.state import SessionState
from ramify.actors.session.input.branch_writer import BranchWriter
from ramify.actors.session.input.template import ChatTemplate
from ramify.actors.tokenizer import GUARD, Tokenizer
from ramify.protocol.config import Limits
from ramify.protocol.errors import BadRequest
from ramify.protocol.wire import Append, ChatMessage, JsonObject, MessagePlace, Open, Role

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

LLAMA_2 = """
{%- if messages[0]['role'] == 'system' %}
{%- set loop_messages = messages[1:] %}{%- set system_message = messages[0]['content'] %}
{%- else %}{%- set loop_messages = messages %}{%- set system_message = false %}{%- endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{%- if loop.index0 == 0 and system_message != false %}
{%- set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}
{%- else %}{%- set content = message['content'] %}{%- endif %}
{%- if message['role'] == 'user' %}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{- ' ' + content.strip() + ' ' + eos_token }}{%- endif %}
{%- endfor %}"""

LLAMA_3 = """
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Version 7's shape: tools before the last user turn, the system text inside the last user turn.
MISTRAL = """
{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
{%- if message['role'] == 'user'
    or (message['role'] == 'assistant' and not message['tool_calls']) %}
{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate') }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if message['role'] == 'user' %}
{%- if tools and message == user_messages[-1] %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- if loop.last and system_message is defined %}
{{- '[INST]' + system_message + '\n\n' + message['content'] + '[/INST]' }}
{%- else %}{{- '[INST]' + message['content'] + '[/INST]' }}{%- endif %}
{%- elif message['tool_calls'] %}
{%- for call in message['tool_calls'] %}
{%- if call['id'] | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{%- endfor %}
{{- '[TOOL_CALLS]' + (message['tool_calls'] | tojson) + eos_token }}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}
{%- elif message['role'] == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + message['content'] }}
{{- ', "call_id": "' + message['tool_call_id'] + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}"""

QWEN_25 = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
{%- else %}{{- 'You are Qwen, a helpful assistant.' }}{%- endif %}
{{- '\n\n# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools><|im_end|>\n' }}
{%- else %}
{%- if messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>system\nYou are Qwen, a helpful assistant.<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') or (message.role == 'system' and not loop.first)
    or (message.role == 'assistant' and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != 'tool') %}
{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Strips the thoughts of turns before the last user turn: append mode keeps them.
QWEN_3 = """
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages %}{%- if message.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}{%- set reasoning = '' %}
{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') }}
{{- '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}
{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# Knows no system role, and says nothing about it.
IGNORANT = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{- 'User: ' + message.content + '\n' }}
{%- elif message.role == 'assistant' %}{{- 'Assistant: ' + message.content + '\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant: ' }}{%- endif %}"""

# Ends the last turn differently from those before it.
LAST_DIFFERS = """
{%- for message in messages %}
{{- message.role + ': ' + message.content }}
{%- if loop.last %}{{- '<eos>' }}{%- else %}{{- '\n' }}{%- endif %}
{%- endfor %}"""

# Shows a result with the name of the call before it, and the end of a call as the token that stops it.
NAMES_CALLS = """
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set function = message.tool_calls[0].function %}{%- set last.name = function.name %}
{{- '<call ' + function.name + '>' + function.arguments | tojson + '</s>' }}
{%- elif message.role == 'assistant' %}
{{- '<answer>' + message.content + ('</s>' if loop.last else '<end>') }}
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{- raise_exception('no call before it') }}{%- endif %}
{{- '<result of ' + last.name + '>' + message.content + '<end>' }}
{%- else %}{{- '<' + message.role + '>' + message.content + '<end>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<a>' }}{%- endif %}"""

# Marks the first result of a conversation, and the first call, as DeepSeek's do.
MARKS_FIRST = """
{%- set ns = namespace(calls=false, results=false) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set function = message.tool_calls[0].function %}
{{- ('\n' if ns.calls else '<calls>') + function.name + function.arguments | tojson + '<eos>' }}
{%- set ns.calls = true %}
{%- elif message.role == 'tool' %}
{{- ('\n' if ns.results else '<results>') + message.content + '<end>' }}{%- set ns.results = true %}
{%- else %}{{- '<' + message.role + '>' + message.content + '<eos>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<a>' }}{%- endif %}"""

# Has no place for a system turn that nothing follows.
ASKS_FOR_USERS = (
    CHATML
    + """
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
{{- raise_exception('No user query found') }}{%- endif %}"""
)

TEMPLATES = {
    "chatml": CHATML,
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "mistral": MISTRAL,
    "qwen-2.5": QWEN_25,
    "qwen-3": QWEN_3,
    "names calls": NAMES_CALLS,
    "marks first": MARKS_FIRST,
    "asks for users": ASKS_FOR_USERS,
}
TOOLS: list[JsonObject] = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def tokenizer(source: str, *, tokens: bool = False) -> Tokenizer:
    """`tokens`: texts have some, one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if tokens else []
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|eot_id|>"],
    )
    fast.chat_template = source
    return Tokenizer.of(fast)


@pytest.fixture(scope="module")
def load() -> Callable[[str], ChatTemplate]:
    made: dict[str, ChatTemplate] = {}

    def get(name: str) -> ChatTemplate:
        if name not in made:
            made[name] = ChatTemplate(tokenizer(TEMPLATES.get(name, name)))
        return made[name]

    return get


def turns(*pairs: tuple[Role, str]) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=content) for role, content in pairs]


CONTENT = st.text(st.sampled_from("ab <|im_end>\n{}[]S/é"), max_size=12)
GROUPS = st.lists(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), CONTENT), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", ["chatml", "llama-3", "qwen-2.5"])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(groups=GROUPS, system=st.booleans(), tools=st.booleans())
def test_first_and_deltas_are_the_whole_rendering(
    load: Callable[[str], ChatTemplate], name: str, groups: Any, system: bool, tools: bool
) -> None:
    """Any roles in any grouping, for templates that never rewrite."""
    template, given_tools = load(name), TOOLS if tools else None
    appends = [turns(*group) for group in groups]
    if system:
        appends[0].insert(0, ChatMessage(role="system", content="Be brief."))
    text = template.first(appends[0], given_tools, False)
    for before, after in pairwise(appends):
        text += template.delta(before[-1].role, True, after, given_tools, False)
    every = [message for group in appends for message in group]
    assert text == template.strict(every, given_tools, False)
    prompt = template.generation_prompt(every[-1].role)
    assert text + prompt == template.strict(every, given_tools, True)


@pytest.mark.parametrize("name", ["chatml", "llama-2", "llama-3", "mistral", "qwen-2.5", "qwen-3"])
@settings(derandomize=True, deadline=None, max_examples=40)
@given(contents=st.lists(CONTENT, min_size=1, max_size=5))
def test_a_chat_with_generated_answers(
    load: Callable[[str], ChatTemplate], name: str, contents: list[str]
) -> None:
    """first, generate, closing, delta, ...: what a session does, in both ways of closing."""
    assume(all(content == content.strip() for content in contents))
    template = load(name)
    history = turns(("user", "Q1"))
    text = template.first(history, None, True)
    unclosed = text
    for content in contents:
        answer = f"A {content}".strip()
        # Llama-2's and Mistral's templates put a blank before an answer; the model samples it.
        header = " " if name in ("llama-2", "mistral") else ""
        question = turns(("user", f"Q {content}".strip()))
        history += [*turns(("assistant", answer)), *question]
        text += (
            header
            + answer
            + template.closing()
            + template.delta("assistant", True, question, None, True)
        )
        unclosed += header + answer + template.delta("assistant", False, question, None, True)
    assert text == unclosed == template.strict(history, None, True)


@pytest.mark.parametrize(
    ("name", "closing", "eos", "rest"),
    [
        ("chatml", "<|im_end|>\n", "<|im_end|>", "\n"),
        ("qwen-2.5", "<|im_end|>\n", "<|im_end|>", "\n"),
        ("qwen-3", "<|im_end|>\n", "<|im_end|>", "\n"),
        ("llama-2", " </s>", "</s>", ""),
        ("llama-3", "<|eot_id|>", "<|eot_id|>", ""),
        ("mistral", "</s>", "</s>", ""),
    ],
)
def test_closing(load: Any, name: str, closing: str, eos: str, rest: str) -> None:
    template = load(name)
    assert template.closing() == closing
    assert template.rest_after_eos(eos) == rest
    assert template.rest_after_eos("<|endoftext|>") is None
    assert template.rest_after_eos("") is None


def test_a_default_system_prompt_comes_once(load: Any) -> None:
    template = load("qwen-2.5")
    assert "You are Qwen" in template.first(turns(("user", "Hi")), None, True)
    assert template.delta("assistant", True, turns(("user", "Hi")), TOOLS, True) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_round_trip(load: Any) -> None:
    """Call, two results in one append, answer: equal to the whole conversation."""
    template = load("qwen-2.5")
    question = turns(("user", "Weather?"))
    call = ChatMessage(
        role="assistant",
        tool_calls=[
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Köln"}'},
            }
        ],
    )
    results = [
        ChatMessage(role="tool", content="rain", tool_call_id="c1"),
        ChatMessage(role="tool", content="10 C", tool_call_id="c1"),
    ]
    text = template.first(question, TOOLS, False)
    text += template.delta("user", True, [call], TOOLS, False)
    text += template.delta("assistant", True, results, TOOLS, True)
    assert text == template.strict([*question, call, *results], TOOLS, True)
    assert '"arguments": {"city": "Köln"}' in text


CALL = ChatMessage(
    role="assistant", tool_calls=[{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
)


def result(content: str) -> ChatMessage:
    return ChatMessage(role="tool", content=content, tool_call_id="c1")


class Branch:
    """A branch of append mode, written by `BranchWriter`."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tokenizer(TEMPLATES[name], tokens=True)
        room = 1 << 20
        self.template = ChatTemplate(self.tokenizer)
        self.state = SessionState(
            1, context=room, vocab=room, limits=Limits(), decode=self.tokenizer.decode
        )
        self.branch = self.state.root("main")
        self.writer = BranchWriter(self.state, self.tokenizer, self.template)

    def append(self, *messages: ChatMessage, strict: bool = False) -> None:
        op = Append(id=1, messages=list(messages))
        prepared = self.writer.prepare(
            self.branch, op, strict=strict, tools=TOOLS, room=self.state.context
        )
        at_once(self.writer.apply(self.branch, prepared, 1))

    def says(self, text: str, spoken: ChatMessage) -> None:
        """A generation that a token ended which the template does not end turns with."""
        segment = OutputSegment(self.branch.position)
        segment.tokens.extend(self.tokenizer.encode(text))
        segment.release(len(segment.tokens), text)
        segment.ends()
        self.branch.segments.append(segment)
        segment.spoken = spoken
        self.writer.close_turn(self.branch)

    def text(self) -> str:
        return Tokenizer.unguarded("".join(segment.raw for segment in self.branch.segments))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["chatml", "qwen-2.5", "names calls"])
def test_tool_results_one_by_one_are_those_at_once(name: str, strict: bool) -> None:
    """Also where the template joins them, or writes the name of the call with each."""
    every = [*turns(("user", "Q")), CALL, result("rain"), result("sun")]
    branch = Branch(name)
    for message in every:
        branch.append(message, strict=strict)
    assert branch.text() == branch.template.strict(every, TOOLS, True)
    branch.append(*turns(("assistant", "A"), ("user", "R")), strict=strict)
    every += turns(("assistant", "A"), ("user", "R"))
    assert branch.text() == branch.template.strict(every, TOOLS, True)


def test_the_end_of_results_that_others_may_join_is_known() -> None:
    """Strict mode finds turns by it that were rendered anew."""
    branch = Branch("qwen-2.5")
    end = branch.writer.strict.end_of([result("rain")], 0)
    assert end == "rain" + branch.template.pending_end("tool") == "rain\n</tool_response><|im_end|>\n"


@pytest.mark.parametrize("name", ["chatml", "qwen-2.5", "names calls", "marks first"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_calls_behind_results(name: str, size: int) -> None:
    """Also where the template remembers that there were some; `size`: messages an append."""
    called = [CALL, result("rain"), CALL, result("sun"), result("wind")]
    every = [*turns(("user", "Q")), *called, *turns(("assistant", "A"), ("user", "R")), *called[:2]]
    branch = Branch(name)
    for at in range(0, len(every), size):
        branch.append(*every[at : at + size])
    assert branch.text() == branch.template.strict(every, TOOLS, every[-1].role != "assistant")


def test_results_behind_a_generated_call_bring_the_token_that_stopped_it() -> None:
    branch = Branch("names calls")
    branch.append(*turns(("user", "Q")))
    branch.writer.open_turn(branch.branch, Open(client="c", tools=TOOLS))
    branch.says('<call weather>{"city": "Rome"}', CALL)
    branch.append(result("rain"))
    said = '<user>Q<end><a><call weather>{"city": "Rome"}</s><result of weather>rain<end><a>'
    assert branch.text() == said


def test_results_without_a_call_are_refused_as_the_template_says() -> None:
    branch = Branch("names calls")
    branch.append(*turns(("user", "Q"), ("assistant", "A")))
    with pytest.raises(BadRequest, match="no call before it"):
        branch.append(result("rain"))


@pytest.mark.parametrize("strict", [False, True])
def test_a_system_turn_alone_is_refused_with_a_way_out(strict: bool) -> None:
    branch = Branch("asks for users")
    system, question = turns(("system", "Be brief."), ("user", "Q"))
    with pytest.raises(BadRequest, match="in one `append`"):
        branch.append(system, strict=strict)
    branch.append(system, question, strict=strict)
    assert branch.text() == branch.template.strict([system, question], TOOLS, True)


def test_tools_that_a_template_repeats_before_each_user_turn(load: Any) -> None:
    text = load("mistral").delta("assistant", True, turns(("user", "Hi")), TOOLS, True)
    assert text.startswith("[AVAILABLE_TOOLS][{")
    assert text.endswith("[/AVAILABLE_TOOLS][INST]Hi[/INST]")


def test_mistral_tool_results(load: Any) -> None:
    template = load("mistral")
    result = [ChatMessage(role="tool", content="1", tool_call_id="c00000001")]
    expected = '[TOOL_RESULTS]{"content": 1, "call_id": "c00000001"}[/TOOL_RESULTS]'
    assert template.delta("assistant", True, result, None, True) == expected
    assert template.delta("tool", True, result, None, True) == expected
    assert template.generation_prompt("tool") == ""


@pytest.mark.parametrize(("name", "follow"), [("mistral", False), ("qwen-3", True), ("llama-3", True)])
def test_whether_users_may_speak_behind_results(load: Any, name: str, follow: bool) -> None:
    assert load(name).lets_users_follow_results() is follow


def test_thoughts_stay_in_append_mode_and_go_in_strict_mode(load: Any) -> None:
    template = load("qwen-3")
    answer = "<think>\nhm\n</think>\n\nParis"
    history = turns(("user", "Q"), ("assistant", answer))
    more = turns(("user", "And?"))
    appended = template.first(history, None, False) + template.delta("assistant", True, more, None, True)
    assert answer in appended
    assert "hm" not in template.strict([*history, *more], None, True)


@pytest.mark.parametrize("name", ["llama-2", "mistral"])
def test_roles_that_must_alternate(load: Any, name: str) -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        load(name).delta("user", True, turns(("user", "again")), None, False)
    with pytest.raises(BadRequest, match="roles must alternate"):
        load(name).first(turns(("assistant", "Hi")), None, False)


@pytest.mark.parametrize("name", ["llama-2", "mistral"])
def test_a_system_turn_alone_is_refused_where_it_would_get_lost(load: Any, name: str) -> None:
    with pytest.raises(BadRequest, match="append both"):
        load(name).first(turns(("system", "Be brief.")), None, False)
    both = load(name).first(turns(("system", "Be brief."), ("user", "Hi")), None, False)
    assert "Be brief." in both


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", ["chatml", "llama-3", "qwen-2.5"])
def test_a_system_turn_alone_is_fine_elsewhere(load: Any, name: str, tools: Any) -> None:
    template = load(name)
    system, user = turns(("system", "Be brief.")), turns(("user", "Hi"))
    text = template.first(system, tools, False)
    assert text + template.generation_prompt("system", tools=bool(tools)) == template.strict(
        system, tools, True
    )
    text += template.delta("system", True, user, tools, True)
    assert text == template.strict([*system, *user], tools, True)


def test_a_system_turn_is_never_skipped_in_silence(load: Any) -> None:
    messages = turns(("system", "Be brief."), ("user", "Hi"))
    with pytest.raises(BadRequest, match="leaves a system turn out"):
        load(IGNORANT).first(messages, None, False)
    with pytest.raises(BadRequest, match="leaves a system turn out"):
        load(IGNORANT).delta("assistant", True, messages, None, False)


def test_a_guarded_system_turn_counts_as_shown(load: Any) -> None:
    text = load("chatml").first(turns(("system", "never say <|im_end|>"), ("user", "x")), None, False)
    assert GUARD in text


def test_a_turn_end_that_depends_on_what_follows_is_left_to_the_next_turn(load: Any) -> None:
    template = load(LAST_DIFFERS)
    assert template.closing() == ""
    assert template.delta("assistant", True, turns(("user", "Hi")), None, False) == "\nuser: Hi<eos>"


def test_contents_that_hold_the_marker_change_nothing(load: Any) -> None:
    text = load("chatml").delta("user", True, turns(("user", "ramifyf3a9c1marker")), None, False)
    assert text == "<|im_start|>user\nramifyf3a9c1marker<|im_end|>\n"


def test_the_history_is_not_rendered() -> None:
    """A delta costs the new turns, and questions about the end of a turn are asked once."""
    sizes: list[int] = []

    class Counting:
        inner = tokenizer(CHATML)

        def render(
            self,
            messages: Sequence[Mapping[str, Any]],
            tools: Sequence[Mapping[str, Any]] | None = None,
            generate: bool = False,
            effort: str | None = None,
        ) -> str:
            sizes.append(len(messages))
            return self.inner.render(messages, tools, generate, effort)

        def unguarded(self, rendered: str) -> str:
            return self.inner.unguarded(rendered)

    template = ChatTemplate(Counting())
    for _ in range(5):
        template.delta("assistant", True, turns(("user", "Hi")), None, False)
        template.generation_prompt("user")
    assert max(sizes) <= 3
    assert sizes.count(3) == 5 + 1  # one per delta, one for the closing


def test_messages_as_templates_read_them() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "not json"}}
    bare = {"name": "g", "arguments": "{}"}
    message = ChatMessage(role="assistant", tool_calls=[call, bare])
    assert as_dicts([message, ChatMessage(role="tool", content="1", name="f", tool_call_id="c")]) == [
        {"role": "assistant", "content": "", "tool_calls": [call, bare]},
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c"},
    ]


@pytest.mark.parametrize(
    "arguments",
    ['{"x": ' + "[" * 900 + "]" * 900 + "}", '{"x": NaN}', r'{"x": "\ud800"}', "[" * 100_000],
)
def test_arguments_that_a_template_could_not_write_stay_a_string(arguments: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    (shown,) = as_dicts([ChatMessage(role="assistant", tool_calls=[call])])
    assert shown["tool_calls"] == [call]


class Written:
    """A template that is a function of the messages; notes with which tools it was asked."""

    def __init__(self, write: Callable[[Sequence[Mapping[str, Any]], bool], str]) -> None:
        self.write = write
        self.tools: list[Any] = []

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        generate: bool = False,
        effort: str | None = None,
    ) -> str:
        self.tools.append(tools)
        return self.write(messages, tools is not None) + ("<a>" if generate else "")

    def unguarded(self, rendered: str) -> str:
        return rendered


def plainly(messages: Sequence[Mapping[str, Any]], tools: bool) -> str:
    return "".join(f"<{m['role'][0]}>{m['content']} </e>\n" for m in messages)


def test_what_is_left_of_an_end_behind_the_sampled_token() -> None:
    template = ChatTemplate(Written(plainly))
    assert template.closing() == " </e>\n"
    assert template.rest_after_eos("</e>") == "\n"
    assert template.rest_after_eos("e>") is None  # "</" would be lost
    assert template.rest_after_eos("<other>") is None
    assert template.rest_after_eos("") is None


def test_a_template_that_wants_tools_is_asked_with_one_and_refusals_with_tools_stand() -> None:
    def wants(messages: Sequence[Mapping[str, Any]], tools: bool) -> str:
        if not tools:
            raise BadRequest("tools, please")
        return plainly(messages, tools)

    written = Written(wants)
    assert ChatTemplate(written).closing("user") == " </e>\n"
    assert [each is None for each in written.tools] == [True, False] * 2

    def refuses(messages: Sequence[Mapping[str, Any]], tools: bool) -> str:
        raise BadRequest("no")

    never = Written(refuses)
    with pytest.raises(BadRequest, match="no"):
        ChatTemplate(never).closing("system", [{"name": "f"}])
    assert len(never.tools) == 1


def test_a_turn_that_is_not_shown_cannot_be_continued() -> None:
    template = ChatTemplate(Written(lambda messages, tools: "nothing"))
    with pytest.raises(BadRequest, match="does not show a 'user' turn in its place"):
        template.closing("user")


def test_what_a_template_is_asked_is_asked_once() -> None:
    written = Written(plainly)
    template = ChatTemplate(written)
    for _ in range(3):
        assert template.closing("user") == " </e>\n"
        assert template.generation_prompt("user") == "<a>"
        assert template.generation_prompt("user", tools=True) == "<a>"
    assert len(written.tools) == 3
    assert written.tools == [None] * 3
    template.generation_prompt("system", tools=True)
    assert written.tools[-1] is not None


@pytest.mark.parametrize("name", ["chatml", "llama-2", "llama-3", "mistral", "qwen-2.5", "qwen-3"])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    contents=st.lists(st.text(st.sampled_from("abé \n"), max_size=8), min_size=1, max_size=5),
    system=st.booleans(),
    places=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_places_in_messages(
    load: Callable[[str], ChatTemplate], name: str, contents: list[str], system: bool, places: Any
) -> None:
    """What stands before a mark is the text up to it, several in one message too; or it is not found."""
    template = load(name)
    roles: list[Role] = ["user", "assistant"] * 3
    messages = turns(*[(role, f"{role[0]}{c}") for role, c in zip(roles, contents, strict=False)])
    if messages[-1].role == "assistant":
        messages += turns(("user", "?"))
    messages = [*turns(("system", "Be brief.")), *messages] if system else messages
    marks = [MessagePlace(number % len(messages), at) for number, at in places]
    text = template.first(messages, TOOLS, False)
    for mark, found in zip(marks, template.places(messages, marks, text, TOOLS), strict=True):
        content = messages[mark.message].content
        wanted = content[: min(mark.at, len(content.rstrip()))]
        if name in ("chatml", "llama-3", "qwen-2.5"):
            assert found is not None
        if found is not None:
            before = text[:found]
            assert before.endswith(wanted)
            assert text[found:].startswith(content[len(wanted) :].rstrip())
    assert template.places(turns(("user", " \n")), [MessagePlace(0)], "?", None) == [None]


class CountingRenderer:
    """Notes the tools that each rendering was given."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.shown: list[Any] = []

    def render(
        self, messages: Any, tools: Any = None, generate: bool = False, effort: Any = None
    ) -> str:
        self.shown.append(tools)
        return self.inner.render(messages, tools, generate, effort)

    def unguarded(self, rendered: str) -> str:
        return self.inner.unguarded(rendered)


@pytest.mark.parametrize(("name", "late"), [("qwen-2.5", False), ("mistral", True)])
def test_tools_are_rendered_again_only_where_they_are_written_late(name: str, late: bool) -> None:
    """A turn of a conversation with large tools does not cost them where it does not show them."""
    renderer = CountingRenderer(tokenizer(TEMPLATES[name]))
    template = ChatTemplate(renderer)
    large: JsonObject = {"name": "weather", "description": "d" * 5000, "parameters": {}}
    tools = [{"type": "function", "function": large}]
    text = template.delta("assistant", True, turns(("user", "And?")), tools, False)
    assert (tools in renderer.shown) == late == template.late_tools
    assert ("d" * 5000 in text) == late
    assert text.rstrip().endswith("And?[/INST]" if late else "And?<|im_end|>")
