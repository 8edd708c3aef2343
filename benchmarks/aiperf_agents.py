"""AIPerf over the APIs that agents speak: sessions with tools, pauses, and forks into sub-agents.

    python benchmarks/aiperf_agents.py --url http://127.0.0.1:8765 --model NAME --tokenizer DIR \
        --aiperf PATH/bin/aiperf [--out benchmarks/results/aiperf.json]

AIPerf (PyPI: `aiperf`) is run as it is, in an environment of its own. This writes its data set, in its
format for agents (DAG JSONL), and runs it through chat completions, Responses and Messages, streamed
and whole. Of each run it keeps what says whether it worked, and what was found in the cache.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENDPOINTS = ("chat", "responses", "messages")
SYSTEM = "You are an agent that works in a repository. Read before you write, and say what you did. " * 4
PAUSE_MS = 50  # that a tool takes
SCHEMA = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 40}}}
TOOLS = ("read", "list", "test")
FIGURES = (
    "request_count",
    "error_request_count",
    "request_error_rate",
    "request_latency",
    "time_to_first_token",
    "inter_token_latency",
    "output_sequence_length",
    "usage_prompt_tokens",
    "usage_prompt_cache_read_tokens",
    "usage_completion_tokens",
)


def tools(endpoint: str) -> list[dict[str, Any]]:
    """Declared as the endpoint has them."""
    named = [{"name": name, "description": f"{name} a file"} for name in TOOLS]
    if endpoint == "messages":
        return [{**each, "input_schema": SCHEMA} for each in named]
    if endpoint == "responses":
        return [{"type": "function", **each, "parameters": SCHEMA} for each in named]
    return [{"type": "function", "function": {**each, "parameters": SCHEMA}} for each in named]


def conversations(endpoint: str, run: str, sessions: int, turns: int) -> list[dict[str, Any]]:
    """Agents that begin alike; each forks two sub-agents with its last turn.

    `run`: at the head of each prompt, so that nothing of an earlier run is found.
    """
    made: list[dict[str, Any]] = []
    for number in range(sessions):
        own: list[dict[str, Any]] = []
        for turn in range(turns):
            task = f"Task {number}, step {turn}: look at file{number}_{turn}.py and go on."
            messages = [{"role": "user", "content": task}]
            if turn == 0:
                messages.insert(0, {"role": "system", "content": f"{run}. {SYSTEM}"})
            said = {"messages": messages, "max_tokens": 24, "tools": tools(endpoint)}
            own.append({**said, "delay": float(PAUSE_MS * (turn > 0))})
        children = [f"s{number}.{name}" for name in ("review", "test")]
        own[-1]["forks"] = children
        made.append({"session_id": f"s{number}", "turns": own})
        for child in children:
            asked = [{"role": "user", "content": f"Sub-agent {child}: check the last step."}]
            last = {"messages": asked, "max_tokens": 16, "tools": tools(endpoint)}
            made.append({"session_id": child, "turns": [last]})
    return made


def figures(folder: Path) -> dict[str, Any]:
    """Of a run: averages and percentiles, as far as AIPerf has them."""
    told = json.loads((folder / "profile_export_aiperf.json").read_text())
    kept = ("avg", "p50", "p95", "max", "unit")
    return {
        name: {key: told[name][key] for key in kept if told[name].get(key) is not None}
        for name in FIGURES
        if isinstance(told.get(name), dict)
    }


def run(options: argparse.Namespace, endpoint: str, *, streams: bool) -> dict[str, Any]:
    """AIPerf's figures, or its last words if it failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "agents.jsonl"
        made = conversations(endpoint, f"{endpoint} {streams}", options.sessions, options.turns)
        data.write_text("".join(json.dumps(each) + "\n" for each in made))
        command = [options.aiperf, "profile", "--model", options.model, "--url", options.url]
        command += ["--endpoint-type", endpoint, "--tokenizer", options.tokenizer, "--ui", "none"]
        command += ["--input-file", str(data), "--custom-dataset-type", "dag-jsonl"]
        command += ["--concurrency", str(options.concurrency), "--random-seed", "7"]
        command += ["--artifact-dir", str(folder / "out")] + (["--streaming"] if streams else [])
        ended = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
        if ended.returncode:
            return {"failed": (ended.stdout + ended.stderr)[-2000:]}
        return figures(folder / "out")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8765")
    parser.add_argument("--model", default="default_model")
    parser.add_argument("--tokenizer", default="gpu/default_model")
    parser.add_argument("--aiperf", default="aiperf")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    version = subprocess.run([options.aiperf, "--version"], capture_output=True, text=True, check=False)
    told: dict[str, Any] = {"aiperf": version.stdout.strip()}
    told |= {
        f"{endpoint}, {'streamed' if streams else 'whole'}": run(options, endpoint, streams=streams)
        for endpoint in ENDPOINTS
        for streams in (True, False)
    }
    text = json.dumps(told, indent=1) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    return any("failed" in each for each in told.values())


if __name__ == "__main__":
    sys.exit(main())
