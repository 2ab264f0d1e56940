"""The cases that every observer has to pass.

The engine counts the exceptions of an observer and drops steps while it lags. The kit is stricter: an observer accepts
every step, keeps up, and leaves neither threads nor descriptors after `close`.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final, Literal
from unittest import mock

import msgspec
import numpy as np
import pytest

from fd_core.plugins import OBSERVER, installed_plugins
from fd_core.runner.observing import Observer, SampledStep
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.observed import (
    HOURS,
    OBSERVED,
    ORDINARY_HOUR,
    check_observer,
    clock_set_by,
    counted_by,
    hours_of,
    numbers_of,
    require_counts,
    steps_of,
)
from fd_core.testing.hooks.purity import imported_again, require_freed
from fd_core.testing.kit.days.account import account_of
from fd_core.testing.kit.growth import require_bounded, require_idle, seconds_of
from fd_core.testing.kit.privacy import contents_of, created_paths, hidden_from_other_users, hidden_in_any_folder
from fd_core.testing.kit.processes import at_a_limit, resource_snapshot
from fd_core.testing.kit.requirements import OPEN, Requirement, constructed

_GROWING: Final = "requests=1,tokens=2,drafts=some accepted"
_MANY: Final = "steps=33000,requests=1"
_FEW: Final = "steps=300,requests=1"
_FULL: Final = "steps=900,requests=64"
_LARGE: Final = "requests=1024,tokens=33,drafts=all accepted,token_id=2147483647"
_LARGE_STEPS: Final = 512
"""Steps of that size, whose tokens are 180 MB as text, and 70 MB in four bytes."""
_MOST_WRITTEN: Final = 1 << 27
"""Bytes of files after which no more are observed."""
_STEP_SECONDS: Final = 0.005
"""Mean time of such a step."""
_CLOSE_SECONDS: Final = 3.0
"""Time of `close`, which an engine that ends leaves after 5 seconds."""
_MOST_HELD: Final = 1 << 26
"""Bytes that two observers may hold at once."""
_ORDERS: Final[tuple[Literal["little", "big"], ...]] = ("little", "big")
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
    complete: Requirement = OPEN
    """Its files have all tokens of a request if they have those of a request with one, and likewise requests."""

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
    @pytest.mark.fd_alone
    @pytest.mark.fd_thorough
    def test_an_ordinary_day(self) -> None:
        """Observe two engines, and look at what their observers hold, write, show and leave.

        The first, quiet hour shows what the files have all of: ids of requests, or of tokens. Then the process begins
        again with the same id, as in a container. In another hour the disk is full: steps of that hour may be lost.
        """
        engines = [hours_of(engine) for engine in range(2)]
        night = engines[0][0]
        busy = [step for hours in engines for at in range(1, HOURS) if at != ORDINARY_HOUR for step in hours[at]]
        secrets = [str(token).encode() for token in _ids(busy)[1][::997]]
        kinds, counted, clock, failed = list[int](), counted_by(self.new_observer), [0], list[Observer]()

        def begun(count: int) -> list[Observer]:
            """Construct observers as in a new process."""
            cls = imported_again(self.observer_class())
            with mock.patch.object(self, "observer_class", lambda: cls):
                return [self.new_observer() for _ in range(count)]

        def live() -> Generator[None, None, Mapping[str, float]]:
            every, before = begun(1), list[Mapping[str, int]]()
            for hour in range(HOURS):
                clock.append(3600 * (4 * hour - 5 * (hour == 3)))  # which is set back once
                if hour == 1:
                    every[0].close()
                    recorded = enumerate(_lost(made, night[: len(night) // 4]))
                    kinds.extend(kind for kind, lost in recorded if not lost and self.complete.reason is None)
                    _require_all(made, night, kinds)
                    every += begun(len(engines))
                    before = [numbers_of(observer) for observer in every[1:]]
                is_full = hour == ORDINARY_HOUR
                with at_a_limit("sizes of files", 0) if is_full else nullcontext():
                    for together in zip_longest(*(hours[hour] for hours in engines)):
                        for observer, step in zip(every[-2:], together, strict=False):
                            try:
                                if step is not None:
                                    observer.observe(step)
                            except Exception:
                                if not is_full:
                                    raise
                                failed.append(observer)
                yield
            for number, observer in enumerate(every[1:]):
                observer.close()
                steps = [step for hour in engines[number][1:] for step in hour]
                if observer not in failed:
                    require_counts(observer, before[number], steps, counted)
            _require_all(made, night, kinds)
            _require_all(made, busy, kinds, share=8)  # buffers of a file that both append to may cut lines
            return {}

        tokens = [form for hours in engines for form in _forms(next(step for step in hours[-1] if step.requests))]
        with created_paths() as made, clock_set_by(clock), hidden_from_other_users(Path(gettempdir()), *tokens):
            account = account_of(live, *secrets)
        left = Counter(account.left) - Counter(f"{path}" for path in made)
        assert not left, f"after a day these are left: {', '.join(left)}"
        if self.bounded.reason is None:
            assert account.peak < _MOST_HELD, f"two observers hold {account.peak:,} bytes on a day"

    @pytest.mark.law("8")
    def test_files_that_it_opens_later_are_private(self) -> None:
        """It may begin others after so many bytes, on another day or after a restart, in a folder that was there."""
        step, days = next(steps_of(OBSERVED.case(_LARGE).values)), [0]
        with (
            TemporaryDirectory() as folder,
            mock.patch("tempfile.tempdir", folder),
            mock.patch.dict(os.environ, TMPDIR=folder),
            clock_set_by(days),
        ):
            for again, hidden in enumerate(hidden_in_any_folder(Path(folder), *_forms(step))):
                with hidden:
                    observer = self.new_observer()
                    for number in range(_LARGE_STEPS >> 6 * again):
                        day = min(number, 3)
                        days.append(86_400 * day)
                        observer.observe(msgspec.structs.replace(step, epoch=1 + day, step=number - day))
                        if number % 16 == 0 and _bytes_in(folder) > _MOST_WRITTEN:
                            break
                    observer.close()

    @pytest.mark.law("8")
    def test_memory_does_not_grow_with_steps(self) -> None:
        """Steps of ever more epochs, with drafts that are accepted, or rejected."""
        self.bounded.require()
        _observe_many(self.new_observer(), "steps")

    @pytest.mark.law("8")
    def test_memory_does_not_grow_while_no_file_can_be_written(self) -> None:
        """As on a full disk: the steps may be lost, but not the engine, which goes on meanwhile."""
        self.bounded.require()
        observer = self.new_observer()
        with at_a_limit("sizes of files", 0):
            _observe_many(observer, "steps that cannot be written", Exception)

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
            closing = seconds_of(observer.close)
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


def _observe_many(observer: Observer, what: str, *failing: type[Exception]) -> None:
    """Observe more and more steps of ever more epochs, and close; these exceptions are suppressed."""
    steps = steps_of({**OBSERVED.case(_GROWING).values, "steps": sys.maxsize})

    def use(number: int) -> None:
        with suppress(*failing):
            observer.observe(msgspec.structs.replace(next(steps), epoch=number // 4))

    require_bounded(use, _ROUND, what, "8", may_wait=True)
    with suppress(*failing):
        observer.close()


def _forms(step: SampledStep) -> tuple[bytes, ...]:
    """Return the first token of a step as files may have it."""
    token = step.requests[0].token_ids[0]
    return str(token).encode(), *(token.to_bytes(4, order) for order in _ORDERS)


def _bytes_in(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _times(observer: Observer, text: str) -> list[float]:
    """Return the time of each step of a case."""
    return [seconds_of(partial(observer.observe, step)) for step in steps_of(OBSERVED.case(text).values)]


def _ids(steps: Iterable[SampledStep]) -> tuple[list[str], list[int]]:
    """Return the ids of requests and of tokens."""
    rows = [row for step in steps for row in step.requests]
    return [*dict.fromkeys(row.request_id for row in rows)], [token for row in rows for token in row.token_ids]


def _require_all(paths: Iterable[Path], steps: Sequence[SampledStep], kinds: Iterable[int], share: int = 0) -> None:
    """Fail if files lack more than one in `share` of the ids of requests, or of tokens, in some steps."""
    for kind in kinds:
        lost, ids = _lost(paths, steps)[kind], _ids(steps)[kind]
        assert len(lost) <= (len(ids) // share if share else 0), (
            f"its files lack the ids of {('requests', 'tokens')[kind]} of {len(lost)} of {len(ids)}, as {lost[0]}; "
            "write all of a step, also of the last one, and append, or use another file for each observer, also of a "
            "later process with the same id"
        )


def _lost(paths: Iterable[Path], steps: Iterable[SampledStep]) -> tuple[list[str], list[int]]:
    """Return the ids of requests, and of tokens, as text or in four bytes, that files lack."""
    written = b"".join(contents_of(each) for each in paths if each.is_file() and each.stat().st_size < _MOST_BYTES)
    found = {int(number) for number in re.findall(rb"(?<!\d)\d{9,10}(?!\d)", written)}
    names, tokens = _ids(steps)
    for at, order in product(range(4), ("<u4", ">u4")) if not found.issuperset(tokens) else ():
        found.update(np.frombuffer(written[at : at + (len(written) - at) // 4 * 4], order).tolist())
    return [each for each in names if each.encode() not in written], [each for each in tokens if each not in found]
