"""Start-up summary of `fdcore serve`. No secrets: keys are counted, never shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Column, Table

from fd_core.config import ServerConfig
from fd_core.config.layer_groups import ONE_GROUP
from fd_core.config.sizes import format_size
from fd_core.engine.process.messages import EngineInfo
from fd_core.ops.weights import RAW_TYPES, WEIGHT_FORMATS, WeightUse

_LOUD: Final = "WARNING: "
"""Prefix of a value that is highlighted."""
_IF_SET: Final = ("LoRA adapters", "Engines", "Role", "Registers with")
"""Rows that exist only if the user asked for them, so that even a short summary has them."""


def brief(
    rows: list[tuple[str, str]], info: EngineInfo, server: ServerConfig, url: str, *, chat: bool, seconds: float
) -> list[tuple[str, str]]:
    """Return the lines of `summary` and others that a user needs first.

    `chat` is True if the model has a chat template; `seconds` is the duration of the start.
    """
    seqs = max(1, min(info.max_num_seqs, info.num_kv_blocks // info.groups.blocks(info.max_model_len, info.block_size)))
    requests = f"{seqs:,} request{'s' if seqs > 1 else ''} of {info.max_model_len:,} tokens"
    held = f"KV {_megabytes(info.kv_cache_bytes)} for {requests}"
    weights = sum(use.nbytes for use in info.weights)
    reasons = sorted(set(info.size_reasons.values()))
    batch = f"{info.max_num_seqs:,} requests and {info.max_num_batched_tokens:,} tokens a step"
    why = info.backend_reason.partition(":")[0].partition(";")[0]
    return [
        ("Model", f"{info.model}, {info.num_parameters / 1e6:,.1f} M parameters"),
        ("Device", f"{info.device.partition(' (')[0]} (backend {info.backend}, {why})"),
        ("Memory", f"weights {_megabytes(weights)}, {held}" if weights else held),
        ("Batch", f"up to {batch}" + (f" ({'; '.join(reasons)})" if reasons else "")),
        *((label, value) for label, value in rows if label in _IF_SET or value.startswith(_LOUD)),
        ("API", f"{url}/v1, page: {url}/"),
        ("Try", _curl(info, server, url, chat=chat)),
        ("Ready", f"in {seconds:.1f} s; Ctrl-C stops the server after running requests have finished"),
    ]


def _curl(info: EngineInfo, server: ServerConfig, url: str, *, chat: bool) -> str:
    """Return a command that sends a request, for a shell."""
    model: dict[str, object] = {"model": (server.served_model_names or (info.model,))[0]}
    if not info.generates:
        path, body = "embeddings" if info.vectors.classifier is None else "classify", {**model, "input": "Hello"}
    elif chat:
        path, body = "chat/completions", {**model, "messages": [{"role": "user", "content": "Hello"}]}
    else:
        path, body = "completions", {**model, "prompt": "Hello", "max_tokens": 16}
    key = ' -H "Authorization: Bearer $KEY"' if server.requires_keys else ""
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def show_brief(console: Console, rows: list[tuple[str, str]]) -> None:
    """Print one line for each row, however narrow the terminal is: a wrapped command cannot be copied."""
    width = 2 + max(len(label) for label, _ in rows)
    for label, value in rows:
        style = "bold red" if value.startswith(_LOUD) else None
        console.print(f"{label:{width}}{value}", style=style, markup=False, highlight=False, soft_wrap=True)


def summary(
    info: EngineInfo, server: ServerConfig, url: str, *, tools: str = "none", reasoning: str = "none"
) -> list[tuple[str, str]]:
    """Return properties and limits of an engine; `tools` and `reasoning` name the parsers of answers."""
    blocks, groups = f"{info.num_kv_blocks:,} blocks of {info.block_size} tokens", info.groups
    if groups == ONE_GROUP:
        blocks += f" hold {info.num_kv_blocks * info.block_size:,} tokens"
    else:
        of = f"{groups.count} groups of layers, {groups.sliding}" if groups.count > 1 else "layers"
        blocks += f" for {of} with a window of {groups.window:,} tokens"
    names = ", ".join(server.served_model_names or (info.model,))
    return [
        ("URL", f"{url}/v1"),
        ("Model", names if names == info.model else f"{names} ({info.model})"),
        *([("LoRA adapters", _adapters(info))] if info.adapters or info.lora_folder else []),
        ("Architecture", f"{info.architecture}, {info.num_parameters / 1e6:,.1f} M parameters"),
        ("Backend", f"{info.backend} ({info.backend_reason})"),
        ("Device", info.device),
        *(("Speed", _LOUD + warning) for warning in info.warnings),
        *([("Engines", _engines(info, server.data_parallel_size))] if server.data_parallel_size > 1 else []),
        ("Scheduler", info.scheduler),
        *([("Postprocess", info.postprocess)] if info.postprocess else []),
        ("dtype", f"{info.dtype} ({info.dtype_reason})" if info.dtype_reason else info.dtype),
        *([("Weights", "; ".join(_weight_use(info, use) for use in info.weights))] if info.weights else []),
        ("KV cache", f"{blocks} ({info.kv_cache_bytes / 1e6:,.0f} MB of {info.kv_dtype})"),
        ("KV on the host", format_size(info.host_kv_bytes) if info.host_kv_bytes else "none"),
        ("KV store", _store(info)),
        *([("Role", _role(info))] if info.role != "mixed" else []),
        ("max_num_seqs", _size(info, "max_num_seqs", " in all" if server.data_parallel_size > 1 else "")),
        ("max_num_batched_tokens", _size(info, "max_num_batched_tokens")),
        ("max_model_len", _context(info, max(1, server.data_parallel_size))),
        *([("Sampling", _defaults(info))] if info.generation.set_fields() else []),
        ("Tool calls", tools),
        ("Reasoning", reasoning),
        ("Clients", clients(server.host, server.api_keys, server.api_key_file)),
        *([("Registers with", server.router)] if server.router else []),
    ]


def show_summary(console: Console, rows: list[tuple[str, str]], title: str = "fdcore serves") -> None:
    """Print the summary."""
    columns = (Column(no_wrap=True), Column(overflow="fold"))
    table = Table(*columns, show_header=False, title=title, title_justify="left")
    for label, value in rows:
        table.add_row(label, value, style="bold red" if value.startswith(_LOUD) else None)
    console.print(table, markup=False, highlight=False)
    console.print("Ctrl-C stops the server after running requests have finished.")


def _engines(info: EngineInfo, count: int) -> str:
    return (
        f"{count}, each with a share of the machine and {info.max_num_seqs // count:,} slots; placement by cached "
        "prefix and load"
    )


def _size(info: EngineInfo, name: str, scope: str = "") -> str:
    """Return a limit of the batch, and the reason if the settings have none."""
    reason = info.size_reasons.get(name)
    return f"{getattr(info, name):,}{scope}" + (f" ({reason})" if reason else "")


def _context(info: EngineInfo, engines: int) -> str:
    """Return the context length, and the reason if the KV cache limits it."""
    held = info.groups.longest(info.num_kv_blocks // engines, info.block_size)
    if info.max_model_len == held < info.model_max_len:
        return f"{held:,}, limited by the KV cache; the model supports {info.model_max_len:,}"
    return f"{info.max_model_len:,}"


def _defaults(info: EngineInfo) -> str:
    values = ", ".join(f"{name} {value:g}" for name, value in info.generation.set_fields().items())
    return f"{values} unless a request sets them"


def _adapters(info: EngineInfo) -> str:
    loaded = ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in info.adapters) or "none yet"
    return loaded if info.lora_folder is None else f"{loaded}; more can be loaded from {info.lora_folder}"


def _weight_use(info: EngineInfo, use: WeightUse) -> str:
    """Return a text on how weights are stored and computed, and the reason if these differ."""
    size = f"{use.parameters / 1e6:,.1f} M, {use.nbytes / 1e6:,.0f} MB"
    if use.table:
        return f"embedding in {use.computed} ({size})"
    if use.computed == use.stored:
        return f"{use.stored} as stored ({size})"
    if use.computed in WEIGHT_FORMATS:
        return f"{use.stored} quantized to {use.computed} ({size})"
    if use.stored in RAW_TYPES:
        return f"{use.stored} in {use.computed} ({size})"
    why = ", ".join(info.weight_formats) or "no packed weights"
    return f"{use.stored} dequantized to {use.computed} ({size}), because {info.backend} supports {why}"


def _store(info: EngineInfo) -> str:
    if info.kv_store is None:
        return "none: KV is lost when the engine ends"
    return info.kv_store if info.kv_store_answers else _LOUD + info.kv_store


def _role(info: EngineInfo) -> str:
    if info.role == "prefill":
        return f"prefill: computes prompts for decode workers, which connect to port {info.kv_port}"
    return f"decode: receives prompts from the prefill workers that a router selects, through {info.kv_connector}"


def clients(host: str, keys: Sequence[str], file: str | None) -> str:
    """Return the address for clients, and the credentials that they have to send."""
    if file is not None:
        return f"at {host}, with an API key of {file}" + (f" or one of {len(keys)} others" if keys else "")
    if not keys:
        return f"at {host}, without a key"
    return f"at {host}, with {'the API key' if len(keys) == 1 else f'one of {len(keys)} API keys'}"
