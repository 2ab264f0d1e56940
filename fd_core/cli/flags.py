"""Every setting that people can give, once: its flag, its field, how it is read and what it means.

Flags, environment variables (`FD_` and the field in capitals) and keys of a settings file all come from this table.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from fd_core.cli import values
from fd_core.cli.values import Parser
from fd_core.config import EngineConfig, ServerConfig
from fd_core.router.config import RouterConfig
from fd_core.router.gateway.config import GatewayConfig
from fd_core.sizes import format_size

__all__ = [
    "API_KEY_FILE",
    "CONFIG_FILE",
    "ENGINE_FLAGS",
    "GATEWAY_FLAGS",
    "ROUTER_FLAGS",
    "SERVER_FLAGS",
    "TALK_FLAGS",
    "TRANSFER_SECRET_FILE",
    "Flag",
    "Given",
    "takes_flags",
]

Command = Callable[..., None]
Given = Mapping[str, Any]
"""What the command line gave: field to raw value, absent if not given."""


_DEFAULTS: Final = {
    name: default
    for config in (RouterConfig, GatewayConfig, EngineConfig, ServerConfig)
    for name, default in zip(reversed(config.__struct_fields__), reversed(config.__struct_defaults__), strict=False)
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting."""

    field: str
    """Field of one of the settings: `EngineConfig`, `ServerConfig`, `GatewayConfig` or `RouterConfig`."""
    parse: Parser
    help: str
    metavar: str | None = None
    """What stands for the value in the help; None for a switch."""
    name: str = ""
    """Flag; from the field if empty."""
    repeated: bool = False

    @property
    def flag(self) -> str:
        """The flag as typed, such as `--max-num-seqs`."""
        return self.name or "--" + self.field.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable, such as `FD_MAX_NUM_SEQS`."""
        return "FD_" + self.flag.removeprefix("--").replace("-", "_").upper()

    @property
    def key(self) -> str:
        """The key in a settings file, such as `max-num-seqs`."""
        return self.flag.removeprefix("--")

    @property
    def described(self) -> str:
        """The help text with the default."""
        default = _DEFAULTS.get(self.field)
        if default in (None, (), ""):
            return self.help
        return f"{self.help} [default: {format_size(default) if self.parse is values.size else _shown(default)}]"

    @property
    def annotation(self) -> Any:
        """The parameter type that makes typer offer the flag."""
        if self.metavar is None:
            declared = f"{self.flag}/--no-{self.key}"
            return Annotated[bool | None, typer.Option(declared, help=self.described, show_default=False)]
        kind: Any = list[str] if self.repeated else str
        return Annotated[
            kind | None,
            typer.Option(self.flag, help=self.described, metavar=self.metavar, show_default=False),
        ]


TRANSFER_SECRET_FILE: Final = Flag(
    "transfer_secret_file",
    values.optional_text,
    "File with the secret that prefill and decode workers share; the user's own if left out.",
    "FILE",
)
"""For workers of pairs and for the router that brings them together."""

ENGINE_FLAGS: Final = (
    Flag("backend", values.optional_text, "Hardware backend, or `auto` for the best that is available.", "NAME"),
    Flag("dtype", values.choice("auto", "float32", "bfloat16"), "auto, float32 or bfloat16.", "TYPE"),
    Flag("max_model_len", values.whole(2), "Longest prompt plus output, tokens.", "TOKENS"),
    Flag("max_num_seqs", values.whole(1, 65536), "Requests that run at the same time.", "N"),
    Flag("max_num_batched_tokens", values.whole(1), "Tokens computed in one step at most.", "TOKENS"),
    Flag("block_size", values.whole(1, 4096), "Tokens in a KV block.", "TOKENS"),
    Flag("num_kv_blocks", values.whole(1), "KV blocks in all.", "N"),
    Flag("kv_cache_memory", values.size, "Memory for the KV cache, such as 256M or 2Gi.", "SIZE"),
    Flag(
        "gpu_memory_utilization",
        values.number(0, 1, above=True),
        "Share of the free device memory for the KV cache.",
        "SHARE",
    ),
    Flag("enable_prefix_caching", values.switch, "Reuse the KV of prompts that begin alike."),
    Flag("scheduling_policy", values.optional_text, "fcfs, priority, fair or a plugin's.", "NAME"),
    Flag("victim_policy", values.optional_text, "Who is taken back when KV runs out: cheapest or youngest.", "NAME"),
    Flag("pipeline_depth", values.whole(1, 16), "Steps in flight.", "N"),
    Flag(
        "output_transport",
        values.choice("memory", "zmq"),
        "How step outputs leave the runner: memory or zmq (which FD_USE_GET_SAVE_OUTPUT_V1=1 selects too).",
        "HOW",
    ),
    Flag(
        "watchdog_seconds", values.number(0, 86400, above=True), "A step unanswered for so long is a fault.", "SECONDS"
    ),
    Flag(
        "save_preempted_kv",
        values.switch,
        "Keep the KV of preempted requests outside the device (FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST too).",
    ),
    Flag("host_kv_memory", values.size, "Host memory for KV outside the device, such as 512M or 4Gi.", "SIZE"),
    Flag(
        "kv_store",
        values.optional_text,
        "Keep KV beyond this process: disk:FOLDER, redis://HOST:PORT/DB or another store's location.",
        "LOCATION",
    ),
    Flag(
        "kv_store_timeout",
        values.number(0, 3600, above=True),
        "How long a request may wait for stored KV before it computes it.",
        "SECONDS",
    ),
    Flag(
        "kv_store_secret_file",
        values.optional_text,
        "File with the secret that stored KV is bound to; every engine on one store needs the same.",
        "FILE",
    ),
    Flag("kv_store_compression", values.choice("none", "zlib"), "Compression of stored KV: none or zlib.", "HOW"),
    Flag(
        "role",
        values.choice("mixed", "prefill", "decode"),
        "prefill computes prompts for decode workers, decode texts whose prompts they compute, mixed does both.",
        "ROLE",
    ),
    Flag(
        "kv_connector",
        values.optional_text,
        "How KV comes to a decode worker: tcp, shared_memory, kv_store or a plugin's.",
        "NAME",
    ),
    Flag("transfer_host", values.optional_text, "Where a prefill worker listens for decode workers.", "ADDRESS"),
    Flag("transfer_port", values.whole(0, 65535), "Port of that; 0 takes a free one.", "PORT"),
    TRANSFER_SECRET_FILE,
    Flag(
        "lease_seconds",
        values.number(0.1, 3600),
        "A prefill worker that is silent for so long is given up, and the prompt computed by the decode worker.",
        "SECONDS",
    ),
    Flag("num_threads", values.whole(1, 4096), "Processor threads of the backend.", "N"),
    Flag("native_kernels", values.switch, "Compile and use native kernels if the backend has them."),
    Flag(
        "speculative",
        values.speculation,
        'Draft tokens ahead, such as \'{"method": "ngram", "num_speculative_tokens": 3}\'; methods are ngram, suffix, '
        "draft_model or a plugin's.",
        "JSON",
        name="--speculative-config",
    ),
    Flag("revision", values.optional_text, "Branch, tag or commit of a Hugging Face model.", "NAME"),
    Flag(
        "kv_events",
        values.switch,
        "Tell the router which prefixes this server holds; on with --router, else it needs --router-secret-file.",
    ),
    Flag("trace", values.optional_text, "Write what happens in each step to FILE, for `fdcore trace`.", "FILE"),
    Flag("trace_limit", values.size, "Largest size of that file; what happens later is not in it.", "SIZE"),
)

SERVER_FLAGS: Final = (
    Flag("host", values.optional_text, "Address to listen on.", "ADDRESS"),
    Flag("port", values.whole(0, 65535), "Port to listen on; 0 takes a free one.", "PORT"),
    Flag(
        "api_keys",
        values.keys,
        "Key that clients must send; may be repeated. Other users of the machine can see a command line: "
        "FD_API_KEY or --api-key-file keep it secret.",
        "KEY",
        name="--api-key",
        repeated=True,
    ),
    Flag(
        "served_model_names",
        values.names,
        "Name of the model in the API; may be repeated.",
        "NAME",
        name="--served-model-name",
        repeated=True,
    ),
    Flag("chat_template", values.jinja, "Jinja file that replaces the model's chat template.", "FILE"),
    Flag(
        "engine",
        values.choice("process", "inproc"),
        "`process` runs the engine beside the server, `inproc` inside it.",
        "WHERE",
    ),
    Flag(
        "drain_seconds",
        values.number(0, 86400),
        "How long running requests may go on after Ctrl-C.",
        "SECONDS",
    ),
    Flag(
        "max_queued_requests",
        values.whole(0),
        "Waiting requests beyond this are answered with 503.",
        "N",
    ),
    Flag(
        "log_level",
        values.choice("debug", "info", "warning", "error", "critical"),
        "debug, info, warning, error or critical.",
        "LEVEL",
    ),
    Flag("router", values.optional_text, "Register with the router whose admin address this is.", "URL"),
    Flag(
        "router_secret",
        values.secret_in_file,
        "File with the secret that a router and its workers share: one line of 16 characters or more.",
        "FILE",
        name="--router-secret-file",
    ),
    Flag("advertise_url", values.optional_text, "Where the router finds this server, if not at --host.", "URL"),
)

ROUTER_FLAGS: Final = (
    Flag(
        "policy",
        values.optional_text,
        "Who chooses a mixed worker: random, round_robin, power_of_two, request_num, process_tokens, metrics_score, "
        "cache_aware, prefix_hash, session or a plugin's.",
        "NAME",
    ),
    Flag("prefill_policy", values.optional_text, "Who chooses the prefill worker of a pair.", "NAME"),
    Flag("decode_policy", values.optional_text, "Who chooses the decode worker of a pair.", "NAME"),
    Flag("cache_block_size", values.whole(1, 65536), "Tokens in a block of the router's prefix index.", "TOKENS"),
    Flag("max_attempts", values.whole(1, 1000), "Workers, or pairs, that one request is tried on.", "N"),
    Flag("max_requests_per_worker", values.whole(0), "Requests that one worker gets at a time; 0 sets no bound.", "N"),
    Flag(
        "health_check_interval_secs",
        values.number(0, 86400, above=True),
        "How often workers are asked how they are.",
        "SECONDS",
    ),
    Flag(
        "health_check_timeout_secs",
        values.number(0, 86400, above=True),
        "How long they may take to answer that.",
        "SECONDS",
    ),
)
"""Settings of `RouterConfig` that have a flag; a settings file takes all of them."""

_SECRET: Final = next(flag for flag in SERVER_FLAGS if flag.field == "router_secret")
GATEWAY_FLAGS: Final = (
    *(flag for flag in SERVER_FLAGS if flag.field in ("host", "port", "api_keys", "drain_seconds", "log_level")),
    Flag("workers", values.names, "Address of a worker; may be repeated.", "URL", name="--worker", repeated=True),
    Flag("prefill", values.names, "Address of a prefill worker; may be repeated.", "URL", repeated=True),
    Flag("decode", values.names, "Address of a decode worker; may be repeated.", "URL", repeated=True),
    TRANSFER_SECRET_FILE,
    Flag(
        "tokenizer",
        values.optional_text,
        "Model whose tokenizer the workers use, or `bytes` for the null backend; a worker is asked if it is left out.",
        "MODEL",
    ),
    Flag("worker_api_keys", values.keys_in_file, "File with the key of the workers.", "FILE", name="--worker-key-file"),
    Flag(
        "read_seconds",
        values.number(0, 86400, above=True),
        "A worker that is silent for so long within a request has failed.",
        "SECONDS",
        name="--read-timeout",
    ),
    Flag(
        "unreachable_seconds",
        values.number(0, 86400, above=True),
        "An answer that stands still is ended if health checks do not reach its worker for so long.",
        "SECONDS",
        name="--unreachable-timeout",
    ),
    Flag("admin_host", values.optional_text, "Address on which workers register.", "ADDRESS"),
    Flag("admin_port", values.whole(0, 65535), "Port on which workers register; 0 takes a free one.", "PORT"),
    _SECRET,
)
"""Settings of `GatewayConfig`."""

API_KEY_FILE: Final = Flag("api_key_file", values.keys_in_file, "File with API keys, one a line.", "FILE")
"""Adds to `api_keys`."""

TALK_FLAGS: Final = (
    *(flag for flag in SERVER_FLAGS if flag.field in ("api_keys", "chat_template", "engine")),
    API_KEY_FILE,
)
"""Settings of the server's side that matter to a command which talks to a model or a server."""

CONFIG_FILE: Final = Flag("config", values.optional_text, "TOML file with settings named like the flags.", "FILE")


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default)


def takes_flags(
    *groups: Iterable[Flag], parameter: str = "given"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every flag of `groups`; what was typed arrives as the mapping `parameter`."""
    flags = tuple(flag for group in groups for flag in group)

    def decorate(function: Command) -> Command:
        hints = typing.get_type_hints(function, include_extras=True)
        own = [
            item.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, item in inspect.signature(function).parameters.items()
            if name != parameter
        ]
        added = [
            inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag.annotation)
            for flag in flags
        ]

        def command(**arguments: Any) -> None:
            given = {flag.field: arguments.pop(flag.field) for flag in flags}
            arguments[parameter] = {name: value for name, value in given.items() if value not in (None, [], ())}
            function(**arguments)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {item.name: item.annotation for item in (*own, *added)}
        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined] # read by inspect
        return command

    return decorate
