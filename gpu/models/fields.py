"""Typed access to the values of a config.json, with errors that name the file and the field.

It remembers which fields were read: one that changes the mathematics and that a family does not read is
refused instead of ignored.
"""

from typing import Any

from ramify.protocol.errors import ModelError

_MOST = 1 << 31
# What sizes are at most, by how their names end: many times those of any model, and small enough that
# no product of them overflows. Others: _MOST.
_BOUNDS = (
    ("vocab_size", 1 << 24), ("vocab_size_per_layer_input", 1 << 24), ("state_size", 1 << 12),
    ("d_state", 1 << 12), ("_size", 1 << 18), ("hidden_size_per_layer_input", 1 << 18),
    ("heads", 1 << 12), ("groups", 1 << 12), ("group", 1 << 12), ("_dim", 1 << 14), ("rank", 1 << 14),
)  # fmt: skip
_MOST_NUMBER = 1e30  # of numbers that are no sizes
_TOLD = 400  # characters of an error

# Fields that change what a model computes, unless they are null, false, 0 or empty
_SWITCHES = (
    "attention_chunk_size", "attn_logit_softcapping", "attn_output_gate", "attn_temperature_tuning",
    "clip_qkv", "conv_L_cache", "enable_moe_block", "final_logit_softcapping",
    "hidden_size_per_layer_input",
    "kv_lora_rank", "linear_num_value_heads", "mamba_d_state", "mlp_bias", "n_routed_experts",
    "no_rope_layers", "num_experts", "num_kv_shared_layers", "num_local_experts", "parallel_attn",
    "q_lora_rank", "use_bidirectional_attention", "use_parallel_residual", "use_qk_norm",
)  # fmt: skip
# ... or unless they are 1
_FACTORS = (
    "attention_multiplier", "embedding_multiplier", "logit_scale", "logits_scaling",
    "partial_rotary_factor", "residual_multiplier",
)  # fmt: skip


class Fields:
    """The `values` of config.json, defaults included; `generation`: those of generation_config.json.

    `where`: the file's name, for errors.
    """

    def __init__(
        self, architecture: str, values: dict[str, Any], generation: dict[str, Any], where: str
    ) -> None:
        self.architecture = architecture
        self._values = values
        self._generation = generation
        self._read: set[str] = set()
        self._where = where

    def rename(self, names: dict[str, str]) -> None:
        """Rename the fields of a config that has other names. `names`: its name of each, by ours."""
        self._values = dict(self._values)
        for ours, theirs in names.items():
            if theirs in self._values:
                self._values[ours] = self._values.pop(theirs)

    def inside(self, name: str, defaults: dict[str, Any] = {}) -> "Fields":  # noqa: B006
        """Return the fields of an object, which may be missing. Unread ones are not refused."""
        values = self.get(name) or {}
        if not isinstance(values, dict):
            raise self.refused(f"{name} is {values!r}: must be an object")
        return Fields(self.architecture, defaults | values, {}, f"{self._where}, {name}")

    def get(self, name: str) -> Any:
        self._read.add(name)
        return self._values.get(name)

    def refused(self, told: str) -> ModelError:
        """Make the error to raise. Values in `told` may be of any length: they are cut."""
        if len(told) > _TOLD:
            told = f"{told[: _TOLD // 2]} ... {told[-_TOLD // 2 :]}"
        return ModelError(f"{self._where}: {told}")

    def integer(self, name: str, default: int | None = None, most: int | None = None) -> int:
        """Read a positive integer, at most `most`; None: the bound of fields of this name."""
        value = self.get(name)
        if value is None:
            value = default
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or not 1 <= value <= (most or _most(name))
        ):
            told = _positive(name) if most is None else f"an integer from 1 to {most}"
            raise self.refused(f"{name} is {value!r}: must be {told}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Read a positive integer; None: the config has none."""
        if self.get(name) is None:
            return None
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _most(name):
            raise self.refused(f"{name} is {value!r}: must be {_positive(name)} or null")
        return value

    def optional(self, name: str) -> float | None:
        """Read a positive number; None: the config has none."""
        if self.get(name) is None:
            return None
        value = self.number(name)
        if not 0 < value < _MOST:
            raise self.refused(f"{name} is {value!r}: must be a positive number or null")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        valid = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not valid or not abs(value) < _MOST_NUMBER:  # NaN is not below, either
            raise self.refused(f"{name} is {value!r}: must be a number below {_MOST_NUMBER:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        return bool(self.get(name))

    def eos(self) -> tuple[int, ...]:
        """Read all ids that end a text: generation_config.json and config.json may each name some."""
        ids: list[int] = []
        for value in (self._generation.get("eos_token_id"), self.get("eos_token_id")):
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, int) and token not in ids:
                    ids.append(token)
        return tuple(ids)

    def refuse_unread(self) -> None:
        """Raise ModelError for a field that changes the mathematics and was not read."""
        for name in (*_SWITCHES, *_FACTORS):
            value = self._values.get(name)
            matters = value and not (name in _FACTORS and value == 1)
            if matters and name not in self._read:
                raise self.refused(f"{name} is {value!r}: {self.architecture} is not served with it")
        types = self._values.get("layer_types") or []
        if "layer_types" not in self._read and any(kind != "full_attention" for kind in types):
            raise self.refused(f"layer_types: {self.architecture} is served with full_attention only")


def _most(name: str) -> int:
    return next((most for ending, most in _BOUNDS if name.endswith(ending)), _MOST)


def _positive(name: str) -> str:
    most = _most(name)
    return "a positive integer" + ("" if most == _MOST else f" of at most {most}")
