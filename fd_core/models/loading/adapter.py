"""LoRA adapters in PEFT's format, adapter_config.json and adapter_model.safetensors, validated before use."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fd_core.errors import ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.files import PICKLE_HINT, StoredTensor, read_json_object
from fd_core.models.loading.safetensors_files import read_safetensors, text_name
from fd_core.ops.weights import RAW_TYPES, Adapter, LowRank, RawTensor

Floats = npt.NDArray[np.float32]

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_TENSOR: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_REFUSED: Final[Mapping[str, str]] = {
    "use_dora": "DoRA is not served",
    "use_qalora": "QALoRA is not served",
    "lora_bias": "biases of adapters are not served",
    "modules_to_save": "full modules in addition to low-rank ones are not served",
    "trainable_token_indices": "trained token embeddings are not served",
    "target_parameters": "adapters of parameters, such as experts, are not served",
    "layer_replication": "replicated layers are not served",
    "fan_in_fan_out": "transposed weights are not served",
    "rank_pattern": "ranks that differ from module to module are not served",
    "alpha_pattern": "alphas that differ from module to module are not served",
    "alora_invocation_tokens": "activated LoRA is not served",
    "arrow_config": "Arrow is not served",
}
_CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq")
"""Prefixes of `init_lora_weights` methods that also change the base model's weights."""


def read_adapter(folder: Path, linears: Mapping[str, tuple[int, int]], max_rank: int) -> Adapter:
    """Read the adapter in a folder for a model whose adaptable `linears` map names to (out, in).

    Raises `ModelError`, with the file and the field or tensor, if it is damaged, made for another model, above
    `max_rank` or of an unsupported kind.
    """
    config_path, path = folder / _CONFIG, folder / _WEIGHTS
    if not config_path.is_file():
        raise _wrong(f"{folder} is not a LoRA adapter: it has no {_CONFIG}")
    values = read_json_object(config_path)
    config = ModelConfig(values, origin=str(config_path))
    rank = _check_config(config, max_rank)
    if not path.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        what = f"{folder} has no {_WEIGHTS}"
        raise _wrong(what, PICKLE_HINT if pickled else "save it with PEFT's save_pretrained()")
    alpha = config.number("lora_alpha", 8.0)
    scale = alpha / (math.sqrt(rank) if config.flag("use_rslora") else rank)
    stored = read_safetensors(path)
    found = _by_linear(path, stored, linears)
    _check_targets(config, path, found, linears=linears)
    digest = hashlib.sha256(f"fd_core adapter 1 {scale!r}\n".encode())
    deltas = {}
    for name in sorted(found):
        if lack := {"A", "B"} - found[name].keys():
            raise _wrong(f"{path}: {name} has no lora_{lack.pop()}")
        out, ins = linears[name]
        down = _read(path, found[name]["A"], (rank, ins), digest=digest)
        deltas[name] = LowRank(down, _read(path, found[name]["B"], (out, rank), digest=digest, scale=scale))
    return Adapter(digest.hexdigest(), rank, deltas)


def _check_config(config: ModelConfig, max_rank: int) -> int:
    """Return the rank."""
    kind = config.text("peft_type", "LORA")
    if kind != "LORA":
        raise _wrong(f"{config.origin}: peft_type {kind[:40]!r} is not supported, expected LORA")
    for field, why in _REFUSED.items():
        config.refuse(field, why)
    if (bias := config.text("bias", "none")) != "none":
        raise _wrong(f"{config.origin}: bias is {bias[:40]!r}, but trained biases are not supported")
    init = config.values.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
        raise _wrong(
            f"{config.origin}: init_lora_weights is {init[:40]!r}, which also changes the base model's weights",
            "convert it to a plain LoRA: PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    rank = config.count("r")
    if rank > max_rank:
        raise _wrong(f"{config.origin}: the rank r is {rank}, the limit is {max_rank}", "raise --max-lora-rank")
    return rank


def _by_linear(
    path: Path, stored: Mapping[str, StoredTensor], linears: Mapping[str, Any]
) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors by linear, and by A or B."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for tensor_name, tensor in stored.items():
        match = _TENSOR.fullmatch(tensor_name)
        name, side = match.groups() if match else (tensor_name, "")
        name = text_name(name)
        name = name if name.startswith("model.") or name == "lm_head" else f"model.{name}"
        if not match or name not in linears:
            served = sorted({each.rpartition(".")[2] for each in linears})
            layers = len({each.split(".")[2] for each in linears})
            raise _wrong(
                f"{path}: tensor {tensor_name[:200]!r} belongs to no adaptable linear of this model",
                f"adapters may change {', '.join(served)} of this model's {layers} layers",
            )
        if side in found.setdefault(name, {}):
            raise _wrong(f"{path}: tensor {tensor_name[:200]!r} appears twice")
        found[name][side] = tensor
    if not found:
        raise _wrong(f"{path} has no tensors")
    return found


def _check_targets(config: ModelConfig, path: Path, found: Mapping[str, Any], linears: Mapping[str, Any]) -> None:
    """Raise if tensors of modules in the config's `target_modules` are missing."""
    targets = config.values.get("target_modules")
    if not isinstance(targets, Sequence) or isinstance(targets, str) or config.values.get("exclude_modules"):
        return  # a pattern; the tensors show its matches
    layers = config.indices("layers_to_transform")
    for target in map(str, targets):
        wanted = [name for name in linears if name.endswith(f".{target}")]
        if not wanted:
            raise _wrong(
                f"{config.origin}: target_modules names {target[:80]!r}, which adapters of this model cannot change"
            )
        for name in wanted:
            if name not in found and (not layers or int(name.split(".")[2]) in layers):
                raise _wrong(
                    f"{path}: {name} is among target_modules, but it has no tensors",
                    "the adapter was made for another model, or its file is truncated",
                )


def _read(path: Path, tensor: StoredTensor, shape: tuple[int, int], digest: Any, scale: float = 1.0) -> Floats:
    code = RAW_TYPES.get(tensor.dtype)
    if code is None:
        raise _wrong(f"{path}: tensor {tensor.name!r} is stored as {tensor.dtype}")
    if tensor.shape != shape:
        raise _wrong(
            f"{path}: tensor {tensor.name!r} has shape {tensor.shape}; this model and r in {_CONFIG} need {shape}",
            "the adapter was made for another model, or its files do not belong together",
        )
    data = tensor.view(code)
    digest.update(f"{tensor.name} {tensor.dtype} {shape}\n".encode())
    digest.update(np.ascontiguousarray(data).data)
    with np.errstate(over="ignore"):
        values = RawTensor(tensor.dtype, data).to_float32() * np.float32(scale)
    if not np.isfinite(values).all():
        raise _wrong(f"{path}: tensor {tensor.name!r} has values that are NaN or inf")
    return values


def _wrong(what: str, hint: str | None = None) -> ModelError:
    return ModelError(what, field="lora_modules", hint=hint)
