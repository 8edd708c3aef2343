"""Walk the README as a newcomer would, in a fresh clone and environment, and read what comes back.

    python benchmarks/newcomer_walk.py [--output docs/newcomer.md] [--only WORD] [--tests]

Clones this repository's HEAD into a temporary folder, runs `make serve` there, then each command and
program of the README from top to bottom beside that server. `EXPECTED` says of each what its output must
hold; a command that no row knows fails: a new line of the README needs a row here. It needs network for
packages, npm for the JavaScript, and port 8765 free. Exits with 1 where anything is not as it should be.
"""

import argparse
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PORT = 8765
ADDRESS = f"http://127.0.0.1:{PORT}"
INSTALL_S, STEP_S = 1800.0, 240.0
MOST_SHOWN = 400  # characters of an output
CLIENT_MB = "1[0-4]"  # of packages, as the README says
WORDS = r"\w+(\W+\w+){3}"  # an answer of at least four words
THINGS = (
    r"```(\w*)\n(.*?)```|`((?:make serve|pip install|docker|\.venv/bin/pip) [^`\n]+)`"
    r"|^\| `(examples/\w+\.py)` \|"
)
BROKEN = re.compile(r"Traceback|Error:|\berror: |command not found|No such file|UnhandledPromise")

# (what the command holds, what its output must match, or why it is not run)
EXPECTED: tuple[tuple[str, str | None, str], ...] = (
    (r"make serve MODEL=", None, "needs a model of one's own"),
    (
        r"make serve (ARGS|LOG)=",
        None,
        "the server is running: flags of `ramify serve`, which tests give it",
    ),
    (r"make serve", r"ready: ws://127\.0\.0\.1:8765/v1/ws(?s:.*)page http://127\.0\.0\.1:8765/", ""),
    (r"make test", r"\d+ passed", ""),
    (r"^docker ", None, "needs a daemon; the image's parts are what `make serve` installs"),
    (r"pip install '.\[serve\]'", None, "what `make serve` installs"),
    (r"pip install \.$", rf"{WORDS}(?s:.*)\b{CLIENT_MB} MB", ""),
    (r"^git diff", r"\S", ""),  # for a larger model, as the README says
    (r"ramify chat|connect_sync|--input-type|from openai|from ollama|ramify-client", WORDS, ""),
    (r"pip install openai ollama", r"Successfully installed|already satisfied", ""),
    (r"^curl ", r'"status": ?"completed"', ""),
    (r"await story.fork", r"(?s)other: \.\.\..*prompt tokens were cached", ""),
    (r"class City", r"City\(name=.+, country='(France|Peru)'\)", ""),
    (r"--sglang|bench plot", None, "needs a server of SGLang"),
    (r"bench (chat|tree)", r"tok/s(?s:.*)\d x|\d sessions x", ""),
    (r"bench throughput", None, "needs a GPU"),
    (r"examples/best_of", r"(?s)(try-\d.*){8}eight answers", ""),
    (r"examples/tree_of_thought", r"(?s)24 from.*[-+*/] \d+ = \d+ \(left: .*\d+ calls", ""),
    (r"examples/judge", r"(?s)(clarity.*grade +[A-F].*){2}", ""),
    (r"examples/agent", r"(?s)finish\[\w+\].*\d of 4 questions came to an answer", ""),
    (r"examples/tools", r"(?s)-> 78.*-> 12:15", ""),
    (r"examples/", WORDS, ""),
)
Found = tuple[str, str, float, str]  # step, what is wrong or "not run: ...", seconds, output


@dataclass
class Step:
    """One thing of the README. `kind`: sh, python or js."""

    kind: str
    text: str

    @property
    def name(self) -> str:
        first = next(line for line in self.text.splitlines() if line.strip())
        return self.text if self.kind == "sh" and "\n" not in self.text else f"{first.strip()} ..."


def steps(readme: str) -> Iterator[Step]:
    """What the README says to run, in its order; lines that begin with a comment part commands."""
    for kind, block, inline, example in re.findall(THINGS, readme, re.DOTALL | re.MULTILINE):
        if inline or example:
            yield Step("sh", inline or f".venv/bin/python {example}")
        elif kind in ("python", "js"):
            yield Step(kind, block)
        elif kind == "sh":
            parts = re.split(r"^#.*\n", block, flags=re.MULTILINE)
            yield from (Step("sh", part.strip()) for part in parts if part.strip())
        elif re.search(r"^(make|git|\.venv|docker|npm)\b|^\.venv", block, re.MULTILINE):
            lines = (re.sub(r"\s{2,}#.*", "", line).strip() for line in block.splitlines())
            yield from (Step("sh", line) for line in lines if line)


def expected(step: Step) -> tuple[str | None, str]:
    """Raises LookupError where no row knows the step."""
    for part, pattern, why in EXPECTED:
        if re.search(part, step.text):
            return pattern, why
    raise LookupError(f"no row of EXPECTED knows it: {step.name}")


def run(step: Step, clone: Path) -> tuple[int, str, str]:
    """The exit status of a step, what it says, and what it says beside."""
    place, text, told = clone, step.text.replace("HOST:PORT", f"127.0.0.1:{PORT}"), None
    if step.kind == "python":
        (clone / "readme_program.py").write_text(text)
        text = ".venv/bin/python readme_program.py"
    elif step.kind == "js":
        place = clone.parent / "js"
        place.mkdir(exist_ok=True)
        (place / "story.mjs").write_text(text)
        text = f"npm install --silent {shlex.quote(str(clone / 'clients/web'))}"
        text += " && node --experimental-websocket --no-warnings story.mjs"
    elif "--input-type=module" in text:
        place, text = clone / "clients/web", text.replace("node ", "node --no-warnings ", 1)
    elif text == "pip install .":  # another environment, which talks to the server
        text = """cd .. && python3 -m venv thin && thin/bin/pip install -q ./ramify &&
            thin/bin/ramify chat Hello. && echo $(du -sm --apparent-size --exclude 'pip*' \
            --exclude 'setuptools*' --exclude __pycache__ thin/lib | cut -f1) MB"""
    elif text.startswith("git diff"):
        with (clone / "LICENSE").open("a") as file:
            file.write("A line more, so that there is a difference.\n")
    elif re.fullmatch(r"\.venv/bin/ramify chat( --url \S+)?", text):
        told, text = "Hello.\n/tree\n", f"{text} --script"
    limit = INSTALL_S if "make " in text or "pip " in text else STEP_S
    try:
        done = subprocess.run(
            ["bash", "-c", text], cwd=place, input=told, capture_output=True, text=True,
            timeout=limit, env=environment(), check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return 124, "", f"no end after {error.timeout:.0f} s"
    return done.returncode, done.stdout, done.stderr


def environment() -> dict[str, str]:
    """Ours, without what would let the clone find another Ramify."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "RAMIFY_AUTH_TOKEN", "MAKEFLAGS", "MAKELEVEL")
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"NO_COLOR": "1"}


@contextmanager
def serving(clone: Path) -> Iterator[str]:
    """`make serve` in the clone; what it said until it was ready. Raises RuntimeError."""
    log = clone.parent / "serve.log"
    with log.open("w") as file:
        server = subprocess.Popen(
            ["make", "serve"], cwd=clone, stdout=file, stderr=subprocess.STDOUT,
            env=environment(), start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + INSTALL_S
        while not ready():
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"`make serve` gave no server:\n{log.read_text()[-2000:]}")
            time.sleep(1)
        time.sleep(1)  # its last lines
        yield log.read_text()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def ready() -> bool:
    try:
        with urllib.request.urlopen(f"{ADDRESS}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def brief(output: str) -> str:
    """An output in some lines, without frames and banners, of pip's the last; no session's key."""
    lines = re.sub(r"(?s)╭.*?╰|(?<=\bk_)\w+", "", output).splitlines()
    lines = lines[-1:] if output.startswith(("Looking in", "Collecting", "Requirement")) else lines
    told = (re.sub(r"[\s\u2500-\u257f]+", " ", each).strip() for each in lines)
    line = " / ".join(filter(None, told))
    return (
        line if len(line) <= MOST_SHOWN else f"{line[: MOST_SHOWN // 2]} ... {line[-MOST_SHOWN // 2 :]}"
    )


def judge(pattern: str, code: int, output: str, beside: str) -> str:
    """What is wrong with an output; empty: nothing."""
    if code:
        return f"exit status {code}"
    if found := BROKEN.search(output + beside):
        return f"says {found[0]!r}"
    return "" if re.search(pattern, output) else "does not say what it should"


def links(readme: str, clone: Path) -> list[str]:
    """Files that the README links to and that are not there."""
    named = re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", readme)
    return sorted({name for name in named if not (clone / name).exists()})


def walk(clone: Path, only: str, tests: bool) -> list[Found]:
    """What came of each step, in the README's order."""
    readme = (clone / "README.md").read_text()
    found: list[Found] = [("links to files", ", ".join(links(readme, clone)), 0.0, "")]
    begin = time.monotonic()
    with serving(clone) as said:
        for step in steps(readme):
            if only and only not in step.text and step.text != "make serve":
                continue
            try:
                pattern, why = expected(step)
            except LookupError as error:
                found.append((step.name, str(error), 0.0, ""))
                continue
            if step.text == "make test" and not tests:
                pattern, why = None, "--tests runs it"
            if pattern is None:
                found.append((step.name, f"not run: {why}", 0.0, ""))
                continue
            if step.text == "make serve":
                code, output, beside = 0, said[said.find("ready: ") :], said
            else:
                begin = time.monotonic()
                code, output, beside = run(step, clone)
            wrong = judge(pattern, code, output, beside)
            found.append((step.name, wrong, time.monotonic() - begin, output))
            print(f"{'MISS' if wrong else 'ok  '} {step.name[:90]} {wrong}", flush=True)
            if wrong:
                print((output + beside)[-1500:], flush=True)
    return found


def page(found: list[Found]) -> str:
    """The walk as Markdown."""
    done = sum(1 for _, wrong, *_ in found if not wrong)
    left = sum(wrong.startswith("not run") for _, wrong, *_ in found)
    lines = [
        "# A newcomer's walk\n",
        "What `benchmarks/newcomer_walk.py` got: the README, line by line, in a fresh clone and",
        "environment. The answers are those of the bundled model: patterns judge that there is one, a",
        f"reader how good it is. Outputs are cut to {MOST_SHOWN} characters, without stderr. At the end",
        f"{os.cpu_count()} cores had a load of {os.getloadavg()[0]:.0f}.",
        f"{done} of {len(found)} steps are as the README says, {left} were not run.\n",
    ]
    for name, wrong, seconds, output in found:
        lines.append(f"- {'**' + wrong + '**' if wrong else 'ok'}, {seconds:.0f} s\n")
        lines.append(f"      {name.splitlines()[0][:140]}")
        words = brief(output)
        lines += [f"      > {words[at : at + 140]}" for at in range(0, len(words), 140)]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Command line; exits with 1 where a step is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="write the walk to this file, as Markdown")
    parser.add_argument("--only", default="", help="only steps that hold this text")
    parser.add_argument("--tests", action="store_true", help="run `make test`, too")
    options = parser.parse_args()
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            sys.exit(f"port {PORT} has a server: end it, the README's commands would talk to it")
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "ramify"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        found = walk(clone, options.only, options.tests)
    if options.output:
        options.output.write_text(page(found))
    wrong = [name for name, what, *_ in found if what and not what.startswith("not run")]
    sys.exit(f"{len(wrong)} steps are not as they should be" if wrong else 0)


if __name__ == "__main__":
    main()
