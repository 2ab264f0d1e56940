"""Contract of a family of models, which plugins offer with `fd_register_models`.

A family is data: it maps a config to `Traits`, the differences from the plain decoder of Llama, and names tensors. It
computes nothing. The decoder is written once over `Ops`, so a family runs on every backend.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from fd_core.errors import ModelError
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.models.families.spec import (
    ImageSpec,
    LinearSpec,
    MergerSpec,
    MoeSpec,
    MtpSpec,
    NormSpec,
    RecurrentSpec,
    RopeSpec,
    Traits,
    VectorSpec,
    gate_up_down,
    head_dim_of,
    mtp_spec,
    rope_spec,
    scaled_rope_spec,
    separate_experts,
)
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.gguf_family import Gguf, StoredTensors

__all__ = [
    "DenseLayer",
    "Family",
    "Gguf",
    "ImageProcessor",
    "ImageSpec",
    "LinearSpec",
    "MergerSpec",
    "ModelConfig",
    "MoeSpec",
    "MtpSpec",
    "NormSpec",
    "OutputLayers",
    "RecurrentSpec",
    "RopeSpec",
    "StoredTensors",
    "Traits",
    "VectorSpec",
    "gate_up_down",
    "head_dim_of",
    "mtp_spec",
    "rope_spec",
    "scaled_rope_spec",
    "separate_experts",
]


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A layer after pooling: `name.weight`, `name.bias` if the checkpoint has it, an activation, a layer norm."""

    name: str
    activation: str = "identity"
    """`identity`, `tanh`, `relu`, `gelu`, `silu` or `sigmoid`."""
    norm: str = ""
    """Name of the norm; empty without one."""
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class OutputLayers:
    """Output of a model that classifies texts: the tokens that it reads, and its layers; the last yields the labels."""

    pooling: Literal["last", "cls", "mean", "all"]
    layers: tuple[DenseLayer, ...]


class Family(abc.ABC):
    """One family, made without arguments."""

    architectures: ClassVar[tuple[str, ...]]
    """Names in `architectures` of `config.json`, the usual one first."""
    model_type: ClassVar[str]
    """Name in `model_type` of `config.json`, by which `transformers` finds its code."""
    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plain": {}}
    """Small models on which the conformance kit compares the family with `transformers`: name to the fields of the
    config that differ from the kit's usual ones. They should cover every field that `traits` reads."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that `config.json` leaves out, where they are not those of Llama; a null is not left out."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Fields of `config.json` with another name than Llama's: Llama's to the stored one."""
    gguf: ClassVar[Mapping[str, Gguf]] = {}
    """By the name of the architecture in `general.architecture` of GGUF files; empty if llama.cpp has no such model."""

    processor_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of the processor with which the kit compares images, which differ from its usual ones."""

    @abc.abstractmethod
    def traits(self, config: ModelConfig) -> Traits:
        """Describe the model of a config. Raises `ModelError` for fields that it cannot follow."""

    def mtp(self, config: ModelConfig) -> MtpSpec | None:
        """Describe the layer for multi-token prediction that checkpoints may have; by default there is none."""
        return None

    def images(self, config: ModelConfig) -> ImageSpec | None:
        """Describe the encoder of images; by default the model takes none."""
        return None

    def image_processor(self, config: ModelConfig, settings: ModelConfig) -> ImageProcessor:
        """Return the processor of a model with an encoder of images; `settings` is its `preprocessor_config.json`.

        Raises `ModelError` by default.
        """
        raise ModelError(f"{config.origin}: the model family {type(self).__name__} has no processor of images")

    def outputs(self, config: ModelConfig, architecture: str) -> OutputLayers | None:
        """Return the output of an architecture that classifies texts, by default by the last token; else None."""
        return OutputLayers("last", (DenseLayer("score"),))

    @classmethod
    def reference(cls, folder: Path) -> Callable[[Sequence[int]], npt.NDArray[np.float32]] | None:
        """Return a function from tokens to the logits of each, float32[tokens, V], for the checkpoint in `folder`.

        The conformance kit asks for it if `transformers` has no code for `model_type`, and then writes the checkpoint
        with the family's own names. None leaves the logits of such a family uncompared.
        """
        return None
