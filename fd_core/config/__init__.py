"""Frozen settings, merged once from flags, environment and file.

Flags are named as in vLLM and FastDeploy. The meaning and default of a field are documented at the flag of its name in
`fd_core.cli.settings.flags`; only the rest is documented here. Times are seconds and sizes bytes. Derived limits
that depend on the model are resolved when the engine starts, in `resolve_limits`.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fd_core.config.constraints import ByteSize, CheckedStruct, OneOf, Range
from fd_core.config.generation import GenerationDefaults
from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.deprecations import accept_old_names
from fd_core.errors import ConfigError

__all__ = [
    "EngineConfig",
    "Limits",
    "ListenConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "requested_sizes",
    "resolve_limits",
    "step_budget",
]

DEFAULT_BLOCK_SIZE: Final = 32
CHEAP_TOKENS: Final = 64
"""Tokens below which a step is bound by reading weights, unless a setting overrides it."""
_MAX_DRAFTS: Final = 16
"""Limit of draft tokens; more never pay off."""
_DAY: Final = 86400
_DTYPES: Final = {
    **dict.fromkeys(("half", "fp16"), "float16"),
    **dict.fromkeys(("float", "fp32"), "float32"),
    "bf16": "bfloat16",
}
_KV_DTYPES: Final = dict.fromkeys(("fp8_e4m3", "float8_e4m3fn"), "fp8")
_OTHER_KV_DTYPES: Final = {
    **dict.fromkeys(("fp8_e5m2", "fp8_inc"), "fp8 or int8"),
    **dict.fromkeys(("float32", "float16", "bfloat16"), "auto, which stores KV in the type of --dtype"),
}
_OTHER_QUANTIZATION: Final = {
    **dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "compressed-tensors"),
        "auto, which detects the format of the checkpoint",
    ),
    "fp8": "int8, which uses the same memory",
}
_OTHER_IMPL: Final = dict.fromkeys(("vllm", "sglang"), "fd_core")
_OTHER_ATTENTION: Final = {
    "FLASHINFER": "flashinfer",
    "TRITON_ATTN": "triton",
    **dict.fromkeys(
        ("FLASH_ATTN", "FLASHMLA", "APPEND_ATTN", "MLA_ATTN", "NATIVE_ATTN", "flash_attn", "fa2", "fa3", "xformers"),
        "auto, which selects the fastest that passes its test",
    ),
}
LOG_LEVELS: Final = OneOf("debug", "info", "warning", "error", "critical")


class SpeculativeConfig(CheckedStruct, frozen=True, kw_only=True):
    """Speculative decoding, the content of `--speculative-config`."""

    method: str
    """A drafter: `ngram`, `suffix`, `draft_model`, or one that a plugin offers."""
    model: str | None = None
    """The draft model, named like the model itself, for a drafter that uses one."""
    num_speculative_tokens: Annotated[int, Range(0, _MAX_DRAFTS)] = 3
    """k: largest number of drafts per request and step."""
    cheap_tokens: Annotated[int, Range(1)] = CHEAP_TOKENS
    """Drafts shrink so that a step stays below this many tokens."""
    options: dict[str, int | float | str] = msgspec.field(default_factory=dict)


class EngineConfig(CheckedStruct, frozen=True, kw_only=True):
    """Model and resources of an engine."""

    model: str
    """`smollm2`, a folder, a `.gguf` file or a Hugging Face name."""
    revision: str | None = None
    model_impl: Annotated[str, OneOf("auto", "fd_core", "transformers", instead=_OTHER_IMPL)] = "auto"
    """`auto` computes models that no family serves with the code of `transformers`, if it is installed."""
    language_model_only: bool = False
    """True: an encoder of images is not loaded, and the model takes none."""
    generation_config: str = "auto"
    """Source of default sampling parameters: `auto` for the checkpoint's, `none`, or a file or folder."""
    override_generation_config: GenerationDefaults = GenerationDefaults()
    """Default sampling parameters that replace those of `generation_config`."""
    backend: str = "auto"
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16", aliases=_DTYPES)] = "auto"
    quantization: Annotated[str, OneOf("auto", "int8", "int4", instead=_OTHER_QUANTIZATION)] = "auto"
    kv_cache_dtype: Annotated[str, OneOf("auto", "int8", "fp8", aliases=_KV_DTYPES, instead=_OTHER_KV_DTYPES)] = "auto"
    """`auto` stores keys and values in the dtype of activations, `int8` with scales, `fp8` as float8_e4m3fn."""
    attention_backend: Annotated[str, OneOf("auto", "triton", "flashinfer", "torch", instead=_OTHER_ATTENTION)] = "auto"
    max_model_len: Annotated[int, Range(2)] | None = None
    """Longest prompt plus output, tokens; the model's own limit if None."""
    max_num_seqs: Annotated[int, Range(1, 65536)] | None = None
    """Slots: largest number of running requests; None selects what suits the backend."""
    max_num_batched_tokens: Annotated[int, Range(1)] | None = None
    """Step token budget; None selects what suits the backend, see `step_budget`."""
    block_size: Annotated[int, Range(1, 4096)] | None = None
    num_kv_blocks: Annotated[int, Range(1)] | None = None
    kv_cache_memory: Annotated[int, ByteSize()] | None = None
    """Bytes for the KV cache; used if `num_kv_blocks` is None."""
    gpu_memory_utilization: Annotated[float, Range(0, 1, above=True)] = 0.9
    """Share of free device memory for model and KV cache when neither of the above is given."""
    enable_prefix_caching: bool = True
    scheduler: str = "continuous"
    scheduling_policy: str = "fair"
    victim_policy: str = "cheapest"
    postprocess: str | None = None
    pooling: Annotated[str, OneOf("auto", "last", "cls", "mean")] = "auto"
    observer: str | None = None
    pipeline_depth: Annotated[int, Range(1, 16)] | None = None
    num_threads: Annotated[int, Range(1, 4096)] | None = None
    tensor_parallel_size: Annotated[int, Range(1, 64)] = 1
    pipeline_parallel_size: Annotated[int, Range(1, 64)] = 1
    enable_expert_parallel: bool = False
    """True if tensor-parallel ranks divide the experts of a block, instead of each expert."""
    distributed_executor_backend: Annotated[str, OneOf("uni", "mp", "ray")] | None = None
    rank_transport: Annotated[str, OneOf("shared_memory", "gloo")] = "shared_memory"
    native_kernels: bool = True
    speculative: SpeculativeConfig | None = None
    """Speculative decoding; None computes one token a step."""
    structured_output: bool = True
    max_forced_tokens: Annotated[int, Range(0, _MAX_DRAFTS)] = 8
    """Tokens forced by a grammar that a step takes as drafts for one request; a drafter's own number replaces it."""
    lora_modules: tuple[str, ...] = ()
    lora_folder: str | None = None
    weights_folder: str | None = None
    max_loras: Annotated[int, Range(1, 1024)] = 8
    max_lora_rank: Annotated[int, Range(1, 512)] = 64
    output_transport: Annotated[str, OneOf("memory", "zmq")] = "memory"
    watchdog_seconds: Annotated[float, Range(0, _DAY, above=True)] = 60.0
    restart_attempts: Annotated[int, Range(0, 1_000_000)] = 5
    save_preempted_kv: bool = True
    host_kv_memory: Annotated[int, ByteSize(0)] = 512 * 2**20
    kv_store: str | None = None
    kv_store_timeout: Annotated[float, Range(0, 3600, above=True)] = 1.0
    kv_store_secret_file: str | None = None
    """File with the secret that protects stored values; None uses one in the cache folder."""
    kv_store_compression: Annotated[str, OneOf("none", "zlib")] = "none"
    role: Annotated[str, OneOf("mixed", "prefill", "decode")] = "mixed"
    kv_connector: str = "tcp"
    transfer_host: str = "127.0.0.1"
    transfer_port: Annotated[int, Range(0, 65535)] = 0
    transfer_secret_file: str | None = None
    lease_seconds: Annotated[float, Range(0.1, 3600)] = 10.0
    kv_events: bool | None = None
    """True to report the prefixes in the device cache to a router; None reports nothing."""
    trace: str | None = None
    trace_limit: Annotated[int, ByteSize()] = 256 * 2**20

    @property
    def block_tokens(self) -> int:
        """Tokens in a KV block, unless a model with recurrent layers needs more."""
        return self.block_size or DEFAULT_BLOCK_SIZE

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def rank_seconds(self) -> float:
        """Timeout of waits between ranks, in seconds: below the watchdog's, so that the rank at fault is named."""
        return self.watchdog_seconds / 2


@accept_old_names
class ListenConfig(CheckedStruct, frozen=True, kw_only=True):
    """Listener and access control of a server or a router."""

    host: str = "127.0.0.1"
    port: Annotated[int, Range(0, 65535)] = 8000
    health_port: Annotated[int, Range(0, 65535)] | None = None
    api_keys: tuple[str, ...] = ()
    """API keys of clients; without any, access is open."""
    api_key_file: str | None = None
    protect_pages: bool = False
    share_prefix_cache: bool = False
    access_log: bool = False
    log_format: Annotated[str, OneOf("text", "json")] = "text"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    limit_concurrency: Annotated[int, Range(1)] | None = None
    limit_concurrency_per_address: Annotated[int, Range(1)] | None = None
    timeout_headers: Annotated[float, Range(0, _DAY, above=True)] = 20.0
    """Timeout for the header of a request, and for a TLS handshake, in seconds."""
    timeout_keep_alive: Annotated[float, Range(0, _DAY, above=True)] = 30.0
    timeout_body: Annotated[float, Range(0, _DAY, above=True)] = 30.0
    timeout_write: Annotated[float, Range(0, _DAY, above=True)] = 60.0
    max_body_bytes: Annotated[int, ByteSize()] = 16 * 1024 * 1024
    max_body_memory: Annotated[int, ByteSize()] = 256 * 1024 * 1024
    ssl_certfile: str | None = None
    """Certificates in PEM format; None serves plain HTTP."""
    ssl_keyfile: str | None = None
    ssl_keyfile_password: str = ""
    ssl_ca_certs: str | None = None
    drain_delay: Annotated[float, Range(0, _DAY)] = 0.0
    drain_seconds: Annotated[float, Range(0, _DAY)] = 30.0
    otlp_traces_endpoint: str | None = None
    log_level: Annotated[str, LOG_LEVELS] = "info"

    @property
    def requires_keys(self) -> bool:
        """True if clients need a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protect_pages and not self.requires_keys:
            hint = "set --api-key-file, --api-key or FD_API_KEY"
            raise ConfigError("protected pages require an API key", field="--protect-pages", hint=hint)
        if self.health_port and self.health_port == self.port:
            message = f"health_port={self.health_port} is the port of the server, too"
            raise ConfigError(message, field="--health-port", hint="choose another, or omit it")
        if self.max_body_memory < self.max_body_bytes:
            message = f"max_body_memory={self.max_body_memory:,} is smaller than max_body_bytes={self.max_body_bytes:,}"
            raise ConfigError(message, field="--max-body-memory", hint="increase it or lower --max-body-size")


class MediaLimits(CheckedStruct, frozen=True, kw_only=True):
    """Most inputs of each kind in one request."""

    image: Annotated[int, Range(0, 1024)] = 16


class ServerConfig(ListenConfig, frozen=True, kw_only=True):
    """Listener and access control of the OpenAI-compatible server."""

    served_model_names: tuple[str, ...] = ()
    verbose: bool = False
    chat_template: str | None = None
    trust_request_chat_template: bool = False
    enable_tokenizer_info_endpoint: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    response_store: Annotated[int, Range(0, 1_000_000)] = 0
    engine: Annotated[str, OneOf("process", "inproc")] = "process"
    data_parallel_size: Annotated[int, Range(1, 1024)] = 1
    max_queued_requests: Annotated[int, Range(0)] = 1024
    max_n: Annotated[int, Range(1, 128)] = 128
    max_logprobs: Annotated[int, Range(0, 20)] = 20
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str | None = None
    limit_mm_per_prompt: MediaLimits = MediaLimits()
    batch_api: bool = True
    batch_store: str | None = None
    batch_store_limit: Annotated[int, ByteSize()] = 2**30
    batch_store_key_limit: Annotated[int, ByteSize()] | None = None
    metrics_names: Annotated[str, OneOf("fdcore", "vllm")] = "fdcore"
    router: str | None = None
    router_secret: str = ""
    """Secret that this router requires of workers that register."""
    router_ca_certs: str | None = None
    advertise_url: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.router is None:
            return
        if not self.router.startswith(("http://", "https://")):
            hint = "set it to http://HOST:PORT of the router's admin port"
            raise ConfigError(f"{self.router!r} is not a URL", field="--router", hint=hint)
        if not self.router_secret:
            message = "registering with a router requires its secret"
            raise ConfigError(message, field="--router-secret-file", hint="use the same file as the router")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for one loaded model; scheduler and runner are built from them."""

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
    """Pipeline stages of the model; each computes a different step at the same time."""
    whole_prompts: bool = False
    """True for an encoder: each prompt is computed in one step, whose budget holds the longest one."""
    groups: LayerGroups = ONE_GROUP
    """Groups of layers, each with block tables of its own."""
    max_image_tokens: int = 0
    """Tokens of images that are encoded in one step, at least those of the largest image; 0 if the model takes none."""
    whole_images: bool = False
    """True if a step computes all tokens of an image, because they attend to each other in both directions."""

    @property
    def blocks_per_seq(self) -> int:
        """Entries of one block table."""
        return -(-self.max_model_len // self.block_size)


def step_budget(config: EngineConfig, default: int, default_num_seqs: int = 32) -> int:
    """Return the most tokens of a step: those configured, or `default` and at least one for each slot."""
    return config.max_num_batched_tokens or max(default, config.max_num_seqs or default_num_seqs)


def requested_sizes(
    config: EngineConfig,
    default_pipeline_depth: int = 1,
    default_batched_tokens: int = 2048,
    default_num_seqs: int = 32,
) -> dict[str, int]:
    """Return the sizes that settings and defaults determine, under the names of `OperatingEnvelope`."""
    budget = step_budget(config, default_batched_tokens, default_num_seqs)
    max_drafts = 0 if config.speculative is None else config.speculative.num_speculative_tokens
    if not max_drafts and config.structured_output:
        max_drafts = min(config.max_forced_tokens, budget - 1)
    adapted = bool(config.lora_modules) or config.lora_folder is not None
    return {
        "max_num_seqs": config.max_num_seqs or default_num_seqs,
        "max_num_batched_tokens": budget,
        "max_model_len": config.max_model_len or 0,
        "block_size": config.block_tokens,
        "max_drafts": max_drafts,
        "pipeline_depth": config.pipeline_depth or max(default_pipeline_depth, config.pipeline_parallel_size),
        "max_loras": config.max_loras if adapted else 0,
        "max_lora_rank": config.max_lora_rank if adapted else 0,
    }


def resolve_limits(
    config: EngineConfig,
    *,
    model_max_len: int,
    vocab_size: int,
    bytes_per_block: int,
    free_bytes: int,
    default_pipeline_depth: int = 1,
    default_batched_tokens: int = 2048,
    default_num_seqs: int = 32,
    whole_prompts: bool = False,
    groups: LayerGroups = ONE_GROUP,
    image_tokens: tuple[int, int, bool] = (0, 1, False),
) -> Limits:
    """Compute every limit for a loaded model with `free_bytes` left; `ConfigError` names the settings that conflict.

    `image_tokens` are those of the largest image, and the patches of which one consists: a step encodes about as many
    patches as it computes tokens. If the third part is True, a step has room for all of an image besides decodes.
    """
    sizes = requested_sizes(config, default_pipeline_depth, default_batched_tokens, default_num_seqs)
    budget, max_drafts, block_size = sizes["max_num_batched_tokens"], sizes["max_drafts"], sizes["block_size"]
    if budget < 1 + max_drafts:
        message = (
            f"max_num_batched_tokens={budget} is less than the {1 + max_drafts} tokens of a decode with {max_drafts} "
            "drafts"
        )
        raise ConfigError(message, field="--max-num-batched-tokens", hint="increase it or use fewer draft tokens")
    max_len = model_max_len if config.max_model_len is None else config.max_model_len
    if max_len > model_max_len:
        message = f"max_model_len={max_len} exceeds the context length of the model ({model_max_len})"
        raise ConfigError(message, field="--max-model-len", hint=f"use at most {model_max_len}")
    if whole_prompts and budget < max_len - 1:
        if config.max_num_batched_tokens is None:
            budget = max_len - 1
        elif config.max_model_len is None:
            max_len = budget + 1
        else:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than a text of {max_len - 1} tokens, which this model "
                "computes in one step",
                field="--max-num-batched-tokens",
                hint=f"use at least {max_len - 1}, or lower --max-model-len",
            )
    beside_image = image_tokens[0] + (sizes["max_num_seqs"] - 1) * (1 + max_drafts)
    if image_tokens[2] and budget < beside_image:
        if config.max_num_batched_tokens is not None:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than an image of {image_tokens[0]} tokens, which this model "
                f"computes in one step, and {beside_image - image_tokens[0]} tokens of other requests",
                field="--max-num-batched-tokens",
                hint=f"use at least {beside_image}, or lower --max-num-seqs",
            )
        budget = beside_image
    useful = sizes["max_num_seqs"] * groups.blocks(max_len, block_size)
    # Between a chunk's plan and its output, its blocks are held in addition to the window before it.
    useful += groups.sliding * -(-budget * sizes["pipeline_depth"] // block_size)
    blocks = _kv_blocks(config, useful, bytes_per_block, free_bytes=max(0, free_bytes))
    longest = groups.longest(blocks, block_size)
    if config.max_model_len is None and longest:
        max_len = min(max_len, longest)
    elif longest < max_len:
        layers = "" if groups.count == 1 else f" for one of {groups.count} groups of layers"
        raise ConfigError(
            f"{blocks} KV blocks of {block_size} tokens{layers} hold {longest} tokens, fewer than "
            f"max_model_len={max_len}",
            field="--num-kv-blocks" if config.num_kv_blocks is not None else "--kv-cache-memory",
            hint="increase the memory of the KV cache or lower --max-model-len",
        )
    return Limits(
        max_num_seqs=sizes["max_num_seqs"],
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        block_size=block_size,
        num_kv_blocks=blocks,
        vocab_size=vocab_size,
        max_drafts=max_drafts,
        pipeline_depth=sizes["pipeline_depth"],
        num_stages=config.pipeline_parallel_size,
        whole_prompts=whole_prompts,
        groups=groups,
        max_image_tokens=image_tokens[0] and max(image_tokens[0], budget // image_tokens[1]),
        whole_images=image_tokens[2],
    )


def _kv_blocks(config: EngineConfig, useful: int, bytes_per_block: int, free_bytes: int) -> int:
    """Return the number of KV blocks to allocate; by default no more than the `useful` ones, which fill all slots."""
    if config.num_kv_blocks is not None:
        if config.num_kv_blocks * bytes_per_block > free_bytes:
            raise ConfigError(
                f"{config.num_kv_blocks} KV blocks need {config.num_kv_blocks * bytes_per_block:,} bytes, but "
                f"{free_bytes:,} are free",
                field="--num-kv-blocks",
                hint=f"use at most {free_bytes // bytes_per_block:,}, or omit it to use the free memory",
            )
        return config.num_kv_blocks
    if config.kv_cache_memory is not None:
        blocks = config.kv_cache_memory // bytes_per_block
        if config.kv_cache_memory > free_bytes:
            message = (
                f"kv_cache_memory={config.kv_cache_memory:,} exceeds the {free_bytes:,} bytes that are free for KV"
            )
            hint = "lower it, or omit it to use the free memory; on CPUs, a quarter of the free memory is for KV"
            raise ConfigError(message, field="--kv-cache-memory", hint=hint)
        if blocks < 1:
            message = (
                f"kv_cache_memory={config.kv_cache_memory:,} is smaller than one KV block of {bytes_per_block:,} bytes"
            )
            raise ConfigError(message, field="--kv-cache-memory", hint="increase it, or omit it to use the free memory")
    else:
        blocks = min(int(free_bytes * config.gpu_memory_utilization) // bytes_per_block, useful)
    if blocks < 1:
        raise ConfigError(
            f"no KV block of {bytes_per_block:,} bytes fits into the configured memory; {free_bytes:,} bytes are free "
            "for KV after loading the weights",
            field="--kv-cache-memory",
            hint="stop other programs, or use a smaller model, --quantization int8 or a smaller --block-size",
        )
    return blocks
