"""Stateful test of the whole engine in adversarial orders against the golden texts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fd_core.scheduling.requests import State
from fd_core.types import FinishReason, RequestSpec
from tests.engine.helpers import golden, random_specs
from tests.engine.stepping import SMALL, How, Stepper, greedy, scripted, small_engine
from tests.engine.stored import keep_kv

PREFIX = tuple(range(100, 112))


def _specs() -> list[RequestSpec]:
    """Random requests: some share a prefix, some stop inside their text, one has another salt."""
    plain = random_specs(12, seed=13, max_prompt=20, max_tokens=42)
    shared = [greedy(f"s{index}", (*PREFIX, index), 40) for index in range(5)]
    salted = [greedy("t0", (*PREFIX, 0), 40, cache_salt="other")]
    stops = []
    for index, spec in enumerate(shared[:3]):
        whole = greedy(f"e{index}", spec.prompt, 40)
        stops.append(greedy(f"e{index}", spec.prompt, 40, stop_token_ids=(scripted(whole)[6 * index + 5],)))
    return [*plain, *shared, *salted, *stops]


SPECS = _specs()


class EngineMachine(RuleBasedStateMachine):
    """Rules are biased towards pressure: requests arrive in bursts, are mostly admitted at once, and are aborted
    mid-step.
    """

    @initialize(
        depth=st.integers(1, 3),
        slots=st.integers(2, 6),
        extra_budget=st.sampled_from([40, 20, 8, 3, 1, 0]),
        extra_blocks=st.sampled_from([0, 0, 1, 4, 12]),
        k=st.sampled_from([0, 1, 3, 5]),
        wrong=st.sampled_from([0.0, 0.3, 1.0]),
        caching=st.booleans(),
        eager=st.sampled_from([True, True, True, False]),
        kept=st.sampled_from([None, (True, False, False), (True, True, True), (False, True, True)]),
    )
    def start(
        self,
        depth: int,
        slots: int,
        extra_budget: int,
        extra_blocks: int,
        k: int,
        wrong: float,
        caching: bool,
        eager: bool,
        kept: tuple[bool, bool, bool] | None,
    ) -> None:
        engine = small_engine(
            SPECS,
            k,
            wrong,
            max_num_seqs=slots,
            max_num_batched_tokens=1 + k + extra_budget,
            num_kv_blocks=SMALL["num_kv_blocks"] + extra_blocks,
            enable_prefix_caching=caching,
        )
        self.depth = depth
        self.stepper = Stepper(engine, eager=eager)
        if kept is not None and caching:
            preempted, finished, persist = kept
            keep_kv(self.stepper, preempted=preempted, finished=finished, persist=persist)
        self.expected = golden(SPECS)
        self.unused = list(SPECS)
        self.aborted: set[str] = set()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            while len(self.stepper.in_flight) < self.depth and self.stepper.plan() is not None:
                pass
            if self.stepper.in_flight:
                self.stepper.answer()
            if self.stepper.tiers is not None and self.stepper.tiers.pending:
                self.stepper.complete(0, How.WELL)

    @precondition(lambda self: self.unused)
    @rule(data=st.data(), count=st.integers(3, 7))
    def submit(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.unused))):
            self.stepper.submit(self.unused.pop(data.draw(st.integers(0, len(self.unused) - 1))))

    @rule(times=st.integers(3, 16))
    def fill_the_pipeline_and_answer(self, times: int) -> None:
        self.step(times)

    @precondition(lambda self: len(self.stepper.in_flight) < self.depth)
    @rule()
    def plan(self) -> None:
        self.stepper.plan()

    @precondition(lambda self: self.stepper.in_flight)
    @rule()
    def answer(self) -> None:
        self.stepper.answer()

    @precondition(lambda self: len(self.stepper.probe.waiting) > 4)
    @rule(data=st.data())
    def abort_waiting(self, data: st.DataObject) -> None:
        requests = self.stepper.probe.requests
        self._abort(data, [name for name, request in requests.items() if request.state is State.WAITING])

    @precondition(lambda self: int(self.stepper.probe.slots.running.sum()) > 2 and self.stepper.in_flight)
    @rule(data=st.data())
    def abort_running(self, data: st.DataObject) -> None:
        self._abort(data, self._in_slots(self.stepper.probe.slots.running))

    @precondition(lambda self: int(self.stepper.probe.slots.draining.sum()))
    @rule(data=st.data())
    def abort_draining(self, data: st.DataObject) -> None:
        self._abort(data, self._in_slots(self.stepper.probe.slots.draining))

    @precondition(lambda self: self.stepper.tiers is not None and self.stepper.tiers.pending)
    @rule(data=st.data(), how=st.sampled_from([How.WELL, How.WELL, How.IN_PART, How.BADLY]))
    def end_an_operation(self, data: st.DataObject, how: How) -> None:
        assert self.stepper.tiers is not None
        self.stepper.complete(data.draw(st.integers(0, len(self.stepper.tiers.pending) - 1)), how)

    @precondition(lambda self: int(self.stepper.probe.slots.loading.sum()))
    @rule(data=st.data())
    def abort_loading(self, data: st.DataObject) -> None:
        self._abort(data, self._in_slots(self.stepper.probe.slots.loading))

    @precondition(lambda self: self.stepper.probe.slots.occupied.any())
    @rule()
    def pause(self) -> None:
        self.stepper.scheduler.pause()

    @rule()
    def resume(self) -> None:
        self.stepper.scheduler.resume()

    @rule()
    def change_weights(self) -> None:
        """The same text goes on, because the scripted model has no weights."""
        self.pause()
        while (held := self.stepper.scheduler.held()).running or held.draining or held.loading or held.fenced:
            self.step()
        self.stepper.perform(self.stepper.scheduler.change_weights(b"other"))
        self.resume()

    def _in_slots(self, which: npt.NDArray[np.bool_]) -> list[str]:
        return [self.stepper.request_in(slot) for slot in np.flatnonzero(which).tolist()]

    def _abort(self, data: st.DataObject, names: list[str]) -> None:
        request_id = data.draw(st.sampled_from(sorted(names)))
        self.aborted.add(request_id)
        for _ in range(data.draw(st.integers(1, 2))):
            self.stepper.abort(request_id)

    @invariant()
    def delivered_text_is_prefix_of_golden(self) -> None:
        for request_id, tokens in getattr(self, "stepper", _NOTHING).texts.tokens.items():
            whole = self.expected[request_id]
            assert tokens == whole[: len(tokens)]
            reason = self.stepper.texts.ends.get(request_id)
            if reason is FinishReason.ABORT:
                assert request_id in self.aborted
            elif reason is not None:
                assert tokens == whole
            assert reason is not FinishReason.ERROR

    def teardown(self) -> None:
        if not hasattr(self, "stepper"):
            return
        self.stepper.scheduler.resume()
        self.stepper.run(self.depth, max_steps=3000)
        self.delivered_text_is_prefix_of_golden()
        submitted = {spec.request_id for spec in SPECS} - {spec.request_id for spec in self.unused}
        assert set(self.stepper.texts.ends) == submitted, "a request never finished"


class _Nothing:
    class texts:  # noqa: N801 - stands for an attribute
        tokens: dict[str, list[int]] = {}  # noqa: RUF012 - never changed


_NOTHING = _Nothing()

TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
TestEngine = pytest.mark.timeout(120)(TestEngine)


@pytest.mark.soak
@pytest.mark.timeout(900)
class TestEngineAtLength(EngineMachine.TestCase):
    settings = settings(max_examples=35, stateful_step_count=40, deadline=None)
