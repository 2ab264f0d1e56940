"""The steps of a rehearsal are the largest that the limits allow."""

from __future__ import annotations

import pytest

from fd_core.config import Limits
from fd_core.engine.computing import rehearsed
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.contract import StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.runner import Runner
from fd_core.testing.models.checkpoints import write_checkpoint


@pytest.mark.parametrize(("budget", "chunk", "decoding"), [(40, 40, 5), (200, 99, 5), (3, 3, 3)])
def test_longest_context_is_rehearsed_in_the_largest_chunk(tmp_path, monkeypatch, budget, chunk, decoding):
    ops = NumpyOps()
    with open_checkpoint(write_checkpoint("llama", tmp_path)) as checkpoint:
        model = load_model(checkpoint, ops, 100)
    limits = Limits(
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        max_model_len=100,
        block_size=4,
        num_kv_blocks=1000,
        vocab_size=model.vocab_size,
    )
    steps: list[StepInput] = []
    attend = NumpyOps.paged_attention

    def paged_attention(self, q, layer, heads, step):
        if all(step is not each for each in steps):
            steps.append(step)
        return attend(self, q, layer, heads, step)

    monkeypatch.setattr(NumpyOps, "paged_attention", paged_attention)
    with rehearsed(lambda limits: Runner(ops, model, limits, NumpyPostprocess), limits):
        pass
    assert [len(step.token_ids) for step in steps] == [chunk, budget // decoding * decoding, decoding]
    assert int(steps[0].context_len[0]) == 99
