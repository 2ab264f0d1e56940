"""Typed access to a model's config; a value of the wrong kind is a `ModelError` that names its field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fd_core.errors import ModelError
from fd_core.ops.contract import PlainActivation

ACTIVATIONS: Final[Mapping[str, PlainActivation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "quick_gelu": "quick_gelu",
}
PoolingMethod = Literal["last", "cls", "mean", "all"]
"""Tokens whose states make a vector: the last, the first, the mean of all, or a vector of each."""
_MAX_COUNT = 1 << 31


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the fields of its text model, if it is that of a multimodal one.

    Such a model has one output projection, which the outer config may tie.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return {**config}
    outer = {name: config[name] for name in ("architectures", "model_type", "tie_word_embeddings") if name in config}
    return {**config, **text, **outer}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Content of config.json or of GGUF metadata, or a nested part of it; null counts as absent."""

    values: Mapping[str, Any]
    prefix: str = ""
    """Prefix of a nested part, such as `rope_parameters.`."""
    origin: str = "config.json"
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Fields that the file has under other names, which errors show."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of the file that fields were converted from, which errors show."""

    def filled(self, defaults: Mapping[str, Any], renamed: Mapping[str, str]) -> ModelConfig:
        """Return the config with values for fields that it leaves out, and names under which it has others."""
        values = self.values if defaults.keys() <= self.values.keys() else {**defaults, **self.values}
        return replace(self, values=values, renamed=renamed)

    def name_of(self, field: str) -> str:
        """Return the name under which the file has a field."""
        name = f"{self.prefix}{self.renamed.get(field, field)}"
        return self.keys.get(name, name)

    def count(self, field: str, default: int | None = None) -> int:
        """Return a positive integer."""
        return self._integer(field, default, 1, expected="a positive integer")

    def index(self, field: str, default: int) -> int:
        """Return an integer that is not negative."""
        return self._integer(field, default, 0, expected="an integer that is not negative")

    def optional_count(self, field: str, default: int | None = None) -> int | None:
        """Return a positive integer, the default if it is absent, or None if it is null."""
        if field not in self.values:
            return default
        return None if self._get(field) is None else self.count(field)

    def number(self, field: str, default: float | None = None) -> float:
        """Return a finite, positive number."""
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self._wrong(field, "a positive number", value)
        return float(value)

    def optional_number(self, field: str, default: float | None = None) -> float | None:
        """Return a finite, positive number, the default if it is absent, or None if it is null."""
        if field not in self.values:
            return default
        return None if self._get(field) is None else self.number(field)

    def single(self, field: str, default: float | None = None) -> float:
        """Return a positive number, which files hold as a float32, in its shortest decimal form."""
        return float(str(np.float32(self.number(field, default))))

    def optional_single(self, field: str) -> float | None:
        """Return a positive number as `single` does, or None if it is absent or 0."""
        return self.single(field) if self.values.get(field) else None

    def flag(self, field: str, default: bool = False) -> bool:
        """Return a boolean, the default if it is absent, or False if it is null."""
        value = self.values.get(self.renamed.get(field, field), default)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self._wrong(field, "true or false", value)
        return value

    def text(self, field: str, default: str) -> str:
        """Return a string."""
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self._wrong(field, "a string", value)
        return value

    def part(self, field: str) -> ModelConfig | None:
        """Return a nested object, or None if it is absent."""
        value = self._get(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(field, "an object", value)
        return ModelConfig(value, f"{self.prefix}{field}.", self.origin)

    def indices(self, field: str) -> tuple[int, ...]:
        """Return an integer or a list of integers that are not negative as a tuple; empty if it is absent."""
        value = self._get(field)
        listed = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in listed):
            raise self._wrong(field, "integers that are not negative", value)
        return tuple(listed)

    def channels(self, field: str, default: float) -> npt.NDArray[np.float32]:
        """Return the numbers of red, green and blue."""
        value = self._get(field, [default] * 3)
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise self._wrong(field, "three numbers", value)
        return np.array([ModelConfig({field: each}, self.prefix, self.origin).number(field) for each in value], "f4")

    def strings(self, field: str) -> list[str]:
        """Return a list of strings, empty if it is absent."""
        value = self._get(field, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(field, "a list of strings", value)
        return value

    def layer_types(self, num_layers: int, local: str = "sliding_attention") -> tuple[str, ...] | None:
        """Return the attention type of each layer, full or `local`, or None if the config does not list it."""
        value = self._get("layer_types")
        if value is None:
            return None
        known = {"full_attention": "full_attention", local: local}
        if local == "linear_attention":
            known |= {"attention": "full_attention", "mamba": local}  # names of earlier versions of transformers
        if not isinstance(value, list | tuple) or len(value) != num_layers or not set(value) <= set(known):
            raise self._wrong("layer_types", f"a list of {num_layers} values from {' and '.join(known)}", value)
        return tuple(known[each] for each in value)

    def activation(self, field: str = "hidden_act") -> PlainActivation:
        """Return the activation of the feed-forward layers; by default silu, or tanh-approximated gelu for Gemma."""
        name = self.text(field, "gelu_pytorch_tanh" if field == "hidden_activation" else "silu")
        if name not in ACTIVATIONS:
            raise self._wrong(field, f"one of {', '.join(ACTIVATIONS)}", name)
        return ACTIVATIONS[name]

    def refuse(self, field: str, why: str) -> None:
        """Raise if the field is truthy."""
        if self._get(field):
            raise ModelError(f"{self.origin}: {self.name_of(field)} is set, but {why}")

    def _integer(self, field: str, default: int | None, least: int, expected: str) -> int:
        value = self._get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _MAX_COUNT:
            raise self._wrong(field, expected, value)
        return value

    def _get(self, field: str, default: Any = None) -> Any:
        value = self.values.get(self.renamed.get(field, field))
        return default if value is None else value

    def _wrong(self, field: str, expected: str, value: object) -> ModelError:
        found = "it is missing" if value is None else f"found {str(value)[:60]!r}"
        return ModelError(f"{self.origin}: {self.name_of(field)} must be {expected}; {found}")
