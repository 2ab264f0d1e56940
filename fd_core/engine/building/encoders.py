"""Settings of an engine for an encoder: a model that computes each text whole, in one step, and keeps no KV."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fd_core.config import EngineConfig
from fd_core.errors import ConfigError, ModelError
from fd_core.models.loading.vector_settings import read_longest_text
from fd_core.models.registry import spec_of_config


def encoder_settings(config: EngineConfig, path: Path | None) -> EngineConfig:
    """Return the settings, for an encoder without those that only matter for generated text and for KV.

    Raises `ConfigError` for those that it cannot follow, and `ModelError` for an unreadable file.
    """
    try:
        if path is None or not (path / "config.json").is_file() or (spec := spec_of_config(path)).causal:
            return config
    except ModelError:  # reported when the model is loaded
        return config
    longest = read_longest_text(path)
    if config.max_model_len is None and longest is not None:
        config = msgspec.structs.replace(config, max_model_len=min(longest + 1, spec.max_positions))
    for field, wanted in (
        ("--speculative-config", config.speculative is not None),
        ("--kv-store", config.kv_store is not None),
        ("--role", config.role != "mixed"),
        ("--kv-cache-dtype", config.kv_cache_dtype != "auto"),
        ("--lora-modules", bool(config.lora_modules)),
        ("--lora-folder", config.lora_folder is not None),
        ("--pipeline-parallel-size", config.pipeline_parallel_size > 1),
    ):
        if wanted:
            raise ConfigError(
                f"{config.model} is an encoder: it generates no text and keeps no KV, so {field} does not apply",
                field=field,
                hint="omit it",
            )
    return msgspec.structs.replace(
        config, enable_prefix_caching=False, structured_output=False, save_preempted_kv=False, kv_events=None
    )
