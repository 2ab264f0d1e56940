import numpy as np
import pytest

from fd_core.engine.rehearsal import REJECT_EVERY, Rehearsal


def rehearsal(count=5, steps=20, num_drafts=0, block_size=4):
    prompts = [[100 * index + place for place in range(6 + index % block_size)] for index in range(1, count + 1)]
    return Rehearsal(prompts, steps=steps, num_drafts=num_drafts, block_size=block_size, draw=np.random.default_rng(0))


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_every_step_computes_every_request_and_ends_none(num_drafts):
    rehearsed = rehearsal(num_drafts=num_drafts)
    delivered = 0
    for _ in range(20):
        plan = rehearsed.plan()
        assert plan.num_tokens.tolist() == [1 + num_drafts] * 5
        deltas = rehearsed.commit(plan, rehearsed.answer(plan))
        assert [delta.finish_reason for delta in deltas] == [None] * 5
        delivered += sum(len(delta.token_ids) for delta in deltas)
        rehearsed.check_integrity()
    rejected = sum((slot + step) % REJECT_EVERY == 0 for slot in range(5) for step in range(1, 21))
    assert delivered == 5 * 20 * (1 + num_drafts) - (rejected if num_drafts else 0)


def test_a_rehearsal_that_runs_too_long_says_so():
    rehearsed = rehearsal(steps=1)

    def play():
        for _ in range(10):
            plan = rehearsed.plan()
            rehearsed.commit(plan, rehearsed.answer(plan))

    with pytest.raises(RuntimeError, match="longer than it was made for"):
        play()
