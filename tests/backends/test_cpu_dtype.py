"""`--dtype auto` on the processor: bfloat16 only where the kernels have instructions for it, and the reason is told."""

from __future__ import annotations

import pytest

from fd_core.backends.cpu import CpuBackend
from fd_core.cli.summary import summary
from fd_core.config import EngineConfig, ServerConfig
from fd_core.ops.native import fastest_dtype
from tests.server.fakes import engine_info


@pytest.mark.parametrize(
    ("instruction_set", "dtype"),
    [
        ("amx_bf16", "bfloat16"),
        ("amx_emulated", "bfloat16"),
        ("avx512_bf16", "bfloat16"),
        ("avx512", "float32"),
        ("avx2", "float32"),
        ("generic", "float32"),
    ],
)
def test_bfloat16_needs_instructions(instruction_set: str, dtype: str) -> None:
    assert fastest_dtype(instruction_set) == dtype


@pytest.mark.parametrize(("asked", "dtype"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_a_processor_without_instructions_computes_in_float32_unless_asked(
    asked: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("FD_ISA", "generic")
    backend = CpuBackend(EngineConfig(model="m", dtype=asked))
    ops = backend.make_ops()
    if ops.name != "native":
        pytest.skip("the native kernels cannot be built here")
    assert ops.dtype == dtype
    if asked == "auto":
        assert backend.dtype_reason == "the processor lacks bfloat16 instructions (generic)"


def test_eager_torch_says_why_it_takes_float32() -> None:
    pytest.importorskip("torch")
    backend = CpuBackend(EngineConfig(model="m", native_kernels=False))
    assert backend.make_ops().dtype == "float32"
    assert "intermediate result" in backend.dtype_reason


def test_the_summary_gives_the_reason() -> None:
    info = engine_info(dtype="float32", dtype_reason="the processor lacks bfloat16 instructions (avx2)")
    rows = dict(summary(info, ServerConfig(), "http://here"))
    assert rows["dtype"] == "float32 (the processor lacks bfloat16 instructions (avx2))"
