"""Examine one pack, check by check, in a separate process, because a driver crash is a finding, too.

python -m fd_core.testing.report.doctor.examine BACKEND NUMBER EVENTS STDERR [OPERATION,...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

import msgspec
import numpy as np

from fd_core.errors import ConfigError, FdError
from fd_core.ops.contract import Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.axes.parts import KitCase, cases_of, supported_by
from fd_core.testing.kit.target import parse_target
from fd_core.testing.models.arrays import assert_near, assert_same
from fd_core.testing.report.doctor.checks import CHECKS, OpCheck
from fd_core.testing.report.doctor.runs import OpFinding, PackDescribed, PackRefused, ProbeBegun, ProbeEnded
from fd_core.testing.report.doctor.watching import WatchedOps, shortest

_COPIED: Final = (4096, 2048)
_SECONDS_OF_A_PART: Final = 2.0
"""CPU time after which no further case of a part is begun: a busy machine does not lower their number."""

HostCalls = Callable[[], str]
"""Return the process's error output since the last call."""


def examine(
    ops: Ops,
    check: OpCheck,
    limits: Mapping[str, str],
    backend: str,
    bandwidth: float | None = None,
    read_output: HostCalls = str,
    began: Callable[[str], None] = lambda _: None,
) -> list[OpFinding]:
    """Run cases of the kit until one fails, which is reduced, or the time is over; then time the largest. Never raises.

    A failure is of the operation that raised, or else of the first one with another result than numpy's.
    """
    findings = {name: OpFinding(primitive=name, dtype=ops.dtype, outcome="ok") for name in check.operations}
    for ability in (*check.part.needs, *check.asks):
        if ability in limits:
            reason = f"{ability}: {limits[ability]}"
            return [msgspec.structs.replace(each, outcome="limit", reason=reason) for each in findings.values()]
    large = [check.part.case(text) for text in check.large]
    fell_back: dict[str, str] = {}
    begun = time.process_time()
    for case in (*large, *cases_of(check.part)[0]):
        watched = WatchedOps(ops, began, read_output)
        supported = case.with_only(supported_by(ops, limits))
        try:
            check.part.check(cast(Ops, watched), supported.values)
        except Exception as error:  # noqa: BLE001 - a vendor's kernel may raise anything
            return [_failure(ops, check, supported, error, watched.raised, backend)]
        fell_back |= {name: fell_back.get(name) or words for name, words in watched.fell_back.items()}
        if case not in large and time.process_time() - begun > _SECONDS_OF_A_PART:
            break
    for name in findings.keys() & fell_back.keys():
        findings[name] = msgspec.structs.replace(findings[name], fell_back=_line(fell_back[name]))
    for case in large:
        watched = WatchedOps(ops, began, timed=check.operations)
        with suppress(Exception):  # calls that are repeated may change the results
            check.part.check(cast(Ops, watched), case.with_only(supported_by(ops, limits)).values)
        for name, cost in watched.costs.items():
            floor = cost.moved / bandwidth if bandwidth and cost.moved else None
            ratio = cost.seconds / floor if floor else None
            findings[name] = msgspec.structs.replace(
                findings[name], seconds=cost.seconds, floor_seconds=floor, ratio=ratio, calls=cost.calls
            )
    return [each for name, each in findings.items() if name in fell_back]  # those that a case called


def _failure(ops: Ops, check: OpCheck, case: KitCase, error: Exception, raised: str, backend: str) -> OpFinding:
    if raised:
        reason = f"{type(error).__name__}: {error}"
        return OpFinding(primitive=raised, dtype=ops.dtype, outcome="missing", reason=_line(reason))
    reason = f"{case}: {error}"
    try:
        case.check(ops, f"fdcore conformance {backend}")
    except AssertionError as reduced:
        reason = str(reduced)
    name = _deviating(ops, case) or check.label
    return OpFinding(primitive=name, dtype=ops.dtype, outcome="wrong", reason=_line(reason, 1000))


def _deviating(ops: Ops, case: KitCase) -> str:
    """Return the first operation of a case whose result is not that of numpy; empty if there is none."""
    packs = ops, NumpyOps()
    own = {name for pack in packs for name in vars(Ops) if getattr(type(pack), name, None) is not getattr(Ops, name)}
    sides = [WatchedOps(each, traced=own) for each in packs]
    for side in sides:
        with suppress(Exception):
            case.part.check(cast(Ops, side), case.values)
    for (name, found), (other, expected) in zip(*(side.results for side in sides), strict=False):
        if name != other:
            break
        try:
            for ours, right in zip(found, expected, strict=True):
                assert ours.shape == right.shape
                if right.dtype.kind in "iu":
                    assert_same(ours, right)
                elif right.size and np.isfinite(right).all():
                    assert_near(ops, ops.from_host(np.asarray(ours, np.float32)), np.asarray(right, np.float32))
        except (AssertionError, ValueError):
            return name
    return ""


def copy_bandwidth(ops: Ops) -> float | None:
    """Return bytes read and written in a second by a copy of rows on the device; None if that fails."""
    try:
        x = ops.from_host(np.ones(_COPIED, np.float32))
        rows = ops.from_host(np.arange(_COPIED[0], dtype=np.int32))
        return 2 * 4 * _COPIED[0] * _COPIED[1] / shortest(ops, lambda: ops.gather_rows(x, rows))
    except Exception:  # noqa: BLE001 - the check of that operation reports it
        return None


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


def _examine_all(
    text: str,
    begin: int,
    folder: Path,
    read_output: HostCalls,
    only: frozenset[str],
    publish: Callable[[msgspec.Struct], None],
) -> None:
    target = parse_target(text, folder)
    try:
        ops = target.ops
    except FdError as error:
        publish(PackRefused(_line(str(error)), by_config=isinstance(error, ConfigError)))
        return
    except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
        publish(PackRefused(_line(f"{type(error).__name__}: {error}"), by_config=False))
        return
    bandwidth = copy_bandwidth(ops)
    checks = [check for check in CHECKS if not only or only & {*check.operations}]
    publish(PackDescribed(ops.dtype, target.backend.describe(), target.emulated, bandwidth, len(checks)))
    for number, check in enumerate(checks[begin:], begin):
        publish(ProbeBegun(number, check.label))

        def began(name: str, number: int = number) -> None:
            publish(ProbeBegun(number, name))

        for found in examine(ops, check, target.limits, text, bandwidth, read_output, began):
            if not only or found.primitive in only or found.bad:
                publish(found)
        publish(ProbeEnded(number))


def _main(text: str, begin: str, events: str, errors: str, only: str = "") -> None:
    names = frozenset(only.splitlines())
    folder = Path(f"{events}-models")  # the parent removes it even if this process crashes
    with Path(events).open("ab", buffering=0) as file:

        def publish(event: msgspec.Struct) -> None:
            file.write(msgspec.json.encode(event) + b"\n")

        _examine_all(text, int(begin), folder, _new_words(Path(errors)), names, publish)


if __name__ == "__main__":
    _main(*sys.argv[1:])
