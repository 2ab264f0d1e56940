"""Tiny random checkpoints of every architecture in Hugging Face's format, written without a framework.

Names and shapes are derived from the spec that the loader checks, so a new architecture only needs another case here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from fd_core.models.families.builtin.ernie import Ernie, ErnieMoe
from fd_core.models.families.builtin.gemma import Gemma3
from fd_core.models.families.builtin.llama import Llama, Mistral
from fd_core.models.families.builtin.qwen import Qwen2, Qwen3, Qwen3Moe
from fd_core.models.families.contract import Family, MoeSpec
from fd_core.models.families.encoders.gemma import EmbeddingGemma
from fd_core.models.loading.config import ModelConfig
from fd_core.models.registry import describe
from fd_core.testing.models.arrays import Values


def _sizes(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, longest: int
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": longest,
    }


SIZES: Final[Mapping[str, Any]] = {
    **_sizes(64, 96, 3, heads=4, kv_heads=2, head_dim=16, vocabulary=160, longest=256),
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

_CASES_OF_FAMILIES: Final[Mapping[str, tuple[type[Family], str]]] = {
    "llama": (Llama, "plain"),
    "llama-biases-wide-heads": (Llama, "biases"),
    "llama-llama3-rope": (Llama, "llama3-rope"),
    "llama-linear-rope": (Llama, "linear-rope"),
    "mistral-window": (Mistral, "window"),
    "qwen2": (Qwen2, "tied"),
    "qwen2-window": (Qwen2, "window"),
    "qwen3-yarn": (Qwen3, "yarn"),
    "qwen3-moe": (Qwen3Moe, "normalized"),
    "gemma3": (Gemma3, "mixed"),
    "ernie": (Ernie, "biases"),
    "ernie-moe": (ErnieMoe, "shared"),
}
CASES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    name: (family.model_type, family.cases[case]) for name, (family, case) in _CASES_OF_FAMILIES.items()
}
"""Hugging Face's model type and config fields in addition to `SIZES`, by case."""

ENCODER: Final = "gemma3-encoder"
"""Model of a `STEP_CASE` that attends in both directions and has no output projection."""
_FAMILIES: Final[Mapping[str, tuple[type[Family], str]]] = {**_CASES_OF_FAMILIES, ENCODER: (EmbeddingGemma, "mixed")}

ENGINE_CASE: Final = "engine"
"""A minimal model, for tests that need an engine but no realistic model."""
PACKED_ENGINE_CASE: Final = "packed_engine"
"""The same with quantized weights, in groups of 32 values."""
LONG_CASE: Final = "long"
"""A small model with contexts longer than any split of a kernel."""
LONGEST_CASE: Final = "longest"
"""A minimal model with the longest contexts of published ones."""
WIDE_CASE: Final = "wide"
"""A small model with a vocabulary larger than 2^17."""
STEP_CASE: Final = "step"
"""A small model whose last token has an embedding of NaN and a logit of 0, unless the head is tied; followed by a colon
and one of `CASES`, a model of that kind."""
FORMER_STEP_CASE: Final = "former_step"
"""The same with other weights."""

_SIZES_OF: Final[Mapping[str, Mapping[str, Any]]] = {
    LONG_CASE: _sizes(64, 96, 2, heads=4, kv_heads=2, head_dim=32, vocabulary=1031, longest=5000),
    WIDE_CASE: _sizes(32, 64, 1, heads=2, kv_heads=1, head_dim=16, vocabulary=140_003, longest=512),
    PACKED_ENGINE_CASE: _sizes(32, 32, 1, heads=4, kv_heads=1, head_dim=8, vocabulary=97, longest=512),
    ENGINE_CASE: _sizes(16, 16, 1, heads=2, kv_heads=1, head_dim=8, vocabulary=97, longest=512),
    STEP_CASE: _sizes(64, 96, 2, heads=6, kv_heads=2, head_dim=16, vocabulary=131, longest=4096),
    FORMER_STEP_CASE: _sizes(64, 96, 2, heads=6, kv_heads=2, head_dim=16, vocabulary=131, longest=4096),
    LONGEST_CASE: _sizes(16, 16, 1, heads=2, kv_heads=1, head_dim=8, vocabulary=1031, longest=2**17 + 2),
}


@cache
def abilities_of(case: str) -> tuple[str, ...]:
    """Return the abilities of `fd_core.testing.kit.limits` that a case requires."""
    spec = describe(ModelConfig(_config_of(case)))
    attention = spec.attention
    needed = {
        "encoders": not spec.causal,
        "biases": any(linear.bias for linear in spec.linears()),
        "interleaved_rope": any(each.rope.interleaved for each in attention),
        "moe": any(isinstance(layer.feed_forward, MoeSpec) for layer in spec.layers),
        "softcap": any((spec.softcap, *(each.softcap for each in attention))),
        "window": any(each.window for each in attention),
    }
    return tuple(name for name, needs in needed.items() if needs)


def is_tied(case: str) -> bool:
    """Return True if the head of a case is its embedding."""
    family, name = _FAMILIES[case]
    return bool(family.cases[name].get("tie_word_embeddings", False))


def write_checkpoint(case: str, folder: Path, **more: Any) -> Path:
    """Write the case into `folder`, created if absent, and return it; the bytes are deterministic.

    `more` are fields of its config. A case that ends in `@F16` or `@BF16` is stored in that dtype, in two files.
    """
    case, _, dtype = case.partition("@")
    base = case.partition(":")[0]
    tensors = write_config(
        {**_config_of(case), **more}, folder, seed=1000 + [*sorted([*CASES, ENGINE_CASE]), *_SIZES_OF].index(base)
    )
    if base in (STEP_CASE, FORMER_STEP_CASE) and "lm_head.weight" in tensors:
        tensors["model.embed_tokens.weight"][-1] = np.nan
        tensors["lm_head.weight"][-1] = 0.0
        _save(tensors, folder)
    if dtype:
        (folder / "model.safetensors").unlink()
        _save_shards(tensors, folder, dtype)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    return folder


def _config_of(case: str) -> dict[str, Any]:
    base, _, model = case.partition(":")
    family, name = _FAMILIES.get(model or base, _FAMILIES["llama"])
    named = {"architectures": [family.architectures[0]], "model_type": family.model_type, "torch_dtype": "float32"}
    config = {**SIZES, **family.cases[name], **_SIZES_OF.get(base, {}), **named}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    return config


def write_config(config: Mapping[str, Any], folder: Path, seed: int) -> dict[str, Any]:
    """Write the random model of a config into `folder`, created if absent, and return its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    spec, values = describe(ModelConfig(config)), Values(seed=seed)
    tensors = {tensor: _weight(values, tensor, shape, norm_offset=spec.norm_offset) for tensor, shape in spec.tensors()}
    _save(tensors, folder)
    return tensors


def _save(tensors: dict[str, Any], folder: Path) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _save_shards(tensors: Mapping[str, Any], folder: Path, dtype: str) -> None:
    """Write tensors in two files, those that lose nothing in the dtype, which are most, and an index of both."""
    places: dict[str, str] = {}
    for index in range(2):
        entries, data, name = dict[str, Any](), b"", f"model-{index + 1:05}-of-00002.safetensors"
        for tensor, values in [*tensors.items()][index::2]:
            bits, begin = values.view(np.uint32), len(data)
            exact = not (bits & 0xFFFF).any()
            narrow = (bits >> 16).astype(np.uint16) if dtype == "BF16" else values.astype(np.float16)
            data += (narrow if exact else values).tobytes()
            entries[tensor] = {"dtype": dtype if exact else "F32", "shape": values.shape}
            entries[tensor]["data_offsets"] = [begin, len(data)]
            places[tensor] = name
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def drawn_ropes(rng: np.random.Generator, pairs: int) -> Iterator[dict[str, Any]]:
    """Yield rope parameters of each kind for so many pairs, with numbers of any magnitude of published models."""

    def drawn(low: float, high: float) -> float:
        return float(low * (high / low) ** rng.random())

    factors = {"long_factor": [1.0 + each for each in range(pairs)]}
    factors |= {"short_factor": [1.0 + each / 9 for each in range(pairs)]}
    for rope in (
        {"rope_type": "linear"},
        {"rope_type": "llama3", "low_freq_factor": drawn(0.5, 2), "high_freq_factor": drawn(2.5, 8)},
        {"rope_type": "yarn", "truncate": False, "beta_fast": drawn(8, 16), "beta_slow": drawn(0.1, 0.4)},
        {"rope_type": "yarn", "mscale": drawn(0.2, 0.7), "mscale_all_dim": drawn(1.2, 2)},
        {"rope_type": "yarn", "attention_factor": drawn(1.2, 2)},
        {"rope_type": "longrope", "original_max_position_embeddings": 4} | factors,  # contexts of the kit exceed it
        {"rope_type": "longrope", "original_max_position_embeddings": 128, "attention_factor": drawn(1.2, 2)} | factors,
    ):
        original = {} if rope["rope_type"] == "linear" else {"original_max_position_embeddings": int(drawn(500, 5000))}
        yield {"rope_theta": drawn(1000, 1e6), "factor": drawn(1.5, 40), **original, **rope}
    yield {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": drawn(1000, 1e6)}


def rewrite_weights(folder: Path, case: str) -> None:
    """Replace the weights of a checkpoint by those of a case with the same shapes; who has the file open keeps it."""
    (write_checkpoint(case, folder / "new") / "model.safetensors").replace(folder / "model.safetensors")


def _weight(values: Values, name: str, shape: tuple[int, ...], norm_offset: float) -> Any:
    """Return weights whose logits vary enough between tokens for a meaningful comparison."""
    if len(shape) == 1 or shape[0] == 1:
        norm, size = name.endswith("norm.weight"), np.ones(1, np.float32)
        if norm_offset:  # blocks outweigh the scaled embedding, whose own token is not the most likely next one
            signs = [1, -1] if name == "model.norm.weight" else [4] if "post_" in name else [1]
            size = np.array(signs, np.float32)
        return values(*shape, scale=0.2) + (np.resize(size, shape) - np.float32(norm_offset) if norm else np.float32(0))
    return values(*shape, scale=0.5 if "embed" in name or "lm_head" in name else 1.4 * shape[1] ** -0.5)
