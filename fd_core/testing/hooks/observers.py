"""The cases that every observer has to pass.

The engine counts the exceptions of an observer and drops steps while it lags. The kit is stricter: an observer accepts
every step, keeps up, and leaves neither threads nor descriptors after `close`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import gettempdir
from typing import Final

import msgspec
import pytest

from fd_core.plugins import OBSERVER, installed_plugins
from fd_core.runner.observing import Observer, SampledRequest, SampledStep
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.connectors.remote import resource_snapshot
from fd_core.testing.hooks.observed import OBSERVED, check_observer, steps_of
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import require_bounded, require_idle
from fd_core.testing.kit.privacy import created_paths, hidden_from_other_users
from fd_core.testing.kit.requirements import OPEN, Requirement, constructed, lacks

_MANY: Final = "steps=33000,requests=1"
_FEW: Final = "steps=300,requests=1"
_FULL: Final = "steps=900,requests=64"
_STEP_SECONDS: Final = 0.005
"""Mean time of such a step."""
_CLOSE_SECONDS: Final = 3.0
"""Time of `close`, which an engine that ends leaves after 5 seconds."""
_RECORDED: Final = 299
"""Steps that fill no buffer of a usual size exactly."""
_TOKEN: Final = 151_637
"""Token of all steps that an observer may write."""
_MOST_BYTES: Final = 1 << 24
"""Size of a file that may be that of the steps of a test."""
_ROUND: Final = 4096
"""Steps, a few times of which fill what an observer keeps up to a limit."""


class ObserverSuite:
    """Derive a class `Test...` from it and name the observer."""

    observer: str
    """Value that users pass to `--observer`."""
    bounded: Requirement = OPEN
    """Its memory does not grow with the steps of an engine."""

    def observer_class(self) -> type[Observer]:
        """Return the class of the observer; override for a class that no plugin registers."""
        return installed_plugins().load(OBSERVER, self.observer)

    def new_observer(self) -> Observer:
        """Create the observer as an engine does."""
        return self.observer_class()()

    def construct(self) -> None:
        """Construct the plugin. Raises `PluginError`."""
        constructed(OBSERVER, self.observer_class(), self.new_observer).close()

    @pytest.mark.law("8")
    @pytest.mark.fd_cases(OBSERVED)
    def test_case(self, case: KitCase) -> None:
        case.check(self.new_observer, "pytest", option="--fd-case")

    @pytest.mark.law("8")
    def test_closing_releases_threads_and_files(self) -> None:
        case = OBSERVED.case("plain").values
        check_observer(self.new_observer, case)  # first imports stay
        before = resource_snapshot()
        for _ in range(3):
            check_observer(self.new_observer, case)
        after = resource_snapshot()
        assert after.threads == before.threads, f"threads are left running: {after.threads}"
        assert after.processes == before.processes, f"processes are left running: {after.processes}"
        assert after.descriptors == before.descriptors, f"descriptors are left open: {after.descriptors}"

        def close_one() -> Observer:
            observer = self.new_observer()
            observer.close()  # a thread may refer to it until then
            return observer

        require_freed(close_one)

    @pytest.mark.law("8")
    def test_what_it_writes_has_the_last_step(self) -> None:
        """Look for the ids of requests in its files after `close`, if it writes all of them."""
        one, *two = (
            [f"request {number} of {_RECORDED} by {by}" for number in range(_RECORDED)]
            for by in ("one", "two", "three")
        )
        written = self._written(one)
        if not all(name.encode() in written for name in one[: _RECORDED // 4]):
            lacks("it writes no file that has the id of each request")
        lost = [name for name in one if name.encode() not in written]
        assert not lost, f"after close, its files lack the last {len(lost)} of {_RECORDED} steps"
        written = self._written(*two)
        lost = [name for names in two for name in names if name.encode() not in written]
        assert len(lost) < _RECORDED // 8, (  # buffers of a file that both append to may cut lines
            f"two observers at once, as of two engines, lose {len(lost)} of {2 * _RECORDED} steps in their files: use "
            "another file for each, or append"
        )

    def _written(self, *requests: list[str]) -> bytes:
        """Return what observers write at the same time, each about its requests.

        Other users of the machine may open no file with the ids of tokens, which are the text of an answer.
        """
        hidden = str(_TOKEN).encode(), _TOKEN.to_bytes(4, "little")
        with created_paths() as files, hidden_from_other_users(Path(gettempdir()), *hidden):
            observers = [self.new_observer() for _ in requests]
            for number, names in enumerate(zip(*requests, strict=True)):
                for observer, name in zip(observers, names, strict=True):
                    observer.observe(SampledStep(0, number, (SampledRequest(name, (_TOKEN,), 0, 0),)))
            for observer in observers:
                observer.close()
        return b"".join(each.read_bytes() for each in files if each.is_file() and each.stat().st_size < _MOST_BYTES)

    @pytest.mark.law("8")
    @pytest.mark.parametrize("restarts", [False, True])
    def test_memory_does_not_grow_with_steps(self, *, restarts: bool) -> None:
        """Steps of one epoch, or each of another one."""
        self.bounded.require()
        observer = self.new_observer()
        steps = steps_of({**OBSERVED.case("requests=1").values, "steps": sys.maxsize})

        def use(number: int) -> None:
            step = next(steps)
            observer.observe(msgspec.structs.replace(step, epoch=number) if restarts else step)

        require_bounded(use, _ROUND, "steps", "8", may_wait=True)
        observer.close()

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("8")
    def test_a_step_of_many_requests_takes_little_time(self) -> None:
        """Take the mean, as some steps may write what others left, and wait for more steps and for the end."""
        observer = self.new_observer()
        try:
            times = _times(observer, _FULL)
            seconds = sum(times) / len(times)
            require_idle("an observer that waits for steps")
        finally:
            start = time.perf_counter()
            observer.close()
            closing = time.perf_counter() - start
        assert seconds < _STEP_SECONDS, (
            f"a step of 64 requests takes {1000 * seconds:.1f} ms in the mean of {len(times)}, and "
            f"{1000 * max(times):.0f} at most, expected less than {1000 * _STEP_SECONDS:.0f} in the mean: an "
            "engine makes hundreds of steps a second, and drops those for which the observer is too slow"
        )
        assert closing < _CLOSE_SECONDS, (
            f"`close` takes {closing:.1f} s, expected less than {_CLOSE_SECONDS:g}: an engine that ends does not wait "
            "for it, and what is not written by then is lost"
        )

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("8")
    def test_the_time_of_a_step_does_not_grow_with_past_steps(self) -> None:
        observer = self.new_observer()
        before = min(_times(observer, _FEW))
        for step in steps_of(OBSERVED.case(_MANY).values):
            observer.observe(step)
        after = min(min(_times(observer, _FEW)) for _ in range(3))
        observer.close()
        assert after < 5 * before, f"after 33,000 steps a step takes {after / before:.0f} times as long"


def _times(observer: Observer, text: str) -> list[float]:
    """Return the time of each step of a case."""
    times = []
    for step in steps_of(OBSERVED.case(text).values):
        start = time.perf_counter()
        observer.observe(step)
        times.append(time.perf_counter() - start)
    return times
