"""The digest that identifies weights, cheap enough to compute at every start.

It guards the keys of stored KV blocks, so different weights must not share it by accident. It is not a defence
against someone who forges a file on purpose: that is what the pinned SHA-256 of a download is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fd_core.models.loading.mapped_file import MappedFile

__all__ = ["digest_of", "digest_of_tokenizer"]

_WHOLE = 32 << 20
_PAGE = 4096
_SAMPLES = 1024


def digest_of(config: Mapping[str, Any], files: Iterable[tuple[MappedFile, Iterable[int]]]) -> str:
    """Return the hex SHA-256 over the config and, for each (file, offsets of its tensors), its content.

    A file of up to 32 MiB is covered whole. Of a larger one it covers the size, the first 4 KiB (the header
    begins there), 4 KiB at the start of each tensor and 1,024 pages of 4 KiB spread evenly over the file: about
    5 MB of reading for a model of any size.
    """
    total = hashlib.sha256(b"fd_core weights 1\n")
    total.update(json.dumps(config, sort_keys=True, default=str).encode())
    for file, tensor_offsets in files:
        total.update(f"\nfile {file.size}\n".encode())
        if file.size <= _WHOLE:
            total.update(file.buffer(0, file.size, "the file"))
            continue
        spread = (index * (file.size - _PAGE) // (_SAMPLES - 1) for index in range(_SAMPLES))
        for offset in sorted({0, *tensor_offsets, *spread}):
            total.update(file.buffer(offset, min(_PAGE, file.size - offset), "a page"))
    return total.hexdigest()


def digest_of_tokenizer(source: bytes | Mapping[str, Any]) -> str:
    """Return the hex SHA-256 of a tokenizer: the bytes of its file, or its settings where it has none."""
    if isinstance(source, bytes):
        return hashlib.sha256(source).hexdigest()
    return hashlib.sha256(json.dumps(source, sort_keys=True, default=list).encode()).hexdigest()
