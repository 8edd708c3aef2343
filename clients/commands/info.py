"""`ramify info`: versions, devices and model facts, of this machine or of a server.

Torch is loaded only for what serving a model will be like.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ramify.clients.commands.checkpoints import find_model
from ramify.clients.commands.engine import EngineMissing, load
from ramify.clients.commands.screen import shown
from ramify.clients.errors import ConnectionLost
from ramify.clients.session_link import websocket_url
from ramify.protocol.checkpoint.files import json_files
from ramify.protocol.errors import ConfigError, ModelError

MOST_BYTES = 1 << 20  # of a server's answer
HERE_S = 1.0  # a server on this machine answers within this time, or is none
PACKAGES = ("ramify", "torch", "transformers", "tokenizers", "safetensors", "websockets", "msgspec")
FACTS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("info", help="versions, devices, and facts of a model or server")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--url", help="ask this server")
    what.add_argument("--model", metavar="DIR|FILE.gguf|OWNER/NAME[:TYPE]", help="look at this model")
    parser.add_argument(
        "--tensor-parallel", metavar="N", type=int, default=1, choices=range(1, 65),
        help="with --model: what each of N ranks has of it",
    )  # fmt: skip
    parser.add_argument(
        "--expert-parallel", action="store_true",
        help="with --tensor-parallel: for ranks that have some experts whole",
    )  # fmt: skip
    parser.add_argument("--token", help="bearer token (default: $RAMIFY_TOKEN)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts as `name: value` lines. Raises ConfigError, ConnectionLost, ModelError."""
    if args.model is None and (args.tensor_parallel > 1 or args.expert_parallel):
        raise ConfigError("--tensor-parallel and --expert-parallel are of a model: give --model too")
    if args.expert_parallel and args.tensor_parallel == 1:
        raise ConfigError("--expert-parallel divides experts among ranks: give --tensor-parallel too")
    if args.url is not None:
        facts = server_info(args.url, args.token or os.environ.get("RAMIFY_TOKEN"))
        if isinstance(started := facts.get("started"), float):
            with suppress(OverflowError, OSError, ValueError):  # of a hostile server
                facts["started"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started))
        try:
            show(facts)
        except RecursionError:
            raise ConnectionLost(f"{args.url} tells facts that are nested too deep to show") from None
        return 0
    show(local_info())
    if args.model is not None:
        path = find_model(args.model)[0]
        show({"model": model_info(path)})
        try:
            forecast = load("ramify.gpu.startup.forecast").forecast
            show({"served": forecast(path, args.tensor_parallel, args.expert_parallel)})
        except (ModelError, EngineMissing) as error:
            show({"not served": str(error)})
    return 0


def show(facts: dict[str, Any], indent: str = "") -> None:
    """Print nested facts."""
    for name, value in facts.items():
        if isinstance(value, dict):
            print(shown(f"{indent}{name}:"))
            show(value, indent + "  ")
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else value
            print(shown(f"{indent}{name}: {text}"))


def local_info() -> dict[str, Any]:
    """Collect versions and devices of this machine."""
    versions: dict[str, str] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "versions": versions,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        "gpus": gpus() or "none found",
    }


def gpus() -> list[str]:
    """Ask the driver's own tool for the names of NVIDIA GPUs."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def model_info(path: Path) -> dict[str, Any]:
    """Read facts from a folder's files, or from a GGUF file. Raises ModelError that names the file."""
    files = json_files(path)
    facts = files("config.json")
    if facts is None:
        raise ModelError(
            f"{path / 'config.json'}: no such file: give the folder of a model, or a GGUF file"
        )
    weights = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in weights)
    template = (path / "chat_template.jinja").is_file() or "chat_template" in (
        files("tokenizer_config.json") or {}
    )
    return {
        "file" if path.is_file() else "folder": str(path),
        "architectures": facts.get("architectures", []),
        **{name: facts[name] for name in FACTS if name in facts},
        "weights": f"{len(weights)} files, {size / 2**20:.1f} MiB",
        "chat template": "yes" if template else "no",
    }


def server_at(port: int, token: str | None = None) -> tuple[str, dict[str, Any]] | None:
    """Find the URL and the facts of the Ramify server on this machine at `port`, if there is one."""
    url = f"ws://127.0.0.1:{port}/v1/ws"
    try:
        facts = server_info(url, token, timeout_s=HERE_S)
    except ConnectionLost:
        return None
    return (url, facts) if isinstance(facts.get("model"), dict) else None


def server_info(url: str, token: str | None, *, timeout_s: float = 10.0) -> dict[str, Any]:
    """Ask a server for `GET /v1/info`. Raises ConnectionLost."""
    address = websocket_url(url).replace("ws", "http", 1).removesuffix("/v1/ws") + "/v1/info"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(address, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            facts = json.loads(response.read(MOST_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            raise ConnectionLost(f"{address} answered HTTP {error.code}") from None
    except (OSError, ValueError, HTTPException, RecursionError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            reason = "nothing listens there (ramify serve starts a server)"
        raise ConnectionLost(f"cannot read {address}: {reason}") from None
    if not isinstance(facts, dict):
        raise ConnectionLost(f"{address} does not tell what a Ramify server tells")
    return facts
