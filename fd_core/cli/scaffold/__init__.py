"""What `fdcore plugins new` writes: the project of a hardware backend, and the templates of its files."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Framework"]


class Framework(StrEnum):
    """The pack of operations that a backend begins with."""

    TORCH = "torch"
    PADDLE = "paddle"
    ONNX = "onnx"
    NUMPY = "numpy"
