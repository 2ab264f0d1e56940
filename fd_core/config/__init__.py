"""Frozen settings, merged once from flags, environment and file.

Flags are named as in vLLM and FastDeploy. Every field says its unit. Derived limits that depend on the model are
resolved when the engine starts, in `resolve_limits`.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fd_core.config.constraints import ByteSize, CheckedStruct, OneOf, Range
from fd_core.errors import ConfigError

__all__ = [
    *("EngineConfig", "Limits", "ListenConfig", "ServerConfig", "SpeculativeConfig"),
    *("resolve_limits", "step_budget"),
]

_MAX_DRAFTS: Final = 16
"""More drafts than this never pay."""
_DAY: Final = 86400
_OTHER_KV_DTYPES: Final = {
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "float8_e4m3fn"), "int8, which takes as much memory"),
    **dict.fromkeys(("float32", "float16", "bfloat16"), "auto, which keeps KV in the type that --dtype chooses"),
}
_OTHER_QUANTIZATION: Final = {
    **dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "compressed-tensors"),
        "auto, which reads what the checkpoint says of itself",
    ),
    "fp8": "int8, which takes as much memory",
}
_OTHER_ATTENTION: Final = {
    "FLASHINFER": "flashinfer",
    "TRITON_ATTN": "triton",
    **dict.fromkeys(
        ("FLASH_ATTN", "FLASHMLA", "APPEND_ATTN", "MLA_ATTN", "NATIVE_ATTN", "flash_attn", "fa2", "fa3", "xformers"),
        "auto, which takes the fastest that computes right",
    ),
}
LOG_LEVELS: Final = OneOf("debug", "info", "warning", "error", "critical")


class SpeculativeConfig(CheckedStruct, frozen=True, kw_only=True):
    """How next tokens are guessed, the content of `--speculative-config`."""

    method: str
    """A drafter: `ngram`, `suffix`, `draft_model`, or one that a plugin offers."""
    model: str | None = None
    """The draft model, named like the model itself, for a drafter that uses one."""
    num_speculative_tokens: Annotated[int, Range(0, _MAX_DRAFTS)] = 3
    """k: largest number of drafts per request and step."""
    cheap_tokens: Annotated[int, Range(1)] = 64
    """Drafts shrink so that a step stays below this many tokens."""
    options: dict[str, int | float | str] = msgspec.field(default_factory=dict)
    """What the drafter itself reads."""


class EngineConfig(CheckedStruct, frozen=True, kw_only=True):
    """What the engine runs and how large it may grow."""

    model: str
    """`smollm2`, a folder, a `.gguf` file or a Hugging Face name."""
    revision: str | None = None
    backend: str = "auto"
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    quantization: Annotated[str, OneOf("auto", "int8", "int4", instead=_OTHER_QUANTIZATION)] = "auto"
    """What the weights of linear layers become when they are loaded; `auto` leaves them as they are stored."""
    kv_cache_dtype: Annotated[str, OneOf("auto", "int8", instead=_OTHER_KV_DTYPES)] = "auto"
    """`auto` keeps keys and values in the dtype of activations, `int8` in 8 bits with scales."""
    attention_backend: Annotated[str, OneOf("auto", "triton", "flashinfer", "torch", instead=_OTHER_ATTENTION)] = "auto"
    """What computes attention, of a backend that has a choice; `auto` takes the first that computes right."""
    max_model_len: Annotated[int, Range(2)] | None = None
    """Longest prompt plus output, tokens; the model's own limit if None."""
    max_num_seqs: Annotated[int, Range(1, 65536)] = 32
    """Slots: requests that run at the same time."""
    max_num_batched_tokens: Annotated[int, Range(1)] | None = None
    """Step token budget; None takes what suits the backend, see `step_budget`."""
    block_size: Annotated[int, Range(1, 4096)] = 32
    """Tokens in a KV block."""
    num_kv_blocks: Annotated[int, Range(1)] | None = None
    kv_cache_memory: Annotated[int, ByteSize()] | None = None
    """Bytes for the KV cache; used if `num_kv_blocks` is None."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True)] = 0.9
    """Share of free device memory that model and KV cache may take when neither of the above is given."""
    enable_prefix_caching: bool = True
    scheduler: str = "continuous"
    scheduling_policy: str = "fcfs"
    victim_policy: str = "cheapest"
    postprocess: str | None = None
    """What writes the token matrix of a step; None takes the one for the backend's framework."""
    pooling: Annotated[str, OneOf("auto", "last", "mean")] = "auto"
    """What of a text becomes its vector: the state of its last token, or the mean of all; `auto` asks the
    checkpoint."""
    observer: str | None = None
    """A plugin that is told what each step sampled; None tells nobody."""
    pipeline_depth: Annotated[int, Range(1, 16)] | None = None
    """Steps in flight; None takes what the backend measures best."""
    num_threads: Annotated[int, Range(1, 4096)] | None = None
    """CPU threads of the backend, of each rank; None takes the processors available, divided over the ranks."""
    tensor_parallel_size: Annotated[int, Range(1, 64)] = 1
    """Ranks that compute the model together, each with a share of every layer, on a device of its own."""
    pipeline_parallel_size: Annotated[int, Range(1, 64)] = 1
    """Ranks that compute the model one after the other, each with some of the layers."""
    distributed_executor_backend: Annotated[str, OneOf("uni", "mp", "ray")] | None = None
    """How ranks are started: `uni` in the engine's process, which holds one; `mp` as processes of this machine."""
    rank_transport: Annotated[str, OneOf("shared_memory", "gloo")] = "shared_memory"
    """How ranks on processors exchange what they computed: over memory of this machine, or by gloo over the network."""
    native_kernels: bool = True
    """Whether the CPU backend may compile and use its C++ kernels."""
    speculative: SpeculativeConfig | None = None
    """Drafting of tokens ahead; None computes one token a step."""
    structured_output: bool = True
    """Whether texts of a given form are served."""
    max_forced_tokens: Annotated[int, Range(0, _MAX_DRAFTS)] = 8
    """Tokens forced by a grammar that a step takes as drafts for one request; a drafter's own number replaces it."""
    lora_modules: tuple[str, ...] = ()
    """LoRA adapters that are served from the start, each NAME=FOLDER or JSON: {"name": NAME, "path": FOLDER}."""
    lora_folder: str | None = None
    """Folder whose adapters may be loaded while the engine serves; None allows none."""
    max_loras: Annotated[int, Range(1, 1024)] = 8
    """Adapters that are loaded at a time."""
    max_lora_rank: Annotated[int, Range(1, 512)] = 64
    """Largest rank of an adapter."""
    output_transport: Annotated[str, OneOf("memory", "zmq")] = "memory"
    """How a step's output travels from the runner: `memory`, or `zmq` (FastDeploy's FD_USE_GET_SAVE_OUTPUT_V1=1)."""
    watchdog_seconds: Annotated[float, Range(0, _DAY, above=True)] = 60.0
    """A step not answered within this time is an engine fault."""
    restart_attempts: Annotated[int, Range(0, 1_000_000)] = 5
    """Failed starts in a row after which an engine that died is given up; 0 tries again for good."""
    save_preempted_kv: bool = True
    """Whether the KV of preempted requests is kept outside the device, so that they come back without recomputing."""
    host_kv_memory: Annotated[int, ByteSize(0)] = 512 * 2**20
    """Bytes of host memory for KV outside the device."""
    kv_store: str | None = None
    """Where KV is kept beyond this process, such as `disk:FOLDER` or `redis://HOST:PORT/DB`; None keeps none."""
    kv_store_timeout: Annotated[float, Range(0, 3600, above=True)] = 1.0
    """Seconds that a request may wait for its KV before it computes it."""
    kv_store_secret_file: str | None = None
    """File with the secret of stored values; None takes the user's own."""
    kv_store_compression: Annotated[str, OneOf("none", "zlib")] = "none"
    role: Annotated[str, OneOf("mixed", "prefill", "decode")] = "mixed"
    """`mixed` computes prompts and texts, `prefill` prompts for other workers, `decode` texts whose prompts others
    compute."""
    kv_connector: str = "tcp"
    """How KV travels from a prefill worker to this decode worker: `tcp`, `shared_memory`, `kv_store` or a plugin's."""
    transfer_host: str = "127.0.0.1"
    """Where a prefill worker listens for decode workers."""
    transfer_port: Annotated[int, Range(0, 65535)] = 0
    """0 takes a free one."""
    transfer_secret_file: str | None = None
    """File with the secret that prefill and decode workers share; None takes the user's own."""
    lease_seconds: Annotated[float, Range(0.1, 3600)] = 10.0
    """A prefill worker that is silent for so long is given up, and the prompt computed by the decode worker."""
    kv_events: bool | None = None
    """Whether the engine reports the prefixes in its device cache to a router; None reports nothing."""
    trace: str | None = None
    """File that receives a trace of every step, for `fdcore trace`; None writes no trace."""
    trace_limit: Annotated[int, ByteSize()] = 256 * 2**20
    """Bytes after which nothing more is written to `trace`."""

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank_seconds(self) -> float:
        """Seconds for which ranks wait for each other: less than the watchdog's, so that the one at fault is named."""
        return self.watchdog_seconds / 2


class ListenConfig(CheckedStruct, frozen=True, kw_only=True):
    """How a server or a router listens, and for whom."""

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    health_port: Annotated[int, Range(0, 65535)] | None = None
    """Where /health is served by a thread of its own as well, without TLS; None serves it at `port` only."""
    api_keys: tuple[str, ...] = ()
    """API keys of clients; without any everybody is served."""
    api_key_file: str | None = None
    """File of API keys with names and limits, which SIGHUP reads again."""
    protect_pages: bool = False
    """Whether /metrics and the pages ask for a key as well."""
    share_prefix_cache: bool = False
    """Whether requests of different API keys share cached prefixes: `cached_tokens` and the time to the first token
    then show a client which prompts others have sent."""
    access_log: bool = False
    """Whether each request is logged with one line."""
    log_format: Annotated[str, OneOf("text", "json")] = "text"
    allowed_hosts: tuple[str, ...] = ()
    """Names that requests may ask for beside this machine's own; `*` for any. Without any, a server on loopback answers
    to its own names only, and another one to all."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests, such as `https://chat.example.org`; `*` for any."""
    limit_concurrency: Annotated[int, Range(1)] | None = None
    """Connections at a time; None takes what the limit of descriptors leaves."""
    limit_concurrency_per_address: Annotated[int, Range(1)] | None = None
    """Connections at a time from one address of another machine; None takes three quarters of all."""
    timeout_headers: Annotated[float, Range(0, _DAY, above=True)] = 20.0
    """Seconds in which the head of a request has to come, and a TLS handshake to end."""
    timeout_keep_alive: Annotated[float, Range(0, _DAY, above=True)] = 30.0
    """Seconds for which a connection may wait for its next request."""
    timeout_body: Annotated[float, Range(0, _DAY, above=True)] = 30.0
    """Seconds in which a body has to come, and one more for each 64 KiB that came."""
    timeout_write: Annotated[float, Range(0, _DAY, above=True)] = 60.0
    """Seconds for which a client may leave its answer in the buffers, and one more for each 64 KiB that it takes."""
    max_body_bytes: Annotated[int, ByteSize()] = 16 * 1024 * 1024
    """Largest body of a request, in bytes."""
    max_body_memory: Annotated[int, ByteSize()] = 256 * 1024 * 1024
    """Bytes that all bodies being received may hold, beside the first 64 KiB of each."""
    ssl_certfile: str | None = None
    """Certificates in PEM format; None serves plain HTTP."""
    ssl_keyfile: str | None = None
    """Private key of the certificate; None looks for it in the file of the certificate."""
    ssl_keyfile_password: str = ""
    ssl_ca_certs: str | None = None
    """Authorities of which every client needs a certificate."""
    drain_delay: Annotated[float, Range(0, _DAY)] = 0.0
    """Seconds after Ctrl-C or SIGTERM for which requests are still taken while /ready already answers 503."""
    drain_seconds: Annotated[float, Range(0, _DAY)] = 30.0
    """How long running requests may go on after Ctrl-C."""
    otlp_traces_endpoint: str | None = None
    """Where an OpenTelemetry collector takes spans by OTLP over HTTP; None makes none."""
    log_level: Annotated[str, LOG_LEVELS] = "info"

    @property
    def asks_for_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protect_pages and not self.asks_for_keys:
            raise ConfigError(
                "there is no key that could protect the pages",
                field="--protect-pages",
                hint="give --api-key-file, --api-key or FD_API_KEY",
            )
        if self.max_body_memory < self.max_body_bytes:
            raise ConfigError(
                f"max_body_memory is {self.max_body_memory:,} bytes, less than one body of {self.max_body_bytes:,}",
                field="--max-body-memory",
                hint="raise it or lower --max-body-size",
            )


class ServerConfig(ListenConfig, frozen=True, kw_only=True):
    """How the OpenAI-compatible server listens and whom it serves."""

    served_model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    """Jinja source that replaces the model's own template."""
    trust_request_chat_template: bool = False
    """Whether requests may bring a template of their own; templates run in a sandbox with bounds."""
    enable_tokenizer_info_endpoint: bool = False
    """Whether /tokenizer_info tells control tokens and the chat template."""
    tool_call_parser: str = "auto"
    """What finds tool calls in answers; `auto` takes what fits the model, `none` finds none."""
    reasoning_parser: str = "auto"
    """What tells reasoning from the answer; `auto` takes what fits the model, `none` leaves it in the text."""
    response_store: Annotated[int, Range(0, 1_000_000)] = 0
    """Answers of /v1/responses that are kept for later requests; 0 keeps none."""
    engine: Annotated[str, OneOf("process", "inproc")] = "process"
    """Whether the engine runs in a process of its own or in the server's."""
    data_parallel_size: Annotated[int, Range(1, 1024)] = 1
    """Engines behind the server, each with the whole model, processors or a device of its own, and its own KV."""
    max_queued_requests: Annotated[int, Range(0)] = 1024
    """Requests waiting beyond this are answered with 503."""
    max_n: Annotated[int, Range(1, 128)] = 128
    """Texts that one request may ask for, all its prompts and choices together."""
    max_logprobs: Annotated[int, Range(0, 20)] = 20
    """Most likely tokens that a request may ask for beside each token."""
    batch_api: bool = True
    """Whether files and batches are kept, see /v1/files and /v1/batches."""
    batch_store: str | None = None
    """Folder of files and batches; None takes one in the cache folder."""
    batch_store_limit: Annotated[int, ByteSize()] = 2**30
    """Bytes of all files that are kept."""
    batch_store_key_limit: Annotated[int, ByteSize()] | None = None
    """Bytes of the files of one API key; None takes an equal share of all, and at least a quarter."""
    metrics_names: Annotated[str, OneOf("fdcore", "vllm")] = "fdcore"
    """`vllm` adds vLLM's names to those of /metrics, for dashboards and routers that look for them."""
    router: str | None = None
    """Admin address of a router to register with; None registers nowhere."""
    router_secret: str = ""
    """What that router asks of whoever registers."""
    router_ca_certs: str | None = None
    """Authorities that the router's certificate may come from; None takes those of the system."""
    advertise_url: str | None = None
    """Where the router finds this server; None takes host and port."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits as they hold for one loaded model; what scheduler and runner are built from."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    vocab_size: int
    max_drafts: int = 0
    """k: largest number of draft tokens per request and step."""
    pipeline_depth: int = 1
    num_stages: int = 1
    """Parts of the model that a step passes one after the other, each of which computes another step meanwhile."""

    @property
    def blocks_per_seq(self) -> int:
        """Entries of one block table."""
        return -(-self.max_model_len // self.block_size)


def step_budget(config: EngineConfig, default: int) -> int:
    """Return the most tokens of a step: those asked for, or `default` and at least one for each slot."""
    return config.max_num_batched_tokens or max(default, config.max_num_seqs)


def resolve_limits(
    config: EngineConfig,
    *,
    model_max_len: int,
    vocab_size: int,
    bytes_per_block: int,
    free_bytes: int,
    default_pipeline_depth: int = 1,
    default_batched_tokens: int = 2048,
) -> Limits:
    """Fix every limit for a loaded model, or say which setting contradicts which.

    `free_bytes` is device memory left once the weights are loaded. Raises `ConfigError` naming field and numbers.
    """
    budget = step_budget(config, default_batched_tokens)
    max_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    if not max_drafts and config.structured_output:
        max_drafts = min(config.max_forced_tokens, budget - 1)
    if budget < 1 + max_drafts:
        raise ConfigError(
            f"max_num_batched_tokens is {budget}, but one decode with "
            f"{max_drafts} drafts takes {1 + max_drafts} tokens",
            field="--max-num-batched-tokens",
            hint="raise it or use fewer draft tokens",
        )
    max_len = model_max_len if config.max_model_len is None else config.max_model_len
    if max_len > model_max_len:
        raise ConfigError(
            f"max_model_len is {max_len}, but the model was built for {model_max_len} tokens",
            field="--max-model-len",
            hint=f"use at most {model_max_len}",
        )
    blocks = _kv_blocks(config, max_len, bytes_per_block, free_bytes)
    if config.max_model_len is None:
        max_len = min(max_len, blocks * config.block_size)
    elif blocks * config.block_size < max_len:
        raise ConfigError(
            f"{blocks} KV blocks of {config.block_size} tokens hold {blocks * config.block_size} tokens, "
            f"fewer than max_model_len {max_len}",
            field="--num-kv-blocks" if config.num_kv_blocks is not None else "--kv-cache-memory",
            hint="give the cache more memory or lower --max-model-len",
        )
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        block_size=config.block_size,
        num_kv_blocks=blocks,
        vocab_size=vocab_size,
        max_drafts=max_drafts,
        pipeline_depth=config.pipeline_depth or max(default_pipeline_depth, config.pipeline_parallel_size),
        num_stages=config.pipeline_parallel_size,
    )


def _kv_blocks(config: EngineConfig, max_len: int, bytes_per_block: int, free_bytes: int) -> int:
    """Return how many KV blocks to allocate; never more than all slots could fill."""
    useful, free_bytes = config.max_num_seqs * -(-max_len // config.block_size), max(0, free_bytes)
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks * bytes_per_block > free_bytes:
            raise ConfigError(
                f"{config.num_kv_blocks} KV blocks take {config.num_kv_blocks * bytes_per_block:,} bytes, "
                f"but {free_bytes:,} are free",
                field="--num-kv-blocks",
                hint=f"at most {free_bytes // bytes_per_block:,} fit; leave it out to take what fits",
            )
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        blocks = config.kv_cache_memory // bytes_per_block
        if config.kv_cache_memory > free_bytes:
            raise ConfigError(
                f"kv_cache_memory is {config.kv_cache_memory:,} bytes, but {free_bytes:,} are free for KV",
                field="--kv-cache-memory",
                hint="give less, or leave it out to take what fits; a processor gives KV a quarter of its free memory",
            )
        if blocks < 1:
            raise ConfigError(
                f"kv_cache_memory is {config.kv_cache_memory:,} bytes, and one KV block takes {bytes_per_block:,}",
                field="--kv-cache-memory",
                hint="give more, or leave it out to take what fits",
            )
    else:
        blocks = min(int(free_bytes * config.gpu_memory_utilization) // bytes_per_block, useful)
    if blocks < 1:
        raise ConfigError(
            f"not one KV block of {bytes_per_block:,} bytes fits into the memory given, of which the machine has "
            f"{free_bytes:,} bytes for KV beside the weights",
            field="--kv-cache-memory",
            hint="end other programs, take a smaller model or --quantization int8, or give a smaller --block-size",
        )
    return blocks
