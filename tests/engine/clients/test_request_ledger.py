"""Requests resume in a new epoch after the tokens already delivered, up to a limit of attempts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fd_core.engine.clients.request_ledger import MAX_DEATHS, MAX_DEATHS_IN_VAIN, RequestLedger
from fd_core.errors import BadRequest
from fd_core.types import Delta, FinishReason, RequestSpec, TokenLogprobs
from tests.engine.helpers import Texts, golden, null_engine, random_specs, run
from tests.engine.stepping import Stepper, greedy, scripted, small_engine

SPECS = random_specs(14, seed=17, max_prompt=20, max_tokens=40)
A, B, C = (greedy(name, [1, 2, 3], 20) for name in "abc")


def resumed_after(spec: RequestSpec, delivered: list[int]) -> RequestSpec:
    """Return what a new epoch is sent after `delivered`."""
    ledger = RequestLedger()
    ledger.begin(spec)
    ledger.deliver(Delta(spec.request_id, tuple(delivered)))
    assert ledger.died("a test") == []
    (again,) = ledger.resubmissions()
    return again


# Bookkeeping --------------------------------------------------------------------------------------------------


def test_new_epoch_resumes_requests_in_order_of_arrival() -> None:
    ledger = RequestLedger()
    for spec in (A, B, C):
        ledger.begin(spec)
    ledger.deliver(Delta("c", (7,)))
    ledger.deliver(Delta("a", (0, 5)))
    ledger.deliver(Delta("c", (8, 9)))
    assert ledger.died("it is gone") == []
    assert [(spec.request_id, spec.delivered) for spec in ledger.resubmissions()] == [
        ("a", (0, 5)),
        ("b", ()),
        ("c", (7, 8, 9)),
    ]
    assert all(spec.prompt == A.prompt and spec.params == A.params for spec in ledger.resubmissions())


def test_finished_and_abandoned_requests_are_not_resumed() -> None:
    ledger = RequestLedger()
    for spec in (A, B):
        ledger.begin(spec)
    ledger.deliver(Delta("a", (1,), FinishReason.LENGTH))
    ledger.drop("b")
    ledger.drop("unknown")
    assert ledger.deliver(Delta("a", (2,))) is None
    assert ledger.deliver(Delta("b", (2,))) is None
    assert (ledger.died("gone"), ledger.resubmissions(), len(ledger)) == ([], [], 0)


def test_unacknowledged_abort_survives_engine_death() -> None:
    ledger = RequestLedger()
    for spec in (A, B):
        ledger.begin(spec)
    ledger.aborting(["b"])
    assert ledger.died("gone") == [Delta("b", finish_reason=FinishReason.ABORT)]
    assert [spec.request_id for spec in ledger.resubmissions()] == ["a"]


def test_cached_tokens_come_from_the_first_epoch_reporting_them() -> None:
    ledger = RequestLedger()
    ledger.begin(A)
    ledger.died("gone")
    assert ledger.deliver(Delta("a", (1,), cached_tokens=16)) == Delta("a", (1,), cached_tokens=16)
    ledger.died("gone")
    assert ledger.deliver(Delta("a", (2,), FinishReason.STOP, cached_tokens=0)) == Delta("a", (2,), FinishReason.STOP)


def test_request_without_progress_fails_after_repeated_deaths() -> None:
    ledger = RequestLedger()
    for spec in (A, B):
        ledger.begin(spec)
    ledger.begin(C)
    ledger.deliver(Delta("b", (1,)))
    for _ in range(MAX_DEATHS_IN_VAIN - 1):
        ledger.admitted(["a", "b", "unknown"])
        assert ledger.died("it burns") == []
    ledger.admitted(["a", "b"])
    (end,) = ledger.died("it burns")
    assert (end.request_id, end.finish_reason) == ("a", FinishReason.ERROR)
    assert end.error == f"the engine died {MAX_DEATHS_IN_VAIN} times with this request, which is not retried (it burns)"
    assert [spec.request_id for spec in ledger.resubmissions()] == ["b", "c"], (
        "b made progress in the first of them, c was waiting"
    )


def test_epoch_admits_one_suspect_at_a_time() -> None:
    """All were admitted in the same step, which b kills: a and c must not be failed along with it."""
    ledger = RequestLedger()
    for spec in (A, B, C):
        ledger.begin(spec)
    ledger.admitted("abc")
    assert ledger.died("it burns") == []
    assert [spec.request_id for spec in ledger.resubmissions()] == ["a"]
    assert [name in ledger.held_suspects for name in "abc"] == [False, True, True]
    assert ledger.next_suspect() is None, "a got no token yet"
    ledger.deliver(Delta("a", (7,)))
    assert ledger.next_suspect() == B
    assert ledger.next_suspect() is None
    ledger.admitted("ab")
    (end,) = ledger.died("it burns")
    assert (end.request_id, end.finish_reason) == ("b", FinishReason.ERROR)
    assert [(spec.request_id, spec.delivered) for spec in ledger.resubmissions()] == [("a", (7,)), ("c", ())]
    assert ledger.next_suspect() is None


def test_finished_suspect_admits_the_next_and_skips_abandoned_ones() -> None:
    ledger = RequestLedger()
    for spec in (A, B, C):
        ledger.begin(spec)
    ledger.admitted("abc")
    ledger.died("it burns")
    ledger.resubmissions()
    ledger.drop("b")
    ledger.deliver(Delta("a", finish_reason=FinishReason.ABORT))
    assert ledger.next_suspect() == C
    assert ledger.next_suspect() is None


def test_deaths_while_held_back_do_not_count_against_a_request() -> None:
    ledger = RequestLedger()
    for spec in (A, B):
        ledger.begin(spec)
    ledger.admitted("ab")
    ledger.died("it burns")
    while "a" in ledger:
        assert [spec.request_id for spec in ledger.resubmissions()] == ["a"]
        assert all(end.request_id == "a" for end in ledger.died("an unrelated failure"))
    assert [spec.request_id for spec in ledger.resubmissions()] == ["b"]
    assert ledger.died("an unrelated failure") == []


def test_request_fails_after_many_deaths_despite_progress() -> None:
    ledger = RequestLedger()
    ledger.begin(A)
    for _ in range(MAX_DEATHS - 1):
        ledger.deliver(Delta("a", (1,)))
        assert ledger.died("gone") == []
    ledger.deliver(Delta("a", (1,)))
    (end,) = ledger.died("gone")
    assert end.finish_reason is FinishReason.ERROR
    assert len(ledger) == 0


# Resuming a request --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_text_resumes_from_any_token_with_logprobs(k: int, depth: int) -> None:
    """Limits, penalties, seeds and stop tokens count from the prompt."""
    stops = greedy("stops", [9, 8, 7], 40, stop_token_ids=(scripted(greedy("stops", [9, 8, 7], 40))[25],), min_tokens=3)
    specs = [*SPECS, stops]
    whole = run(null_engine(num_kv_blocks=200), specs)
    for cut in (1, 16, 31):
        stepper = Stepper(small_engine(specs, k, 0.3, num_kv_blocks=20), eager=True)
        cuts = {spec.request_id: min(cut, len(whole.tokens[spec.request_id]) - 1) for spec in specs}
        stepper.submit(*(resumed_after(spec, whole.tokens[spec.request_id][: cuts[spec.request_id]]) for spec in specs))
        texts = stepper.run(depth)
        assert texts.tokens == {name: tokens[cuts[name] :] for name, tokens in whole.tokens.items()}
        assert texts.scores == {name: scores[cuts[name] :] for name, scores in whole.scores.items()}
        assert texts.ends == whole.ends


def test_delivered_tokens_count_as_recomputed_not_as_prompt() -> None:
    engine = null_engine()
    run(engine, [resumed_after(greedy("a", range(20), 9), [1, 2, 3, 4])])
    stats = engine.stats()
    assert (stats.scheduler.counters.prompt_tokens, stats.scheduler.counters.recomputed_tokens) == (0, 24)
    assert stats.scheduler.outputs.generated_tokens == 5


def test_resuming_a_complete_text_is_rejected() -> None:
    engine = null_engine()
    (delta,) = engine.submit(resumed_after(greedy("a", [1, 2], 4), [1, 2, 3, 4]))
    assert delta.finish_reason is FinishReason.ERROR
    assert delta.error is not None and "none of the at most 4 remains" in delta.error
    with pytest.raises(BadRequest):
        engine.probe().scheduler.add(resumed_after(greedy("a", [1, 2], 4), [1, 2, 3, 4, 5]))


# Deaths at random moments ---------------------------------------------------------------------------------------


class Epochs(RuleBasedStateMachine):
    """Request ledger of a client whose engines die with steps in flight and lose their last messages.

    How far an engine gets in a number of steps depends on when its KV copies finish, so no rule and no drawn choice
    may depend on live state: Hypothesis requires identical draws when it replays a sequence.
    """

    @initialize(
        depth=st.integers(1, 3),
        k=st.sampled_from([0, 0, 3]),
        transport=st.sampled_from(["memory", "memory", "zmq"]),
        slots=st.integers(1, 5),
    )
    def start(self, depth: int, k: int, transport: str, slots: int) -> None:
        self.settings = {"pipeline_depth": depth, "output_transport": transport, "max_num_seqs": slots}
        self.k = k
        self.ledger, self.texts = RequestLedger(), Texts()
        self.unused = list(SPECS)
        self.aborted: set[str] = set()
        self.epoch = 0
        self.expected = golden(SPECS)
        self.new_epoch()

    def new_epoch(self) -> None:
        self.epoch += 1
        self.engine = small_engine(SPECS, self.k, 0.3, seed=self.epoch, **self.settings)
        for spec in self.ledger.resubmissions():
            self.record(self.engine.submit(spec))

    def record(self, deltas: list[Delta]) -> None:
        self.texts.take([seen for delta in deltas if (seen := self.ledger.deliver(delta)) is not None])

    @precondition(lambda self: self.unused)
    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        for _ in range(min(count, len(self.unused))):
            spec = self.unused.pop()
            self.ledger.begin(spec)
            self.record(self.engine.submit(spec))

    @rule(times=st.integers(1, 12))
    def steps(self, times: int) -> None:
        for _ in range(times):
            self.record(self.engine.step())

    @rule(which=st.integers(0, len(SPECS) - 1), acknowledged=st.booleans())
    def abort(self, which: int, acknowledged: bool) -> None:
        if len(self.ledger) < 2:
            return
        name = sorted(self.ledger)[which % len(self.ledger)]
        self.aborted.add(name)
        self.ledger.aborting([name])
        if acknowledged:
            self.record(self.engine.abort([name]))

    @rule(lost=st.integers(0, 3))
    def die(self, lost: int) -> None:
        """The engine's last messages are lost."""
        if not len(self.ledger):
            return
        for _ in range(lost):
            self.engine.step()
        self.engine.close()
        self.texts.take(self.ledger.died("a test"))
        self.new_epoch()

    @invariant()
    def delivered_text_is_prefix_of_golden(self) -> None:
        for name, tokens in getattr(self, "texts", Texts()).tokens.items():
            whole, end = self.expected[name], self.texts.ends.get(name)
            assert tokens == whole[: len(tokens)]
            assert end not in (FinishReason.STOP, FinishReason.LENGTH) or tokens == whole
            assert end is not FinishReason.ABORT or name in self.aborted
            scores = self.texts.scores[name]
            assert len(scores) in (0, len(tokens))
            assert all(isinstance(score, TokenLogprobs) for score in scores)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.record(self.engine.step())
        self.delivered_text_is_prefix_of_golden()
        self.engine.close()
        begun = {spec.request_id for spec in SPECS} - {spec.request_id for spec in self.unused}
        assert set(self.texts.ends) | self.aborted >= begun, "a request has no end"
        stats = self.engine.stats()
        assert (stats.scheduler.slots.running, stats.scheduler.slots.waiting) == (0, 0)
        assert (stats.scheduler.blocks.used, stats.scheduler.blocks.fenced) == (0, 0)


TestEpochs = Epochs.TestCase
TestEpochs.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestEpochs = pytest.mark.timeout(120)(TestEpochs)
