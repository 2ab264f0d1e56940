"""One set of bf16 weights in every format that the engines read, made from one GGUF file.

Quantised weights are dequantised and rounded to bf16 once; those bf16 bytes go into a Hugging Face folder (safetensors)
and into a GGUF file, so engines differ in code and not in weights. Variants at other precisions start from the same
bf16 values.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_RECIPE = "1"
"""Part of the cache key: raise it when a conversion changes."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model in every format, each converted on first use and cached."""

    original: Path
    kept: Path
    """Folder of the converted checkpoint."""
    weight_bytes: int
    """Of the weights in bf16, which is what one decode step must read."""

    @property
    def folder(self) -> Path:
        """A Hugging Face folder in bf16."""
        return self._made("hf", partial(_write_folder, self.original))

    @property
    def folder_w8a8(self) -> Path:
        """A folder of compressed-tensors: int8 with a scale for each row, activations rounded token by token."""
        return self._made("hf-w8a8", partial(_write_quantized, self.folder))

    @property
    def gguf_bf16(self) -> Path:
        return self._made("model-bf16.gguf", partial(_write_gguf, self.original, "BF16"))

    @property
    def gguf_f16(self) -> Path:
        return self._made("model-f16.gguf", partial(_write_gguf, self.original, "F16"))

    @property
    def gguf_q8_0(self) -> Path:
        return self._made("model-q8_0.gguf", partial(_write_gguf, self.original, "Q8_0"))

    def _made(self, name: str, write: Callable[[Path], None]) -> Path:
        target, scratch = self.kept / name, self.kept / f"{name}.partial"
        if not target.exists():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.unlink(missing_ok=True)
            write(scratch)
            scratch.rename(target)
        return target


def fetch_default() -> Path:
    """Return SmolLM2's GGUF file from fd_core's own cache, downloaded and checked first where it is missing."""
    from fd_core.models.catalog import resolve_model  # only needed where no file is given

    return resolve_model("smollm2").path


def prepare(source: Path, cache: Path) -> Checkpoint:
    """Return the GGUF file `source` (architecture llama) in every format; conversions are cached under `cache`."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.sha256(_RECIPE.encode())).hexdigest()[:16]
    reader = gguf.GGUFReader(source)
    architecture = _metadata(reader)["general.architecture"]
    if architecture != "llama":
        raise ValueError(f"{source.name}: architecture {architecture!r}; this benchmark converts llama")
    kept = cache / f"{source.stem}-{digest}"
    kept.mkdir(parents=True, exist_ok=True)
    return Checkpoint(source, kept, 2 * sum(int(tensor.n_elements) for tensor in reader.tensors))


def tokenizer_of(source: Path) -> Tokenizer:
    """Return the byte-level BPE tokenizer of the GGUF file; each digit is a token, as SmolLM requires."""
    meta = _metadata(gguf.GGUFReader(source))
    if meta.get("tokenizer.ggml.model") != "gpt2" or meta.get("tokenizer.ggml.pre") != "smollm":
        raise ValueError(f"{source.name}: only SmolLM's byte-level BPE tokenizer is known to this benchmark")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _bf16_weights(reader: gguf.GGUFReader) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor as uint16 bit patterns of bf16, rounded to nearest even."""
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        raw = quantize(values, gguf.GGMLQuantizationType.BF16).view(np.uint16)
        yield tensor.name, raw.reshape(values.shape)


def _as_float32(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _write_quantized(source: Path, target: Path) -> None:
    from fd_core.cli.models.models import companion_files
    from fd_core.models.opening import open_checkpoint
    from fd_core.models.quantized_folder import write_quantized

    with open_checkpoint(source) as checkpoint:
        write_quantized(checkpoint, "int8", target, companion_files(checkpoint), lambda *_: None)


def _write_folder(source: Path, folder: Path) -> None:
    folder.mkdir()
    reader = gguf.GGUFReader(source)
    meta, weights = _metadata(reader), dict(_bf16_weights(reader))
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    hidden = meta["llama.embedding_length"]
    tensors = {}
    for name, stored in weights.items():
        raw = stored
        if ".attn_q." in name:
            raw = _undo_rope_permutation(raw, heads)
        elif ".attn_k." in name:
            raw = _undo_rope_permutation(raw, kv_heads)
        tensors[_folder_name(name)] = raw
    _write_safetensors(tensors, folder / "model.safetensors")
    eos = meta["tokenizer.ggml.eos_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "vocab_size": meta["llama.vocab_size"],
        "tie_word_embeddings": "output.weight" not in weights,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", eos),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer_of(source).save(str(folder / "tokenizer.json"))
    eos_token = meta["tokenizer.ggml.tokens"][eos]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": meta["tokenizer.ggml.tokens"][config["bos_token_id"]],
        "eos_token": eos_token,
        "pad_token": eos_token,
        "chat_template": meta.get("tokenizer.chat_template"),
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))


def _write_safetensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write bf16 bit patterns by the format's layout: header size, JSON header, data (numpy has no bf16)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, raw in tensors.items():
        start, end = end, end + raw.nbytes
        header[name] = {"dtype": "BF16", "shape": list(raw.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for raw in tensors.values():
            file.write(np.ascontiguousarray(raw).data)


def _folder_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{_TOP_NAMES[parts[0]]}.{parts[1]}"


def _undo_rope_permutation(raw: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in the order of rotated halves; GGUF's llama keeps each rotated pair in adjacent rows."""
    rows, columns = raw.shape
    return np.ascontiguousarray(
        raw.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def _write_gguf(source: Path, form: str, target: Path) -> None:
    """Write the bf16 values in another type, vectors as float32, with the metadata of their source file."""
    reader, kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType[form]
    writer = gguf.GGUFWriter(target, "llama", use_temp_file=True)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value_type, *item_type = field.types
        writer.add_key_value(name, field.contents(), value_type, item_type[0] if item_type else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form}"])
    for name, raw in _bf16_weights(reader):
        values = _as_float32(raw)
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
