"""Work on logits of many numbers of rows on the fake driver; print the first and the later compilations, as JSON."""

from __future__ import annotations

import json

import numpy as np
import torch
from fake_driver import FakeDriver
from fd_core.ops.torch.ops import TorchOps
from fd_core.testing.models.arrays import on_device, penalty_input, sample_input

from fd_gpu_cuda.kernels.sampler import TritonSampling

VOCABULARY, DRAFTS = 4099, 5


def work(by: TritonSampling, rows: int, seen: int) -> None:
    host = TorchOps()
    logits, ids = torch.zeros(rows, VOCABULARY), torch.zeros(rows, dtype=torch.int32)
    for asked in ({"temperature": 0.0}, {}, {"top_k": rows, "top_p": 0.9}, {"min_p": 0.1}):
        by.sample(logits, on_device(host, sample_input(rows, **asked)))
    counts = np.zeros((rows + 3, VOCABULARY), np.int32)
    drafts = [(0, 1)] * seen
    by.penalize(
        logits, on_device(host, penalty_input(counts, rows=np.arange(rows), counts_rows=np.arange(rows), drafts=drafts))
    )
    by.mask_logits(logits, ids, torch.zeros(rows, -(-VOCABULARY // 32), dtype=torch.int32))
    indices = torch.zeros(seen, dtype=torch.int32)
    by.add_at(logits, indices, indices, torch.zeros(seen))
    by.add_at(torch.zeros(rows, VOCABULARY, dtype=torch.int32), indices, indices, indices)
    by.logprobs(logits, ids, min(seen, 20))
    by.ranks(logits, ids)
    by.token_matrix(torch.zeros(rows, 1 + DRAFTS, dtype=torch.int32), ids, ids, indices, 256)
    by.verify(torch.zeros(rows, 1 + DRAFTS, dtype=torch.int32), torch.zeros(rows, DRAFTS, dtype=torch.int32), ids)


def main() -> None:
    fake = FakeDriver().install()
    by = TritonSampling(torch.device("cpu"), 132)
    work(by, 3, 3)
    first = fake.compiled
    for rows, seen in ((1, 1), (2, 0), (16, 16), (33, 40), (64, 1), (63, 32)):
        work(by, rows, seen)
    print(json.dumps({"first": first, "later": fake.compiled[len(first) :]}))


if __name__ == "__main__":
    main()
