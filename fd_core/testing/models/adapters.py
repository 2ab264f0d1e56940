"""Tiny random LoRA adapters in PEFT's format, and the equivalent merged models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from fd_core.models.loading.safetensors_files import text_name
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import spec_of
from fd_core.testing.models.arrays import Values


def write_adapter(
    model: Path,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    targets: Collection[str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter for the model at `model` into `folder` and return it; a seed determines the bytes.

    It changes the model's linears named in `targets`, all by default, by a third of their size. `config` replaces
    fields.
    """
    with open_checkpoint(model) as checkpoint:
        every = spec_of(checkpoint).adaptable()
    linears = {name: shape for name, shape in every.items() if not targets or name.rpartition(".")[2] in targets}
    values = Values(seed)
    tensors = {}
    for name, (out, ins) in linears.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = values(rank, ins, scale=ins**-0.5)
        tensors[f"base_model.model.{name}.lora_B.weight"] = values(out, rank, scale=0.25)
    there = sorted({name.rpartition(".")[2] for name in linears})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": there, "bias": "none"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **(config or {})}))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def merge_adapter(model: Path, adapter: Path, folder: Path) -> Path:
    """Write the merged model with weights W + alpha / r B A, as float32 safetensors, into `folder` and return it."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    rank = settings["r"]
    scale = settings["lora_alpha"] / (rank**0.5 if settings.get("use_rslora") else rank)
    weights, deltas = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        prefix = f"base_model.model.{text_name(name.removesuffix('.weight'))}"
        if f"{prefix}.lora_A.weight" in deltas:
            a, b = (deltas[f"{prefix}.lora_{side}.weight"].astype(np.float64) for side in "AB")
            weights[name] = (weights[name] + scale * (b @ a)).astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
