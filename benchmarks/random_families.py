"""Write a GGUF file of a model of experts, latent attention or recurrent layers, with random weights, to measure speed.

    python benchmarks/random_families.py granite-hybrid q8_0 -o /tmp/granite.gguf
    fdcore bench compare --model /tmp/granite.gguf --engines fd_core-q4_1,llama.cpp-q4_1

Sizes are those of small published models, or scaled to half a billion parameters; the tokenizer is SmolLM2's.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from fd_core.models.catalog import resolve_model
from fd_core.models.families.builtin.qwen import Qwen3Moe
from fd_core.models.families.contract import Family
from fd_core.models.families.latent.deepseek import DeepSeekV2
from fd_core.models.families.recurrent.lfm import Lfm2
from fd_core.models.families.recurrent.mamba import GraniteHybrid
from fd_core.models.families.recurrent.qwen import Qwen3Next
from fd_core.models.opening import open_checkpoint
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.families.gguf_files import convert

VOCABULARY = 49_152
LONGEST = 8_192


def sizes(hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    """Return a config's fields."""
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": True,
        **more,
    }


MODELS: dict[str, tuple[type[Family], str, dict[str, Any]]] = {
    # LFM2 350M.
    "lfm2": (
        Lfm2,
        "lfm2",
        sizes(
            1024,
            16,
            16,
            8,
            64,
            intermediate_size=4608,
            block_auto_adjust_ff_dim=False,
            layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        ),
    ),
    # Granite 4.0 H 350M.
    "granite-hybrid": (
        GraniteHybrid,
        "granitehybrid",
        sizes(
            768,
            32,
            12,
            4,
            64,
            intermediate_size=2048,
            shared_intermediate_size=2048,
            num_local_experts=0,
            num_experts_per_tok=0,
            mamba_n_heads=48,
            mamba_d_state=128,
            mamba_d_head=32,
            embedding_multiplier=12.0,
            residual_multiplier=0.246,
            attention_multiplier=0.015625,
            logits_scaling=3.0,
            position_embedding_type="nope",
            layer_types=["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)],
        ),
    ),
    # Qwen3-Next with a quarter of its width and a sixteenth of its experts.
    "qwen3-next": (
        Qwen3Next,
        "qwen3next",
        sizes(
            1024,
            16,
            8,
            2,
            128,
            intermediate_size=2048,
            linear_num_key_heads=8,
            linear_num_value_heads=16,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=256,
            shared_expert_intermediate_size=256,
            layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(16)],
        ),
    ),
    # Qwen3 30B A3B, half as wide, a third of the layers, a quarter of the experts.
    "qwen3-moe": (
        Qwen3Moe,
        "qwen3moe",
        sizes(
            1024,
            16,
            16,
            4,
            64,
            intermediate_size=3072,
            num_experts=32,
            num_experts_per_tok=8,
            moe_intermediate_size=384,
            norm_topk_prob=True,
        ),
    ),
    # DeepSeek V2 Lite, half as wide, with half the layers and experts and two linears to queries.
    "deepseek": (
        DeepSeekV2,
        "deepseek2",
        sizes(
            1024,
            14,
            8,
            8,
            192,
            intermediate_size=2816,
            q_lora_rank=512,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=1,
            n_routed_experts=32,
            num_experts_per_tok=6,
            moe_intermediate_size=352,
            n_shared_experts=2,
            routed_scaling_factor=1.0,
        ),
    ),
}
"""Family, llama.cpp's name, and the fields of the config."""


def config_of(name: str) -> dict[str, Any]:
    """Return the whole config of a model."""
    family, _, fields = MODELS[name]
    config = {**SIZES, **family.defaults, **fields, "vocab_size": VOCABULARY, "max_position_embeddings": LONGEST}
    return config | {"architectures": [family.architectures[0]], "model_type": family.model_type}


def write(name: str, kind: Kind, target: Path, seed: int) -> None:
    """Write the file: matrices of the layers and the table in this type, everything else in float32."""
    (family, arch, _), config = MODELS[name], config_of(name)
    with TemporaryDirectory(dir=target.parent) as folder:
        write_config(config, Path(folder), seed)
        with open_checkpoint(Path(folder)) as original:
            wide = convert(original, arch, family.gguf[arch], config, Path(folder) / "wide.gguf")
        model, tokenizer = gguf.GGUFReader(wide), gguf.GGUFReader(resolve_model("smollm2").path)
        writer = gguf.GGUFWriter(target, arch, use_temp_file=True)
        for reader, wanted in ((model, arch), (tokenizer, "tokenizer")):
            for key, field in reader.fields.items():
                if key.startswith(f"{wanted}."):
                    value, *items = field.types
                    writer.add_key_value(key, field.contents(), value, items[0] if items else None)
        block = gguf.GGML_QUANT_SIZES[kind][0]
        for tensor in model.tensors:
            values, part = np.asarray(tensor.data), tensor.name
            matrix = part.endswith(".weight") and values.ndim > 1 and values.shape[-1] % block == 0
            if matrix and not any(each in part for each in ("norm", "conv", "ffn_gate_inp")):
                writer.add_tensor(part, gguf.quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(part, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("weights", choices=("q8_0", "q4_1", "q4_0", "bf16"))
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.model, Kind[given.weights.upper()], given.out, given.seed)
    print(f"{given.out}: {given.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
