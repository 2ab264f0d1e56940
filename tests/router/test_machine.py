"""Every interleaving of success, error, disconnect, retry, worker loss and return, checked against a model.

The model is a list of attempts in force, and sums the load that each should count. It has no release guards.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fd_core.router.config import RouterConfig
from fd_core.router.router import Router
from fd_core.router.selection import IDLE, NoWorker, Selection, WorkerLoad
from fd_core.router.workers import ROLES, Role, RouterWorker
from tests.router.helpers import is_idle, policy_class, request

URLS: dict[str, Role] = {
    "http://m0": "mixed",
    "http://m1": "mixed",
    "http://p0": "prefill",
    "http://p1": "prefill",
    "http://d0": "decode",
    "http://d1": "decode",
}
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
DRAWS = st.floats(0, 1, exclude_max=True)
POLICIES = (
    "cache_aware",
    "cache_aware",
    "cache_aware",
    "session",
    "process_tokens",
    "power_of_two",
    "prefix_hash",
    "round_robin",
)
BLOCK = 2


@dataclass
class Attempt:
    """The model's record of one selection."""

    selection: Selection
    tokens: tuple[int, ...]
    avoided: frozenset[str]
    missing: int
    """Prompt tokens that the prefill side neither holds nor computes for an earlier attempt."""
    started: bool = False
    verdicts: dict[RouterWorker, str] = field(default_factory=dict)

    def counts(self) -> dict[RouterWorker, WorkerLoad]:
        counted = {}
        for index, worker in enumerate(self.selection.workers):
            if not self.started:
                counted[worker] = WorkerLoad(1, 1, 0 if index else self.missing)
            elif worker.role != "prefill":
                counted[worker] = WorkerLoad(1, 0, 0)
        return counted


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router: Router | None = None
        self.now = 0.0
        self.registered: dict[str, RouterWorker] = {}
        self.replaced: list[RouterWorker] = []
        self.processes: dict[str, str | None] = {}
        self.states: dict[str, str] = {}
        self.ports: dict[str, int | None] = {}
        self.reported_roles: dict[str, str | None] = {}
        self.running: list[Attempt] = []
        self.ended: list[Attempt] = []
        self.holds: dict[RouterWorker, set[tuple[int, ...]]] = {}
        self.faults = 0
        self.served = self.failed = self.left = self.declined = self.unused = 0

    @initialize(policy=st.sampled_from(POLICIES), prefill=st.sampled_from(POLICIES))
    def start(self, policy: str, prefill: str) -> None:
        config = RouterConfig(
            policy=policy,
            prefill_policy=prefill,
            decode_policy="request_num",
            cache_block_size=BLOCK,
            eviction_duration_mins=1e6,
            circuit_failure_threshold=2,
            max_attempts=4,
        )
        self.router = Router(config, policy_class)
        for url in URLS:
            self.register(url, None)
            self.check(url, True, None)

    def ready(self) -> Router:
        assert self.router is not None
        return self.router

    @rule(url=st.sampled_from(list(URLS)), process=st.sampled_from([None, "one", "two"]))
    def register(self, url: str, process: str | None) -> None:
        before = self.registered.get(url)
        worker = self.ready().register(url, URLS[url], self.now, instance=process)
        same = before is not None and process is not None and process == self.processes.get(url)
        if same and self.states[url] != "draining":
            assert worker == before
            return
        self.install(url, worker, process)
        self.states[url] = "unknown"

    @rule(
        url=st.sampled_from(list(URLS)),
        ok=st.sampled_from([True, True, False]),
        process=st.sampled_from([None, "one", "two"]),
        port=st.sampled_from([None, 7001, 7001, 7002]),
        role=st.sampled_from([None, None, None, *ROLES]),
    )
    def check(self, url: str, ok: bool, process: str | None, port: int | None = 7000, role: str | None = None) -> None:
        if url not in self.registered:
            return
        worker, known, state = self.registered[url], self.processes[url], self.states[url]
        after = self.ready().health(worker, ok, self.now, instance=process, role=role, kv_port=port)
        if state == "draining":
            assert after == worker
        elif not ok:
            assert after == worker
            self.states[url] = "unhealthy"
        else:
            self.states[url] = "healthy"
            self.ports[url], self.reported_roles[url] = port, role
            other = process is not None and known not in (None, process)
            recovered = state == "unhealthy" and (process is None or process != known)
            if other or recovered:
                self.install(url, after, process)
            else:
                assert after == worker
                self.processes[url] = process or known

    @rule()
    def every_worker_recovers(self) -> None:
        for url in URLS:
            if self.states.get(url) in (None, "draining"):
                self.register(url, None)
            self.check(url, True, None)

    @rule(which=st.integers(0, 99), ok=st.booleans())
    def apply_late_check(self, which: int, ok: bool) -> None:
        if not self.replaced:
            return
        worker = self.replaced[which % len(self.replaced)]
        assert self.ready().health(worker, ok, self.now) == worker

    def install(self, url: str, worker: RouterWorker, process: str | None) -> None:
        before = self.registered.get(url)
        assert worker != before
        if before is not None:
            assert worker.incarnation > before.incarnation
            self.holds.pop(before, None)
            self.replaced.append(before)
        self.registered[url] = worker
        self.processes[url] = process

    @rule(url=st.sampled_from(list(URLS)))
    def deregister(self, url: str) -> None:
        assert self.ready().deregister(url, self.now) == self.registered.get(url)
        if url in self.registered:
            self.states[url] = "draining"
            self.drop_drained()

    def drop_drained(self) -> None:
        busy = {worker for attempt in self.running for worker in attempt.counts()}
        for url, worker in list(self.registered.items()):
            if self.states[url] == "draining" and worker not in busy:
                del self.registered[url]
                del self.states[url]
                self.holds.pop(worker, None)

    @rule(tokens=PROMPTS, rng=DRAWS, session=st.sampled_from([None, "s", "t"]))
    def select(self, tokens: list[int], rng: float, session: str | None) -> None:
        answer = self.ready().select(request(tokens, session=session), self.now, rng)
        self.record(answer, tuple(tokens), frozenset())

    @rule(tokens=PROMPTS, rng=DRAWS)
    def one_request_completes(self, tokens: list[int], rng: float) -> None:
        before = len(self.running)
        self.select(tokens, rng, None)
        if len(self.running) > before:
            self.first_token(before)
            attempt = self.running[before]
            if attempt.selection.mode == "pd":
                self.ready().prefilled(attempt.selection, self.now)
                self.succeeded(attempt, attempt.selection.prefill)
            self.succeed(before)
            self.end(before)

    def record(self, answer: Selection | NoWorker, tokens: tuple[int, ...], avoided: frozenset[str]) -> None:
        if isinstance(answer, NoWorker):
            return
        assert [worker.role for worker in answer.workers] in (["mixed"], ["prefill", "decode"], ["decode"])
        if answer.mode == "alone":
            assert not [one for one in self.candidates(avoided) if one.role != "decode"]
        for worker in answer.workers:
            assert self.registered[worker.url] == worker and self.states[worker.url] == "healthy"
            assert worker.url not in avoided
            assert self.reported_roles[worker.url] in (None, worker.role)
        if answer.mode == "pd":
            assert answer.kv_port is not None and answer.kv_port == self.ports[answer.prefill.url]
        else:
            assert answer.kv_port is None
        missing = len(tokens)
        if self.ready().config.policy_of(answer.prefill.role) == "cache_aware":
            held = self.holds.get(answer.prefill, set())
            assert answer.hits == leading(held, tokens)
            computed = (blocks(one.tokens) for one in self.running if one.selection.prefill == answer.prefill)
            missing = max(1, missing - BLOCK * leading(held.union(*computed), tokens))
        self.running.append(Attempt(answer, tokens, avoided, missing))

    def candidates(self, avoided: frozenset[str]) -> list[RouterWorker]:
        members = (
            self.ready().registry.member(worker) for url, worker in self.registered.items() if url not in avoided
        )
        return [one.worker for one in members if one is not None and one.open_to_requests(self.now)]

    @rule(which=st.integers(0, 99))
    def first_token(self, which: int) -> None:
        if not self.running:
            return
        attempt = self.running[which % len(self.running)]
        attempt.selection.first_token()
        attempt.started = True
        self.drop_drained()

    @rule(which=st.integers(0, 99))
    def succeed(self, which: int) -> None:
        if not self.running:
            return
        attempt = self.running[which % len(self.running)]
        self.ready().served(attempt.selection, self.now)
        self.succeeded(attempt, attempt.selection.decode)

    @rule(which=st.integers(0, 99))
    def prefill(self, which: int) -> None:
        pairs = [attempt for attempt in self.running if attempt.selection.mode == "pd"]
        if not pairs:
            return
        attempt = pairs[which % len(pairs)]
        self.ready().prefilled(attempt.selection, self.now)
        self.succeeded(attempt, attempt.selection.prefill)

    def succeeded(self, attempt: Attempt, worker: RouterWorker) -> None:
        if worker in attempt.verdicts:
            self.faults += 1
            return
        attempt.verdicts[worker] = "served"
        self.served += 1
        aware = self.ready().config.policy_of(worker.role) == "cache_aware"
        if aware and self.registered.get(worker.url) == worker:
            self.holds.setdefault(worker, set()).update(blocks(attempt.tokens))

    @rule(which=st.integers(0, 99), side=st.booleans())
    def decline(self, which: int, side: bool) -> None:
        if not self.running:
            return
        attempt = self.running[which % len(self.running)]
        worker = attempt.selection.decode if side else attempt.selection.prefill
        self.ready().declined(attempt.selection, worker)
        if worker in attempt.verdicts:
            self.faults += 1
        else:
            attempt.verdicts[worker] = "declined"
            self.declined += 1

    @rule(which=st.integers(0, 99), side=st.booleans(), severe=st.booleans())
    def fail(self, which: int, side: bool, severe: bool) -> None:
        if not self.running:
            return
        attempt = self.running[which % len(self.running)]
        worker = attempt.selection.decode if side else attempt.selection.prefill
        self.ready().failed(attempt.selection, worker, self.now, severe=severe)
        if worker in attempt.verdicts:
            self.faults += 1
        else:
            attempt.verdicts[worker] = "failed"
            self.failed += 1

    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        """End after a success, a failure or, without a verdict, a disconnect."""
        if not self.running:
            return
        attempt = self.running.pop(which % len(self.running))
        assert attempt.selection.release()
        silent = sum(worker not in attempt.verdicts for worker in attempt.selection.workers)
        if attempt.verdicts.get(attempt.selection.decode) == "served":
            self.unused += silent
        else:
            self.left += silent
        self.ended.append(attempt)
        self.drop_drained()

    @rule(which=st.integers(0, 99), late=st.booleans())
    def end_twice(self, which: int, late: bool) -> None:
        if not self.ended:
            return
        attempt = self.ended[which % len(self.ended)]
        if late:
            self.ready().served(attempt.selection, self.now)
            self.faults += 1
        else:
            assert not attempt.selection.release()
            self.faults += 1

    @rule(which=st.integers(0, 99), rng=DRAWS)
    def retry(self, which: int, rng: float) -> None:
        if not self.ended:
            return
        promising = [attempt for attempt in self.ended if not attempt.started] or self.ended
        attempt = promising[which % len(promising)]
        answer = self.ready().retry(attempt.selection, self.now, rng)
        failed = {worker.url for worker, verdict in attempt.verdicts.items() if verdict != "served"}
        avoided = attempt.avoided | (failed or {worker.url for worker in attempt.selection.workers})
        assert not (attempt.started and isinstance(answer, Selection))
        self.record(answer, attempt.tokens, frozenset(avoided))

    @rule(tokens=PROMPTS, rng=DRAWS, side=st.booleans())
    def one_request_fails_over(self, tokens: list[int], rng: float, side: bool) -> None:
        before = len(self.running)
        self.select(tokens, rng, None)
        while len(self.running) > before:
            self.fail(before, side, severe=False)
            self.end(before)
            self.retry(len([attempt for attempt in self.ended if not attempt.started]) - 1, rng)

    @rule(seconds=st.sampled_from([0.5, 2.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def counters_match_the_attempts_in_force(self) -> None:
        if self.router is None:
            return
        expected: dict[RouterWorker, WorkerLoad] = {}
        for attempt in self.running:
            for worker, load in attempt.counts().items():
                expected[worker] = expected.get(worker, IDLE).plus(load)
        state = self.router.snapshot()
        shown = {one.worker: one.load for one in state.workers if one.load != IDLE} | dict(state.departed)
        assert shown == expected
        for load in (*shown.values(), state.total):
            assert min(load.requests, load.waiting, load.prefill_tokens) >= 0
        assert (state.faults, state.tally.served, state.tally.failed) == (self.faults, self.served, self.failed)
        assert (state.tally.left, state.tally.declined, state.tally.unused) == (self.left, self.declined, self.unused)

    @invariant()
    def snapshot_matches_the_model(self) -> None:
        if self.router is None:
            return
        state = self.router.snapshot()
        shown = {one.worker: (one.state.value, one.index_blocks) for one in state.workers}
        assert state.index_blocks == sum(map(len, self.holds.values()))
        assert shown == {
            worker: (self.states[url], len(self.holds.get(worker, ()))) for url, worker in self.registered.items()
        }

    @invariant()
    def cached_candidates_match_a_fresh_search(self) -> None:
        if self.router is None:
            return
        placer, query = self.router._placer, request()
        placer._forget_what_changed(self.now)
        kept = placer._untried(query, frozenset(), self.now)
        placer._kept.clear()
        assert kept == placer._untried(query, frozenset(), self.now)

    def teardown(self) -> None:
        while self.running:
            self.end(0)
            self.counters_match_the_attempts_in_force()
        if self.router is not None:
            assert is_idle(self.router)


def leading(held: set[tuple[int, ...]], tokens: tuple[int, ...]) -> int:
    return next((count for count, block in enumerate(blocks(tokens)) if block not in held), len(blocks(tokens)))


def blocks(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tokens[: end + BLOCK] for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
