"""The digest that identifies weights, cheap enough to compute at every start.

It guards the keys of stored KV blocks, so different weights must not share it by accident. It is not a defence
against someone who forges a file on purpose: that is what the pinned SHA-256 of a download is for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fd_core.models.loading.mapped_file import MappedFile, StoredTensor

__all__ = ["digest_of"]

_WHOLE = 32 << 20
_PAGE = 4096
_SAMPLES = 1024


def digest_of(config: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> str:
    """Return the hex SHA-256 over the config and the content of each file that holds some of the tensors.

    A file of up to 32 MiB is covered whole. Of a larger one it covers the size, the first 4 KiB (the header
    begins there), 4 KiB at the start of each tensor and 1,024 pages of 4 KiB spread evenly over the file: about
    5 MB of reading for a model of any size.
    """
    total = hashlib.sha256(b"fd_core weights 1\n")
    total.update(json.dumps(config, sort_keys=True, default=str).encode())
    offsets: dict[MappedFile, set[int]] = {}
    for tensor in tensors:
        offsets.setdefault(tensor.file, {0}).add(tensor.offset)
    for file in sorted(offsets, key=lambda each: each.path.name):
        total.update(f"\nfile {file.size}\n".encode())
        if file.size <= _WHOLE:
            total.update(file.buffer(0, file.size, "the file"))
            continue
        spread = (index * (file.size - _PAGE) // (_SAMPLES - 1) for index in range(_SAMPLES))
        for offset in sorted(offsets[file].union(spread)):
            total.update(file.buffer(offset, min(_PAGE, file.size - offset), "a page"))
    return total.hexdigest()
