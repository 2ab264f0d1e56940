"""`--dtype auto` on the CPU: bfloat16 with native kernels, with the reason reported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fd_core.backends.cpu import CpuBackend, ReferenceBackend
from fd_core.cli.serving.summary import summary
from fd_core.config import EngineConfig, ServerConfig
from fd_core.errors import ConfigError
from tests.server.fakes import engine_info


@pytest.mark.parametrize(("option", "dtype"), [("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_cpu_without_bfloat16_instructions_uses_bfloat16(
    option: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = pytest.importorskip("fd_core.ops.native.pack")
    monkeypatch.setattr(pack.NativeOps, "instruction_set", "generic")  # compiling its kernels takes most of a minute
    backend = CpuBackend(EngineConfig(model="m", dtype=option))
    ops = backend.make_ops()
    if ops.name != "native":
        pytest.skip("the native kernels cannot be built here")
    assert ops.dtype == dtype
    assert backend.dtype_reason.startswith("the CPU lacks bfloat16 instructions (generic), but")


@pytest.mark.parametrize(
    ("instructions", "products", "words"),
    [
        ("amx_bf16", "amx_int8", "has bfloat16 instructions"),
        ("avx512_bf16", "avx512_vnni", "has bfloat16 instructions"),
        ("avx512", "avx512_vnni", "--quantization int8 halves the time"),
        ("avx2", "avx_vnni", "--quantization int8 halves the time"),
        ("avx2", "avx2", "halving memory reads is faster"),
    ],
)
def test_reason_names_the_faster_option(
    instructions: str, products: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = pytest.importorskip("fd_core.ops.native.pack")
    monkeypatch.setattr(pack.NativeOps, "instruction_set", instructions)
    monkeypatch.setattr(pack.NativeOps, "packed_products", products)
    reason = pack.NativeOps.__new__(pack.NativeOps).dtype_reason
    assert words in reason
    assert ("int8" in reason) == ("vnni" in products and "bf16" not in instructions)


@pytest.mark.parametrize(("instructions", "emulated"), [("amx_emulated", True), ("amx_bf16", False)])
def test_emulated_instructions_are_reported(instructions: str, emulated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = pytest.importorskip("fd_core.ops.native.pack")
    monkeypatch.setattr(pack.NativeOps, "instruction_set", instructions)
    backend = CpuBackend(EngineConfig(model="m"))
    if backend.make_ops().name != "native":
        pytest.skip("the native kernels cannot be built here")
    assert backend.emulated == emulated


def test_native_kernels_need_no_torch() -> None:
    code = (
        "import sys; from fd_core.backends.cpu import CpuBackend; from fd_core.config import EngineConfig; "
        "CpuBackend.import_framework(); name = CpuBackend(EngineConfig(model='m')).make_ops().name; "
        "print(name, 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert found.split() in (["native", "False"], ["torch", "True"])


def test_eager_torch_reports_reason_for_float32() -> None:
    pytest.importorskip("torch")
    backend = CpuBackend(EngineConfig(model="m", native_kernels=False))
    assert backend.make_ops().dtype == "float32"
    assert "intermediate result" in backend.dtype_reason


def test_summary_includes_the_reason() -> None:
    info = engine_info(dtype="bfloat16", dtype_reason="the CPU has bfloat16 instructions (amx_bf16)")
    rows = dict(summary(info, ServerConfig(), "http://here"))
    assert rows["dtype"] == "bfloat16 (the CPU has bfloat16 instructions (amx_bf16))"


@pytest.mark.parametrize("native", [True, False])
def test_float16_is_rejected_with_alternative(native: bool) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="computes in float32 or bfloat16, got float16") as refused:
        CpuBackend(EngineConfig(model="m", dtype="float16", native_kernels=native)).make_ops()
    assert refused.value.field == "--dtype"
    assert refused.value.hint == "bfloat16 takes as much memory"


def test_fallback_to_numpy_names_the_command_that_installs_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fd_core.backends.cpu.missing", lambda *names: names)
    monkeypatch.setattr("fd_core.ops.native.build.obtainable", lambda: False)
    ReferenceBackend(EngineConfig(model="m")).make_ops()
    assert "pip install 'fd-core[cpu]'" in caplog.text
    caplog.clear()
    ReferenceBackend(EngineConfig(model="m", backend="reference")).make_ops()
    assert caplog.text == "", "it was selected by name"
