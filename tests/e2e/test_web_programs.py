"""Programs in the browser client: its core on frames by hand, and all of it in Node on a real server."""

import json
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from ramify.clients import connect

WEB = Path(__file__).resolve().parents[2] / "clients/web/lib"
SOCKETS = "--experimental-websocket"  # what Node 20 needs, and later ones ignore


def _has_sockets() -> bool:
    node = shutil.which("node")
    if node is None:
        return False
    probe = [node, SOCKETS, "-e", "new WebSocket('ws://127.0.0.1:9').onerror = () => {}"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
needs_sockets = pytest.mark.skipif(not _has_sockets(), reason="needs node with WebSocket")

PRELUDE = """
import { connect, RamifyError } from "./index.js";
const url = process.argv[2];
const session = connect(url, { storage: null, open: { tick_ms: 0 } });
const tried = (promise) =>
  Promise.resolve(promise).then((value) => ({ ok: value }),
    ({ code, branch, cause, message }) => ({ code, branch, cause: cause?.code, message }));
const greedy = { temperature: 0 };
const read = async (generation) => {
  let text = "";
  for await (const delta of generation) text = text.slice(0, text.length - delta.cut) + delta.text;
  return text;
};
let shown;
"""
END = """
console.log(JSON.stringify(shown));
await session.close();
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts where every version of node takes them for modules."""
    folder = tmp_path_factory.mktemp("web")
    for path in WEB.glob("*.js"):
        shutil.copy(path, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    return folder


Played = Callable[[Any, str], Awaitable[Any]]


@pytest.fixture
def play(modules: Path) -> Played:
    """Run a script against a server: what it puts into `shown`."""

    def node(url: str, script: str) -> Any:
        (modules / "script.js").write_text(PRELUDE + script + END)
        result = subprocess.run(
            ["node", SOCKETS, "script.js", url],
            cwd=modules,
            capture_output=True,
            check=False,
            timeout=30,
        )
        assert result.returncode == 0, result.stderr.decode()
        return json.loads(result.stdout)

    async def run(served: Any, script: str) -> Any:
        url = f"ws://127.0.0.1:{served.engine.port}/v1/ws"
        return await anyio.to_thread.run_sync(node, url, script)

    return run


def core(modules: Path, script: str) -> Any:
    """What a script prints that plays frames to the core."""
    opened = """
import { Core } from "./core.js";
const core = new Core({ client: "t" });
core.receive({ type: "state", session: "s", key: "k", revision: 1, op: 0,
  branches: [{ branch: "main", position: 6 }] });
const done = (id, more) => ({ type: "done", id, branch: "main", position: 9, reason: "stop",
  usage: { prompt: 6 }, revision: 2, ...more });
"""
    (modules / "hand.js").write_text(opened + script)
    result = subprocess.run(["node", "hand.js"], cwd=modules, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


@needs_node
def test_a_choice_that_takes_the_last_token_back(modules: Path) -> None:
    script = """
const ticket = core.submit({ type: "select", branch: "main", choices: ["ld", "x"] }, 1);
const stream = ticket.streams.get("main");
core.receive({ type: "delta", branch: "main", position: 6, text: "world", truncate: 5 });
core.receive(done(1, { position: 6, text: "ld", choice: 0, scores: [-1, -2], rebased: 5,
  usage: { prompt: 6 } }));
const { choice, scores } = stream.done;
console.log(JSON.stringify([stream.text, choice, scores, [...core.heads], core.tickets.size]));
"""
    heads = [["main", {"position": 6, "received": 6}]]
    assert core(modules, script) == ["ld", 0, [-1, -2], heads, 0]


@needs_node
def test_what_is_skipped_names_its_cause_though_that_was_answered_before(modules: Path) -> None:
    script = """
const [first, second, third] = [
  core.submit({ type: "append", branch: "main", tokens: [1] }, 1),
  core.submit({ type: "generate", branch: "main" }, 1),
  core.submit({ type: "generate", branch: "main" }, 2)];
core.receive({ type: "error", id: 1, branch: "main", code: "too_long", message: "m" });
core.receive({ type: "error", id: 2, branch: "main", code: "skipped", message: "s" });
core.receive({ type: "error", id: 3, branch: "main", code: "skipped", message: "s" });
console.log(JSON.stringify([first, second, third].map(({ error }) => [error.code, error.cause?.code])));
"""
    assert core(modules, script) == [["too_long", None], ["skipped", "too_long"], ["skipped", None]]


@needs_node
def test_a_generation_that_fails_on_its_way_rejects_and_keeps_its_text(modules: Path) -> None:
    script = """
const ticket = core.submit({ type: "generate", branch: "main" }, 1);
const stream = ticket.streams.get("main");
core.receive({ type: "delta", branch: "main", position: 8, text: "so far" });
core.receive(done(1, { position: 8, reason: "error", error: "internal", message: "NaN" }));
const { code, message, done: { text } } = stream.error;
console.log(JSON.stringify([code, message, text, stream.settled, core.tickets.size]));
"""
    assert core(modules, script) == ["internal", "NaN", "so far", True, 0]


@needs_sockets
async def test_select_as_in_python(serving: Any, play: Played) -> None:
    script = """
session.append("hello wor");
const one = session.select(["ld"]);
const shown_ = await read(one);
const { text, choice, scores } = await one.result;
session.fork(["a", "b"]);
const both = session.select([" Paris", " Madrid", " one two"],
  { branch: ["a", "b"], method: "greedy_token_selection" });
const results = await Promise.all(both.map((each) => each.result));
const bad = await tried(session.select(["a", ""]).result);
const { branches } = await session.tree({ branch: "main", text: true });
shown = { shown: shown_, text, choice, count: scores.length, bad: bad.code,
  same: results[0].text === results[1].text, best: results[0], position: session.position("main"),
  at: branches[0].position, turns: branches[0].turns.map((turn) => turn.text).join("") };
"""
    async with serving() as served:
        told = await play(served, script)
        async with connect(f"ws://127.0.0.1:{served.engine.port}/v1/ws") as peer:
            await peer.main.append("hello wor")
            await peer.main.select(["ld"])
            best = await peer.main.select(
                [" Paris", " Madrid", " one two"], method="greedy_token_selection"
            )
    assert (told["shown"], told["text"], told["choice"], told["count"]) == ("ld", "ld", 0, 1)
    assert (told["same"], told["turns"], told["bad"]) == (True, "hello world", "bad_request")
    assert told["position"] == told["at"]
    assert told["best"]["text"] == best.text
    assert told["best"]["scores"] == pytest.approx(best.scores)


@needs_sockets
async def test_a_program_in_one_frame(serving: Any, play: Played) -> None:
    """Children think quietly, the best goes on; another time all are joined."""
    script = """
const sent = [];
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (text) {
  sent.push(JSON.parse(text));
  return send.call(this, text);
};
await new Promise((resolve) => session.addEventListener("state", resolve, { once: true }));
sent.length = 0;
session.append([{ role: "user", content: "Hi" }]);
session.fork(["a", "b", "c"]);
const thoughts = session.generate({ branch: ["a", "b", "c"], max_tokens: 5, hidden: true, ...greedy });
const pruned = session.prune(["a", "b", "c"], { into: ["main"], by: "logprob" });
const answer = session.generate({ max_tokens: 6, ...greedy });
session.fork(["x", "y"]);
const drafts = session.generate({ branch: ["x", "y"], max_tokens: 4, ...greedy });
const joined = session.join(["x", "y"], { each: "<{text}>", role: null });
const last = session.generate({ max_tokens: 3, ...greedy });
const all = await Promise.all([...thoughts, answer, ...drafts, last].map((each) => each.result));
const { result } = await pruned;
await joined;
const tree = await session.tree({ text: true });
shown = { frames: sent.length - 1, ops: sent[0].map((op) => op.type), texts: all.map(({ text }) => text),
  kept: result.kept.map(({ from, into }) => [from, into]), dropped: result.dropped,
  names: tree.branches.map(({ branch }) => branch), at: tree.branches[0].position,
  knows: session.position("main"), gone: session.position("x") ?? null,
  said: tree.branches[0].turns.map((turn) => turn.text).join("") };
"""
    async with serving() as served:
        told = await play(served, script)
    assert told["frames"] == 1
    assert told["ops"] == [
        *("append", "fork", "generate", "prune", "generate", "fork", "generate", "join", "generate")
    ]
    assert told["texts"][:3] == ["", "", ""]  # hidden
    assert all(told["texts"][3:])
    assert (told["kept"], told["dropped"]) == ([["a", "main"]], ["a", "b", "c"])
    assert (told["names"], told["gone"]) == (["main"], None)
    assert told["knows"] == told["at"]
    x, y = told["texts"][4:6]
    assert f"<{x}><{y}>{told['texts'][6]}" in told["said"]


@needs_sockets
async def test_failures_and_what_is_skipped(serving: Any, play: Played) -> None:
    script = """
session.append("one two");
session.fork(["p", "q"]);
const broken = tried(session.append([1000000], { branch: "p" }));
const both = session.generate({ branch: ["p", "q"], max_tokens: 3, ...greedy });
const pruned = tried(session.prune(["p", "q"], { by: "vote", into: ["best"] }));
const best = session.generate({ branch: "best", max_tokens: 3, ...greedy });
const behind = tried(session.join(["p"], { branch: "main" }));
const long = session.generate({ max_tokens: 100000, ...greedy, branch: "q2" });
const [p, q, won] = await Promise.all([...both, best].map(({ result }) => tried(result)));
shown = { broken: await broken, p, q: q.ok?.reason, best: won.ok?.reason,
  kept: (await pruned).ok?.result?.kept?.map(({ from }) => from),
  behind: await behind, missing: await tried(long.result) };
session.fork(["w"]);
const running = session.generate({ branch: "w", max_tokens: 400, ...greedy });
const queued = session.select(["a", "b"], { branch: "w" });
for await (const { text } of running) if (text) break;
await session.cancel({ branch: "main", subtree: true });
shown.cancelled = [(await running.result).reason, (await tried(queued.result)).code];
shown.usable = (await session.generate({ max_tokens: 2, ...greedy }).result).reason;
"""
    async with serving(fake={"step_seconds": 0.002}) as served:
        told = await play(served, script)
    assert told["broken"]["code"] == "bad_request"
    assert (told["p"]["code"], told["p"]["cause"]) == ("skipped", "bad_request")
    assert (told["q"], told["kept"], told["best"]) == ("length", ["q"], "length")
    assert (told["behind"]["code"], told["behind"]["cause"]) == ("skipped", "bad_request")
    assert told["missing"]["code"] == "no_branch"
    assert told["cancelled"] == ["cancelled", "cancelled"]
    assert told["usable"] == "length"


@needs_sockets
async def test_a_program_through_a_lost_connection(serving: Any, play: Played) -> None:
    """The socket goes at every frame in turn; the texts are those of a run without a loss."""
    script = """
const run = async (cut) => {
  let frames = 0;
  class Cut extends WebSocket {
    set onmessage(take) {
      super.onmessage = (event) => {
        take(event);
        frames += 1;
        if (frames === cut) this.close();
      };
    }
  }
  const mine = connect(url, { storage: null, open: { tick_ms: 0 }, WebSocket: Cut });
  mine.append([{ role: "user", content: "Hi" }]);
  mine.fork(["a", "b"]);
  const thoughts = mine.generate({ branch: ["a", "b"], max_tokens: 4, ...greedy });
  const chosen = mine.select([" one", " two"], { branch: "a" });
  mine.prune(["a", "b"], { into: ["main"], by: "logprob" });
  const last = mine.generate({ max_tokens: 4, ...greedy });
  const all = await Promise.all([...thoughts, chosen, last].map((each) => each.result));
  const texts = all.map(({ text }) => text);
  await mine.close();
  return { texts, frames };
};
const whole = await run(-1);
const all = [];
for (let cut = 1; cut <= Math.min(whole.frames, 8); cut += 1) all.push((await run(cut)).texts);
shown = { whole: whole.texts, frames: whole.frames, all };
"""
    async with serving(fake={"step_seconds": 0.002}) as served:
        told = await play(served, script)
    assert told["frames"] > 3
    assert all(texts == told["whole"] for texts in told["all"])
