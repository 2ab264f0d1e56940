"""Every user setting, once: its flag, its field, its parser and its help.

Flags, environment variables (`FD_` and the field in capitals) and keys of a settings file are all derived from this
table.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from fd_core.cli.settings.other_servers import report_variables
from fd_core.config import EngineConfig, MediaLimits, ServerConfig, SpeculativeConfig
from fd_core.config.constraints import ByteSize, CheckedStruct, OneOf, Rule, rules_of, texts
from fd_core.config.generation import GenerationDefaults
from fd_core.config.paths import read_bounded, user_path
from fd_core.config.sizes import format_size
from fd_core.errors import ConfigError
from fd_core.router.config import GatewayConfig, RouterConfig

Parser = Callable[[Any], Any]

_SPECULATION: Final = '{"method": "ngram", "num_speculative_tokens": 3}'
_MAX_FILE_BYTES: Final = 1 << 20
_MIN_SECRET_CHARS: Final = 16


def text(value: Any) -> str:
    """Return `value` unchanged; it must be non-empty text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected text, got {value!r}")
    return value


def keys(value: Any) -> tuple[str, ...]:
    """Return API keys from a list or from one text. Errors never contain the key."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts:
        raise ValueError("expected a key or a list of keys")
    for part in parts:
        if not isinstance(part, str) or not part or not all("!" <= letter <= "~" for letter in part):
            raise ValueError("a key must consist of visible ASCII characters and must not be empty")
    return tuple(parts)


def keys_in_file(path: Any) -> tuple[str, ...]:
    """Return the API keys in a file, one a line."""
    lines = read_text(Path(text(path))).splitlines()
    return keys([line.strip() for line in lines if line.strip()])


def lasting_file(path: Any) -> str:
    """Return the path of a file that is read several times, which a pipe, such as `<(COMMAND)`, cannot be."""
    with contextlib.suppress(OSError):  # explained when it is read
        if Path(text(path)).is_fifo():
            raise ValueError(f"{path} is a pipe, but it is read several times; write it to a file")
    return str(path)


def key_file(path: Any) -> str:
    """Return the path of a file of API keys, checked before anything is loaded."""
    from fd_core.http.access.keys import read_key_file

    try:
        read_key_file(Path(lasting_file(path)))
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return str(path)


def secret_in_file(path: Any) -> str:
    """Return the secret in a file: one line of at least 16 visible ASCII characters. It is never shown."""
    lines = keys_in_file(path)
    if len(lines) != 1 or len(lines[0]) < _MIN_SECRET_CHARS:
        raise ValueError(f"{path} must contain one line of at least {_MIN_SECRET_CHARS} characters")
    return lines[0]


def jinja(value: Any) -> str:
    """Return a chat template: the text of the file that `value` names, or `value` itself if it is Jinja."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is neither a file nor a template")
    if "{{" in value or "{%" in value:
        return value
    return read_text(Path(value))


def read_text(path: Path) -> str:
    """Return the text of a file of at most 1 MiB."""
    try:
        return read_bounded(path, _MAX_FILE_BYTES).decode()
    except ConfigError as error:
        raise ValueError(error.message) from error
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def speculation(value: Any) -> SpeculativeConfig:
    """Parse speculative decoding: a JSON object, or a table of a settings file.

    Fields that the engine does not define go to the drafter, as in
    `{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}`.
    """
    try:
        table = msgspec.json.decode(value, type=dict[str, Any]) if isinstance(value, str) else dict(value)
        own = set(SpeculativeConfig.__struct_fields__) - {"options"}
        options = {name: table.pop(name) for name in list(table) if name not in own}
        return msgspec.convert({**table, "options": options}, SpeculativeConfig)
    except (ConfigError, msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{error}; for example {_SPECULATION}") from None


def generation(value: Any) -> GenerationDefaults:
    """Parse default sampling parameters: a JSON object, or a table of a settings file."""
    names = ", ".join(GenerationDefaults.__struct_fields__)
    try:
        table = msgspec.json.decode(value, type=dict[str, Any]) if isinstance(value, str) else dict(value)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        raise ValueError(f"expected an object of {names}") from None
    if unknown := [name for name in table if name not in GenerationDefaults.__struct_fields__]:
        raise ValueError(f"{unknown[0]!r} is not a default sampling parameter; expected {names}")
    return GenerationDefaults.read(table)


def hosts(value: Any) -> tuple[str, ...]:
    """Return host names, or `*.NAME` for all below one, of a list or of a text with commas."""
    names = texts(value)
    for name in names:
        if not re.fullmatch(r"(\*\.)?[A-Za-z0-9.-]+", name):
            raise ValueError(f"expected host names such as images.example.org or *.example.org, got {name!r}")
    return names


def media_limits(value: Any) -> MediaLimits:
    """Parse the most inputs of a request: a JSON object, or a table of a settings file."""
    try:
        return msgspec.convert(msgspec.json.decode(value) if isinstance(value, str) else value, MediaLimits)
    except (ConfigError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f'{error}; expected an object such as {{"image": 4}}') from None


Command = Callable[..., None]
Given = Mapping[str, Any]
"""Values from the command line: field to raw value, absent if not given."""


_STRUCTS: Final[tuple[type[CheckedStruct], ...]] = (RouterConfig, GatewayConfig, EngineConfig, ServerConfig)
_RULES: Final = {name: rule for struct in _STRUCTS for name, rule in rules_of(struct).items()}
_DEFAULTS: Final = {
    name: default
    for struct in _STRUCTS
    for name, default in zip(reversed(struct.__struct_fields__), reversed(struct.__struct_defaults__), strict=False)
}


_METAVARS: Final = {bool: None, ByteSize: "SIZE", int: "N", float: "SECONDS", str: "NAME"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting."""

    field: str
    """Field of one of the settings: `EngineConfig`, `ServerConfig`, `GatewayConfig` or `RouterConfig`."""
    help: str
    value: str = ""
    """Placeholder of the value in the help; from its type if empty."""
    parser: Parser | None = None
    """Parser for values that the field's type and constraint alone do not define."""
    name: str = ""
    """Flag; from the field if empty."""
    short: str = ""
    repeated: bool = False
    common: bool = False
    """True for the most used settings, which the help explains first."""

    @property
    def rule(self) -> Rule:
        """Constraint of the field; none for a flag without a field."""
        return _RULES.get(self.field, Rule(object, False, None))

    @property
    def metavar(self) -> str | None:
        """Placeholder of the value in the help; None for a switch."""
        kind = ByteSize if isinstance(self.rule.constraint, ByteSize) else self.rule.kind
        return self.value or _METAVARS[kind]

    @property
    def group(self) -> str:
        """Heading under which help and documentation list the setting."""
        return _GROUP_OF.get(self.field, OTHER)

    def parse(self, value: Any) -> Any:
        """Parse a text or typed `value`. Raises `ValueError` with a phrase that completes "NAME: ..."."""
        if self.value in ("FILE", "FOLDER") and isinstance(value, str) and value.startswith("~"):
            value = str(user_path(value, self.flag))  # shells leave a ~ in quotes and after = unchanged
        return (self.parser or self.rule.read)(value)

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
        """The help text with the choices and the default."""
        constraint = self.rule.constraint
        choices = f" Choices: {', '.join(constraint.words)}." if isinstance(constraint, OneOf) else ""
        if aliases := getattr(constraint, "aliases", None):
            choices += f" Aliases: {', '.join(aliases)}."
        default: Any = _DEFAULTS.get(self.field)
        if isinstance(default, msgspec.Struct):
            default = {name: value for name, value in msgspec.structs.asdict(default).items() if value is not None}
        if default in (None, (), "", {}):
            return self.help + choices
        shown = format_size(default) if isinstance(constraint, ByteSize) else _shown(default)
        return f"{self.help}{choices} [default: {shown}]"


@cache
def _annotation(flag: Flag) -> Any:
    """Return the parameter type for which typer offers the flag; many commands have the same flags."""
    shown: Any = {"help": flag.described, "rich_help_panel": COMMON if flag.common else flag.group}
    if flag.metavar is None:
        return Annotated[bool | None, typer.Option(f"{flag.flag}/--no-{flag.key}", **shown)]
    kind: Any = list[str] if flag.repeated else str
    words = getattr(flag.rule.constraint, "words", ())
    names = filter(None, (flag.flag, flag.short))
    return Annotated[
        kind | None, typer.Option(*names, metavar=flag.metavar, autocompletion=lambda: list(words), **shown)
    ]


TRANSFER_SECRET_FILE: Final = Flag(
    "transfer_secret_file",
    "File with the secret shared by prefill workers, decode workers and their router; by default one in the cache "
    "folder.",
    "FILE",
    parser=lasting_file,
)

_MODEL: Final = (
    Flag("revision", "Branch, tag or commit of a Hugging Face model."),
    Flag(
        "model_impl",
        "Code that computes the model: fd_core, transformers, or auto, which prefers fd_core.",
        "CODE",
    ),
    Flag("language_model_only", "Do not load the encoder of images; prompts with images are rejected."),
    Flag("dtype", "Data type of the model's computations.", "TYPE", common=True),
    Flag(
        "quantization",
        "Quantize the weights of linear layers at loading; `auto` uses them as stored.",
        "FORM",
        common=True,
    ),
    Flag(
        "generation_config",
        "Default sampling parameters of requests: auto for those of the model's authors, none, or a "
        "generation_config.json or its folder.",
        "SOURCE",
    ),
    Flag(
        "override_generation_config",
        """Default sampling parameters that replace those of the model, such as '{"temperature": 0.6}'.""",
        "JSON",
        parser=generation,
    ),
    Flag("pooling", "Pooling of embeddings: last (token), mean, or auto, as configured in the checkpoint.", "HOW"),
)
_DEVICE: Final = (
    Flag("backend", "Hardware backend that runs the model, or `auto` for the best one available.", common=True),
    Flag(
        "attention_backend",
        "Attention implementation, on backends with several; auto selects the first that passes its test.",
    ),
    Flag("num_threads", "CPU threads of each rank; by default all available CPUs, divided between ranks."),
    Flag("native_kernels", "Compile and use native kernels if the backend has them."),
)
_SCHEDULING: Final = (
    Flag(
        "max_model_len",
        "Longest request, prompt and output together, in tokens; by default the model's limit.",
        "TOKENS",
        common=True,
    ),
    Flag(
        "max_num_seqs",
        "Most requests that run at the same time; by default the backend's choice, which `fdcore env` lists.",
        common=True,
    ),
    Flag(
        "max_num_batched_tokens",
        "Step token budget: most tokens computed in one step; by default the backend's choice, which `fdcore env` "
        "lists.",
        "TOKENS",
    ),
    Flag("scheduler", "Scheduler: continuous or a plugin's."),
    Flag(
        "scheduling_policy",
        "Order in which waiting requests are admitted: fair (shares of keys), fcfs, priority or a plugin's policy.",
    ),
    Flag(
        "victim_policy",
        "Which running request is preempted when KV blocks run out: cheapest, youngest or a plugin's policy.",
    ),
    Flag("pipeline_depth", "Steps in flight at the same time; by default the backend's choice."),
    Flag(
        "postprocess",
        "Postprocessor of sampled tokens on the device; by default the one for the backend's framework.",
    ),
    Flag("observer", "Observer plugin that receives the tokens sampled by each step."),
    Flag(
        "output_transport",
        "Transport of step outputs from the runner to the engine; FD_USE_GET_SAVE_OUTPUT_V1=1 selects zmq too.",
        "HOW",
    ),
)
_KV_CACHE: Final = (
    Flag(
        "gpu_memory_utilization",
        "Share of free device memory for the KV cache, above 0 and at most 1.",
        "SHARE",
        common=True,
    ),
    Flag("kv_cache_memory", "Device memory for the KV cache, such as 256M or 2Gi.", common=True),
    Flag("num_kv_blocks", "Number of blocks in the KV cache."),
    Flag("block_size", "Tokens in one KV block.", "TOKENS"),
    Flag(
        "kv_cache_dtype",
        "Data type of the KV cache: auto for the model's; int8 or fp8 take half of the memory.",
        "TYPE",
    ),
    Flag("enable_prefix_caching", "Reuse the KV of prompts with a common prefix."),
    Flag(
        "save_preempted_kv",
        "Save the KV of preempted requests to host memory, so that they resume without recomputing; "
        "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST sets it too.",
    ),
    Flag("host_kv_memory", "Host memory for KV outside the device, such as 512M or 4Gi; 0 disables it."),
    Flag(
        "kv_store",
        "Location of a persistent KV store: disk:FOLDER, redis://HOST:PORT/DB or a plugin's.",
        "LOCATION",
    ),
    Flag(
        "kv_store_timeout",
        "Timeout of a request's wait for stored KV, after which its prompt is recomputed, in seconds.",
    ),
    Flag(
        "kv_store_secret_file",
        "File with the secret that authenticates stored KV; engines that share a store need the same secret.",
        "FILE",
        parser=lasting_file,
    ),
    Flag("kv_store_compression", "Compression of KV in the store.", "HOW"),
)
_ADAPTER: Final = (
    Flag(
        "lora_modules",
        "LoRA adapter in PEFT's format that is served as a separate model, as NAME=FOLDER or "
        """'{"name": NAME, "path": FOLDER}'; may be repeated.""",
        "NAME=FOLDER",
        repeated=True,
    ),
    Flag("lora_folder", "Folder from which /v1/load_lora_adapter may load adapters; by default none.", "FOLDER"),
    Flag("weights_folder", "Folder from which /v1/update_weights may load weights; by default none.", "FOLDER"),
    Flag("max_loras", "Most adapters loaded at a time."),
    Flag("max_lora_rank", "Largest rank of an adapter."),
)
_DECODING: Final = (
    Flag(
        "speculative",
        'Speculative decoding, such as \'{"method": "ngram", "num_speculative_tokens": 3}\'; methods are ngram, '
        "suffix, draft_model or a plugin's.",
        "JSON",
        parser=speculation,
        name="--speculative-config",
    ),
    Flag("structured_output", "Support structured output: JSON, schemas, regular expressions, choices, grammars."),
    Flag("max_forced_tokens", "Most tokens forced by a grammar that one step appends to a request."),
)
_PARALLELISM: Final = (
    Flag("tensor_parallel_size", "Tensor-parallel ranks, each with a share of every layer.", short="-tp", common=True),
    Flag(
        "pipeline_parallel_size",
        "Pipeline stages, each with some of the layers.",
        short="-pp",
    ),
    Flag(
        "enable_expert_parallel",
        "Let each tensor-parallel rank hold some experts whole, instead of a share of every expert.",
    ),
    Flag(
        "distributed_executor_backend",
        "Launcher of ranks: mp on this machine; ray on nodes, with the plugin launcher_ray; uni for one rank.",
        "HOW",
    ),
    Flag(
        "rank_transport",
        "Collectives between ranks on CPUs: shared_memory on this machine, or gloo over the network.",
        "HOW",
    ),
)
_DISAGGREGATION: Final = (
    Flag(
        "role",
        "Role of this server: prefill computes prompts for decode workers, decode generates from prompts computed by "
        "prefill workers, mixed does both.",
        "ROLE",
    ),
    Flag(
        "kv_connector",
        "Transport of KV from prefill workers to a decode worker: tcp, shared_memory, kv_store or a plugin's "
        "connector.",
    ),
    Flag("transfer_host", "Address on which the prefill worker listens for decode workers.", "ADDRESS"),
    Flag("transfer_port", "Port on which the prefill worker listens for decode workers (0: any free port).", "PORT"),
    TRANSFER_SECRET_FILE,
    Flag(
        "lease_seconds",
        "Timeout of a silent prefill worker, after which the decode worker computes the prompt itself, in seconds.",
    ),
    Flag(
        "kv_events",
        "Report cached prefixes to the router; on by default with --router, otherwise requires --router-secret-file.",
    ),
)
_FAULT: Final = (
    Flag("watchdog_seconds", "Timeout of a step, after which the engine is restarted, in seconds."),
    Flag(
        "restart_attempts",
        "Failed restarts in a row after which the server exits with code 5; 0 retries forever, with backoff of up to "
        "60 s.",
    ),
    Flag("trace", "File for a trace of every step, for `fdcore trace`.", "FILE"),
    Flag("trace_limit", "Size limit of the trace file; later steps are not recorded."),
)
ENGINE_FLAGS: Final = (
    *_MODEL,
    *_DEVICE,
    *_SCHEDULING,
    *_KV_CACHE,
    *_ADAPTER,
    *_DECODING,
    *_PARALLELISM,
    *_DISAGGREGATION,
    *_FAULT,
)

API_KEY_FILE: Final = Flag(
    "api_key_file",
    "File of API keys with names and limits, as TOML or JSON, or with one key per line; SIGHUP reloads it.",
    "FILE",
    parser=key_file,
    common=True,
)

_ADDRESS: Final = (
    Flag("host", "Address on which the server listens.", "ADDRESS", common=True),
    Flag("port", "Port on which the server listens (0: any free port).", "PORT", common=True),
    Flag(
        "health_port",
        "Additional port for /health, served by a separate thread without TLS, so that a busy event loop does not "
        "delay probes.",
        "PORT",
    ),
    Flag(
        "ssl_certfile",
        "File with the TLS certificate and its chain, for https; reloaded when it changes.",
        "FILE",
        parser=lasting_file,
    ),
    Flag(
        "ssl_keyfile",
        "File with the private key of the certificate, if not in the same file.",
        "FILE",
        parser=lasting_file,
    ),
    Flag(
        "ssl_keyfile_password",
        "Password of the private key. Other users of the machine can see command lines: FD_SSL_KEYFILE_PASSWORD keeps "
        "it secret.",
        "PASSWORD",
    ),
    Flag(
        "ssl_ca_certs",
        "File with certificate authorities; every client must present a certificate of one of them.",
        "FILE",
        parser=lasting_file,
    ),
)
_ACCESS: Final = (
    API_KEY_FILE,
    Flag(
        "api_keys",
        "API key that clients must send; may be repeated. Other users of the machine can see command lines: "
        "--api-key-file or FD_API_KEY keep the key secret.",
        "KEY",
        parser=keys,
        name="--api-key",
        repeated=True,
    ),
    Flag("protect_pages", "Require an API key for /metrics, the live page, /load and /version too."),
    Flag(
        "share_prefix_cache",
        "Share cached prefixes between API keys; cached_tokens then reveals which prompts other keys have sent.",
    ),
    Flag(
        "allowed_hosts",
        "Host header to accept in addition to this machine's, such as api.example.org, *.example.org or * for any; "
        "may be repeated. By default any if --host is reachable from other machines.",
        "HOST",
        repeated=True,
    ),
    Flag(
        "allowed_origins",
        "Origin whose pages may send requests from browsers, such as https://chat.example.org, or * for any; may be "
        "repeated.",
        "ORIGIN",
        repeated=True,
    ),
)
_CONNECTION: Final = (
    Flag(
        "limit_concurrency",
        "Most open connections, further ones get 503; by default as many as the open-file limit allows, at most 10000.",
    ),
    Flag(
        "limit_concurrency_per_address",
        "Most open connections from one address of another machine, such as a proxy, or from one IPv6 /64 network; by "
        "default three quarters of all.",
    ),
    Flag("timeout_headers", "Timeout for receiving the head of a request, in seconds."),
    Flag("timeout_keep_alive", "Idle timeout of a connection between requests, in seconds."),
    Flag("timeout_body", "Timeout for receiving a body, in seconds; every 64 KiB received extend it by a second."),
    Flag(
        "timeout_write",
        "Timeout for a client that does not read its answer, in seconds; every 64 KiB read extend it by a second.",
    ),
    Flag("max_body_bytes", "Size limit of a request body, such as 16M.", name="--max-body-size"),
    Flag(
        "max_body_memory",
        "Memory for bodies being received, not counting the first 64 KiB of each; a request beyond it gets 503.",
    ),
    Flag(
        "drain_delay",
        "Time after Ctrl-C or SIGTERM in which requests are still accepted, while /ready already reports the drain, "
        "in seconds.",
    ),
    Flag("drain_seconds", "Time for running requests to finish after Ctrl-C, in seconds."),
)
_LOG: Final = (
    Flag("log_level", "Lowest severity of log lines.", "LEVEL"),
    Flag("log_format", "Format of log lines: text, or one JSON object per line.", "FORM"),
    Flag("access_log", "Log one line for each request: address, path, status, tokens, request id, name of the key."),
    Flag(
        "otlp_traces_endpoint",
        "URL of an OpenTelemetry collector, OTLP over HTTP; requires `fd-core[otel]`.",
        "URL",
    ),
)
LISTEN_FLAGS: Final = (*_ADDRESS, *_ACCESS, *_CONNECTION, *_LOG)

_API: Final = (
    Flag(
        "served_model_names",
        "Name of the model in the API; may be repeated.",
        "NAME",
        name="--served-model-name",
        repeated=True,
        common=True,
    ),
    Flag("chat_template", "Jinja file that replaces the model's chat template.", "FILE", parser=jinja),
    Flag("trust_request_chat_template", "Accept chat templates in requests and run them in a sandbox."),
    Flag(
        "tool_call_parser",
        "Parser of tool calls: hermes, qwen3_coder, llama3_json, pythonic, mistral, ernie45, deepseek, "
        "deepseek_v31, glm45, gpt_oss, minimax_m2, kimi_k2, lfm2, nemotron, a plugin's parser, auto to select it by "
        "the chat template, or none.",
    ),
    Flag(
        "reasoning_parser",
        "Parser of reasoning: qwen3, deepseek_r1, ernie45, mistral, gpt_oss, a plugin's parser, auto to select it by "
        "the chat template, or none.",
    ),
    Flag("enable_tokenizer_info_endpoint", "Expose control tokens and the chat template at /tokenizer_info."),
    Flag(
        "allowed_media_domains",
        "Hosts from which images may be downloaded, such as images.example.org or *.example.org, separated by commas. "
        "Addresses that are not public are never contacted.",
        "HOSTS",
        parser=hosts,
    ),
    Flag("allowed_local_media_path", "Folder of image files that requests may name by file URLs.", "FOLDER"),
    Flag(
        "limit_mm_per_prompt",
        """Most images of a request, such as '{"image": 4}'.""",
        "JSON",
        parser=media_limits,
    ),
    Flag("max_n", "Most texts per request, over all its prompts and choices."),
    Flag("max_logprobs", "Most top log-probabilities per token that a request may request."),
    Flag("max_queued_requests", "Most requests that wait for a slot; further requests get 503."),
    Flag(
        "response_store",
        "Most responses of /v1/responses stored in memory, which later requests can continue (0: none).",
    ),
    Flag("metrics_names", "Metric names in /metrics: fdcore's, or vLLM's in addition.", "NAMES"),
    Flag("verbose", "Show all properties and limits of the engine at start, not only the most important ones."),
)
_BATCH: Final = (
    Flag("batch_api", "Store files and run batches: /v1/files and /v1/batches."),
    Flag("batch_store", "Folder of files and batches; by default one in the cache folder.", "FOLDER"),
    Flag("batch_store_limit", "Size limit of all stored files."),
    Flag(
        "batch_store_key_limit",
        "Size limit of the files of one API key; by default an equal share of all, and at least a quarter.",
    ),
)
_ENGINE_PROCESS: Final = (
    Flag("engine", "Run the engine in a separate process, or in the server's process.", "WHERE"),
    Flag(
        "data_parallel_size",
        "Engines of this server, each with the whole model, separate CPUs or a separate device, and separate KV.",
        short="-dp",
    ),
)
_REGISTRATION: Final = (
    Flag(
        "router",
        "Admin URL of the router with which this server registers; a name with several addresses stands for a router "
        "at each.",
        "URL",
    ),
    Flag(
        "router_secret",
        "File with the secret shared by a router and its workers: one line of at least 16 characters.",
        "FILE",
        parser=secret_in_file,
        name="--router-secret-file",
    ),
    Flag(
        "router_ca_certs", "File with the authorities of the router's certificate, if not those of the system.", "FILE"
    ),
    Flag("advertise_url", "URL of this server for the router, if it differs from --host and --port.", "URL"),
)
SERVER_FLAGS: Final = (*LISTEN_FLAGS, *_API, *_BATCH, *_ENGINE_PROCESS, *_REGISTRATION)

ROUTER_FLAGS: Final = (
    Flag(
        "policy",
        "Policy for mixed workers: random, round_robin, power_of_two, request_num, process_tokens, "
        "metrics_score, cache_aware, prefix_hash, session or a plugin's.",
        common=True,
    ),
    Flag("prefill_policy", "Policy for the prefill worker of a pair."),
    Flag("decode_policy", "Policy for the decode worker of a pair."),
    Flag("cache_block_size", "Tokens in a block of the router's prefix index.", "TOKENS"),
    Flag("max_attempts", "Most attempts per request, on different workers or pairs."),
    Flag("max_requests_per_worker", "Most requests in flight per worker (0: no limit)."),
    Flag("health_check_interval_secs", "Seconds between two health checks of a worker."),
    Flag("health_check_timeout_secs", "Timeout of a health check, in seconds."),
)
"""Settings of `RouterConfig` that have a flag; a settings file accepts all of them."""

GATEWAY_FLAGS: Final = (
    *LISTEN_FLAGS,
    *(flag for flag in SERVER_FLAGS if flag.field == "router_secret"),
    Flag("workers", "URL of a mixed worker; may be repeated.", "URL", name="--worker", repeated=True, common=True),
    Flag("prefill", "URL of a prefill worker; may be repeated.", "URL", repeated=True, common=True),
    Flag("decode", "URL of a decode worker; may be repeated.", "URL", repeated=True, common=True),
    TRANSFER_SECRET_FILE,
    Flag(
        "tokenizer",
        "Model whose tokenizer the workers use, or `bytes` for the null backend; by default that of the model that a "
        "worker reports.",
        "MODEL",
    ),
    Flag("worker_api_keys", "File with the API key of the workers.", "FILE", keys_in_file, name="--worker-key-file"),
    Flag(
        "worker_ca_certs", "File with the authorities of the workers' certificates, if not those of the system.", "FILE"
    ),
    Flag(
        "read_seconds", "Timeout for a worker that sends nothing within a request, in seconds.", name="--read-timeout"
    ),
    Flag(
        "unreachable_seconds",
        "Timeout for the answer of a worker that sends nothing and is unreachable by health checks, in seconds.",
        name="--unreachable-timeout",
    ),
    Flag("admin_host", "Address on which workers register.", "ADDRESS"),
    Flag("admin_port", "Port on which workers register (0: any free port).", "PORT"),
)

GROUPS: Final[Mapping[str, tuple[Flag, ...]]] = {
    "Address and TLS": _ADDRESS,
    "Access": _ACCESS,
    "API": _API,
    "Model": _MODEL,
    "Device": _DEVICE,
    "Scheduling": _SCHEDULING,
    "KV cache": _KV_CACHE,
    "LoRA adapters": _ADAPTER,
    "Decoding": _DECODING,
    "Parallelism": (*_PARALLELISM, *_ENGINE_PROCESS),
    "Disaggregation": _DISAGGREGATION,
    "Routing": ROUTER_FLAGS,
    "Batches": _BATCH,
    "Connections": _CONNECTION,
    "Logs": _LOG,
    "Restarts and traces": _FAULT,
    "Workers": (*_REGISTRATION, *GATEWAY_FLAGS),
}
"""Headings of help and documentation, and their settings; a setting under several belongs to the first."""
_GROUP_OF: Final = {flag.field: title for title, flags in reversed(tuple(GROUPS.items())) for flag in flags}
COMMON: Final = "Most used settings"
OTHER: Final = "Options"
HELP_ALL: Final = "--help-all"
_MOST_EXPLAINED: Final = 12
"""Settings up to which the help of a command explains all of them."""

CLIENT_KEY_FILE: Final = Flag(
    "client_keys", "File whose first line is the API key to send.", "FILE", parser=keys_in_file, name="--api-key-file"
)
KEY_FLAGS: Final = (*(flag for flag in SERVER_FLAGS if flag.field == "api_keys"), CLIENT_KEY_FILE)
CHAT_FLAGS: Final = (*(flag for flag in SERVER_FLAGS if flag.field in ("chat_template", "engine")), *KEY_FLAGS)
"""Server settings that apply to a command which uses a model or a server."""

CONFIG_FILE: Final = Flag("config", "TOML file with settings named like the flags.", "FILE", parser=text)


USER_VARIABLES: Final = (
    *(flag.variable for flag in (*ENGINE_FLAGS, *SERVER_FLAGS, *GATEWAY_FLAGS, *ROUTER_FLAGS, CONFIG_FILE)),
    *("FD_MODEL", "FD_CACHE", "FD_ISA", "FD_CXXFLAGS", "FD_DOCTOR_PATIENCE"),
)
"""Environment variables of users, for `report_variables`."""


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, dict):
        return msgspec.json.encode(default).decode()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[HELP_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


_HelpAll = Annotated[
    bool, typer.Option(HELP_ALL, is_eager=True, callback=_help_all, help="Explain every setting and exit.")
]


def takes_flags(*groups: Iterable[Flag]) -> Callable[[Command], Command]:
    """Give a command every flag of `groups`; the typed values arrive as the mapping `given`."""
    flags = tuple(flag for group in groups for flag in group)

    def decorate(function: Command) -> Command:
        hints = typing.get_type_hints(function, include_extras=True)
        own = [
            item.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, item in inspect.signature(function).parameters.items()
            if name != "given"
        ]
        added = [
            inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(flag))
            for flag in flags
        ]
        if len(flags) > _MOST_EXPLAINED:
            added.append(
                inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_HelpAll)
            )

        def command(**arguments: Any) -> None:
            report_variables(os.environ, USER_VARIABLES)
            arguments.pop("help_all", None)
            typed = {flag.field: arguments.pop(flag.field) for flag in flags}
            given = {name: value for name, value in typed.items() if value not in (None, [], ())}
            function(given=given, **arguments)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {item.name: item.annotation for item in (*own, *added)}
        command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined] # read by inspect
        return command

    return decorate
