"""Flags of vLLM, SGLang, FastDeploy and llama.cpp that have other names here: each is refused with what there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import typer
from typer.core import TyperCommand

from fd_core.cli.report import say
from fd_core.errors import ConfigError

_IN_PLACE: Final[Mapping[tuple[str, ...], str]] = {
    ("--model", "--model-path", "-m", "-hf", "--hf-repo"): "the model has no flag, as in fdcore serve MODEL",
    ("--ctx-size", "-c", "--context-length"): "--max-model-len is the longest context in tokens",
    ("--mem-fraction-static",): "--gpu-memory-utilization is the share of the device's memory",
    ("--max-running-requests", "--parallel", "-np"): "--max-num-seqs is how many requests run at a time",
    ("--chunked-prefill-size",): "--max-num-batched-tokens is the most tokens of a step",
    ("--disable-radix-cache",): "--no-enable-prefix-caching switches the prefix cache off",
    ("--page-size",): "--block-size is how many tokens a KV block holds",
    ("--num-gpu-blocks-override",): "--num-kv-blocks is the number of KV blocks",
    ("--kv-cache-ratio",): "no share of the KV blocks is set aside for prompts: requests get blocks as they need them",
    ("--swap-space",): "--host-kv-memory is the memory for KV outside the device, as in --host-kv-memory 4Gi",
    ("--enable-chunked-prefill",): "prompts are always computed in parts, of at most --max-num-batched-tokens",
    ("--kv-transfer-config",): "--role and --kv-connector say how workers hand KV over",
    ("--disaggregation-mode", "--splitwise-role"): "--role is prefill, decode or mixed",
    ("--tp", "--tp-size"): "--tensor-parallel-size is how many ranks share a model",
    ("--pp", "--pp-size"): "--pipeline-parallel-size is how many stages share a model",
    ("--dp", "--dp-size"): "--data-parallel-size is how many engines serve a model",
    ("--threads", "-t"): "--num-threads is how many threads compute",
    ("--n-gpu-layers", "--gpu-layers", "-ngl"): "one backend computes all layers, and --backend names it",
    ("--flash-attn", "-fa"): "--attention-backend names what computes attention",
    ("--worker-urls",): "--worker URL names a worker, and may be repeated",
    ("--metrics-port",): "metrics are told at /metrics, on the port of the server",
    ("--engine-worker-queue-port", "--cache-queue-port"): "the processes of a server need no ports",
    ("--enable-auto-tool-choice",): "models whose calls --tool-call-parser can read choose tools without it",
    ("--trust-remote-code",): "code that comes with a model is never run",
    ("--disable-log-requests", "--enable-log-requests"): (
        "prompts are never logged; --access-log logs one line for each request"
    ),
    ("--disable-uvicorn-access-log",): "requests are logged only where --access-log is given",
    ("--uvicorn-log-level",): "--log-level is that of the whole server",
}
REASONS: Final = {flag: reason for flags, reason in _IN_PLACE.items() for flag in flags}
"""What is said of each flag."""


class ServingCommand(TyperCommand):
    """A command for which people have flags of another server at hand."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, unless it has a flag of another server."""
        for flag in (arg.partition("=")[0] for arg in args):
            if flag in REASONS:
                say(ConfigError(f"it is not a flag of fdcore: {REASONS[flag]}", field=flag))
                raise typer.Exit(ConfigError.exit_code)
        return super().parse_args(ctx, args)
