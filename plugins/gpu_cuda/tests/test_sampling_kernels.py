"""The kernels of sampling in Triton's interpreter, against the numpy oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from fd_core.ops.contract import SampleInput  # noqa: E402 - only where both are installed
from fd_core.ops.numpy_ops import NumpyOps  # noqa: E402
from fd_core.ops.torch_ops import TorchOps  # noqa: E402
from fd_core.testing.arrays import on_device, penalty_input, sample_input  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from fd_gpu_cuda.sampling import TritonSampling  # noqa: E402

Floats = npt.NDArray[np.float32]
ORACLE, HOST = NumpyOps(), TorchOps()
INFINITE = np.float32(np.inf)


def kernels(multiprocessors: int = 1) -> TritonSampling:
    """With few multiprocessors a program has several tiles, with many each tile a program."""
    return TritonSampling(torch.device("cpu"), multiprocessors)


def same_choice(logits: Floats, given: SampleInput, by: TritonSampling | None = None) -> npt.NDArray[np.int32]:
    """Compare tokens and peaks with the oracle's; return the tokens."""
    device = on_device(HOST, given)
    tokens, peaks = (each.numpy() for each in (by or kernels()).sample(HOST.from_host(logits.copy()), device))
    right, right_peaks = ORACLE.sample(logits, given)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == right.tolist()
    np.testing.assert_array_equal(peaks, right_peaks)
    return tokens


def hostile_rows(vocabulary: int, seed: int) -> Floats:
    """Logits that are all equal, tied across any cut, -inf but for one, zeros of both signs, tiny, and far apart."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((12, vocabulary)).astype(np.float32) * np.float32(3)
    rows[0] = 1.5
    rows[1] = np.round(rows[1])
    rows[2] = -INFINITE
    rows[2, vocabulary // 2] = -4.0
    rows[3] = rng.choice(np.array([0.0, -0.0], np.float32), vocabulary)
    rows[4] *= np.float32(1e-30)
    rows[5] *= np.float32(1e30)
    rows[6, ::2] = -INFINITE
    rows[7] = np.linspace(-0.001, 0.001, vocabulary, dtype=np.float32)
    rows[8] = -np.abs(rows[8]) * np.float32(1e-42)  # numbers below the smallest normal one
    return rows


@pytest.mark.parametrize("multiprocessors", [1, 132])
@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 3001])
def test_hostile_rows_with_every_filter(vocabulary: int, multiprocessors: int) -> None:
    by = kernels(multiprocessors)
    rng = np.random.default_rng(vocabulary)
    for turn in range(3):
        logits = hostile_rows(vocabulary, turn)
        rows = len(logits)
        given = sample_input(
            rows,
            temperature=rng.choice([0.0, 1e-30, 0.01, 0.7, 1.0, 50.0, 1e30], rows),
            top_k=rng.choice([0, 1, 2, 40, vocabulary - 1, vocabulary, 2**31 - 1], rows),
            top_p=rng.choice([0.0, 1e-6, 0.3, 0.9, 0.999, 1.0], rows),
            min_p=rng.choice([0.0, 0.0, 1e-5, 0.3, 1.0], rows),
            seeds=rng.integers(0, 2**64, rows, np.uint64),
            positions=rng.integers(0, 2**31, rows),
        )
        same_choice(logits, given, by)
    assert not any(each.any() for each in (by._counters, by._lengths, by._bin_counts, by._bin_masses))
