"""One set of bf16 weights in every format that the compared engines read, made from one GGUF file.

Quantized weights are dequantized and rounded to bf16 once; those values go into a folder of safetensors and into GGUF
files, so engines differ in code and not in weights. Variants at other precisions start from the same values.
"""

from __future__ import annotations

import hashlib
import pydoc_data.topics
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

from fd_core.cli.models.models import companion_files
from fd_core.cli.models.quantized_folder import write_quantized
from fd_core.errors import ConfigError
from fd_core.models.opening import open_checkpoint
from fd_core.text.tokenizer import load_tokenizer

_RECIPE = "2"
"""Part of the cache key: raise it when a conversion changes."""
_CORPUS_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class PeerWeights:
    """One model in every format, each converted on first use and cached."""

    original: Path
    kept: Path
    """Folder of the converted weights."""
    weight_bytes: int
    """Of the weights in bf16, which is what one decode step must read."""

    @property
    def folder(self) -> Path:
        """A Hugging Face folder in bf16."""
        return self._made("hf", partial(_write_folder, self.original, "bfloat16"))

    @property
    def folder_w8a8(self) -> Path:
        """A folder of compressed-tensors: int8 with a scale for each row, activations rounded token by token."""
        return self._made("hf-w8a8", partial(_write_folder, self.folder, "int8"))

    @property
    def gguf_bf16(self) -> Path:
        """A GGUF file in bf16."""
        return self._made("model-bf16.gguf", partial(_write_gguf, self.original, "BF16"))

    @property
    def gguf_f16(self) -> Path:
        """A GGUF file in float16, for loaders that read no bf16."""
        return self._made("model-f16.gguf", partial(_write_gguf, self.original, "F16"))

    @property
    def gguf_q8_0(self) -> Path:
        """A GGUF file in Q8_0."""
        return self._made("model-q8_0.gguf", partial(_write_gguf, self.original, "Q8_0"))

    def _made(self, name: str, write: Callable[[Path], None]) -> Path:
        target, scratch = self.kept / name, self.kept / f"{name}.partial"
        if not target.exists():
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.unlink(missing_ok=True)
            write(scratch)
            scratch.rename(target)
        return target


def prepare(source: Path, cache: Path) -> tuple[PeerWeights, list[int]]:
    """Return a GGUF file in every format, converted under `cache`, and running text as its token ids.

    The text is Python's own documentation, which every installation has.
    """
    if not source.is_file():
        raise ConfigError(f"{source} is not a GGUF file", field="--model", hint="name a file that ends in .gguf")
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.sha256(_RECIPE.encode())).hexdigest()[:16]
    text = "".join(pydoc_data.topics.topics.values())[:_CORPUS_CHARACTERS]
    with open_checkpoint(source) as checkpoint:
        corpus = load_tokenizer(checkpoint).backend.encode(text, add_special_tokens=False).ids
    elements = sum(int(tensor.n_elements) for tensor in gguf.GGUFReader(source).tensors)
    kept = cache / f"{source.stem}-{digest}"
    kept.mkdir(parents=True, exist_ok=True)
    return PeerWeights(source, kept, 2 * elements), corpus


def _write_folder(source: Path, form: str, target: Path) -> None:
    with open_checkpoint(source) as checkpoint:
        write_quantized(checkpoint, form, target, companion_files(checkpoint), lambda *_: None)


def _write_gguf(source: Path, form: str, target: Path) -> None:
    """Write the bf16 values in another type, vectors as float32, with the metadata of their source file."""
    reader, kind = gguf.GGUFReader(source), gguf.GGMLQuantizationType[form]
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=True)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        value_type, *item_type = field.types
        writer.add_key_value(name, field.contents(), value_type, item_type[0] if item_type else None)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{form}"])
    for tensor in reader.tensors:
        rounded = quantize(dequantize(tensor.data, tensor.tensor_type), gguf.GGMLQuantizationType.BF16)
        values = dequantize(rounded, gguf.GGMLQuantizationType.BF16).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
