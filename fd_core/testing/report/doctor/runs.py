"""Runs the examination in one process per dtype, plus one for the remaining checks after each crash."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

import fd_core
from fd_core.errors import ConfigError
from fd_core.launching.child import child_command
from fd_core.testing.kit.processes import RunEnd, follow
from fd_core.testing.kit.target import parse_target
from fd_core.testing.report.doctor.checks import CHECKS
from fd_core.testing.report.scratch import scratch_folder

_DTYPES: Final = ("float32", "bfloat16", "float16")
"""Dtypes that are examined; the last one only if a backend has none of the others."""
_PATIENCE: Final = float(os.environ.get("FD_DOCTOR_PATIENCE", "120"))
"""Seconds without an event after which a check counts as hanging."""
_TALKATIVE: Final = {"GLOG_vmodule": "kernel_factory=6"}
"""Makes Paddle log operations that fall back to the host for lack of a device kernel."""

_COMPOSED: Final = 4
"""Framework calls of a composed operation; a single kernel may need others to allocate and view its arrays."""

Outcome = Literal["ok", "missing", "wrong", "crash", "hang", "limit"]
"""`missing`: raised; `wrong`: differs from the oracle; `crash`: ended the process; `hang`: timed out; `limit`: a
declared limit of the backend, or an unsupported dtype."""


class OpFinding(msgspec.Struct, frozen=True, kw_only=True, tag="finding"):
    """One operation in one dtype."""

    primitive: str
    dtype: str
    outcome: Outcome
    reason: str = ""
    """Exception or size of the deviation; empty if the check passed."""
    fell_back: str = ""
    """Evidence that the host computed it; empty if there is none."""
    seconds: float | None = None
    """Minimum seconds of several calls, including synchronization."""
    calls: tuple[str, ...] | None = None
    """Calls of the framework, such as `matmul`, at the largest size; None if they were not recorded."""
    floor_seconds: float | None = None
    """Lower bound in seconds: the minimum bytes at the copy bandwidth of the device."""

    ratio: float | None = None
    """Time as a multiple of the floor."""

    @property
    def slow(self) -> bool:
        # Below a millisecond, the overhead of the call dominates.
        return (self.ratio or 0.0) >= 10.0 and (self.seconds or 0.0) >= 1e-3

    @property
    def composed(self) -> bool:
        """True if the framework composes it of several kernels, which one kernel of the device could replace."""
        return len(self.calls or ()) >= _COMPOSED

    @property
    def bad(self) -> bool:
        return self.outcome not in ("ok", "limit")


class PackDescribed(msgspec.Struct, frozen=True, tag="about"):
    """The device and the pack of one dtype."""

    dtype: str
    device: str
    emulated: bool
    bandwidth: float | None
    """Copy bandwidth of the device in bytes read and written per second; None if it could not be measured."""
    checks: int


class PackRefused(msgspec.Struct, frozen=True, tag="refused"):
    """The pack could not be created, with a one-line reason."""

    reason: str
    by_config: bool
    """True if the backend does not support the dtype; otherwise it is broken."""


class ProbeBegun(msgspec.Struct, frozen=True, tag="begun"):
    """A check began, or one of its operations. If no event follows, it crashed the process."""

    number: int
    primitive: str


class ProbeEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A check ended."""

    number: int


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of `fdcore doctor`."""

    schema: int = 2
    fd_core: str
    machine: str
    backend: str
    packs: list[PackDescribed]
    findings: list[OpFinding]

    @property
    def well(self) -> bool:
        """True if some check ran, and none is missing or wrong."""
        return any(each.outcome == "ok" for each in self.findings) and not any(each.bad for each in self.findings)


DoctorEvent = PackDescribed | PackRefused | ProbeBegun | ProbeEnded | OpFinding
DoctorProgress = Callable[[str, int, int], None]
"""Called with (operation and dtype, checks done, total checks)."""


def run_doctor(text: str, progress: DoctorProgress, only: Sequence[str] = ()) -> DoctorReport:
    """Examine the backend `NAME` or `NAME:FIELD=VALUE` in every dtype that it supports.

    `only` names operations; none for all. Raises `PluginError` if the backend is missing or cannot run here, and
    `ConfigError` for an unknown field or operation.
    """
    known = dict.fromkeys(name for check in CHECKS for name in check.operations)
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"{unknown[0]!r} is not one of {', '.join(known)}", field="--only")
    found: list[PackDescribed | OpFinding] = []
    with scratch_folder("fdcore-doctor-") as own:
        target = parse_target(text, own)
        _ = target.cls
        texts = {target.config().dtype: text}
        if target.config().dtype == "auto":
            texts = {dtype: f"{text}{',' if ':' in text else ':'}dtype={dtype}" for dtype in _DTYPES}
        for dtype, each in texts.items():
            if dtype == _DTYPES[-1] and any(isinstance(event, PackDescribed) for event in found):
                continue
            found += _examine(each, dtype, only, folder=own / dtype, progress=progress)
    return DoctorReport(
        fd_core=fd_core.__version__,
        machine=f"{platform.system()} {platform.machine()}",
        backend=text,
        packs=[each for each in found if isinstance(each, PackDescribed)],
        findings=[each for each in found if isinstance(each, OpFinding)],
    )


def _examine(
    text: str, dtype: str, only: Sequence[str], folder: Path, progress: DoctorProgress
) -> Iterator[PackDescribed | OpFinding]:
    """Examine one dtype, in as many processes as necessary."""
    folder.mkdir()
    errors = folder / "errors"
    begin, examined, about = 0, 0, None
    while True:
        running: ProbeBegun | None = None
        ended = ""
        path = folder / str(begin)
        words = (text, str(begin), str(path), str(errors), "\n".join(only))
        # The child exits when its standard input closes, that is, when this process is gone.
        command = child_command((), "-m", "fd_core.testing.report.doctor.examine", *words)
        environment = _TALKATIVE | os.environ
        for event in follow(
            command, path, DoctorEvent, _PATIENCE, output=errors, stdin=subprocess.PIPE, env=environment
        ):
            match event:
                case PackDescribed():
                    if about is None:
                        yield event
                    about = event
                case PackRefused():
                    yield _of_pack(dtype, "limit" if event.by_config else "missing", event.reason)
                    return
                case ProbeBegun():
                    if running is None:
                        progress(f"{event.primitive} {dtype}", event.number, 0 if about is None else about.checks)
                    running = event
                case ProbeEnded(number):
                    running, examined = None, number + 1
                case OpFinding():
                    yield event
                case RunEnd(_, silent=True):
                    ended = f"hangs: no event for {_PATIENCE:.0f} s"
                case RunEnd(code) if code:
                    ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit status {code}"
        # A driver crash at exit, after all checks, is not a finding.
        if not ended or (about is not None and examined == about.checks):
            return
        if running is None:
            yield _of_pack(dtype, "crash", f"the process {ended} before the first operation or between two")
            return
        yield OpFinding(
            primitive=running.primitive,
            dtype=dtype,
            outcome="hang" if "hang" in ended else "crash",
            reason=f"the process {ended}",
        )
        begin = examined = running.number + 1


def _of_pack(dtype: str, outcome: Outcome, reason: str) -> OpFinding:
    return OpFinding(primitive="make_ops", dtype=dtype, outcome=outcome, reason=reason)
