"""The vector of a text: pooling of states, and the layers that follow, in the layout of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.errors import ModelError
from fd_core.models.loading.config import ACTIVATIONS, ModelConfig, PoolingMethod
from fd_core.models.loading.files import PICKLE_HINT, read_json_object, read_limited
from fd_core.models.loading.safetensors_files import read_safetensors
from fd_core.models.loading.tokenizer_source import read_text_settings
from fd_core.ops.weights import RAW_TYPES, RawTensor

Floats = npt.NDArray[np.float32]
_MODES: Final[dict[str, PoolingMethod]] = {
    "lasttoken": "last",
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
}


class Dense(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of pooled vectors; numbers are float32, little-endian."""

    weight: bytes
    """[outs, in]"""
    outs: int
    bias: bytes = b""
    """[outs], or nothing."""
    activation: str = "identity"
    norm: bytes = b""
    """[outs], weights of a layer norm after the activation, or nothing."""
    norm_bias: bytes = b""
    eps: float = 0.0


class Classifier(msgspec.Struct, frozen=True, kw_only=True):
    """Output layers of a model that classifies texts by a pooled state, or by each state."""

    labels: tuple[str, ...]
    layers: tuple[Dense, ...]
    activation: Literal["softmax", "sigmoid", "none"]
    pooling: PoolingMethod = "last"


class VectorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling method by which a model embeds a text."""

    pooling: PoolingMethod = "last"
    layers: tuple[Dense, ...] = ()
    """Layers of a pooled vector, before it is normalized."""
    normalize: bool = True
    """True if vectors are normalized to length 1."""
    judge: tuple[str, str] | None = None
    """Tokens for no and yes of a reranker, which scores the relevance of a document."""
    classifier: Classifier | None = None
    prompts: dict[str, str] = {}
    """Texts that may be put before a text, by name."""
    prompt: str = ""
    """Put before each text that has no other prompt."""
    second_text: int | None = None
    """For a classifier that scores pairs of texts: what is added to the ids of the second one. None for others."""


_DENSE: Final[Mapping[str, str]] = {**ACTIVATIONS, "identity": "identity", "tanh": "tanh"}
"""Activations of layers, by their name in a config or by the class of torch, in lower case."""


def dense_of(
    read: Callable[[str], Floats | None],
    name: str,
    width: int,
    *,
    activation: str,
    origin: object,
    norm: str = "",
    eps: float = 0.0,
) -> Dense:
    """Return a layer with `width` inputs, whose tensors `read` returns, or None for those that are absent.

    Raises `ModelError` for tensors that do not fit, and for an unknown activation.
    """
    kind = _DENSE.get(activation.rpartition(".")[2].lower())
    if kind is None:
        raise ModelError(
            f"{origin}: the activation {activation[:60]!r} is not served", hint=f"served: {', '.join(_DENSE)}"
        )
    weight = read(f"{name}.weight")
    if weight is None or weight.ndim != 2 or weight.shape[1] != width or not len(weight):
        found = "is missing" if weight is None else f"has shape {weight.shape}"
        raise ModelError(f"{origin}: tensor {f'{name}.weight'!r} {found}, expected (outputs, {width})")

    def vector(of: str) -> bytes:
        values = read(of)
        if values is not None and values.shape != (len(weight),):
            raise ModelError(f"{origin}: tensor {of!r} has shape {values.shape}, expected ({len(weight)},)")
        return b"" if values is None else values.astype("<f4").tobytes()

    return Dense(
        weight=weight.astype("<f4").tobytes(),
        outs=len(weight),
        bias=vector(f"{name}.bias"),
        activation=kind,
        norm=vector(f"{norm}.weight") if norm else b"",
        norm_bias=vector(f"{norm}.bias") if norm else b"",
        eps=eps,
    )


def read_vector_settings(path: Path | None, width: int, default: PoolingMethod = "last") -> VectorSettings:
    """Read the modules of a model's folder, whose states have `width` elements; `ModelError` for unsupported modules.

    `default` is the pooling without any.
    """
    if path is None or not path.is_dir():
        return VectorSettings(pooling=default)
    config = read_json_object(path / "config.json") if (path / "config.json").is_file() else {}
    judge = config.get("classifier_from_token")
    if judge is not None and not (
        isinstance(judge, list) and len(judge) == 2 and all(isinstance(each, str) for each in judge)
    ):
        raise ModelError(f"{path}/config.json: classifier_from_token must be two tokens: no and yes")
    labels = tuple(judge) if judge is not None else None
    modules = path / "modules.json"
    if not modules.is_file():
        return VectorSettings(pooling=default, judge=labels)
    pooling: PoolingMethod | None = None
    normalize, layers = False, list[Dense]()
    declared = read_declared(path)
    prompts, prompt = _prompts(declared)
    crosses = declared.values.get("model_type") == "CrossEncoder"
    if crosses and prompt:
        declared.refuse("default_prompt_name", "a cross-encoder puts no prompt before pairs")
    modalities = ModelConfig(read_text_settings(path), origin=str(path)).part("modality_config") or ModelConfig({})
    right = "logits" if crosses else "last_hidden_state"
    output = (modalities.part("text") or ModelConfig({})).text("method_output_name", right)
    if output != right:
        raise ModelError(f"{path}: the output {output[:40]!r} of the model is not served; expected {right!r}")
    try:
        listed = msgspec.json.decode(read_limited(modules), type=list[dict[str, Any]])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{modules} is not a list of modules: {error}") from error
    for module in listed:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _pooling(_inside(path, module) / "config.json", prompted=bool(prompts))
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense" and pooling is not None and not normalize:
            layers.append(_dense(_inside(path, module), layers[-1].outs if layers else width))
        elif kind != "Transformer":
            raise ModelError(
                f"{modules}: the module {kind[:40]!r} is not served",
                hint="served are Transformer, Pooling, then Dense, then Normalize",
            )
    if pooling is None and crosses:
        return VectorSettings(pooling=default, judge=labels)
    if pooling is None:
        raise ModelError(f"{modules} names no module for pooling")
    form: dict[str, Any] = {"layers": tuple(layers), "normalize": normalize, "judge": labels}
    return VectorSettings(pooling=pooling, prompts=prompts, prompt=prompt, **form)


def read_declared(folder: Path) -> ModelConfig:
    """Return the config of sentence-transformers in a model's folder; empty if there is none."""
    file = folder / "config_sentence_transformers.json"
    return ModelConfig(read_json_object(file) if file.is_file() else {}, origin=str(file))


def _prompts(declared: ModelConfig) -> tuple[dict[str, str], str]:
    """Return the prompts that the authors declare by name, and the default one."""
    declared.refuse("truncate_dim", "vectors are cut only on request, by dimensions")
    prompts, default = declared.values.get("prompts") or {}, declared.values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise ModelError(f"{declared.origin}: prompts must be texts by name")
    if default is not None and default not in prompts:
        raise ModelError(f"{declared.origin}: default_prompt_name {str(default)[:40]!r} is not among the prompts")
    return prompts, "" if default is None else prompts[default]


def read_longest_text(folder: Path) -> int | None:
    """Return the most tokens of a text that the authors of an embedding model embed; None if they set no limit."""
    longest = read_text_settings(folder).get("max_seq_length")
    return longest if type(longest) is int and longest > 0 else None


def _inside(folder: Path, module: Mapping[str, Any]) -> Path:
    """Return the folder of a module. Raises `ModelError` if it is not in the model's."""
    path = PurePosixPath(str(module.get("path", "")).replace("\0", "?"))
    if path.is_absolute() or ".." in path.parts:
        raise ModelError(f"{folder}/modules.json names a folder outside the model's")
    return folder / path


def _dense(folder: Path, width: int) -> Dense:
    """Read a layer of sentence-transformers."""
    file = folder / "model.safetensors"
    if not file.is_file():
        raise ModelError(f"{folder} has no model.safetensors", hint=PICKLE_HINT)
    activation = str(read_json_object(folder / "config.json").get("activation_function", "Tanh"))
    tensors = read_safetensors(file)

    def read(name: str) -> Floats | None:
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype not in RAW_TYPES:
            return None
        return np.array(RawTensor(tensor.dtype, tensor.view(RAW_TYPES[tensor.dtype])).to_float32())

    try:
        return dense_of(read, "linear", width, activation=activation, origin=file)
    finally:
        for tensor in tensors.values():
            tensor.file.close()


def _pooling(file: Path, *, prompted: bool) -> PoolingMethod:
    settings: dict[str, Any] = read_json_object(file)
    if prompted and settings.get("include_prompt") is False:
        raise ModelError(f"{file}: pooling without the prompt (include_prompt) is not served")
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name, on in settings.items() if name.startswith(prefix) and on is True]
    if isinstance(named := settings.get("pooling_mode"), str | list):
        modes = [named] if isinstance(named, str) else [str(each)[:40] for each in named]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{file}: pooling by {' and '.join(modes) or 'no method'} is not served",
            hint="served are the first token, the last token and the mean",
        )
    return _MODES[modes[0]]
