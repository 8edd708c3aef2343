"""Programs that know nothing of Ramify: the `openai` package for Node, and libraries over OpenAI's API.

Each case is skipped where its package is not installed. For Node: `npm ci` in tests/e2e/node. For the
libraries, which bring many others: an environment of their own, as RAMIFY_CLIENTS_PYTHON=PATH/bin/python
(`pip install openai-agents langchain-openai instructor litellm ollama anthropic`; LlamaIndex asks for an
older `openai`, so it has one of its own: `pip install llama-index-llms-openai-like`). For Anthropic's
package for Node and the AI SDK's: a folder with them, as RAMIFY_CLIENTS_NODE=FOLDER (`npm install
@anthropic-ai/sdk ai@6 @ai-sdk/anthropic@3 @ai-sdk/openai@3 @ai-sdk/openai-compatible@2 zod`).
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ramify.clients.bench.server import http_url

HERE = Path(__file__).parent
NODE = shutil.which("node")
PYTHON = os.environ.get("RAMIFY_CLIENTS_PYTHON", sys.executable)
MODEL = "default_model"
FOLDER = Path(os.environ.get("RAMIFY_CLIENTS_NODE", HERE / "node"))
PROGRAMS = {
    "anthropic": "anthropic",
    "agents_sdk": "agents",
    "instructor": "instructor",
    "langchain": "langchain_openai",
    "litellm": "litellm",
    "llamaindex": "llama_index",
    "ollama": "ollama",
}


@pytest.fixture
def address(bundled: str) -> str:
    return http_url(bundled) + "/v1"


def run(*command: str) -> str:
    variables = {**os.environ, "OPENAI_API_KEY": "none", "HTTP_PROXY": "", "HTTPS_PROXY": ""}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=variables, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.skipif(
    NODE is None or not (HERE / "node" / "node_modules").exists(), reason="npm ci in tests/e2e/node"
)
def test_the_package_for_node(request: pytest.FixtureRequest) -> None:
    assert NODE is not None
    address = request.getfixturevalue("address")
    told = json.loads(run(NODE, str(HERE / "node" / "suite.mjs"), address, MODEL).splitlines()[-1])
    assert told["failed"] == {}
    assert len(told["passed"]) >= 16


@pytest.mark.parametrize(
    ("name", "package"), [("anthropic", "@anthropic-ai"), ("ai_sdk", "@ai-sdk/anthropic")]
)
def test_a_program_for_node(request: pytest.FixtureRequest, name: str, package: str) -> None:
    if NODE is None or not (FOLDER / "node_modules" / package).exists():
        pytest.skip(f"{package} is not in RAMIFY_CLIENTS_NODE")
    program = str(HERE / "programs" / f"with_{name}.mjs")
    assert run(NODE, program, request.getfixturevalue("address"), MODEL, str(FOLDER)).strip() == "ok"


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program(request: pytest.FixtureRequest, name: str) -> None:
    found = subprocess.run(
        [
            PYTHON,
            "-c",
            f"import importlib.util as u, sys; sys.exit(not u.find_spec({PROGRAMS[name]!r}))",
        ],
        check=False,
    )
    if found.returncode:
        pytest.skip(f"{PROGRAMS[name]} is not installed in {PYTHON}")
    address = request.getfixturevalue("address")
    assert run(PYTHON, str(HERE / "programs" / f"with_{name}.py"), address, MODEL).split()[-1] == "ok"
