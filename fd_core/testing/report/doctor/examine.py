"""Examine one pack, check by check, in a separate process, because a driver crash is a finding, too.

python -m fd_core.testing.report.doctor.examine BACKEND NUMBER EVENTS STDERR [OPERATION,...]
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.errors import ConfigError, FdError
from fd_core.ops.contract import Array, Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.axes.parts import cases_of, supported_by
from fd_core.testing.kit.target import parse_target
from fd_core.testing.models.arrays import assert_near, assert_same
from fd_core.testing.report.doctor.checks import CHECKS, PART_CHECKS, SIZES, OpCheck, PartCheck, Size
from fd_core.testing.report.doctor.runs import OpFinding, PackDescribed, PackRefused, ProbeBegun

_ORACLE: Final = NumpyOps()
_FALL_BACK: Final = re.compile(r"fall(?:s|ing|en)?[ _-]?back", re.IGNORECASE)
_COPIED: Final = (4096, 2048)
_SECONDS_OF_A_PART: Final = 2.0
"""Time after which no further case of a part is begun."""

HostCalls = Callable[[], str]
"""Return the process's error output since the last call."""


def examine(
    ops: Ops,
    check: OpCheck,
    size: Size,
    limits: Mapping[str, str],
    bandwidth: float | None,
    read_output: HostCalls = str,
) -> OpFinding:
    """Compute one check on a pack and on the oracle. Never raises."""
    found = OpFinding(primitive=check.primitive, case=check.case, dtype=ops.dtype, size=size.name, outcome="ok")
    for ability in ("primitives", *check.asks):
        if ability in limits:
            return msgspec.structs.replace(found, outcome="limit", reason=f"{ability}: {limits[ability]}")
    if check.kv_dtype not in ("auto", *ops.kv_dtypes):
        return msgspec.structs.replace(found, outcome="limit", reason=f"no KV in {check.kv_dtype}")
    read_output()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            prepared = check.prepare(ops, size)
            first = prepared.call()
            arrays = list(prepared.results(first))
            hosts = [np.array(ops.to_host(array)) for array in arrays]
        words = [*(str(each.message) for each in warned), *read_output().splitlines()]
        fell_back = _elsewhere(ops, arrays) or next(filter(_FALL_BACK.search, words), "")
        found = msgspec.structs.replace(found, fell_back=_line(fell_back))
        right = check.prepare(_ORACLE, size)
        _compare(ops, check, hosts, right=[np.array(each) for each in right.results(right.call())])
        if size is SIZES[-1] and prepared.moved:
            if find_spec(calls := f"fd_core.ops.{ops.framework}.calls"):
                with import_module(calls).recorded_calls() as names:
                    prepared.call()
                found = msgspec.structs.replace(found, calls=tuple(names))
            seconds, floor = _shortest(ops, prepared.call), prepared.moved / bandwidth if bandwidth else None
            ratio = seconds / floor if floor else None
            found = msgspec.structs.replace(found, seconds=seconds, floor_seconds=floor, ratio=ratio)
    except AssertionError as error:
        return msgspec.structs.replace(found, outcome="wrong", reason=_line(str(error).partition("\n")[0]))
    except Exception as error:  # noqa: BLE001 - a vendor's kernel may raise anything
        return msgspec.structs.replace(found, outcome="missing", reason=_line(f"{type(error).__name__}: {error}"))
    return found


def examine_cases(ops: Ops, check: PartCheck, limits: Mapping[str, str], backend: str) -> OpFinding:
    """Check an operation in cases of the kit until one fails, which is reduced, or the time is over. Never raises."""
    found = OpFinding(primitive=check.primitive, case="cases", dtype=ops.dtype, size="", outcome="ok")
    for ability in check.asks:
        if ability in limits:
            return msgspec.structs.replace(found, outcome="limit", reason=f"{ability}: {limits[ability]}")
    cases, _ = cases_of(check.part)
    begun, done = time.perf_counter(), 0
    try:
        for case in cases:
            done += 1
            case.with_only(supported_by(ops, limits)).check(ops, f"fdcore conformance {backend}")
            if time.perf_counter() - begun > _SECONDS_OF_A_PART:
                break
    except AssertionError as error:
        found = msgspec.structs.replace(found, outcome="wrong", reason=_line(str(error), 1000))
    return msgspec.structs.replace(found, size=f"{done} of {len(cases)} cases")


def _compare(ops: Ops, check: OpCheck, found: list[npt.NDArray[Any]], right: list[npt.NDArray[Any]]) -> None:
    assert len(found) == len(right), f"expected {len(right)} arrays, got {len(found)}"
    for ours, theirs in zip(found, right, strict=True):
        assert ours.shape == theirs.shape, f"expected shape {theirs.shape}, got {ours.shape}"
        if check.exact or theirs.dtype.kind in "iu":
            assert_same(ours, theirs)
        elif check.primitive == "logprobs":  # float32 in packs of any dtype
            assert_near(_ORACLE, ours, theirs)
        else:
            assert_near(ops, ops.from_host(ours), theirs)


def copy_bandwidth(ops: Ops) -> float | None:
    """Return bytes read and written in a second by a copy of rows on the device; None if that fails."""
    try:
        x = ops.from_host(np.ones(_COPIED, np.float32))
        rows = ops.from_host(np.arange(_COPIED[0], dtype=np.int32))
        return 2 * 4 * _COPIED[0] * _COPIED[1] / _shortest(ops, lambda: ops.gather_rows(x, rows))
    except Exception:  # noqa: BLE001 - the check of that operation reports it
        return None


def _shortest(ops: Ops, call: Callable[[], Any]) -> float:
    """Return the minimum seconds of a few calls, including synchronization."""
    best, begun = float("inf"), time.perf_counter()
    for _ in range(5):
        started = time.perf_counter()
        call()
        # Work is executed in order, so a copy of four bytes completes after all earlier work.
        ops.to_host(ops.from_host(np.zeros(1, np.int32)))
        best = min(best, time.perf_counter() - started)
        if time.perf_counter() - begun > 0.5:
            break
    return best


def _elsewhere(ops: Ops, arrays: list[Array]) -> str:
    """Return a message about an array on another device than the pack's arrays; empty if there is none."""
    home = ops.from_host(np.zeros(1, np.float32))
    for array in arrays:
        if isinstance(array, np.ndarray) and not isinstance(home, np.ndarray):
            return "it returned a numpy array"
        if _place(array) != _place(home):
            return f"expected a result on {_place(home)}, got {_place(array)}"
    return ""


def _place(array: Array) -> str:
    for name in ("device", "place"):
        if (place := getattr(array, name, None)) is not None:
            return str(place)
    return ""


def _line(text: str, length: int = 300) -> str:
    return " ".join(text.split())[:length]


def _new_words(path: Path) -> HostCalls:
    read = 0

    def words() -> str:
        nonlocal read
        sys.stderr.flush()
        with path.open("rb") as file:
            file.seek(read)
            content = file.read()
        read += len(content)
        return content.decode(errors="replace")

    return words


def _events(
    text: str, begin: int, folder: Path, read_output: HostCalls, only: frozenset[str]
) -> Iterator[msgspec.Struct]:
    target = parse_target(text, folder)
    try:
        ops = target.ops
    except FdError as error:
        yield PackRefused(_line(str(error)), by_config=isinstance(error, ConfigError))
        return
    except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
        yield PackRefused(_line(f"{type(error).__name__}: {error}"), by_config=False)
        return
    bandwidth = copy_bandwidth(ops)
    work: list[tuple[OpCheck | PartCheck, Size | None]] = [(check, size) for check in CHECKS for size in SIZES]
    work += [(check, None) for check in PART_CHECKS]
    work = [(check, size) for check, size in work if not only or check.primitive in only]
    yield PackDescribed(ops.dtype, target.backend.describe(), target.emulated, bandwidth, len(work))
    for number, (check, size) in enumerate(work[begin:], begin):
        if isinstance(check, PartCheck):
            yield ProbeBegun(number, check.primitive, "cases", size="")
            yield examine_cases(ops, check, target.limits, text)
            continue
        assert size is not None
        yield ProbeBegun(number, check.primitive, check.case, size=size.name)
        yield examine(ops, check, size, limits=target.limits, bandwidth=bandwidth, read_output=read_output)


def _main(text: str, begin: str, events: str, errors: str, only: str = "") -> None:
    names = frozenset(only.splitlines())
    folder = Path(f"{events}-models")  # the parent removes it even if this process crashes
    with Path(events).open("ab", buffering=0) as file:
        for event in _events(text, int(begin), folder, read_output=_new_words(Path(errors)), only=names):
            file.write(msgspec.json.encode(event) + b"\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
