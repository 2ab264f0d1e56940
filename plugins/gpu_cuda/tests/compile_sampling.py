"""Compiles the kernels on logits, for one compute capability and a real vocabulary; prints the faults."""

from __future__ import annotations

import sys

import numpy as np
import torch
from compiling import MULTIPROCESSORS, Compiler
from extent import everything
from fd_core.ops.torch.ops import TorchOps
from fd_core.testing.models.arrays import on_device, penalty_input, sample_input

from fd_gpu_cuda.kernels.sampler import TritonSampling

VOCABULARIES = {"Qwen3": 151_936, "GPT-2": 50_257}
RELEASE_AND_ACQUIRE = r"atom[.]global[.]gpu[.]acq_rel[.]add"


def main(capability: int) -> None:
    compiler, host = Compiler(capability).install(), TorchOps()
    # Atomics: programs of a row find the last one, and weights are added to bins (no result in new Triton releases).
    compiler.wanted = dict.fromkeys(("find_peaks", "draw", "find_cuts", "score", "count_before"), RELEASE_AND_ACQUIRE)
    compiler.wanted["fill_bins"] = r"(red|atom)[.]global[.]gpu[.]relaxed[.]add[.]f64(.|\n)*" + RELEASE_AND_ACQUIRE
    compiler.wanted["penalize"] = r"div[.]rn[.](ftz[.])?f32"
    by = TritonSampling(torch.device("cpu"), MULTIPROCESSORS[capability])
    for model, vocabulary in VOCABULARIES.items() if everything() else [("Qwen3", VOCABULARIES["Qwen3"])]:
        compiler.case = model
        logits, ids = torch.empty(8, vocabulary), torch.zeros(8, dtype=torch.int32)
        for asked in ({"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.9}):
            by.sample(logits, on_device(host, sample_input(8, **asked)))
        by.penalize(logits, on_device(host, penalty_input(np.zeros((8, vocabulary), np.int32), drafts=[(1, 2)])))
        by.logprobs(logits, ids, 20)
        by.ranks(logits, ids)
        if everything():
            by.mask_logits(logits, ids, torch.zeros(8, -(-vocabulary // 32), dtype=torch.int32))
            by.add_at(logits, ids, ids, torch.zeros(8))
            by.add_at(torch.zeros(8, vocabulary, dtype=torch.int32), ids, ids, ids)
    by.verify(torch.zeros(8, 6, dtype=torch.int32), torch.zeros(8, 5, dtype=torch.int32), ids)
    by.token_matrix(torch.zeros(8, 6, dtype=torch.int32), ids, ids, ids, 256)
    print("\n".join(compiler.failures))


if __name__ == "__main__":
    main(int(sys.argv[1]))
