"""Effects reach the port that performs them; completions wake waiting threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from fd_core.effects.operations import AbandonLease, Cancel, Effect, Found, Lookup, Save, Saved, Send, Sent
from fd_core.effects.port import CompletionQueue, EffectPort, JoinedEffectPort

NO_BLOCKS = np.zeros(0, np.int32)


class RecordingPort(EffectPort[str]):
    """Port that records effects and completes them at once, optionally on another thread."""

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


def test_effects_reach_their_port_in_order(queue) -> None:
    offload, transfer = RecordingPort(queue, Lookup, Save), RecordingPort(queue, Send, AbandonLease)
    effects = [Lookup(1, ()), Send(2, "lease", 0, NO_BLOCKS), AbandonLease("lease"), Save(3, (), NO_BLOCKS, True)]
    joined = JoinedEffectPort(queue, offload, transfer)
    joined.perform(effects)
    assert offload.performed == [effects[0], effects[3]]
    assert transfer.performed == effects[1:3]
    assert joined.stats() == ("2 performed", "2 performed", None)


def test_cancel_reaches_both_ports(queue) -> None:
    offload, transfer = RecordingPort(queue, Lookup), RecordingPort(queue, Send)
    JoinedEffectPort(queue, offload, transfer).perform([Cancel(4)])
    assert offload.performed == transfer.performed == [Cancel(4)]


def test_effect_without_port_is_rejected(queue) -> None:
    joined = JoinedEffectPort(queue, RecordingPort(queue, Lookup), None)
    joined.perform([Cancel(1)])
    with pytest.raises(ValueError, match="no port of this engine performs AbandonLease"):
        joined.perform([AbandonLease("lease")])
    port = JoinedEffectPort(queue, None, None)
    assert (port.completions(), port.stats()) == ([], (None, None, None))
    with pytest.raises(ValueError, match="no port of this engine performs Lookup"):
        port.perform([Cancel(1), Lookup(1, ())])


def test_completions_of_both_ports_are_ordered_and_unique(queue) -> None:
    joined = JoinedEffectPort(queue, RecordingPort(queue), None)
    for completion in (Found(1, 0, 0), Sent(2), Saved(3, 0)):
        queue.put(completion)
    assert joined.completions() == [Found(1, 0, 0), Sent(2), Saved(3, 0)]
    assert joined.completions() == []


def test_both_ports_are_closed(queue) -> None:
    offload, transfer = RecordingPort(queue), RecordingPort(queue)
    JoinedEffectPort(queue, offload, transfer).close()
    assert offload.closed and transfer.closed


@pytest.mark.timing
def test_wait_ends_on_completion_or_timeout(queue) -> None:
    joined = JoinedEffectPort(queue, RecordingPort(queue), None)
    threading.Timer(0.05, queue.put, [Sent(1)]).start()
    began = time.monotonic()
    joined.wait(20)
    assert time.monotonic() - began < 10
    joined.wait(20)  # it was not consumed
    assert joined.completions() == [Sent(1)]
    began = time.monotonic()
    joined.wait(0.05)
    assert time.monotonic() - began >= 0.04


def test_only_the_first_completion_wakes() -> None:
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
