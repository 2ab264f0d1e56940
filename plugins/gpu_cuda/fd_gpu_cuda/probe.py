"""Whether a CUDA device is here, found out without initialising CUDA: no context, no memory on the device."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from fd_core.backends.contract import Backend
from fd_core.backends.places import EnginePlace, places_on_devices
from fd_core.backends.probing import missing

_NVML = "libnvidia-ml.so.1"
_CUDA_LINE = re.compile(r"^cuda\b[^=]*=\s*(?:'([^']*)'|None)", re.MULTILINE)
_VERSION_LINE = re.compile(r"^__version__\b[^=]*=\s*'([^']*)'", re.MULTILINE)


def cuda_of_torch() -> tuple[str, str | None]:
    """Return torch's version and the CUDA that it was built for, None for a build without; imports nothing.

    torch must be installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "", None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return "", None
    version, cuda = _VERSION_LINE.search(text), _CUDA_LINE.search(text)
    return version[1] if version else "", cuda[1] if cuda else None


def flash_infer() -> str:
    """Say whether FlashInfer is here, which then computes attention of steps with prompts; imports nothing."""
    if missing("flashinfer"):
        return "FlashInfer not installed"
    try:
        return f"FlashInfer {importlib.metadata.version('flashinfer-python')}"
    except importlib.metadata.PackageNotFoundError:
        return "FlashInfer of an unknown version"


def device_problem() -> tuple[int, str]:
    """Return how many devices the driver has, and why there is none that this process may use; "" if there is one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0, f"CUDA_VISIBLE_DEVICES={visible!r} hides every device"
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return 0, f"no NVIDIA driver is installed: {_NVML} is not found"
    return _count(nvml)


class OnCuda(Backend):
    """A backend on the CUDA devices that the driver has."""

    @classmethod
    def places(cls, count: int, ranks: int = 1) -> Sequence[EnginePlace]:
        """Give each engine a device for each rank."""
        return places_on_devices("CUDA_VISIBLE_DEVICES", device_problem()[0], count, ranks)


def _count(nvml: ctypes.CDLL) -> tuple[int, str]:
    """Ask NVML, which talks to the driver and creates nothing on a device."""
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    status = nvml.nvmlInit_v2()
    if status:
        return 0, f"the NVIDIA driver does not answer: {_text(nvml, status)}"
    count = ctypes.c_uint(0)
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    if status:
        return 0, f"the NVIDIA driver does not say which devices there are: {_text(nvml, status)}"
    return count.value, "" if count.value else "the NVIDIA driver sees no device"


def _text(nvml: ctypes.CDLL, status: int) -> str:
    text: bytes = nvml.nvmlErrorString(status)
    return text.decode(errors="replace")
