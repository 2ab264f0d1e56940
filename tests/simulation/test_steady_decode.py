import numpy as np
import pytest

from fd_core.simulation.engines.scripted import REJECT_EVERY, PrefillBurst, SteadyDecode


def decoding(count=5, steps=20, num_drafts=0, block_size=4, waiting_tokens=0):
    prompts = [[100 * index + position for position in range(6 + index % block_size)] for index in range(1, count + 1)]
    draw = np.random.default_rng(0)
    sizes = {"steps": steps, "num_drafts": num_drafts, "block_size": block_size, "waiting_tokens": waiting_tokens}
    return SteadyDecode(prompts, **sizes, draw=draw)


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_every_step_decodes_all_requests(num_drafts):
    workload = decoding(num_drafts=num_drafts)
    delivered = 0
    for _ in range(20):
        plan = workload.plan()
        assert plan.num_tokens.tolist() == [1 + num_drafts] * 5
        deltas = workload.commit(plan, workload.answer(plan))
        assert [delta.finish_reason for delta in deltas] == [None] * 5
        delivered += sum(len(delta.token_ids) for delta in deltas)
        workload.check_integrity()
    rejected = sum((slot + step) % REJECT_EVERY == 0 for slot in range(5) for step in range(1, 21))
    assert delivered == 5 * 20 * (1 + num_drafts) - (rejected if num_drafts else 0)


def test_queued_prompts_wait_throughout_the_run():
    workload = decoding(waiting_tokens=200, steps=10)
    for index in range(3):
        workload.queue(range(1000 * index, 1000 * index + 200))
    for _ in range(10):
        plan = workload.plan()
        assert plan.total_tokens == 5 and not plan.revocations
        workload.commit(plan, workload.answer(plan))
    assert (workload.num_running, workload.num_waiting) == (5, 3)
    workload.check_integrity()
    assert workload.limits.num_kv_blocks * workload.limits.block_size >= 200
    with pytest.raises(ValueError, match="expected a prompt of 200 tokens, got 3"):
        workload.queue([1, 2, 3])
    with pytest.raises(ValueError, match="may fit with 5 requests"):
        decoding(waiting_tokens=20, steps=10)


def test_burst_of_prompts_runs_and_shares_prefix():
    burst = PrefillBurst(6, 50, block_size=4, draw=np.random.default_rng(0))
    assert len({prompt[:46] for prompt in burst.prompts}) == 1 and len(set(burst.prompts)) == 6
    for prompt in burst.prompts:
        burst.queue(prompt)
    computed = 0
    while burst.num_waiting:
        plan = burst.plan()
        computed += plan.total_tokens
        burst.commit(plan, burst.answer(plan))
    assert burst.num_running == 6
    assert computed < 2 * 50
    burst.check_integrity()


def test_too_many_steps_for_the_pool_are_rejected():
    workload = decoding(steps=1)

    def play():
        for _ in range(10):
            plan = workload.plan()
            workload.commit(plan, workload.answer(plan))

    with pytest.raises(RuntimeError, match="requested steps exceed"):
        play()
