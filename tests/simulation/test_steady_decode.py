import numpy as np
import pytest

from fd_core.simulation.steady_decode import REJECT_EVERY, SteadyDecode


def decoding(count=5, steps=20, num_drafts=0, block_size=4):
    prompts = [[100 * index + place for place in range(6 + index % block_size)] for index in range(1, count + 1)]
    draw = np.random.default_rng(0)
    return SteadyDecode(prompts, steps=steps, num_drafts=num_drafts, block_size=block_size, draw=draw)


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_every_step_computes_every_request_and_ends_none(num_drafts):
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


def test_more_steps_than_there_is_room_for_are_refused():
    workload = decoding(steps=1)

    def play():
        for _ in range(10):
            plan = workload.plan()
            workload.commit(plan, workload.answer(plan))

    with pytest.raises(RuntimeError, match="more steps were asked for"):
        play()
