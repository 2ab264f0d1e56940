"""A decode and a prefill engine over a hostile network, driven beside a plain model: the golden texts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fd_core.engine.core import Engine
from fd_core.types import FinishReason, PrefillOutcome, RequestSpec
from tests.engine.helpers import golden
from tests.engine.leased import Lease, Pair, Worker
from tests.engine.stepping import SMALL, greedy, small_engine
from tests.engine.stored import keep_kv
from tests.engine.test_engine_machine import SPECS as PLAIN

PEER = "peer:1"
SPECS = [
    msgspec.structs.replace(spec, prefill_at=PEER) if index % 5 else spec
    for index, spec in enumerate(sorted(PLAIN, key=lambda spec: spec.request_id))
]
"""One in five has a router that knew no prefill worker."""
DIRECT = [greedy(f"direct{index}", range(index, 2 * index + 9), 40) for index in range(8)]
"""Texts that the prefill worker makes itself: they grow and take its blocks."""
EXPECTED = {"decode": PLAIN, "prefill": DIRECT}
FAILURES: list[PrefillOutcome] = ["refused", "lost", "expired", "damaged"]


class PairMachine(RuleBasedStateMachine):
    """Rules are biased to pressure, as those of one engine are; each message comes when a rule says so, or never."""

    @initialize(
        depth=st.integers(1, 3),
        slots=st.tuples(st.integers(2, 5), st.integers(2, 5)),
        extra_budget=st.tuples(st.sampled_from([40, 8, 3, 0]), st.sampled_from([20, 4, 2, 1, 0])),
        extra_blocks=st.tuples(st.sampled_from([0, 0, 4, 12]), st.sampled_from([0, 0, 4, 12])),
        k=st.sampled_from([0, 0, 3]),
        victims=st.sampled_from(["youngest", "youngest", "cheapest"]),
        eager=st.sampled_from([True, True, True, False]),
        kept=st.tuples(st.booleans(), st.booleans()),
    )
    def start(
        self,
        depth: int,
        slots: tuple[int, int],
        extra_budget: tuple[int, int],
        extra_blocks: tuple[int, int],
        k: int,
        victims: str,
        eager: bool,
        kept: tuple[bool, bool],
    ) -> None:
        self.depth, self.k, self.kept = depth, k, dict(zip(EXPECTED, kept, strict=True))
        self.settings = {
            side: {
                "max_num_seqs": slots[index],
                "max_num_batched_tokens": 1 + k + extra_budget[index],
                "num_kv_blocks": SMALL["num_kv_blocks"] + extra_blocks[index],
                "victim_policy": victims,
            }
            for index, side in enumerate(EXPECTED)
        }
        self.pair = Pair(self.engine("decode"), self.engine("prefill"), eager=eager)
        for side in EXPECTED:
            self.keep(side)
        self.expected = {side: golden(specs) for side, specs in EXPECTED.items()}
        self.unused = {"decode": list(SPECS), "prefill": list(DIRECT)}
        self.taken: dict[str, dict[str, RequestSpec]] = {"decode": {}, "prefill": {}}
        self.aborted: set[str] = set()
        self.deaths = 0
        for _ in range(3):
            self.take("prefill", 0)

    def engine(self, side: str) -> Engine:
        return small_engine(PLAIN, self.k if side == "decode" else 0, 0.3, **self.settings[side])

    def keep(self, side: str) -> None:
        if self.kept[side]:
            keep_kv(self.worker(side), finished=True)

    def worker(self, side: str) -> Worker:
        worker: Worker = getattr(self.pair, side)
        return worker

    # What clients and engines do --------------------------------------------------------------------------

    @rule(data=st.data(), side=st.sampled_from(["decode", "decode", "prefill"]), count=st.integers(2, 6))
    def submit(self, data: st.DataObject, side: str, count: int) -> None:
        for _ in range(min(count, len(self.unused[side]))):
            self.take(side, data.draw(st.integers(0, len(self.unused[side]) - 1)))

    def take(self, side: str, index: int) -> None:
        spec = self.unused[side].pop(index)
        self.taken[side][spec.request_id] = spec
        self.worker(side).submit(spec)

    @rule(side=st.sampled_from(list(EXPECTED)), times=st.integers(1, 10))
    def work(self, side: str, times: int) -> None:
        self.worker(side).turn(self.depth, times)

    @rule(times=st.integers(2, 12))
    def all_goes_well(self, times: int) -> None:
        for _ in range(times):
            self.pair.decode.turn(self.depth)
            self.pair.prefill.turn(self.depth)
            self.pair.calm()

    @rule(side=st.sampled_from(list(EXPECTED)))
    def plan_without_answer(self, side: str) -> None:
        worker = self.worker(side)
        if len(worker.in_flight) < self.depth:
            worker.plan()

    @rule(data=st.data(), side=st.sampled_from(["decode", "decode", "prefill"]), state=st.sampled_from([0, 0, 1, 2]))
    def abort(self, data: st.DataObject, side: str, state: int) -> None:
        slots = self.worker(side).scheduler.probe().slots
        which = (slots.loading, slots.running, slots.draining)[state]
        names = [self.worker(side).request_in(slot) for slot in np.flatnonzero(which).tolist()]
        if names := sorted(set(names) & self.taken[side].keys()):
            name = data.draw(st.sampled_from(names))
            self.aborted.add(name)
            self.worker(side).abort(name)

    @precondition(lambda self: self.deaths < 2 and any(self.taken.values()))
    @rule(side=st.sampled_from(list(EXPECTED)))
    def an_engine_is_replaced(self, side: str) -> None:
        """Its clients' requests go on in the next epoch; those of other workers do not."""
        self.deaths += 1
        new = self.pair.replace(self.worker(side), self.engine(side))
        self.keep(side)
        texts = new.texts
        for name, spec in self.taken[side].items():
            if name in texts.ends:
                continue
            if name in self.aborted:
                texts.ends[name] = FinishReason.ABORT
                continue
            new.submit(msgspec.structs.replace(spec, delivered=tuple(texts.tokens.get(name, ()))))

    # What the network does --------------------------------------------------------------------------------

    @precondition(lambda self: self.pair.unasked)
    @rule(data=st.data(), refused=st.sampled_from([False, False, False, True]))
    def an_order_arrives(self, data: st.DataObject, refused: bool) -> None:
        lease = self.one_of(data, self.pair.unasked)
        if refused:
            self.pair.refuse(lease)
        else:
            self.pair.ask(lease)

    @precondition(lambda self: self.pair.reading)
    @rule(data=st.data())
    def blocks_are_read(self, data: st.DataObject) -> None:
        self.pair.read(data.draw(st.integers(0, len(self.pair.reading) - 1)))

    @precondition(lambda self: self.pair.awaited)
    @rule(data=st.data(), failure=st.sampled_from(FAILURES))
    def a_lease_ends(self, data: st.DataObject, failure: PrefillOutcome) -> None:
        lease = self.one_of(data, self.pair.awaited)
        self.pair.end(lease, "transferred" if lease.complete else failure)

    @precondition(lambda self: any(lease.complete for lease in self.pair.awaited))
    @rule(data=st.data(), outcome=st.sampled_from(["transferred", "transferred", "damaged"]))
    def a_commit_arrives(self, data: st.DataObject, outcome: PrefillOutcome) -> None:
        self.pair.end(self.one_of(data, [lease for lease in self.pair.awaited if lease.complete]), outcome)

    @precondition(lambda self: self.pair.unwanted)
    @rule(data=st.data())
    def an_abort_arrives(self, data: st.DataObject) -> None:
        self.pair.abort(self.one_of(data, self.pair.unwanted))

    @precondition(lambda self: any(lease.asked for lease in self.pair.awaited))
    @rule(data=st.data())
    def the_prefill_worker_breaks_off(self, data: st.DataObject) -> None:
        self.pair.abort(self.one_of(data, [lease for lease in self.pair.awaited if lease.asked]))

    @staticmethod
    def one_of(data: st.DataObject, leases: list[Lease]) -> Lease:
        return leases[data.draw(st.integers(0, len(leases) - 1))]

    # What must hold ---------------------------------------------------------------------------------------

    @invariant()
    def delivered_is_a_prefix_of_golden(self) -> None:
        if not hasattr(self, "pair"):
            return
        for side, specs in self.taken.items():
            texts = self.worker(side).texts
            for name in specs:
                whole, tokens = self.expected[side][name], texts.tokens.get(name, [])
                assert tokens == whole[: len(tokens)]
                if texts.ends.get(name) is FinishReason.ABORT:
                    assert name in self.aborted
                elif name in texts.ends:
                    assert tokens == whole

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.pair.run(self.depth)
        self.delivered_is_a_prefix_of_golden()
        for side, specs in self.taken.items():
            assert specs.keys() <= self.worker(side).texts.ends.keys(), "a request has no end"


TestPairs = PairMachine.TestCase
TestPairs.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)
TestPairs = pytest.mark.timeout(120)(TestPairs)


@pytest.mark.soak
@pytest.mark.timeout(900)
class TestPairsAtLength(PairMachine.TestCase):
    settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
