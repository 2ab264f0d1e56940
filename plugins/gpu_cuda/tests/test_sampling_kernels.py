"""The kernels of sampling in Triton's interpreter, against the numpy oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from extent import AT_LENGTH, everything  # noqa: E402
from fd_core.ops.contract import SampleInput  # noqa: E402 - only where both are installed
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.runner.postprocess.torch_matrix import write_token_matrix  # noqa: E402
from fd_core.testing.models.arrays import on_device, penalty_input, sample_input  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from fd_gpu_cuda.kernels.sampler import TritonSampling  # noqa: E402

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


@pytest.mark.parametrize(
    ("vocabulary", "multiprocessors"),
    [
        (1, 1),
        (7, 132),
        (1024, 1),
        (3001, 132),
        pytest.param(1, 132, marks=AT_LENGTH),
        pytest.param(7, 1, marks=AT_LENGTH),
        pytest.param(1024, 132, marks=AT_LENGTH),
        pytest.param(3001, 1, marks=AT_LENGTH),
    ],
)
def test_hostile_rows_with_every_filter(vocabulary: int, multiprocessors: int) -> None:
    by = kernels(multiprocessors)
    rng = np.random.default_rng(vocabulary)
    for turn in range(2):
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


LOGITS = st.sampled_from([-2.5, -0.0, 0.0, 0.5, 0.75, 3.0, 11.0, -np.inf])


@settings(
    max_examples=40 if everything() else 15,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.data())
def test_any_small_row_samples_like_the_oracle(data: Any) -> None:
    rows, vocabulary = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    column = {"min_size": rows, "max_size": rows}
    logits = np.array(
        data.draw(st.lists(st.lists(LOGITS, min_size=vocabulary, max_size=vocabulary), **column)), np.float32
    )
    logits[:, 0] = np.where(np.isfinite(logits).any(axis=1), logits[:, 0], 1.0)
    given = sample_input(
        rows,
        temperature=data.draw(st.lists(st.sampled_from([0.0, 1e-30, 0.7, 1.0, 3.0, 1e30]), **column)),
        top_k=data.draw(st.lists(st.sampled_from([0, 1, 3, 9, 50]), **column)),
        top_p=data.draw(st.lists(st.floats(0, 1, width=32), **column)),
        min_p=data.draw(st.lists(st.sampled_from([0.0, 0.1, 0.8, 1.0]), **column)),
        seeds=data.draw(st.lists(st.integers(0, 2**64 - 1), **column)),
        positions=data.draw(st.lists(st.integers(0, 2**31 - 1), **column)),
    )
    same_choice(logits, given)


def scattered(rows: int, vocabulary: int, seed: int) -> tuple[Floats, dict[str, Any]]:
    """Logits of several scales, every third row full of ties; seeds and positions."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocabulary), np.float32) * rng.choice([0.2, 1.0, 4.0], (rows, 1))
    logits[::3] = np.round(logits[::3] * 2) / 2
    return logits.astype(np.float32), {
        "seeds": rng.integers(0, 2**64, rows, np.uint64),
        "positions": rng.integers(0, 2**31, rows),
    }


@pytest.mark.parametrize(
    ("vocabulary", "columns"),
    [
        (50_257, {"temperature": 0.0}),
        (50_257, {}),
        (151_936, {"top_k": 20, "top_p": 0.95}),
        (32_003, {"top_p": 0.8, "min_p": 0.001}),
        (32_003, {"top_k": 30_000}),
    ],
)
def test_real_vocabulary_samples_like_the_oracle(vocabulary: int, columns: dict[str, Any]) -> None:
    logits, seeds = scattered(2, vocabulary, 3)
    same_choice(logits, sample_input(2, **{"temperature": 0.6, **seeds, **columns}))


def test_cut_through_more_tokens_than_are_listed() -> None:
    """One logit is far below, and all others are nearly alike, so that one bin has them: the whole row is searched."""
    logits, seeds = scattered(3, 12_003, 4)
    logits *= np.float32(0.001)
    logits[:, 77] = -50
    same_choice(logits, sample_input(3, top_k=[9_000, 0, 11_999], top_p=[0.9, 0.8, 1.0], **seeds))


def test_rows_beyond_the_workspace_are_sampled_in_parts() -> None:
    by = kernels(132)
    by.reserve(4)
    logits, seeds = scattered(11, 2001, 5)
    choice = np.arange(11)
    given = sample_input(11, temperature=choice % 3, top_k=choice % 4, top_p=0.5 + choice / 22, **seeds)
    same_choice(logits, given, by)
    tokens = np.arange(11, dtype=np.int32) * 7
    found = by.ranks(torch.from_numpy(logits), torch.from_numpy(tokens))
    assert found.tolist() == ORACLE.ranks(logits, tokens).tolist()
    check_scores(by, logits, tokens, 5)


@pytest.mark.parametrize("columns", [{"temperature": 0.0}, {}, {"top_k": 7, "top_p": 0.9, "min_p": 0.1}])
def test_non_finite_row_is_reported_without_affecting_others(columns: dict[str, Any]) -> None:
    logits, seeds = scattered(6, 3000, 6)
    given = sample_input(6, **seeds, **columns)
    expected = ORACLE.sample(logits, given)[0]
    logits[0, 2000], logits[1, 5], logits[2], logits[5, 0] = np.nan, np.inf, -np.inf, np.nan
    by = kernels()
    tokens, peaks = (each.numpy() for each in by.sample(HOST.from_host(logits), on_device(HOST, given)))
    assert np.isfinite(peaks).tolist() == [False, False, False, True, True, False]
    assert tokens[3:5].tolist() == expected[3:5].tolist()
    assert ((tokens >= 0) & (tokens < 3000)).all()
    # Leftovers of such a row must not reach the next step.
    logits, seeds = scattered(6, 3000, 7)
    same_choice(logits, sample_input(6, **seeds, **columns), by)


def test_a_boundary_belongs_to_the_next_token() -> None:
    """Two equal halves, with the boundary inside a tile, between tiles, and between programs."""
    half, zero = 9_297_664, 14_883_995  # positions where seed 0 draws exactly 1/2 and exactly 0
    logits = np.full((6, 4096), -INFINITE)
    for row, tied in enumerate(([5, 6], [1023, 1024], [2047, 2048], [5, 6], [1024, 1025], [4094, 4095])):
        logits[row, tied] = 1.0
    given = sample_input(6, positions=[half] * 3 + [zero] * 3)
    assert same_choice(logits, given, kernels()).tolist() == [6, 1024, 2048, 5, 1024, 4094]
    assert same_choice(logits, given, kernels(132)).tolist() == [6, 1024, 2048, 5, 1024, 4094]


def test_only_the_first_tied_tokens_are_drawn() -> None:
    """Omitted ties must not shift the tokens after them."""
    logits = np.tile(np.array([0.0] * 10 + [1.0] * 3, np.float32), (16, 1))
    tokens = same_choice(logits, sample_input(16, top_k=4, positions=np.arange(16)))
    assert set(tokens.tolist()) <= {0, 10, 11, 12}


def test_top_p_applies_to_the_top_k_tokens_without_further_ties() -> None:
    """The tokens tied with the last one that top_k keeps weigh a hundred times what is kept."""
    logits = np.tile(np.array([1.0] * 1000 + [2.0] * 3, np.float32), (8, 1))
    tokens = same_choice(logits, sample_input(8, top_k=4, top_p=0.5, positions=np.arange(8)))
    assert set(tokens.tolist()) <= {1000, 1001}


def test_any_program_may_be_the_last_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run in a random order, as on a device, where any of them may be the last."""
    from triton.runtime import interpreter

    rng = np.random.default_rng(8)
    set_index = interpreter.InterpreterBuilder.set_grid_idx

    def shuffled(builder: Any, x: int, y: int, z: int) -> None:
        if (x, y, z) == (0, 0, 0):
            builder.order = rng.permutation(int(np.prod(builder.grid_dim)))
        x, y, z = np.unravel_index(builder.order[np.ravel_multi_index((x, y, z), builder.grid_dim)], builder.grid_dim)
        set_index(builder, int(x), int(y), int(z))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", shuffled)
    by = kernels(132)
    logits, seeds = scattered(5, 7001, 9)
    for turn in range(2):
        same_choice(logits, sample_input(5, top_k=[0, 5, 300, 0, 9], top_p=0.9 + turn / 10, **seeds), by)
    check_scores(by, logits, np.arange(5, dtype=np.int32), 5)


# Changing logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [7, 32, 1024, 3001])
def test_masks_match_the_oracle(vocabulary: int) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((9, vocabulary)).astype(np.float32)
    rows = np.array([8, 0, 5], np.int32)
    bits = rng.integers(-(2**31), 2**31, (3, -(-vocabulary // 32)), dtype=np.int32)
    found = kernels().mask_logits(*map(HOST.from_host, (logits.copy(), rows, bits)))
    np.testing.assert_array_equal(found.numpy(), ORACLE.mask_logits(logits.copy(), rows, bits))


@pytest.mark.parametrize("vocabulary", [11, 5003])
def test_penalties_match_the_oracle_bit_for_bit(vocabulary: int) -> None:
    """Unordered rows, repeated drafts, and counts beyond any product in float32."""
    rng = np.random.default_rng(vocabulary)
    logits = rng.standard_normal((9, vocabulary)).astype(np.float32) * np.float32(4)
    logits[0, ::2], logits[1, ::3] = 0.0, -np.inf
    counts = rng.integers(-12, 2**25, (8, vocabulary), dtype=np.int32).clip(0)
    counts[:, vocabulary // 2 :] = 0
    drafts = sorted(zip(rng.integers(0, 6, 60).tolist(), rng.integers(0, vocabulary, 60).tolist(), strict=True))
    given = penalty_input(
        counts,
        rows=rng.permutation(9)[:6],
        counts_rows=rng.permutation(8)[:6],
        drafts=drafts + [(5, vocabulary - 1)] * 3,
        repetition=rng.choice([0.7, 1.0, 1.3], 6),
        presence=rng.uniform(-2, 2, 6),
        frequency=rng.uniform(-2, 2, 6),
    )
    held = counts.copy()
    found = kernels().penalize(HOST.from_host(logits.copy()), on_device(HOST, given))
    np.testing.assert_array_equal(found.numpy(), ORACLE.penalize(logits.copy(), given))
    np.testing.assert_array_equal(counts, held, "drafts must not stay in the counts")


def test_empty_update_changes_nothing() -> None:
    logits = torch.ones(2, 40)
    kernels().penalize(logits, on_device(HOST, penalty_input(np.zeros((0, 40), np.int32), rows=[])))
    nothing = torch.empty(0, dtype=torch.int32)
    kernels().mask_logits(logits, nothing, torch.empty(0, 2, dtype=torch.int32))
    kernels().add_at(logits, nothing, nothing, torch.empty(0))
    assert (logits == 1).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize("count", [1, 31, 200])
def test_values_are_added_in_their_order(dtype: type[np.generic], count: int) -> None:
    """Many for one cell, of sizes that sum to something else in any other order."""
    rng = np.random.default_rng(count)
    x = (rng.standard_normal((5, 999)) * 8).astype(dtype)
    rows, ids = rng.integers(0, 5, count).astype(np.int32), rng.integers(0, 999, count).astype(np.int32)
    rows[::4], ids[::4] = 4, 998
    rows[1::9], ids[1::9] = 2, 3
    values = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)).astype(dtype)
    if dtype == np.float32:
        values[-1] = -INFINITE
    right = x.copy()
    np.add.at(right, (rows, ids), values)
    found = kernels().add_at(*map(HOST.from_host, (x, rows, ids, values)))
    np.testing.assert_array_equal(found.numpy(), right)


# Reporting ----------------------------------------------------------------------------------------------------


def check_scores(by: TritonSampling, logits: Floats, tokens: npt.NDArray[np.int32], top_n: int) -> None:
    given = torch.from_numpy(logits.copy())
    chosen, top_ids, top = (each.numpy() for each in by.logprobs(given, torch.from_numpy(tokens), top_n))
    right, right_ids, right_top = ORACLE.logprobs(logits, tokens, top_n)
    assert top_ids.dtype == np.int32
    assert top_ids.tolist() == right_ids.tolist()
    np.testing.assert_allclose(chosen, right, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(top, right_top, atol=2e-5, rtol=1e-5)
    np.testing.assert_array_equal(given.numpy(), logits, "the logits were changed")


@pytest.mark.parametrize("top_n", [0, 1, 20, 40])
@pytest.mark.parametrize("vocabulary", [9, 1024, 5003])
def test_most_likely_tokens_match_the_oracle(vocabulary: int, top_n: int) -> None:
    logits = hostile_rows(vocabulary, 10)
    logits[5] *= np.float32(1e-28)  # otherwise the oracle's own sums are too inexact
    tokens = np.random.default_rng(1).integers(0, vocabulary, len(logits)).astype(np.int32)
    check_scores(kernels(), logits, tokens, min(top_n, vocabulary))
    found = kernels(132).ranks(torch.from_numpy(logits), torch.from_numpy(tokens))
    assert found.tolist() == ORACLE.ranks(logits, tokens).tolist()


def test_scores_over_a_real_vocabulary() -> None:
    logits, _ = scattered(2, 151_936, 11)
    logits[1, [151_935, 65_536, 3]] = 30.0
    check_scores(kernels(), logits, np.array([5, 151_935], np.int32), 20)


@pytest.mark.parametrize("k", [1, 7, 16])
def test_drafts_are_accepted_up_to_the_first_wrong_one(k: int) -> None:
    rng = np.random.default_rng(k)
    sampled = rng.integers(0, 2, (131, 1 + k)).astype(np.int32)
    drafts, counts = sampled[:, :k].copy(), rng.integers(0, k + 1, 131).astype(np.int32)
    drafts[rng.random(drafts.shape) < 0.2] += 1
    found = kernels().verify(*map(torch.from_numpy, (sampled, drafts, counts)))
    assert found.tolist() == ORACLE.verify(sampled, drafts, counts).tolist()


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("slots", [1, 33, 257])
def test_token_matrix_matches_torch(slots: int, k: int) -> None:
    rng = np.random.default_rng(slots + k)
    for rows, revoked in ((slots // 2, slots // 3), (slots, 0), (0, slots), (0, 0)):
        order = rng.permutation(slots).astype(np.int32)
        # The interpreter rejects empty memory, so there is always one element more.
        sampled = torch.from_numpy(rng.integers(0, 2**18, (rows + 1, 1 + k)).astype(np.int32))[:rows]
        accepted = torch.from_numpy(rng.integers(0, 1 + k, rows + 1).astype(np.int32))[:rows]
        used, released = torch.from_numpy(order)[:rows], torch.from_numpy(order)[rows : rows + revoked]
        given = sampled, accepted, used, released
        found = kernels().token_matrix(*given, slots)
        assert found.dtype == torch.int32
        assert found.tolist() == write_token_matrix(*given, slots).tolist()


# Launches -----------------------------------------------------------------------------------------------------


def test_launches_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    launches: list[str] = []
    run = interpreter.GridExecutor.__call__

    def counted(executor: Any, *arguments: Any, **options: Any) -> None:
        launches.append(executor.fn.__name__)
        run(executor, *arguments, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    by, logits, ids = kernels(), torch.zeros(2, 99), torch.zeros(2, dtype=torch.int32)

    def of(call: Any, *arguments: Any) -> int:
        launches.clear()
        with _Launches() as others:
            call(*arguments)
        return len(launches) + len(others.names)

    def sampled(**columns: Any) -> int:
        return of(by.sample, logits, on_device(HOST, sample_input(2, **columns)))

    assert [sampled(temperature=0.0), sampled(), sampled(top_k=3, top_p=0.5, min_p=0.1)] == [1, 2, 4]
    penalties = penalty_input(np.zeros((2, 99), np.int32), drafts=[(1, 5)], repetition=2.0)
    assert of(by.penalize, logits, on_device(HOST, penalties)) == 1
    assert of(by.mask_logits, logits, ids, torch.zeros(2, 4, dtype=torch.int32)) == 1
    assert of(by.add_at, logits, ids, ids, torch.ones(2)) == 1
    assert of(by.logprobs, logits, ids, 20) == 1
    assert of(by.ranks, logits, ids) == 1
    assert of(by.token_matrix, ids[:, None], ids, ids, ids[:0], 3) == 1
    assert of(by.verify, torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32), ids) == 1


class _Launches(TorchDispatchMode):
    """Names torch's operations that launch something, which views and allocations do not."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The interpreter accesses the memory of its arguments with its own `set_` and `empty`.
        if not func.is_view and not str(func).startswith(("aten.empty", "aten.set_", "aten.new_empty", "aten.copy_")):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3, 6, 600])
def test_parts_of_rows_are_aligned_for_the_same_kernel(rows: int) -> None:
    """At multiples of 16 bytes: for other addresses Triton would compile further kernels while requests wait."""
    by = kernels()
    by.reserve(rows)
    assert all(part.start * 4 % 16 == 0 for part in by._parts(2000))
