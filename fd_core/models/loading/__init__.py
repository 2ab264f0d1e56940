"""Checkpoint formats: what is on disk, checked and memory-mapped, in Hugging Face names and config terms.

`open_checkpoint` is the door: a folder with safetensors, or a GGUF file. No framework is imported here.
"""

from fd_core.models.loading.checkpoint import (
    Checkpoint,
    GenerationDefaults,
    GgmlTokenizerSource,
    JsonTokenizerSource,
    RawTensor,
    TokenizerSource,
    open_checkpoint,
)

__all__ = [
    "Checkpoint",
    "GenerationDefaults",
    "GgmlTokenizerSource",
    "JsonTokenizerSource",
    "RawTensor",
    "TokenizerSource",
    "open_checkpoint",
]
