"""Axes of scaling policies: loads over time; two instances have to agree in each case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fd_core.cluster.scaling import GroupLoad, ScalingPolicy
from fd_core.router.workers import ROLES
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import another_world
from fd_core.testing.stores.values import draws

_SHAPES: Final[dict[str, Callable[[int, int], float]]] = {
    "constant": lambda call, calls: 1.0,
    "rising": lambda call, calls: (call + 1) / calls,
    "falling": lambda call, calls: 1 - call / calls,
    "pulses": lambda call, calls: float(call % 3 == 0),
    "random": lambda call, calls: draws(call).random(),
}
"""Share of the load of a case, by the number of the call."""

AXES: Final = (
    Axis("role", ROLES, ("GroupLoad.role",)),
    Axis("target", (2, 0, 1, 3, 64, 1000), ("GroupLoad.target",)),
    Axis("ready", ("all", "none", "one less", "one more"), ("GroupLoad.ready",)),
    Axis("slots", (8, 0, 1, 1024), ("GroupLoad.slots",)),
    Axis("running", (1.0, 0.0, 0.5), ("GroupLoad.running",)),
    Axis("waiting", (0, 1, 9, 40_000, 2**31), ("GroupLoad.waiting",)),
    Axis("kv_usage", (0.5, 0.0, 2**-40, 0.899, 0.9, 1.0), ("GroupLoad.kv_usage",)),
    Axis("ttft_seconds", (None, 0.0, 1e-9, 1.5, 3600.0), ("GroupLoad.ttft_seconds",)),
    Axis("shape", tuple(_SHAPES)),
    Axis("calls", (30, 1, 2, 700)),
    Axis("interval", (1.0, 0.0, 0.001, 5.0, 3600.0)),
    Axis("now", (0.0, 32_767.0, 2_147_483_640.0, 4_294_967_290.0, 1e12), ("ScalingPolicy.propose.now",)),
    Axis("follows", (False, True)),
)
"""Axes of a sequence of calls; a case that follows sets the target to what the policy proposed."""
_IDLE: Final = GroupLoad(role="mixed", target=9, ready=9, slots=144)
EXCUSED: Final[Mapping[str, str]] = {"ScalingPolicy.options": "the suite's `options`"}
"""Fields of the contract that no axis varies, with the reason."""


def check_scaling(make: Callable[[], ScalingPolicy], case: Case) -> None:
    """Compare equal calls of two instances, beside another group and in another world. Raises `AssertionError`."""
    one, idle, target, past = make(), make(), int_of(case, "target"), list[tuple[GroupLoad, float, int]]()
    for call, now in enumerate(_times(case)):
        load = _load(case, call, target)
        proposed = one.propose(load, now)
        assert type(proposed) is int, f"call {call} proposed {proposed!r}, which is no int"
        assert proposed >= 0, f"call {call} proposed {proposed} workers"
        past.append((load, now, proposed))
        idle.propose(_IDLE, now)
        target = min(proposed, 1000) if case["follows"] else target
    other = make()
    with ThreadPoolExecutor(1) as pool:
        for call, (load, now, proposed) in enumerate(past):
            with another_world(shift=77 + call):
                again = pool.submit(other.propose, load, now).result()
            assert again == proposed, f"two instances with equal calls differ at call {call}: {proposed} and {again}"


def _times(case: Case) -> Iterator[float]:
    start, interval = float(case["now"] or 0), float(case["interval"] or 0)
    return (start + call * interval for call in range(int_of(case, "calls")))


def _load(case: Case, call: int, target: int) -> GroupLoad:
    share = _SHAPES[str(case["shape"])](call, int_of(case, "calls"))
    ready = {"none": 0, "one less": max(0, target - 1), "one more": target + 1}.get(str(case["ready"]), target)
    slots, late = ready * int_of(case, "slots"), case["ttft_seconds"]
    return GroupLoad(
        role=str(case["role"]),  # type: ignore[arg-type]
        target=target,
        ready=ready,
        running=int(share * slots * float(case["running"] or 0)),
        waiting=int(share * int_of(case, "waiting")),
        slots=slots,
        kv_usage=share * float(case["kv_usage"] or 0),
        ttft_seconds=None if late is None else share * float(late),
    )


SCALING: Final[Part[Callable[[], ScalingPolicy]]] = Part("scaling", AXES, check_scaling)
