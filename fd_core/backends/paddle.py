"""Paddle backends: the CPU, and the base class of vendors whose devices Paddle supports."""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

from fd_core.backends.contract import Availability, Backend
from fd_core.backends.cpu import ProcessorBackend
from fd_core.backends.memory import available_memory
from fd_core.backends.probing import import_pack, missing, run_isolated
from fd_core.config import EngineConfig
from fd_core.errors import PluginError
from fd_core.ops.contract import Ops

_QUESTION: Final = """
import paddle
answer = [paddle.__version__, list(paddle.device.get_available_device()), paddle.is_compiled_with_cuda()]
"""
_FACT: Final = re.compile(r"^(\w+) *= *'?([^'\n]+)'?$", re.MULTILINE)
"""A line of Paddle's `version/__init__.py`, which its build writes."""


@dataclass(frozen=True, slots=True)
class PaddleDevices:
    """Version and devices of the installed Paddle."""

    version: str
    names: tuple[str, ...] = ()
    """Devices other than the CPU, such as `xpu:0` and `metax_gpu:1`."""
    built_for_cuda: bool = True
    problem: str = ""
    """Reason why the devices of Paddle could not be listed; empty on success."""

    def count(self, device: str) -> int:
        """Return the number of devices of a kind, such as `xpu`."""
        return sum(name.partition(":")[0] == device for name in self.names)


def paddle_installed() -> bool:
    """Return True if some distribution provides `paddle`; does not import it."""
    return not missing("paddle")


@cache
def paddle_devices() -> PaddleDevices:
    """List the devices of the installed Paddle, once, in a subprocess.

    Listing them initialises drivers, and a broken driver can crash the process. A CPU-only build is not probed, which
    saves seconds of each start.
    """
    if (version := _built_for_processors()) is not None:
        return PaddleDevices(version, built_for_cuda=False)
    slow = "Paddle did not list its devices within {seconds}"
    answer, problem = run_isolated(_QUESTION, slow=slow, failed="Paddle failed to list its devices")
    if problem:
        return PaddleDevices("", problem=problem)
    version, names, built_for_cuda = answer
    return PaddleDevices(version, tuple(names), built_for_cuda)


def _built_for_processors() -> str | None:
    """Return the version of the installed Paddle if its files show a CPU-only build, else None."""
    spec = importlib.util.find_spec("paddle")
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if folder is None or os.environ.get("CUSTOM_DEVICE_ROOT") or (folder.parent / "paddle_custom_device").exists():
        return None
    try:
        facts = dict(_FACT.findall((folder / "version" / "__init__.py").read_text()))
    except (OSError, UnicodeDecodeError):
        return None
    built_for = {facts.get(name) for name in ("cuda_version", "xpu_xre_version")} | {facts.get("hip_version", "None")}
    return facts.get("full_version") if built_for <= {"False", "None"} else None


class PaddleBackend(Backend):
    """Backend for a kind of device that Paddle supports.

    A vendor sets the class variables, and overrides `device_ops` where the hardware has kernels of its own.
    """

    device: ClassVar[str]
    """Paddle's name of the device, such as `xpu`; for a custom device the name it is registered under."""
    title: ClassVar[str]
    """The device's name for users, such as `MetaX GPU`."""
    paddle_hint: ClassVar[str]
    """Installation hint for a Paddle that drives the device."""
    can_be_emulated: ClassVar[bool] = False
    """True to emulate a missing device with Paddle's CPU kernels in float32 if the backend is selected by name."""
    longest_sort: ClassVar[int | None] = 8192
    """Maximum number of entries that Paddle sorts at once on the device; None for no limit. The default works on all
    supported devices: the XPU kernel supports fewer than 16,384. Emulation keeps the limit, so that tests compute the
    same as the device."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._reserved = 0
        self.emulated = self.probe().emulated
        if self.place == "cpu":
            self.limits = MappingProxyType({"bfloat16": "Paddle does not multiply bfloat16 matrices on a CPU"})

    @classmethod
    def probe(cls) -> Availability:
        """Return available if the device is present or may be emulated; probes in a subprocess."""
        if not paddle_installed():
            return Availability(False, f"Paddle is not installed; {cls.paddle_hint}")
        found = paddle_devices()
        if found.problem:
            return Availability(False, found.problem)
        if count := found.count(cls.device):
            return Availability(True, f"Paddle {found.version} found {count} {cls.title}")
        missing = f"Paddle {found.version} found no {cls.title}"
        if cls.can_be_emulated:
            return Availability(True, f"emulated on the CPU: {missing}", emulated=True)
        return Availability(False, f"{missing}; {cls.paddle_hint}")

    @property
    def place(self) -> str:
        """Paddle's name of the device that computes: `cpu` under emulation."""
        return "cpu" if self.emulated else self.device

    @classmethod
    def import_framework(cls) -> None:
        import_pack(cls.name, "fd_core.ops.paddle.framework", needs="Paddle", hint=cls.paddle_hint)

    def make_ops(self) -> Ops:
        """Initialise the device and return its pack."""
        dtype = self._dtype()
        self.import_framework()
        from fd_core.ops.paddle.framework import require_views, set_threads

        set_threads(self.threads)
        try:
            ops = self.device_ops(dtype, self.place)
            require_views()
            self.free_memory()
        except Exception as error:  # a vendor's runtime may raise anything
            cause = " ".join(str(error).split())[:500] or type(error).__name__
            raise PluginError(
                f"the {self.name} backend cannot use the {self.title}: {cause}",
                field="--backend",
                hint=f"check driver and Paddle with `fdcore env` and `fdcore doctor {self.name}`",
            ) from error
        return ops

    def device_ops(self, dtype: str, place: str) -> Ops:
        """Create the pack of a dtype on `place`; must not use the vendor's kernels if `self.emulated`."""
        from fd_core.ops.paddle.ops import PaddleOps

        return PaddleOps(dtype, place, self.longest_sort)

    def rehearse(self, steps: AbstractContextManager[None]) -> None:
        if self.place == "cpu":
            return
        from fd_core.ops.paddle.framework import measured_memory

        self._reserved = measured_memory(self.place, steps)

    @property
    def reserved_memory(self) -> int:
        return self._reserved

    def free_memory(self) -> int:
        """Return a quarter of the host's free memory if the CPU computes, else what steps leave of the device's."""
        if self.place == "cpu":
            return available_memory() // 4
        return max(self.free_device_memory() - self.reserved_memory, 0)

    def free_device_memory(self) -> int:
        """Return the free memory of the device in bytes, with the largest step not yet deducted."""
        from fd_core.ops.paddle.framework import free_device_memory

        return free_device_memory(self.place)

    def describe(self) -> str:
        cpu = f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''}, Paddle eager"
        if self.emulated:
            return f"{self.title} emulated on the {cpu}: no evidence for the hardware"
        if self.place == "cpu":
            return cpu
        reserved = f", {self._reserved / 2**20:,.0f} MiB measured for steps" if self._reserved else ""
        return f"{self.title}, Paddle eager{reserved}"

    def _dtype(self) -> str:
        offered = ("float32",) if self.place == "cpu" else ("bfloat16", "float32")
        wanted = self.requested_dtype(*offered)
        if wanted is None:
            self.dtype_reason = self.limits.get("bfloat16", f"Paddle supports it on the {self.title}")
        return wanted or offered[0]


class CpuPaddleBackend(ProcessorBackend, PaddleBackend):
    """Paddle on the host's CPUs, float32."""

    name: ClassVar[str] = "cpu+paddle"
    kernels = "Paddle eager"
    device: ClassVar[str] = "cpu"
    title: ClassVar[str] = "processor"
    paddle_hint: ClassVar[str] = "pip install 'fd-core[paddle]'"
    longest_sort: ClassVar[int | None] = None
    auto_rank: ClassVar[int] = 5

    @classmethod
    def probe(cls) -> Availability:
        """Return available if any distribution provides Paddle; does not import it."""
        if not paddle_installed():
            return Availability(False, f"Paddle is not installed; {cls.paddle_hint}")
        return Availability(True, "Paddle is installed")
