"""The cases that every observer has to pass.

The engine counts the exceptions of an observer and drops steps while it lags. The kit is stricter: an observer accepts
every step, keeps up, and leaves neither threads nor descriptors after `close`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Final, Literal
from unittest import mock

import msgspec
import pytest

from fd_core.plugins import OBSERVER, installed_plugins
from fd_core.runner.observing import Observer, SampledRequest, SampledStep
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.connectors.remote import resource_snapshot
from fd_core.testing.hooks.observed import OBSERVED, check_observer, clock_set_by, steps_of
from fd_core.testing.hooks.purity import imported_again, require_freed
from fd_core.testing.kit.growth import require_bounded, require_idle, seconds_of
from fd_core.testing.kit.privacy import created_paths, hidden_from_other_users, kept_out_of_logs
from fd_core.testing.kit.requirements import OPEN, Requirement, constructed, lacks
from fd_core.testing.stores.values import draws

_GROWING: Final = "requests=1,tokens=2,drafts=some accepted"
_MANY: Final = "steps=33000,requests=1"
_FEW: Final = "steps=300,requests=1"
_FULL: Final = "steps=900,requests=64"
_LARGE: Final = "requests=1024,tokens=33,drafts=all accepted,token_id=2147483647"
_LARGE_STEPS: Final = 48
"""Steps of that size, whose tokens are 17 MB as text."""
_STEP_SECONDS: Final = 0.005
"""Mean time of such a step."""
_CLOSE_SECONDS: Final = 3.0
"""Time of `close`, which an engine that ends leaves after 5 seconds."""
_RECORDED: Final = 299
"""Steps, or tokens, that fill no buffer of a usual size exactly."""
_TOKEN: Final = 151_637_000
"""Id of a token from which on an observer may write them: no other number in a log is as large."""
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
    def test_what_it_writes_has_all_requests_and_tokens(self) -> None:
        """Look in its files after `close` for what it writes all of: ids of requests, or of tokens.

        Those of steps with one token show what that is. Other steps have as many tokens, but several requests, drafts,
        gaps and a restart of the engine. Observers of two engines run at the same time, or in turn.
        """
        plain, mixed, *two = ([*_recorded(by, mixed=by == "two")] for by in ("one", "two", "three", "four"))
        tokens = (each.encode() for steps in (plain, mixed) for each in _ids(steps)[1])
        with kept_out_of_logs(*tokens):  # they are the text of an answer
            written, kinds, _ = self._written(plain), list[int](), self._written(mixed)
        for kind, what in enumerate(("requests", "tokens")):
            ids = _ids(plain)[kind]
            if not all(_is_in(written, each) for each in ids[: _RECORDED // 4]):
                continue
            kinds.append(kind)
            lost = [each for each in ids if not _is_in(written, each)]
            assert not lost, (
                f"after close, its files lack the ids of {what} in the last {len(lost)} of {_RECORDED} steps"
            )
        if not kinds:
            lacks("it writes no file that has the id of each request or token")
        self.complete.require()
        for recorded, in_turn in (([mixed], False), (two, False), (two, True)):
            written = self._written(*recorded, in_turn=in_turn)
            for kind in kinds:
                ids = [each for steps in recorded for each in _ids(steps)[kind]]
                lost = [each for each in ids if not _is_in(written, each)]
                # Buffers of a file that both append to may cut lines.
                assert len(lost) <= (len(ids) // 8 if len(recorded) > 1 and not in_turn else 0), (
                    f"{len(recorded)} observers, of as many engines {'in turn' if in_turn else 'at once'}: after steps "
                    f"of several requests and tokens, and a restart, files lack {len(lost)} of {len(ids)} ids, such as "
                    f"{lost[0]!r}; write all requests and tokens of a step, and append, or use another file for each "
                    "observer, also of a later process with the same id"
                )

    def _written(self, *recorded: list[SampledStep], in_turn: bool = False) -> bytes:
        """Return what observers write at the same time, each about its steps, or in processes after each other.

        The later process has the same id, as in a container that restarts, and begins an hour later. Other users of the
        machine may open no file with the ids of tokens, which are the text of an answer.
        """
        with created_paths() as files, _hidden(recorded[0][0]):
            observers = list[Observer]()
            for hours, together in enumerate([[each] for each in recorded] if in_turn else [recorded]):
                cls = imported_again(self.observer_class()) if in_turn else self.observer_class()
                with mock.patch.object(self, "observer_class", lambda cls=cls: cls), clock_set_by([3600 * hours]):
                    new = [self.new_observer() for _ in together]
                    for steps in zip(*together, strict=True):
                        for observer, step in zip(new, steps, strict=True):
                            observer.observe(step)
                    for observer in new:
                        observer.close()
                observers += new  # files may be gone with them
        return b"".join(each.read_bytes() for each in files if each.is_file() and each.stat().st_size < _MOST_BYTES)

    @pytest.mark.law("8")
    def test_files_that_it_opens_later_are_private(self) -> None:
        """It may begin others after so many bytes, on another day, or for an engine that restarts."""
        step, days = next(steps_of(OBSERVED.case(_LARGE).values)), [0]
        with (
            TemporaryDirectory() as folder,
            mock.patch("tempfile.tempdir", folder),
            mock.patch.dict(os.environ, TMPDIR=folder),
            _hidden(step),
            clock_set_by(days),
        ):
            observer = self.new_observer()
            for number in range(_LARGE_STEPS):
                day, at = divmod(number, _LARGE_STEPS // 4)
                days.append(86_400 * day)
                observer.observe(msgspec.structs.replace(step, epoch=1 + day, step=at))
            observer.close()

    @pytest.mark.law("8")
    @pytest.mark.parametrize("restarts", [False, True])
    def test_memory_does_not_grow_with_steps(self, *, restarts: bool) -> None:
        """Steps of one epoch, or each of another one, with drafts that are accepted, or rejected."""
        self.bounded.require()
        observer = self.new_observer()
        steps = steps_of({**OBSERVED.case(_GROWING).values, "steps": sys.maxsize})

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


def _hidden(step: SampledStep) -> AbstractContextManager[None]:
    """Fail if other users may open a file with the first token of a step."""
    token = step.requests[0].token_ids[0]
    forms = str(token).encode(), *(token.to_bytes(4, order) for order in _ORDERS)
    return hidden_from_other_users(Path(gettempdir()), *forms)


def _times(observer: Observer, text: str) -> list[float]:
    """Return the time of each step of a case."""
    return [seconds_of(partial(observer.observe, step)) for step in steps_of(OBSERVED.case(text).values)]


def _recorded(by: str, *, mixed: bool) -> Iterator[SampledStep]:
    """Yield steps of `_RECORDED` tokens, each with another id: one by one, or in steps of several requests."""
    draw, left = draws(len(by)), _RECORDED
    tokens = iter(range(_TOKEN + sum(by.encode()) * _RECORDED, 1 << 31))
    epoch, number = 3, 0
    while left:
        counts = [draw.randrange(1, 7) for _ in range(draw.randrange(1, 5))] if mixed else [1]
        rows = list[SampledRequest]()
        for at, count in enumerate(counts):
            ids = tuple(islice(tokens, min(count, left)))
            left -= len(ids)
            drafts = len(ids) - 1 + draw.randrange(3) * mixed
            rows += [SampledRequest(f"request {left}-{at} by {by}", ids, drafts, len(ids) - 1)] if ids else []
        yield SampledStep(epoch, number, tuple(rows))
        number += draw.randrange(1, 3) if mixed else 1
        if mixed and epoch == 3 and left < _RECORDED // 2:
            epoch, number = 4, 0


def _ids(steps: Iterable[SampledStep]) -> tuple[list[str], list[str]]:
    """Return the ids of requests and of tokens."""
    rows = [row for step in steps for row in step.requests]
    return [row.request_id for row in rows], [str(token) for row in rows for token in row.token_ids]


def _is_in(written: bytes, name: str) -> bool:
    forms = [int(name).to_bytes(4, order) for order in _ORDERS] if name.isdigit() else []
    return any(form in written for form in (name.encode(), *forms))
