"""What is said of ranks before any of them is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from ramify.gpu.ranks.checks import check_ranks
from ramify.protocol.config import ModelConfig
from ramify.protocol.errors import ModelError

FIELDS = {"num_attention_heads": 8, "num_experts": 6}


@pytest.mark.parametrize(
    ("ranks", "fields", "given", "told"),
    [
        (8, FIELDS, {}, None),
        (64, FIELDS, {}, "8 heads are not divisible by 64; give another number"),
        (3, {"text_config": FIELDS}, {}, "8 heads are not divisible by 3"),
        (4, FIELDS, {"expert_parallel": True}, "6 experts are not divisible by 4"),
        (4, {"num_attention_heads": "8"}, {"expert_parallel": True}, None),  # the model says it
        (4, FIELDS, {"deterministic": True}, "leave --deterministic out"),
    ],
)
def test_what_config_json_says(
    ranks: int, fields: Any, given: Any, told: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = ModelConfig(path=tmp_path, device="cpu", tensor_parallel=ranks, **given)
    if told is None:
        check_ranks(config)
        return
    with pytest.raises(ModelError, match=f"--tensor-parallel {ranks}: .*{told}"):
        check_ranks(config)


def test_gpus_that_are_too_few(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = ModelConfig(path=tmp_path, tensor_parallel=4)
    with pytest.raises(ModelError, match="--tensor-parallel 4: each rank has a GPU, and there are 2"):
        check_ranks(config, 2)
    for count in (0, 4):
        check_ranks(config, count)
    check_ranks(ModelConfig(path=tmp_path, tensor_parallel=4, device="cpu"), 2)
