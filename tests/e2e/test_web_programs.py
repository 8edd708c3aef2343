"""Programs in the JavaScript client, in Node on a real server."""

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
const reading = running[Symbol.asyncIterator]();
while (!(await reading.next()).value.text);
await session.cancel({ branch: "main", subtree: true });
shown.cancelled = [(await running.result).reason, (await tried(queued.result)).code];
shown.usable = (await session.generate({ max_tokens: 2, ...greedy }).result).reason;
"""
    async with serving(fake={"step_seconds": 0.002}) as served:
        told = await play(served, script)
    assert told["broken"]["code"] == "bad_request"
    assert told["p"]["code"] == "bad_request"  # what it was skipped for
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
