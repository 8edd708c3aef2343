"""What requests hold: shapes and ranges, checked before any work is done. Unknown fields are refused.

Fields that OpenAI's API has and a text model cannot serve are declared here with the only value that
changes nothing: who always sends it is served, others are told by name. Other fields are `generate`'s.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import msgspec
from msgspec import Meta

from ramify.actors.gateway.apis.openai.effort import Asked, ThinkingEffort, switched, thinking
from ramify.actors.gateway.apis.openai.errors import check_result
from ramify.actors.gateway.apis.openai.messages import Message as Message
from ramify.actors.gateway.apis.openai.messages import Struct as Struct
from ramify.actors.gateway.apis.openai.messages import TextContentPart as TextContentPart
from ramify.actors.gateway.apis.openai.messages import chat_of as chat_of
from ramify.actors.gateway.apis.openai.messages import content_text as content_text
from ramify.actors.gateway.apis.openai.retention import Retention
from ramify.actors.gateway.apis.openai.structural_tags import structural_constraint
from ramify.actors.gateway.port.interfaces import Served
from ramify.protocol.errors import BadRequest, InvalidField
from ramify.protocol.json_value import check_json
from ramify.protocol.sampling import MinP, RepetitionPenalty, TopK, check_temperature
from ramify.protocol.wire import (
    MOST_PRIORITY,
    Constraint,
    Count,
    JsonObject,
    KvHints,
    LongText,
    ShortText,
    StructuralTag,
    Text,
    ThoughtTokens,
    TokenId,
    Tools,
)

MOST_CHOICES = 64  # `n`, and the prompts of one request times `n`
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
AnySeed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Meta(max_length=16)]
_Prompt = Annotated[list[TokenId], Meta(min_length=1, max_length=1 << 24)]
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
ChoicesOfText = Annotated[list[LongText], Meta(min_length=1, max_length=1024)]

R = TypeVar("R")

_OWN_TOOLS = (
    "the server runs no tools of its own: declare functions, or let the client call (an MCP "
    "server's tools: `ramify.agent.mcp_tools`)"
)
# Kinds of parts and tools that the APIs have and this server does not, and what to do instead.
NOT_SERVED = {
    **dict.fromkeys(("image", "image_url", "input_image", "video_url"), "not taken here: send text"),
    **dict.fromkeys(("audio_url", "input_audio"), "no served model hears: send text"),
    **dict.fromkeys(("file", "input_file"), "files are not read: send their text"),
    **dict.fromkeys(
        ("mcp", "web_search", "web_search_preview", "file_search", "code_interpreter", "local_shell",
         "image_generation", "computer_use_preview", "shell", "custom"), _OWN_TOOLS),
}  # fmt: skip


class StreamOptions(Struct, kw_only=True, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted: nothing is padded


class JsonSchemaFormat(Struct, kw_only=True, frozen=True):
    name: ShortText
    schema: JsonObject | None = None
    description: LongText | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, frozen=True):
    """The form of the answer: `type`, and a schema with "json_schema". See `structural_tags`, too."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[Any], Meta(max_length=1024)] | None = None
    triggers: Annotated[list[ShortText], Meta(max_length=1024)] | None = None
    format: JsonObject | None = None

    def constraint(self) -> Constraint | None:
        """The constraint that it asks for. Raises InvalidField."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Constraint(json_schema={"type": "object"}, after_thought=True)
        if self.type == "structural_tag":
            return structural_constraint(self.structures, self.triggers, self.format)
        if self.json_schema is None:
            raise InvalidField("`response_format.json_schema` is missing: give a name and a schema")
        return Constraint(json_schema=self.json_schema.schema or {}, after_thought=True)


class StructuredOutputs(Struct, kw_only=True, frozen=True):
    """A constraint as vLLM's `structured_outputs` has it: one of these."""

    json: JsonObject | LongText | None = None
    regex: LongText | None = None
    choice: ChoicesOfText | None = None
    grammar: LongText | None = None
    json_object: bool | None = None
    structural_tag: StructuralTag | None = None

    def constraint(self) -> Constraint:
        """Convert the constraint to the form of `generate`. Raises InvalidField."""
        named = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(named) != 1:
            raise InvalidField(f"`structured_outputs` wants one of {', '.join(self.__struct_fields__)}")
        return Constraint(
            json_schema={"type": "object"} if self.json_object else self.json,
            regex=self.regex,
            choices=self.choice,
            grammar=self.grammar,
            structural_tag=self.structural_tag,
            after_thought=True,
        )


class NamedFunction(Struct, kw_only=True, frozen=True):
    name: ShortText


class NamedTool(Struct, kw_only=True, frozen=True):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TemplateSettings(Struct, kw_only=True, frozen=True):
    """Settings of a chat template. `thinking`: the name that some give to `enable_thinking`."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Asked | None = None

    @property
    def thinks(self) -> bool | None:
        return self.enable_thinking if self.enable_thinking is not None else self.thinking


def sampling_of(request: object, stop: str | list[str] | None = None, **more: Any) -> dict[str, Any]:
    """Make the fields of `generate` that a request sets: those that APIs call alike, and `more`."""
    given = {name: getattr(request, name, None) for name in _ALIKE} | more
    given["stop"] = [stop] if isinstance(stop, str) else stop
    if given["top_p"] is not None:
        given["top_p"] = max(given["top_p"], 1e-20)  # 0: the likeliest
    if given["seed"] is not None:
        given["seed"] %= 2**63  # ours are not negative
    return {name: value for name, value in given.items() if value is not None}


_ALIKE = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed",
)  # fmt: skip


class Sampling(Struct, kw_only=True, frozen=True):
    """How to sample, in the words of most APIs."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: AnySeed | None = None
    stop: Stop | Stops | None = None

    def __post_init__(self) -> None:
        check_temperature(self.temperature)


class _Settings(Sampling, kw_only=True, frozen=True):
    """The fields of every request for text."""

    model: Annotated[str, Meta(max_length=4096)] | None = None  # the one that is served
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(max_length=4096)] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=1 << 16)] | None = None  # empty
    # not OpenAI's
    repetition_penalty: RepetitionPenalty | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    kv_hints: KvHints | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Meta(ge=-MOST_PRIORITY, le=MOST_PRIORITY)] = 0
    deadline_ms: Count | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | LongText | None = None
    guided_regex: LongText | None = None
    guided_choice: ChoicesOfText | None = None
    guided_grammar: LongText | None = None

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        if self.logit_bias:
            raise InvalidField(
                "`logit_bias` is not served: constrain the output with `structured_outputs` "
                "(choice, regex, json, grammar), or end it with `stop_token_ids`"
            )
        self.constraint()
        if self.stream_options is not None and not self.stream:
            raise InvalidField("`stream_options` goes with `stream`: set it, or leave them out")

    @property
    def choices(self) -> int:
        return self.n or 1

    def constraint(self) -> Constraint | None:
        """The constraint on the output. Raises InvalidField."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        named = {name: value for name, value in guided.items() if value is not None}
        if named and (self.structured_outputs is not None or len(named) > 1):
            raise InvalidField(
                f"`guided_{min(named)}` stands beside another constraint: give one of them"
            )
        given = StructuredOutputs(**named) if named else self.structured_outputs  # type: ignore[arg-type]
        return given.constraint() if given is not None else None

    def sampling(self) -> dict[str, Any]:
        """The fields of `generate` that are set."""
        own = {"stop_token_ids": self.stop_token_ids, "deadline_ms": self.deadline_ms}
        return sampling_of(self, self.stop, **own, ignore_eos=self.ignore_eos, priority=self.priority)


class ChatRequest(_Settings, kw_only=True, frozen=True):
    """POST /v1/chat/completions."""

    MENDS: ClassVar[dict[str, str]] = {
        "functions": "use `tools`",
        "function_call": "use `tool_choice`",
        "input": "use `messages`, or POST /v1/responses",
        "prompt": "use `messages`, or POST /v1/completions",
        "max_output_tokens": "use `max_completion_tokens`",
        "chat_template_kwargs": "only `enable_thinking` and `reasoning_effort` are served",
        "service_tier": "there is one: leave it out; `priority` says whose request goes first",
        "verbosity": "only `medium` is served, which changes nothing: ask for brevity in a message",
    }

    messages: Annotated[list[Message], Meta(min_length=1, max_length=1 << 14)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    reasoning_effort: Asked | None = None
    verbosity: Literal["medium"] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: Retention | None = None
    safety_identifier: ShortText | None = None
    # not OpenAI's
    thought_tokens: ThoughtTokens | None = None
    chat_template_kwargs: TemplateSettings | None = None

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.store:
            raise InvalidField("`store`: chats are not kept: leave it out, or use POST /v1/responses")
        given = self.chat_template_kwargs or TemplateSettings()
        said = (self.reasoning_effort, self.thought_tokens, given.reasoning_effort, given.thinks)
        if sum(each is not None for each in said) > 1:
            raise InvalidField(
                "`reasoning_effort` stands beside another field that says how much to think: give one"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidField("`top_logprobs` goes with `logprobs`: set it to true")
        if self.tools is not None:
            check_json(self.tools, "tools")
        if self.metadata is not None:
            check_json(self.metadata, "metadata")
        known: set[str | None] = set()
        for i, message in enumerate(self.messages):
            ids = [call.get("id") for call in message.tool_calls or ()]
            known.update(ident if isinstance(ident, str) else None for ident in ids)
            if message.role == "tool" and message.tool_call_id is not None and None not in known:
                check_result(f"messages[{i}].tool_call_id", message.tool_call_id, known)

    def constraint(self) -> Constraint | None:
        given = super().constraint()
        form = self.response_format.constraint() if self.response_format is not None else None
        if given is not None and form is not None:
            raise InvalidField("`response_format` stands beside another constraint: give one of them")
        return given or form

    def thinking(self, served: Served) -> ThinkingEffort:
        """Tell how much the model is to think. Raises InvalidField."""
        given = self.chat_template_kwargs or TemplateSettings()
        asked = self.reasoning_effort or given.reasoning_effort
        name = "reasoning_effort"
        if given.thinks is not None:
            name = "chat_template_kwargs.enable_thinking"
            asked = switched(given.thinks, served, name)
        if asked is None:
            return ThinkingEffort(tokens=self.thought_tokens)
        found = thinking(asked, self.limit, served, name)
        return found if self.thought_tokens is None else ThinkingEffort(tokens=self.thought_tokens)

    @property
    def limit(self) -> int | None:
        """The most tokens of each answer, if given."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def choice_of_tool(self) -> str:
        """The choice of a tool, as `generate.tool_choice` has it."""
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return self.tool_choice or "auto"


class CompletionRequest(_Settings, kw_only=True, frozen=True):
    """POST /v1/completions."""

    MENDS: ClassVar[dict[str, str]] = {
        "messages": "use `prompt`, or POST /v1/chat/completions",
        "input": "use `prompt`, or POST /v1/responses",
        "max_completion_tokens": "use `max_tokens`",
        "max_output_tokens": "use `max_tokens`",
        "response_format": "use `structured_outputs`",
        "suffix": "text goes on at its end alone: leave it out",
    }

    prompt: Text | Annotated[list[TokenId | Text | _Prompt], Meta(min_length=1, max_length=1 << 24)]
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Choices | None = None
    echo: bool | None = None
    suffix: None = None

    def __post_init__(self) -> None:
        _Settings.__post_init__(self)
        if self.best_of is not None and self.best_of != self.choices:
            raise InvalidField("`best_of` must equal `n`: ask for all of them and choose yourself")
        if len(self.prompts) * self.choices > MOST_CHOICES:
            raise InvalidField(f"`prompt` times `n` is over {MOST_CHOICES} choices: ask for fewer")

    @property
    def prompts(self) -> "list[str | list[int]]":
        """The prompts: one or more, as text or as tokens. Raises InvalidField."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        kinds = set(map(type, prompt))  # half a million token ids: no line of Python for each
        if int in kinds and len(kinds) > 1:
            raise InvalidField("`prompt` mixes token ids and texts: give a list of one kind")
        return cast("list[str | list[int]]", [prompt] if int in kinds else prompt)


def decode(body: bytes, kind: type[R]) -> R:
    """Decode the request in `body`. Raises BadRequest that names the field in `details["field"]`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        mends, unserved = getattr(kind, "MENDS", {}), getattr(kind, "UNSERVED", NOT_SERVED)
        raise bad_request(str(error), mends, unserved) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is no JSON object: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None


def bad_request(
    message: str, mends: Mapping[str, str] = {}, unserved: Mapping[str, str] = NOT_SERVED
) -> BadRequest:
    """Make our error of msgspec's: what is wrong - at `$.path`; its text names an unknown field."""
    told, field = _told(message, unserved)
    first, _, rest = (field or "").partition(".")
    last = rest.rpartition(".")[2].partition("[")[0]  # of a list's entry the list
    mend = mends.get(field or "") or mends.get(last) or mends.get(first.partition("[")[0])
    return BadRequest(f"{told}: {mend}" if mend else told, details={"field": field})


def _told(message: str, unserved: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the message of an error, and the field that it names."""
    what, _, where = message.partition(" - at `$")
    path = where.removesuffix("`").removeprefix(".")
    if what.startswith("Object contains unknown field `"):
        name = what.removeprefix("Object contains unknown field `").removesuffix("`")
        path = f"{path}.{name}" if path else name
        return f"unknown parameter: `{path}`", path
    if what.startswith("Object missing required field `"):
        name = what.removeprefix("Object missing required field `").removesuffix("`")
        path = f"{path}.{name}" if path else name
        return f"missing parameter: `{path}`", path
    if what.startswith("Invalid value '") and path.endswith("type"):
        name = what.removeprefix("Invalid value '").removesuffix("'")
        if name in unserved:
            return f"`{path}` {name!r}: {unserved[name]}", path
    if not path and what.startswith("`"):  # said here, with its name
        return what, what[1:].partition("`")[0]
    return f"{what} - at `{path}`" if path else what, path or None
