"""Built-in plugins of each kind: their files, and the arguments by which pytest runs their kit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Subject:
    """Files of one or several plugins, and the runs of their kit, the quickest first."""

    modules: tuple[str, ...]
    runs: tuple[tuple[str, ...], ...]
    tests: tuple[str, ...] = ()
    """Tests of what the plugins decide freely; an edit that only these detect is none that the kit has to detect."""


_SUITE: Final = "fd_core.testing.suite"
_CASES: Final = ("--pyargs", f"{_SUITE}.test_cases", "--fd-backend=mutant")
_BACKEND: Final = ("--pyargs", _SUITE, "--fd-backend=mutant")
_TOOLS: Final = (
    "hermes",
    "ernie45",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "deepseek",
    "glm45",
    "gpt_oss",
)
_REASONING: Final = ("qwen3", "deepseek_r1", "ernie45", "mistral", "gpt_oss")
_PARSERS: Final = ("--pyargs", "fd_core.testing.parsers.suite")
_ROUTING: Final = ("tests/testing/test_router_policies.py", "-k", "TestPoliciesOfTheCore")
_SCHEDULER: Final = ("--pyargs", "fd_core.testing.schedulers.suite", "--fd-scheduler=continuous")
SUBJECTS: Final = {
    "backend": Subject(
        tuple(f"fd_core.ops.numpy.{name}" for name in ("ops", "sampling", "kv_8bit")),
        (
            (*_CASES, "--fd-quick"),
            (*_BACKEND, "--fd-quick", "--deselect", "fd_core/testing/suite/test_cases.py"),
            (*_CASES, "-m", "fd_pairs or fd_scale"),
        ),
    ),
    "postprocess": Subject(
        ("fd_core.runner.postprocess.numpy_matrix",),
        (("--pyargs", "fd_core.testing.postprocessors.suite", "--fd-postprocess=numpy"),),
    ),
    "scheduler": Subject(
        tuple(
            f"fd_core.scheduling.{name}"
            for name in (
                "scheduler", "phases", "prefixes", "requests", "running.planner", "running.drafts",
                "running.output_processor", "running.plan", "running.running_batch", "running.slots", "running.tokens",
                "waiting.admission_control", "waiting.admission_planner", "waiting.queue",
                "operations.kv_offloading", "operations.kv_transferring", "operations.registry",
            )
        ),
        ((*_SCHEDULER, "--fd-quick"), (*_SCHEDULER, "-m", "fd_pairs")),
    ),
    "store": Subject(
        ("fd_core.kv.stores.memory", "fd_core.kv.stores.disk", "fd_core.kv.stores.location"),
        (("tests/kv/stores/test_memory.py::TestMemoryStore", "tests/kv/stores/test_disk.py::TestDiskStore"),),
        ("tests/kv/stores", "-k", "not TestMemoryStore and not TestDiskStore"),
    ),
    "parser": Subject(
        tuple(
            f"fd_core.text.parsing.{name}"
            for name in (
                "formats.json_calls", "formats.pythonic", "formats.tagged", "formats.harmony", "thinking", "reader",
                "argument_types",
            )
        ),
        (
            (*_PARSERS, "--fd-quick", *(f"--fd-tool-parser={name}" for name in _TOOLS)),
            (*_PARSERS, *(f"--fd-reasoning-parser={name}" for name in _REASONING)),
            (*_PARSERS, "-m", "fd_pairs or fd_scale", *(f"--fd-tool-parser={name}" for name in _TOOLS)),
        ),
        ("tests/text/parsing",),
    ),
    "router_policy": Subject(
        ("fd_core.router.policies",),
        tuple((*_ROUTING, "-m", marks) for marks in ("not timing and not fd_pairs", "timing or fd_pairs")),
        ("tests/router/test_policies.py",),
    ),
}  # fmt: skip
