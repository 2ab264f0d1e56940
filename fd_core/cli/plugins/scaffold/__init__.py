"""What `fdcore plugins new` writes: the project of a plugin, and in `templates` its files."""

from __future__ import annotations

from enum import StrEnum


class PluginKind(StrEnum):
    """What a new plugin offers."""

    BACKEND = "backend"
    SCHEDULER = "scheduler"
    POSTPROCESS = "postprocess"
    STORE = "store"
    CONNECTOR = "connector"
    ROUTER_POLICY = "router-policy"
    TOOL_PARSER = "tool-parser"
    REASONING_PARSER = "reasoning-parser"


class Framework(StrEnum):
    """The pack of operations that a backend begins with."""

    TORCH = "torch"
    PADDLE = "paddle"
    ONNX = "onnx"
    NUMPY = "numpy"
