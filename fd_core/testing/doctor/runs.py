"""Runs the examination, a process for each dtype; one that ends in the middle is followed by one for the rest."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

import fd_core
from fd_core.errors import ConfigError
from fd_core.testing.doctor.checks import CHECKS
from fd_core.testing.doctor.model import DoctorReport, OpFinding, PackDescribed, PackRefused, ProbeBegun
from fd_core.testing.kit.processes import SilentError, follow
from fd_core.testing.kit.target import parse_target

_DTYPES: Final = ("float32", "bfloat16")
_PATIENCE: Final = float(os.environ.get("FD_DOCTOR_PATIENCE", "120"))
"""Seconds without an event after which a check counts as hanging."""
_TALKATIVE: Final = {"GLOG_vmodule": "kernel_factory=6"}
"""Lets Paddle say that it computes on the host what a device has no kernel for."""

DoctorEvent = PackDescribed | PackRefused | ProbeBegun | OpFinding
DoctorProgress = Callable[[str, int, int], None]
"""Called with (the operation and its dtype, checks done, checks in all)."""


def run_doctor(text: str, progress: DoctorProgress, only: Sequence[str] = ()) -> DoctorReport:
    """Examine the backend that `NAME` or `NAME:FIELD=VALUE` names, in every dtype that it offers.

    `only` names operations; none for all. Raises `PluginError` if the backend is missing or cannot run here, and
    `ConfigError` for a field or an operation that there is not.
    """
    known = dict.fromkeys(check.primitive for check in CHECKS)
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(f"{unknown[0]!r} is not one of {', '.join(known)}", field="--only")
    packs: list[PackDescribed] = []
    findings: list[OpFinding] = []
    with tempfile.TemporaryDirectory(prefix="fdcore-doctor-") as name:
        target = parse_target(text, Path(name))
        _ = target.cls
        texts = {target.config().dtype: text}
        if target.config().dtype == "auto":
            texts = {dtype: f"{text}{',' if ':' in text else ':'}dtype={dtype}" for dtype in _DTYPES}
        for dtype, each in texts.items():
            _examine(each, dtype, only, Path(name) / dtype, progress, packs, findings)
    return DoctorReport(
        fd_core=fd_core.__version__,
        machine=f"{platform.system()} {platform.machine()}",
        backend=text,
        packs=packs,
        findings=findings,
    )


def _examine(
    text: str,
    dtype: str,
    only: Sequence[str],
    folder: Path,
    progress: DoctorProgress,
    packs: list[PackDescribed],
    findings: list[OpFinding],
) -> None:
    """Examine one dtype, in as many processes as it takes."""
    folder.mkdir()
    begin, examined, about = 0, 0, None
    while True:
        running: ProbeBegun | None = None
        ended = ""
        for event in _run(text, begin, only, folder / str(begin)):
            match event:
                case str():
                    ended = event
                case PackDescribed():
                    if about is None:
                        packs.append(event)
                    about = event
                case PackRefused():
                    outcome = "limit" if event.by_config else "missing"
                    findings.append(_of_pack(dtype, outcome, event.reason))
                    return
                case ProbeBegun():
                    running = event
                    what = " ".join(filter(None, (event.primitive, event.case, dtype)))
                    progress(what, event.number, 0 if about is None else about.checks)
                case OpFinding():
                    findings.append(event)
                    running, examined = None, examined + 1
        # What a driver does at the end of a process, when all is examined, is no finding.
        if not ended or (about is not None and examined == about.checks):
            return
        if running is None:
            findings.append(_of_pack(dtype, "crash", f"the process {ended} before the first operation or between two"))
            return
        findings.append(
            OpFinding(
                primitive=running.primitive,
                case=running.case,
                dtype=dtype,
                size=running.size,
                outcome="hang" if "hang" in ended else "crash",
                reason=f"the process {ended}",
            )
        )
        begin = examined = running.number + 1


def _of_pack(dtype: str, outcome: str, reason: str) -> OpFinding:
    return msgspec.convert(
        {"type": "finding", "primitive": "make_ops", "dtype": dtype, "size": "", "outcome": outcome, "reason": reason},
        OpFinding,
    )


def _run(text: str, begin: int, only: Sequence[str], path: Path) -> Iterator[DoctorEvent | str]:
    """Yield what a process finds from a check on, and last how it ended if that was not by itself."""
    errors = path.with_suffix(".errors")
    command = [sys.executable, "-P", "-m", "fd_core.testing.doctor.examine", text, str(begin), str(path), str(errors)]
    command += [",".join(only)]
    with (
        errors.open("ab") as output,
        # The child ends when its standard input closes, which is when nobody follows it any more.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=_TALKATIVE | os.environ
        ) as process,
    ):
        try:
            yield from follow(process, path, DoctorEvent, _PATIENCE)
        except SilentError:
            yield f"hangs: nothing came for {_PATIENCE:.0f} s"
            return
        finally:
            process.kill()
        if process.returncode < 0:
            yield f"was ended by signal {-process.returncode}"
        elif process.returncode:
            yield f"ended with exit status {process.returncode}"
