"""When it is asked what is held outside the device."""

from __future__ import annotations

from fd_core.config import Limits
from fd_core.kv.effects import Found, Load, Lookup
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.requests import State
from fd_core.scheduling.scheduler import Scheduler
from fd_core.scheduling.storage import KeepKV
from fd_core.scheduling.victims import Cheapest
from fd_core.types import RequestSpec, SamplingParams


def test_a_prefix_that_left_the_device_while_its_request_waited_is_asked_for_once() -> None:
    limits = Limits(
        max_num_seqs=2, max_num_batched_tokens=64, max_model_len=40, block_size=4, num_kv_blocks=20, vocab_size=100
    )
    scheduler = Scheduler(limits, Fcfs(), Cheapest(), PrefixHasher(block_size=4, identity="m"), keep_kv=KeepKV())
    request = scheduler.add(RequestSpec(request_id="a", prompt=tuple(range(18)), params=SamplingParams(max_tokens=4)))
    assert scheduler.storage is not None
    (first,) = scheduler.take_effects()
    assert isinstance(first, Lookup)
    scheduler.completed(Found(first.operation, 0, 0))

    blocks = scheduler.pool.allocate(4)
    assert blocks is not None
    for block, key in zip(blocks.tolist(), first.keys, strict=True):
        scheduler.pool.register(block, key)
    scheduler.pool.release(blocks, -1)
    scheduler.storage.ask(request, list(first.keys))
    assert scheduler.take_effects() == [], "the device has it all"
    scheduler.pool.forget_prefixes()

    assert scheduler.plan() is None
    (again,) = scheduler.take_effects()
    assert isinstance(again, Lookup)
    assert again.keys == first.keys
    assert request.state is State.WAITING
    assert scheduler.plan() is None, "it waits for the answer"
    assert scheduler.take_effects() == []

    scheduler.completed(Found(again.operation, 3, 3))
    scheduler.plan()
    (load,) = scheduler.take_effects()
    assert isinstance(load, Load)
    assert load.keys == first.keys[:3]
