"""Effects reach the port that performs them; completions wake whoever waits for them."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from fd_core.effects.operations import Cancel, Effect, Found, GiveUp, Lookup, Save, Saved, Send, Sent
from fd_core.effects.port import CompletionQueue, EffectPort, JoinedEffectPort

NO_BLOCKS = np.zeros(0, np.int32)


class Noting(EffectPort[str]):
    """Notes what it is asked and completes it at once, on another thread if it is told so."""

    def __init__(self, queue: CompletionQueue, *performs: type[Effect]) -> None:
        self.performs = performs  # type: ignore[misc]  # of this one only
        super().__init__(queue)
        self.performed: list[Effect] = []
        self.closed = False

    def perform(self, effects) -> None:
        self.performed += effects

    def stats(self) -> str:
        return f"{len(self.performed)} performed"

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def queue() -> CompletionQueue:
    return CompletionQueue()


def test_effects_go_to_the_port_that_performs_them_in_order(queue) -> None:
    offload, transfer = Noting(queue, Lookup, Save), Noting(queue, Send, GiveUp)
    effects = [Lookup(1, ()), Send(2, "lease", 0, NO_BLOCKS), GiveUp("lease"), Save(3, (), NO_BLOCKS, True)]
    joined = JoinedEffectPort(queue, offload, transfer)
    joined.perform(effects)
    assert offload.performed == [effects[0], effects[3]]
    assert transfer.performed == effects[1:3]
    assert joined.stats() == ("2 performed", "2 performed", None)


def test_a_cancel_goes_to_both_ports(queue) -> None:
    offload, transfer = Noting(queue, Lookup), Noting(queue, Send)
    JoinedEffectPort(queue, offload, transfer).perform([Cancel(4)])
    assert offload.performed == transfer.performed == [Cancel(4)]


def test_an_effect_that_nobody_performs_is_refused(queue) -> None:
    joined = JoinedEffectPort(queue, Noting(queue, Lookup), None)
    joined.perform([Cancel(1)])
    with pytest.raises(ValueError, match="no port of this engine performs GiveUp"):
        joined.perform([GiveUp("lease")])
    nobody = JoinedEffectPort(queue, None, None)
    assert (nobody.completions(), nobody.stats()) == ([], (None, None, None))
    with pytest.raises(ValueError, match="no port of this engine performs Lookup"):
        nobody.perform([Cancel(1), Lookup(1, ())])


def test_completions_of_both_ports_come_in_order_and_once(queue) -> None:
    joined = JoinedEffectPort(queue, Noting(queue), None)
    for completion in (Found(1, 0, 0), Sent(2), Saved(3, 0)):
        queue.put(completion)
    assert joined.completions() == [Found(1, 0, 0), Sent(2), Saved(3, 0)]
    assert joined.completions() == []


def test_both_ports_are_closed(queue) -> None:
    offload, transfer = Noting(queue), Noting(queue)
    JoinedEffectPort(queue, offload, transfer).close()
    assert offload.closed and transfer.closed


@pytest.mark.timing
def test_waiting_ends_with_a_completion_or_the_time(queue) -> None:
    joined = JoinedEffectPort(queue, Noting(queue), None)
    threading.Timer(0.05, queue.put, [Sent(1)]).start()
    began = time.monotonic()
    joined.wait(20)
    assert time.monotonic() - began < 10
    joined.wait(20)  # it was not taken
    assert joined.completions() == [Sent(1)]
    began = time.monotonic()
    joined.wait(0.05)
    assert time.monotonic() - began >= 0.04


def test_the_first_completion_wakes_and_those_behind_it_need_not() -> None:
    woken: list[str] = []
    queue = CompletionQueue(lambda: woken.append(threading.current_thread().name))
    thread = threading.Thread(target=queue.put, args=[Sent(1)], name="copies")
    thread.start()
    thread.join()
    queue.put(Sent(2))
    assert woken == ["copies"]
    assert queue.take() == [Sent(1), Sent(2)]
    queue.put(Sent(3))
    assert len(woken) == 2
