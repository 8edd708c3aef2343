"""Recorded agents' sessions through each door: what is tokenized, computed and spent on a turn.

    python benchmarks/agent_doors.py agent_sessions.jsonl [--doors messages chat ...] [--sessions 6]
        [--turns 60] [--scale 1] [--json FILE]

A real server with the fake executor runs in a process of its own, with the tokenizer and the template
of the bundled model. One session at a time plays its recorded turns: prompts as long, histories as
shared, pauses left out. A turn that called tools is answered with calls, which the server is told to
force. What the model says are random tokens, so their text is other tokens when it is tokenized again.

    new          tokens of a turn's prompt that are neither the parent's prompt nor its answer
    tokenized    tokens that the server made of text (`ramify_tokenized_tokens_total`)
    computed     prompt tokens that were computed, over what an unbounded cache would compute: `new`,
                 and of a first prompt what no earlier one began with
    changed      turns whose history had other tokens than those sampled: some of them had no KV
    CPU          of the server, a turn with an answer of one token, whose prompt has `--at` tokens
                 (+-25 %): CPU time of all its threads but the executor's, ms, median

With `--unbound` each history makes room for another one before it comes back, so it is tokenized again:
what drift there would be.
"""

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from doors import model_of
from fake_server import BUNDLED, FakeServer
from prometheus_client.parser import text_string_to_metric_families
from report import headline, machine, table, write_json
from websockets.sync.client import ClientConnection, connect

WORD = re.compile("\u0120[a-z]{2,4}")  # as the vocabulary writes a blank and letters
CONTEXT = 262_144
SETTLE = 0.03  # seconds after an answer: its session ends behind it
TOOLS, TOOL = 16, 90  # tools of a session, and tokens of one beside its description, about
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 40}},
    "required": ["path"],
    "additionalProperties": False,
}
VERSION = {"anthropic-version": "2023-06-01"}


Json = dict[str, Any]


class Turn(NamedTuple):
    """Of a record, in tokens: `shared` with the prompt of turn `parent` (-1: the head alone)."""

    parent: int
    shared: int
    prompt: int
    output: int
    calls: bool


class Recorded(NamedTuple):
    system: int
    tools: int
    turns: list[Turn]


class Call(NamedTuple):
    id: str
    name: str
    arguments: str


class Said(NamedTuple):
    """A message of a history."""

    role: str
    text: str
    calls: tuple[Call, ...] = ()


@dataclass
class Answer:
    """What came back. `prompt`: tokens."""

    text: str = ""
    calls: dict[Any, Call] = field(default_factory=dict)
    prompt: int = 0
    output: int = 0

    def call(self, key: Any, ident: str, name: str, arguments: str) -> None:
        """A call, or more of one."""
        known = self.calls.get(key, Call("", "", ""))
        self.calls[key] = Call(known.id or ident, known.name or name, known.arguments + arguments)

    @property
    def said(self) -> Said:
        return Said("assistant", self.text, tuple(self.calls.values()))


@dataclass
class Point:
    """A history: what the next turn can go on from. `tokens`: its prompt's and its answer's."""

    said: list[Said]
    tokens: int


def read(path: Path, scale: int) -> list[Recorded]:
    """The sessions of a file, or of all files in a folder. Sizes are divided by `scale`."""
    found = []
    for file in sorted(path.glob("agent_sessions*.jsonl")) if path.is_dir() else [path]:
        for line in file.read_text().splitlines():
            each = json.loads(line)
            turns = [
                Turn(
                    parent, shared // scale, prompt // scale, max(1, output // scale), stop == "tool_use"
                )
                for _, parent, shared, prompt, output, _, stop in each.get("turns", ())
            ]
            if turns:
                found.append(Recorded(each["system"] // scale, each["tools"] // scale, turns))
    return found


# --- doors ----------------------------------------------------------------------------------------


class Door:
    """A stateless door: `body` of a request, and what an answer's events say."""

    name = "chat"
    forces = True  # calls of tools, where a request says so
    path = "/v1/chat/completions"

    def __init__(self, port: int, model: str) -> None:
        self._http = HTTPConnection("127.0.0.1", port)
        self._model = model

    def ask(self, said: list[Said], tools: list[Json], most: int, *, calls: bool) -> Answer:
        """Raises RuntimeError for an answer that is none."""
        body = {"model": self._model, "stream": True, **self.body(said, tools, most, calls)}
        head = {"content-type": "application/json", **VERSION}
        self._http.request("POST", self.path, json.dumps(body).encode(), head)
        reply = self._http.getresponse()
        lines = reply.read().split(b"\n")
        if reply.status != 200:
            raise RuntimeError(f"{self.name}: {reply.status} {lines[0][:500]!r}")
        answer = Answer()
        for line in lines:
            text = line.removeprefix(b"data: ")
            if text.startswith(b"{"):
                self.read(answer, json.loads(text))
        return answer

    def body(self, said: list[Said], tools: list[Json], most: int, calls: bool) -> Json:
        return {
            "messages": [_chat(each) for each in said],
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "tool_choice": "required" if calls else "none",
            "parallel_tool_calls": False,
            "max_completion_tokens": most,
            "stream_options": {"include_usage": True},
        }

    def read(self, answer: Answer, event: Json) -> None:
        for choice in event["choices"]:
            delta = choice["delta"]
            answer.text += delta.get("content") or ""
            for call in delta.get("tool_calls", ()):
                function = call["function"]
                answer.call(
                    call["index"], call.get("id", ""), function.get("name", ""), function["arguments"]
                )
        if event.get("usage"):
            answer.prompt = event["usage"]["prompt_tokens"]
            answer.output = event["usage"]["completion_tokens"]


class OllamaDoor(Door):
    name = "ollama"
    forces = False
    path = "/api/chat"

    def body(self, said: list[Said], tools: list[Json], most: int, calls: bool) -> Json:
        return {
            "messages": [_chat(each, parsed=True) for each in said],
            "tools": [{"type": "function", "function": tool} for tool in tools],
            "options": {"num_predict": most},
        }

    def read(self, answer: Answer, event: Json) -> None:
        answer.text += event["message"]["content"]
        for call in event["message"].get("tool_calls", ()):
            function = call["function"]
            key = len(answer.calls)
            answer.call(key, call.get("id", ""), function["name"], json.dumps(function["arguments"]))
        if event["done"]:
            answer.prompt, answer.output = event["prompt_eval_count"], event["eval_count"]


class MessagesDoor(Door):
    name = "messages"
    path = "/v1/messages"

    def body(self, said: list[Said], tools: list[Json], most: int, calls: bool) -> Json:
        cached, none = {"cache_control": {"type": "ephemeral"}}, {"type": "none"}
        return {
            "system": [{"type": "text", "text": said[0].text, **cached}],
            "messages": [self._message(each) for each in said[1:]],
            "tools": [
                {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
                for t in tools
            ],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True} if calls else none,
            "max_tokens": most,
        }

    @staticmethod
    def _message(said: Said) -> Json:
        text: list[Json] = [{"type": "text", "text": said.text}] if said.text else []
        if said.role == "tool":
            result = {"type": "tool_result", "tool_use_id": said.calls[0].id, "content": text}
            return {"role": "user", "content": [result]}
        uses = [
            {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)}
            for c in said.calls
        ]
        return {"role": said.role, "content": text + uses}

    def read(self, answer: Answer, event: Json) -> None:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                block = event["content_block"]
                answer.call(event["index"], block["id"], block["name"], "")
            case "content_block_delta":
                delta = event["delta"]
                answer.text += delta.get("text", "")
                if "partial_json" in delta:
                    answer.call(event["index"], "", "", delta["partial_json"])
            case "message_start" | "message_delta":
                usage = event.get("usage") or event["message"]["usage"]
                read = usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
                answer.prompt = usage["input_tokens"] + read
                answer.output = usage["output_tokens"]


class ResponsesDoor(Door):
    name = "responses"
    path = "/v1/responses"

    def body(self, said: list[Said], tools: list[Json], most: int, calls: bool) -> Json:
        return {
            "input": [item for each in said for item in self._items(each)],
            "tools": [{"type": "function", **tool} for tool in tools],
            "tool_choice": "required" if calls else "none",
            "parallel_tool_calls": False,
            "max_output_tokens": most,
            "store": False,
        }

    @staticmethod
    def _items(said: Said) -> Iterator[Json]:
        if said.role == "tool":
            call = said.calls[0]
            yield {"type": "function_call_output", "call_id": call.id, "output": said.text}
            return
        if said.text:
            yield {"role": said.role, "content": said.text}
        for call in said.calls:
            function = {"name": call.name, "arguments": call.arguments}
            yield {"type": "function_call", "call_id": call.id, **function}

    def read(self, answer: Answer, event: Json) -> None:
        match event["type"]:
            case "response.output_text.delta":
                answer.text += event["delta"]
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                item = event["item"]
                key = event["output_index"]
                answer.call(key, item["call_id"], item["name"], item["arguments"])
            case "response.completed" | "response.incomplete":
                usage = event["response"]["usage"]
                answer.prompt, answer.output = usage["input_tokens"], usage["output_tokens"]


class OwnDoor(Door):
    """Ours: a history is a branch, so only what is new is sent; one that has gone on is forked."""

    name = "ramify.v1"

    def __init__(self, port: int, model: str) -> None:
        self._url = f"ws://127.0.0.1:{port}/v1/ws"
        self._serial = 0
        self._at: dict[tuple[Said, ...], tuple[ClientConnection, str, int]] = {}
        self._ends: dict[tuple[ClientConnection, str], int] = {}

    def ask(self, said: list[Said], tools: list[Json], most: int, *, calls: bool) -> Answer:
        behind = max((i for i, each in enumerate(said) if each.role == "assistant"), default=-1) + 1
        known = self._at.get(tuple(said[:behind]))
        socket, branch, at = known if known is not None else (self._open(tools), "main", 0)
        self._serial += 3
        ops: list[Json] = []
        if self._ends.get((socket, branch), 0) != at:
            old, branch = branch, f"fork{self._serial}"
            ops.append({"type": "fork", "id": self._serial, "branch": old, "as": [branch], "at": at})
        new = [_chat(each) for each in said[behind:]]
        ops.append({"type": "append", "id": self._serial + 1, "branch": branch, "messages": new})
        asked = {"max_tokens": most, "parallel_tool_calls": False}
        choice = "required" if calls else "none"
        last = {"type": "generate", "id": self._serial + 2, "branch": branch, "tool_choice": choice}
        socket.send(json.dumps([*ops, {**last, **asked}]))
        answer = Answer()
        for event in self._events(socket):
            match event["type"]:
                case "error":
                    raise RuntimeError(f"{self.name}: {event}")
                case "delta":
                    answer.text += event["text"]
                case "done" if event["id"] == self._serial + 2:
                    for i, call in enumerate(event.get("tool_calls") or ()):
                        function = call["function"]
                        answer.call(i, call["id"], function["name"], function["arguments"])
                    answer.text = "" if answer.calls else answer.text
                    answer.prompt, answer.output = event["usage"]["prompt"], event["usage"]["output"]
                    self._at[(*said, answer.said)] = socket, branch, event["position"]
                    self._ends[socket, branch] = event["position"]
                    return answer
        raise RuntimeError("the socket ended")

    def _open(self, tools: list[Json]) -> ClientConnection:
        socket = connect(self._url, max_size=None, legacy=True)
        declared = [{"type": "function", "function": tool} for tool in tools]
        socket.send(json.dumps({"type": "open", "client": "agents", "ttl_s": 0, "tools": declared}))
        return socket

    @staticmethod
    def _events(socket: ClientConnection) -> Iterator[Json]:
        for frame in socket:
            found = json.loads(frame)
            yield from found if isinstance(found, list) else [found]


DOORS = {door.name: door for door in (MessagesDoor, Door, ResponsesDoor, OllamaDoor, OwnDoor)}


def _chat(said: Said, *, parsed: bool = False) -> Json:
    """As chat completions have it."""
    if said.role == "tool":
        return {"role": "tool", "content": said.text, "tool_call_id": said.calls[0].id}
    made = [
        {
            "id": c.id,
            "type": "function",
            "function": {
                "name": c.name,
                "arguments": json.loads(c.arguments) if parsed else c.arguments,
            },
        }
        for c in said.calls
    ]
    return {"role": said.role, "content": said.text, **({"tool_calls": made} if made else {})}


# --- the load -------------------------------------------------------------------------------------


class Corpus:
    """Text of so many tokens, about: words that are one token each, four bytes in the mean."""

    def __init__(self, seed: str) -> None:
        known = json.loads((BUNDLED / "tokenizer.json").read_text())["model"]["vocab"]
        self._words = [word[1:] for word in sorted(known) if WORD.fullmatch(word)]
        self._dice = random.Random(seed)

    def take(self, tokens: int) -> str:
        return " ".join(self._dice.choices(self._words, k=max(1, tokens)))


@dataclass
class TurnFigures:
    """Of one turn. `ideal`: prompt tokens that an unbounded cache would compute."""

    prompt: int
    new: int
    ideal: int
    tokenized: int
    computed: int
    output: int
    cpu_ms: float
    first: bool


def cpu_ns(server: FakeServer) -> int:
    """CPU time of all threads of the server, but for the executor's, which stands for a device."""
    tasks = Path(f"/proc/{server.pid}/task").iterdir()
    mine = [task for task in tasks if int(task.name) not in server.executor]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in mine)


def counters(port: int) -> tuple[int, int, dict[str, int]]:
    """Tokens tokenized, prompt tokens computed, histories by outcome."""
    http = HTTPConnection("127.0.0.1", port)
    http.request("GET", "/metrics")
    tokenized = computed = 0
    outcomes: dict[str, int] = {}
    for family in text_string_to_metric_families(http.getresponse().read().decode()):
        for sample in family.samples:
            match sample.name:
                case "ramify_tokenized_tokens_total":
                    tokenized = int(sample.value)
                case "ramify_prompt_tokens_total" if sample.labels["source"] == "computed":
                    computed = int(sample.value)
                case "ramify_history_total":
                    outcomes[sample.labels["outcome"]] = int(sample.value)
    return tokenized, computed, outcomes


def _post(port: int, path: str, body: Any) -> Any:
    http = HTTPConnection("127.0.0.1", port)
    http.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.loads(http.getresponse().read())


class Head:
    """System prompt and tools: those of sessions with the same sizes are the same."""

    def __init__(self, recorded: Recorded, salt: str) -> None:
        corpus = Corpus(f"{salt} {recorded.system} {recorded.tools}")
        each = max(1, recorded.tools // TOOLS - TOOL)
        self.tools = [
            {"name": f"tool{i}", "description": corpus.take(each), "parameters": SCHEMA}
            for i in range(TOOLS)
        ]
        self.system = Said("system", f"{salt} {corpus.take(recorded.system)}")
        self.known = False

    def tokens(self, port: int) -> int:
        """How many it has."""
        tools = [{"type": "function", "function": tool} for tool in self.tools]
        return int(_post(port, "/tokenize", {"messages": [_chat(self.system)], "tools": tools})["count"])


class AgentReplay:
    """One recorded session through one door, turn by turn."""

    def __init__(
        self, recorded: Recorded, door: Door, server: FakeServer, corpus: Corpus, head: Head, most: int
    ) -> None:
        self._recorded, self._door, self._server = recorded, door, server
        self._corpus, self._head, self._most = corpus, head, most
        self._points: dict[int, Point] = {}

    def turns(self, most: int) -> Iterator[TurnFigures]:
        """Play up to so many."""
        for number, turn in enumerate(self._recorded.turns[:most]):
            if turn.prompt + turn.output + 4096 > CONTEXT:
                return
            yield self._turn(number, turn)

    def _turn(self, number: int, turn: Turn) -> TurnFigures:
        server, head, before = self._server, self._head, self._before(turn)
        said = list(before.said) if before is not None else [head.system]
        known = before.tokens if before is not None else head.tokens(server.port)
        ideal = known if before is not None or head.known else 0
        head.known = True
        text = self._corpus.take(turn.prompt - known)
        calls = said[-1].calls
        said.append(Said("tool", text, calls) if calls else Said("user", text))
        forced = turn.calls and self._most != 1 and self._door.forces
        limit = self._most or (4096 if forced else turn.output)
        tokenized, computed, _ = counters(server.port)
        begin = cpu_ns(server)
        answer = self._door.ask(said, head.tools, limit, calls=forced)
        time.sleep(SETTLE)
        spent = cpu_ns(server) - begin
        later, more, _ = counters(server.port)
        self._points[number] = Point([*said, answer.said], answer.prompt + answer.output)
        return TurnFigures(
            prompt=answer.prompt,
            new=answer.prompt - (before.tokens if before is not None else 0),
            ideal=answer.prompt - ideal,
            tokenized=later - tokenized,
            computed=more - computed,
            output=answer.output,
            cpu_ms=spent / 1e6,
            first=before is None,
        )

    def _before(self, turn: Turn) -> Point | None:
        """The history that a turn goes on from: the longest one on its parent's way that is shared."""
        at = turn.parent
        while at >= 0:
            parent = self._recorded.turns[at]
            if at in self._points and parent.prompt - turn.shared <= max(65, parent.prompt // 100):
                return self._points[at]
            at = parent.parent
        return None


def play(
    name: str, recorded: list[Recorded], server: FakeServer, options: argparse.Namespace, most: int
) -> list[TurnFigures]:
    """All sessions, one after the other. `most`: tokens of an answer; 0: as recorded."""
    model = model_of(server.port)
    door, other = DOORS[name](server.port, model), Door(server.port, model)
    heads: dict[tuple[int, int], Head] = {}
    found: list[TurnFigures] = []
    for number, each in enumerate(recorded):
        head = heads.setdefault((each.system, each.tools), Head(each, f"{name} {most}"))
        replay = AgentReplay(each, door, server, Corpus(f"{name} {most} {number}"), head, most)
        for turn in replay.turns(options.turns):
            found.append(turn)
            if options.unbound:
                other.ask([Said("user", str(len(found)))], [], 1, calls=False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="agent_sessions.jsonl, or its folder")
    parser.add_argument("--doors", nargs="+", choices=list(DOORS), default=list(DOORS))
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=60, help="of a session at most")
    parser.add_argument("--scale", type=int, default=1, help="all recorded sizes are divided by it")
    parser.add_argument(
        "--at", type=int, default=100_000, help="prompt tokens of the turns that are timed"
    )
    parser.add_argument("--unbound", action="store_true", help="no history is there any more")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", help="write the figures of all turns to this file")
    options = parser.parse_args()
    about = machine()
    print(headline(about), flush=True)
    recorded = read(options.data, options.scale)
    random.Random(options.seed).shuffle(recorded)
    recorded = recorded[: options.sessions]
    settings = {
        "bundled": 1, "context": CONTEXT, "pages": 1 << 24, "step_tokens": 8192,
        "step_ms": 1.0, "prompt_us": 5.0, "histories": int(options.unbound),
    }  # fmt: skip
    rows, results = [], []
    for name in options.doors:
        with FakeServer(**settings) as server:
            turns = play(name, recorded, server, options, 0)
            outcomes = counters(server.port)[2]
            timed = [] if options.unbound else play(name, recorded, server, options, 1)
            near = [t.cpu_ms for t in timed if 0.75 < t.prompt / options.at < 1.25 and not t.first]
        later = [t for t in turns if not t.first]
        rows.append([
            name, str(len(turns)), f"{statistics.median(t.prompt for t in later):.0f}",
            f"{sum(t.new for t in later)}", f"{sum(t.tokenized for t in later)}",
            f"{sum(t.computed for t in turns) / sum(t.ideal for t in turns):.3f}",
            f"{sum(t.computed > t.new + 1 for t in later)}",
            f"{statistics.median(near):.1f} ({len(near)})" if near else "-",
            " ".join(f"{k} {v}" for k, v in outcomes.items() if v),
        ])  # fmt: skip
        print(*rows[-1], sep="\t", flush=True)
        results.append(
            {"door": name, "turns": [vars(t) for t in turns], "timed": [vars(t) for t in timed]}
        )
    heads = ["door", "turns", "prompt", "new", "tokenized", "computed", "changed", "CPU ms", "outcomes"]
    print(table(heads, rows))
    write_json(options.json, about, results)


if __name__ == "__main__":
    main()
