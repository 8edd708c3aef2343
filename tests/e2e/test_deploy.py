"""The files in examples/deploy: flags that exist, metrics that are exported, and forms that parse."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from ramify.actors.cluster.metrics import ClusterMetrics, ReplicaGauges, joined
from ramify.actors.kit.metrics import Metrics
from ramify.actors.kit.report import KvTier, Report
from ramify.clients.cli import build_parser

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
NAME = re.compile(r"\bramify_\w+")


def exported() -> set[str]:
    """The names of all samples that a front with a replica shows."""
    front = ClusterMetrics()
    front.watch(lambda: [ReplicaGauges(0, "ready", 1, Report())], lambda told: 0)
    core = Metrics()
    core.tiers = lambda: [KvTier("disk", 1, 1, 1, 1.0)]
    text = joined(front.render(), {0: core.render()}).decode()
    return set(NAME.findall("\n".join(line for line in text.splitlines() if line[0] != "#")))


def test_the_board_shows_what_there_is() -> None:
    board = json.loads((DEPLOY / "grafana-board.json").read_text())
    names: set[str] = set()
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            found = set(NAME.findall(target["expr"]))
            assert found, target
            names |= found
    assert names - exported() == set()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 10


def commands() -> list[list[str]]:
    """The `ramify` commands of all files."""
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    found = []
    for service in compose["services"].values():
        command = service.get("command")
        if command is not None:
            found.append(shlex.split(command) if isinstance(command, str) else list(command))
    job, _ = yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())
    found.append(shlex.split(job["spec"]["entrypoint"])[1:])
    for unit in DEPLOY.glob("*.service"):
        text = unit.read_text().replace("\\\n", " ")
        (line,) = re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE)
        found.append(shlex.split(line)[1:])
    return found


@pytest.mark.parametrize("command", commands(), ids=lambda command: command[0])
def test_flags_are_known(command: list[str]) -> None:
    """As far as argparse looks: the files that they name are not there."""
    args: Any = build_parser().parse_args(command)
    assert args.run is not None


def test_secrets_stay_out_of_the_image() -> None:
    ignored = (DEPLOY.parents[1] / ".dockerignore").read_text().splitlines()
    compose = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())
    for secret in compose["secrets"].values():
        assert f"examples/deploy/{Path(secret['file']).name}" in ignored


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=lambda unit: unit.name)
def test_units_have_a_folder_for_kernels(unit: Path) -> None:
    """Home folders are hidden and all else is read-only, so caches need one."""
    lines = unit.read_text().splitlines()
    assert {"ProtectHome=yes", "CacheDirectory=ramify", "Environment=HOME=%C/ramify"} <= set(lines)


def test_every_file_is_explained() -> None:
    told = (DEPLOY / "README.md").read_text()
    for path in DEPLOY.iterdir():
        assert path.name == "README.md" or f"`{path.name}`" in told, path.name
    for name in ("prometheus.yml", "grafana-source.yml", "grafana-boards.yml"):
        assert yaml.safe_load((DEPLOY / name).read_text())
