"""Output of `fdcore plugins new`: the project of a plugin, and in `templates` its files."""

from __future__ import annotations

from enum import StrEnum


class PluginKind(StrEnum):
    """Kind of a new plugin."""

    BACKEND = "backend"
    MODEL = "model"
    SCHEDULER = "scheduler"
    SCHEDULING_POLICY = "scheduling-policy"
    VICTIM_POLICY = "victim-policy"
    DRAFTER = "drafter"
    READING_DRAFTER = "reading-drafter"
    POSTPROCESS = "postprocess"
    STORE = "store"
    CONNECTOR = "connector"
    ROUTER_POLICY = "router-policy"
    LAUNCHER = "launcher"
    SCALING_POLICY = "scaling-policy"
    OBSERVER = "observer"
    TOOL_PARSER = "tool-parser"
    REASONING_PARSER = "reasoning-parser"


class Framework(StrEnum):
    """The pack of operations with which a backend starts."""

    TORCH = "torch"
    PADDLE = "paddle"
    ONNX = "onnx"
    NUMPY = "numpy"
