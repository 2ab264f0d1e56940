"""Each backend reports why it cannot run, and a probe has no side effects."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fd_core.backends import probing
from fd_core.backends.contract import Backend
from fd_core.backends.paddle import PaddleDevices
from fd_core.config import EngineConfig
from fd_core.errors import ConfigError
from fd_core.plugins import BACKEND, Plugins

from fd_gpu_cuda import backend
from fd_gpu_cuda.backend import CudaBackend, CudaOnnxBackend, CudaPaddleBackend

BACKENDS = (CudaBackend, CudaPaddleBackend, CudaOnnxBackend)


class Nvml:
    """A driver's management library."""

    def __init__(self, count: int = 1, broken: int = 0) -> None:
        self.calls: list[str] = []
        self.nvmlErrorString = lambda status: b"Driver/library version mismatch"
        self._count, self._broken = count, broken

    def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's name
        self.calls.append("init")
        return self._broken

    def nvmlDeviceGetCount_v2(self, at: Any) -> int:  # noqa: N802
        at._obj.value = self._count
        return 0

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def installed(**settings: int) -> Nvml:
        nvml = Nvml(**settings)
        nvml.nvmlErrorString = SimpleCall(b"Driver/library version mismatch")
        monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        return nvml

    return installed


@pytest.mark.parametrize("kind", BACKENDS)
def test_each_of_several_engines_sees_one_device(driver: Any, kind: type[Backend]) -> None:
    driver(count=2)
    shown = [place.environment["CUDA_VISIBLE_DEVICES"] for place in kind.device_assignments(2)]
    assert shown == ["0", "1"]
    with pytest.raises(ConfigError, match="3 engines need one device each, found 2"):
        kind.device_assignments(3)


class SimpleCall:
    """A C function that returns one value."""

    def __init__(self, value: bytes) -> None:
        self.value = value
        self.restype: Any = None

    def __call__(self, *_: Any) -> bytes:
        return self.value


def test_all_three_are_offered_by_the_installed_plugin() -> None:
    offered = Plugins.discover().offered(BACKEND)
    names = {name for name, entry in offered.items() if entry.origin.distribution == "fd-gpu-cuda"}
    assert names == {"gpu_cuda", "gpu_cuda+paddle", "gpu_cuda+onnx"}
    assert [offered[cls.name].load() for cls in BACKENDS] == list(BACKENDS)


def test_probe_imports_no_framework() -> None:
    code = """if True:
        import sys
        from fd_gpu_cuda.backend import CudaBackend
        from fd_gpu_cuda.backend import CudaOnnxBackend, CudaPaddleBackend
        import json
        answers = [cls.probe().reason for cls in (CudaBackend, CudaPaddleBackend, CudaOnnxBackend)]
        loaded = {"torch", "triton", "paddle", "onnxruntime", "flashinfer"} & set(sys.modules)
        print(json.dumps([answers, sorted(loaded)]))"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answers, loaded = json.loads(run.stdout)
    assert loaded == []
    assert all(len(answer) > 10 and "\n" not in answer for answer in answers)


def test_missing_framework_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(backend, "device_problem", lambda: (1, ""))
    for cls, name in zip(BACKENDS, ("torch and triton", "Paddle", "onnx and onnxruntime"), strict=True):
        found = cls.probe()
        assert not found.available
        assert found.reason.startswith(f"{name} ")
        assert "install" in found.reason


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ("2.13.0+cpu", None)),
        ("__version__ = '2.9.1+cu128'\ncuda: str | None = '12.8'\nhip = None\n", ("2.9.1+cu128", "12.8")),
        ("__version__ = '2.9.1+rocm7'\ncuda = None\nhip = '7.0'\n", ("2.9.1+rocm7", None)),
    ],
)
def test_cuda_version_is_read_from_the_file_of_torch(
    text: str, expected: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    assert backend.cuda_of_torch() == expected


def test_torch_without_cuda_differs_from_a_missing_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "missing", lambda *names: [name for name in names if name == "flashinfer"])
    monkeypatch.setattr(backend, "cuda_of_torch", lambda: ("2.13.0+cpu", None))
    monkeypatch.setattr(backend, "device_problem", lambda: (2, ""))
    assert "torch 2.13.0+cpu is built without CUDA" in CudaBackend.probe().reason
    monkeypatch.setattr(backend, "cuda_of_torch", lambda: ("2.9.1+cu128", "12.8"))
    monkeypatch.setattr(backend, "device_problem", lambda: (0, "no NVIDIA driver is installed"))
    assert CudaBackend.probe().reason == "no NVIDIA driver is installed"
    monkeypatch.setattr(backend, "device_problem", lambda: (2, ""))
    monkeypatch.setattr(backend, "compiler_problem", lambda: "")
    found = CudaBackend.probe()
    assert (found.available, found.emulated) == (True, False)
    assert found.reason == "torch 2.9.1+cu128 for CUDA 12.8; the driver has 2 device(s); FlashInfer not installed"
    monkeypatch.setattr(backend, "compiler_problem", lambda: "no C compiler")
    assert CudaBackend.probe().available
    assert CudaBackend.probe().reason == f"{found.reason}; no C compiler"


@pytest.mark.parametrize(
    ("commands", "headers", "environment", "expected"),
    [
        (["gcc"], True, {}, ""),
        (["clang"], True, {}, ""),
        (["icc"], True, {"CC": "icc"}, ""),
        ([], True, {}, "no C compiler; install gcc, or set CC"),
        (["cc"], True, {}, "no C compiler; install gcc, or set CC"),  # a name that Triton does not look for
        (["gcc"], True, {"CC": "icc"}, "the C compiler CC='icc' is not found; unset CC or set it to one command"),
        (["gcc"], True, {"CC": "gcc -m64"}, "CC='gcc -m64' is not found"),
        (["gcc"], False, {}, f"install the headers, such as python3.{sys.version_info.minor}-dev"),
    ],
)
def test_what_triton_lacks_to_build_kernels_is_reported(
    commands: list[str],
    headers: bool,
    environment: dict[str, str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for command in commands:
        (tmp_path / command).touch(mode=0o755)
    if headers:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda *_: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    for name, value in {"PATH": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    problem = backend.compiler_problem()
    if expected:
        assert problem.startswith("Triton cannot build kernels, and torch computes slowly in their place: ")
        assert expected in problem
    else:
        assert problem == ""


def test_flashinfer_version_is_reported_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "missing", lambda *names: [])
    monkeypatch.setattr(importlib.metadata, "version", {"flashinfer-python": "0.6.12"}.__getitem__)
    assert backend.flash_infer() == "FlashInfer 0.6.12"


def test_driver_is_queried_and_shut_down(driver: Any) -> None:
    nvml = driver(count=2)
    assert backend.device_problem() == (2, "")
    assert nvml.calls == ["init", "shutdown"]


def test_driver_without_devices_or_with_an_error_is_reported(driver: Any) -> None:
    driver(count=0)
    assert backend.device_problem() == (0, "the NVIDIA driver found no device")
    driver(broken=18)
    assert "the NVIDIA driver failed: Driver/library version mismatch" in backend.device_problem()[1]


def test_hidden_devices_and_a_missing_driver_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "hides every device" in backend.device_problem()[1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(backend, "_NVML", "libnot-there.so.1")
    assert "no NVIDIA driver is installed" in backend.device_problem()[1]


def answer(text: str, errors: str = "") -> Any:
    return lambda *_, **__: SimpleNamespace(stdout=text, stderr=errors, returncode=1)


def test_runtime_that_falls_back_to_the_processor_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (
        (f'{probing._MARK} ["1.31.1", "CPUExecutionProvider"]', "falls back to CPUExecutionProvider"),
        (f'{probing._MARK} ["1.31.1", "CUDAExecutionProvider"]', ""),
        ("", "cannot start a session: no libcudnn"),
    ):
        backend.provider_problem.cache_clear()
        monkeypatch.setattr(subprocess, "run", answer(text, "no libcudnn"))
        problem = backend.provider_problem()[1]
        assert expected in problem
        assert bool(problem) == bool(expected)
    backend.provider_problem.cache_clear()


def test_onnx_computes_in_float32_and_is_never_selected_by_auto() -> None:
    with pytest.raises(ConfigError, match=r"gpu_cuda\+onnx backend computes in float32, got bfloat16"):
        CudaOnnxBackend(EngineConfig(model="x", dtype="bfloat16")).make_ops()
    assert CudaOnnxBackend.auto_rank < 0 < CudaPaddleBackend.auto_rank < CudaBackend.auto_rank


def test_paddle_is_queried_only_if_the_driver_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def devices() -> PaddleDevices:
        asked.append(True)
        return PaddleDevices("3.3.1", ("gpu:0",))

    monkeypatch.setattr("fd_core.backends.paddle.paddle_devices", devices)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(backend, "device_problem", lambda: (0, "no NVIDIA driver is installed"))
    assert (CudaPaddleBackend.probe().reason, asked) == ("no NVIDIA driver is installed", [])
    monkeypatch.setattr(backend, "device_problem", lambda: (1, ""))
    assert CudaPaddleBackend.probe().available
    assert CudaPaddleBackend(EngineConfig(model="x")).place == "gpu"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (PaddleDevices("2.6.2", ("gpu:0",)), "Paddle 2.6.2 is too old; pip install 'fd-core[paddle-gpu]'"),
        (PaddleDevices("3.3.1", (), built_for_cuda=False), "Paddle 3.3.1 is a CPU-only build; pip install"),
        (PaddleDevices("3.10.0", ("gpu:0",)), "Paddle 3.10.0 found 1 CUDA device"),
        (PaddleDevices("0.0.0", ("gpu:0",)), "Paddle 0.0.0 found 1 CUDA device"),
        (PaddleDevices("", problem="the import failed"), "the import failed"),
    ],
)
def test_old_paddle_and_one_for_processors_are_named(
    found: PaddleDevices, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fd_core.backends.paddle.paddle_installed", lambda: True)
    monkeypatch.setattr("fd_core.backends.paddle.paddle_devices", lambda: found)
    monkeypatch.setattr(backend, "device_problem", lambda: (1, ""))
    assert CudaPaddleBackend.probe().reason.startswith(words)
