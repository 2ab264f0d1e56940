"""State that one runner's persistent batch takes over from another."""

import numpy as np

from fd_core.config import Limits
from fd_core.runner.batch import PersistentBatch
from fd_core.types import Admission, SamplingParams

LIMITS = Limits(
    max_num_seqs=3,
    max_num_batched_tokens=8,
    max_model_len=8,
    block_size=4,
    num_kv_blocks=6,
    vocab_size=100,
    max_drafts=2,
)
ALL = np.arange(3, dtype=np.int32)


def admitted(*lengths: int) -> PersistentBatch:
    batch = PersistentBatch(LIMITS)
    for slot, length in enumerate(lengths):
        tokens = np.arange(length, dtype=np.int32) + 10 * slot
        batch.admit(Admission(slot, 5, tokens, length, SamplingParams(), eos_token_ids=(), computed=0))
    return batch


def test_batch_takes_over_delivered_tokens_and_drafts() -> None:
    own, other = admitted(1, 3, 7), admitted(1, 3, 7)
    own.settle(
        ALL,
        own.advance(ALL),
        np.array([[90, 91, 92], [93, -1, -1], [94, 95, -1]], np.int32),
        np.array([2, 0, 1], np.int32),
    )
    own.guess(ALL, np.array([[80, 81], [82, 0], [83, 84]], np.int32), np.array([2, 1, 2], np.int32))
    other.correct(*own.latest(ALL))
    np.testing.assert_array_equal(other.length, [4, 4, 8])  # the last row is full
    np.testing.assert_array_equal(other.num_drafts, own.num_drafts)
    for slot in range(3):
        known = own.length[slot] + own.num_drafts[slot]
        np.testing.assert_array_equal(other.tokens[slot, :known], own.tokens[slot, :known])


def test_late_tokens_do_not_reach_next_request_in_slot() -> None:
    own, other = admitted(1, 3, 6), admitted(1, 3, 6)
    own.settle(ALL, own.advance(ALL), np.full((3, 3), 90, np.int32), np.zeros(3, np.int32))
    other.admit(Admission(1, 6, np.array([7, 8], np.int32), 2, SamplingParams(), eos_token_ids=(), computed=0))
    other.correct(*own.latest(ALL))
    assert other.length.tolist() == [2, 2, 7] and other.tokens[1, :3].tolist() == [7, 8, 12]
