"""Flags and environment variables of other servers, and what takes their place here."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

FLAGS: Final[Mapping[tuple[str, ...], str]] = {
    ("--model", "--model-path", "-m", "-hf", "--hf-repo"): "the model is an argument, as in fdcore serve MODEL",
    ("--ctx-size", "-c", "--context-length", "--max-seq-len"): "use --max-model-len, the context length in tokens",
    ("--mem-fraction-static",): "use --gpu-memory-utilization, the share of the device's memory",
    ("--max-running-requests", "--parallel", "-np"): "use --max-num-seqs, the largest number of running requests",
    ("--chunked-prefill-size",): "use --max-num-batched-tokens, the most tokens of a step",
    ("--disable-radix-cache",): "use --no-enable-prefix-caching",
    ("--page-size",): "use --block-size, the tokens in a KV block",
    ("--num-gpu-blocks-override",): "use --num-kv-blocks",
    ("--kv-cache-memory-bytes",): "use --kv-cache-memory, as in --kv-cache-memory 2Gi",
    ("--kv-cache-ratio",): "no KV blocks are reserved for prompts: requests get blocks on demand",
    ("--swap-space", "--kv-offloading-size"): (
        "use --host-kv-memory, the memory for KV outside the device, as in --host-kv-memory 4Gi"
    ),
    ("--cpu-offload-gb",): "weights are never offloaded; --quantization int8 or int4 makes them smaller",
    ("--enable-chunked-prefill",): "chunked prefill is always on; --max-num-batched-tokens limits a chunk",
    ("--async-scheduling",): "use --pipeline-depth 2, which plans a step while another one is computed",
    ("--kv-transfer-config",): "use --role and --kv-connector",
    ("--disaggregation-mode", "--splitwise-role"): "use --role, which is prefill, decode or mixed",
    ("--tp", "--tp-size"): "use --tensor-parallel-size",
    ("--pp", "--pp-size"): "use --pipeline-parallel-size",
    ("--dp", "--dp-size"): "use --data-parallel-size",
    ("--api-server-count",): "one process serves HTTP; --data-parallel-size adds engines",
    ("--ep-size",): "use --enable-expert-parallel with --tensor-parallel-size",
    ("--disable-custom-all-reduce",): "use --rank-transport, which selects the collectives on CPUs",
    ("--threads", "-t"): "use --num-threads",
    ("--device", "--n-gpu-layers", "--gpu-layers", "-ngl"): (
        "one backend computes all layers; select it with --backend, which `fdcore env` lists"
    ),
    ("--flash-attn", "-fa"): "use --attention-backend",
    ("--enforce-eager", "--compilation-config", "-O", "--cuda-graph-sizes", "--max-seq-len-to-capture"): (
        "the backend decides what it compiles and captures; --no-native-kernels runs without compiled kernels"
    ),
    ("--seed",): "requests have seeds: send `seed` with a request that must be reproducible",
    ("--task", "--runner", "--convert"): (
        "every model serves completions and embeddings; --pooling selects how embeddings are pooled"
    ),
    ("--tokenizer", "--tokenizer-mode", "--skip-tokenizer-init"): "the tokenizer is the one of the model's folder",
    ("--tokenizer-revision", "--code-revision"): "use --revision, which applies to the whole repository",
    ("--load-format",): "the format is detected: safetensors or GGUF",
    ("--download-dir",): "set HF_HOME, the cache of Hugging Face models, or FD_CACHE for all others",
    ("--hf-overrides", "--rope-scaling", "--rope-theta"): "change config.json in a copy of the model's folder",
    ("--trust-remote-code",): "code in model repositories is never run",
    ("--enable-lora",): "it is not needed: --lora-modules or --lora-folder enables adapters",
    ("--max-cpu-loras",): "use --max-loras, the most adapters loaded at a time",
    ("--num-speculative-tokens", "--speculative-model"): "use --speculative-config",
    ("--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend"): (
        "there is one implementation; --no-structured-output disables it"
    ),
    ("--mm-processor-kwargs",): "images are processed as the settings of the model have it",
    ("--media-io-kwargs",): "the format of an image is detected, and its alpha channel is dropped",
    ("--chat-template-content-format",): "the format is detected from the chat template",
    ("--response-role",): "the role of an answer is always assistant",
    ("--enable-auto-tool-choice",): "it is not needed: with --tool-call-parser, tool_choice auto is always supported",
    ("--enable-reasoning",): "it is not needed: use --reasoning-parser",
    ("--root-path",): "configure the path in the proxy, which removes it from requests",
    ("--worker-urls",): "use --worker URL, which may be repeated",
    ("--metrics-port",): "metrics are served at /metrics, on the port of the server",
    ("--disable-log-stats",): "statistics are never logged; they are at /metrics",
    ("--engine-worker-queue-port", "--cache-queue-port"): "the processes of a server communicate without ports",
    ("--disable-frontend-multiprocessing",): "use --engine inproc",
    ("--disable-log-requests", "--enable-log-requests"): (
        "prompts are never logged; use --access-log for one line per request"
    ),
    ("--disable-uvicorn-access-log",): "requests are only logged with --access-log",
    ("--uvicorn-log-level",): "use --log-level, which applies to the whole server",
}
REASONS: Final = {flag: reason for flags, reason in FLAGS.items() for flag in flags}


class OlderVariable(NamedTuple):
    """A variable of FastDeploy that sets a field, and the meaning of its two values if it is a switch."""

    variable: str
    field: str
    no: Any = None
    yes: Any = None


OLDER_VARIABLES: Final = (
    OlderVariable("FD_USE_GET_SAVE_OUTPUT_V1", "output_transport", no="memory", yes="zmq"),
    OlderVariable("FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST", "save_preempted_kv", no=False, yes=True),
    OlderVariable("FD_DEBUG", "log_level", no="info", yes="debug"),
    OlderVariable("FD_SUPPORT_MAX_CONNECTIONS", "limit_concurrency"),
)
VARIABLES: Final[Mapping[tuple[str, ...], str]] = {
    ("FD_MODEL_CACHE", "FD_MODEL_SOURCE"): (
        "models come from Hugging Face; set HF_HOME for their cache, or FD_CACHE for all others"
    ),
    ("FD_LOG_DIR", "FD_LOG_BACKUP_COUNT"): "log lines are written to standard error; redirect it to a file",
    ("FD_DISABLE_CHUNKED_PREFILL", "FD_ENABLE_MAX_PREFILL"): (
        "chunked prefill is always on; FD_MAX_NUM_BATCHED_TOKENS limits a chunk"
    ),
    ("FD_DISABLED_RECOVER",): "preempted requests always resume",
    ("FD_ENABLE_MULTI_API_SERVER",): "use FD_DATA_PARALLEL_SIZE",
    ("FD_MAX_STOP_SEQS_NUM", "FD_STOP_SEQS_MAX_LEN"): "the limits of stop strings cannot be changed",
    ("FD_PLUGINS",): "every installed plugin is loaded; uninstall those that you do not want",
    ("FD_SERVICE_NAME", "FD_HOST_NAME"): "set OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES for traces",
    ("FD_SAMPLING_CLASS", "FD_MOE_BACKEND", "FD_USE_MACHETE", "FD_USE_DEEP_GEMM"): "the backend selects its kernels",
    (
        *("FD_CPU_USE_BF16", "FD_USE_HF_TOKENIZER", "FD_USE_FASTSAFETENSOR", "FD_USE_AGGREGATE_SEND"),
        *("FD_ZMQ_SNDHWM", "FD_ENC_DEC_BLOCK_NUM", "FD_PD_CHANGEABLE", "FD_CACHE_PARAMS", "FD_ENABLE_CACHE_TASK"),
        *("FD_ENABLE_INTERNAL_ADAPTER", "FD_ENABLE_MODEL_LOAD_CACHE", "FD_TRITON_KERNEL_CACHE_DIR", "FD_ENABLE_PDL"),
        "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS",
    ): "there is no such setting",
}


def report_variables(environment: Mapping[str, str], known: Iterable[str]) -> None:
    """Print a line for each FD_* variable that is probably a misspelling of a `known` one, or only FastDeploy has."""
    foreign = {name: reason for names, reason in VARIABLES.items() for name in names}
    names = {*known, *(each.variable for each in OLDER_VARIABLES)}
    for name in sorted(each for each in environment.keys() - names if each.startswith("FD_")):
        if name in foreign:
            print(f"fdcore: {name} of FastDeploy is ignored: {foreign[name]}", file=sys.stderr)
        elif close := difflib.get_close_matches(name, names, n=1, cutoff=0.85):
            print(f"fdcore: {name} is not a setting and is ignored; did you mean {close[0]}?", file=sys.stderr)
