"""Attention in Triton's interpreter, against the numpy oracle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from extent import AT_LENGTH  # noqa: E402
from fd_core.config import EngineConfig, requested_sizes  # noqa: E402 - only where both are installed
from fd_core.ops.contract import Heads, HostStep, KVShape, Rope, StepInput  # noqa: E402
from fd_core.ops.numpy.ops import NumpyOps  # noqa: E402
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.testing.models.arrays import TOLERANCE, Values, assert_near, on_device, step_input  # noqa: E402
from interpreting import dots_in_order, integers_become_bfloat16  # noqa: E402, F401
from launches import counted  # noqa: E402
from processor import PLAIN, make_ops, plain_attention  # noqa: E402

from fd_gpu_cuda.kernels import attention as kernels  # noqa: E402
from fd_gpu_cuda.kernels.attention import HeadSizes, PagedAttention, prefill_tile, span_of  # noqa: E402
from fd_gpu_cuda.kv_cache import CudaKVCache  # noqa: E402

TYPES = {torch.float32: "float32", torch.float16: "float32", torch.bfloat16: "bfloat16"}
H100, L4, LONE = (132, 227 * 1024), (58, 99 * 1024), (1, 227 * 1024)
"""Multiprocessors, and shared memory of a program."""


def attention(device: tuple[int, int] = H100) -> PagedAttention:
    return PagedAttention(torch.device("cpu"), *device)


class Batch:
    """Rows of (tokens, context) over scattered blocks, with the results of the oracle."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        heads: tuple[int, int, int] = (4, 2, 32),
        dtype: Any = torch.float32,
        kv: str = "auto",
        block_size: int = 16,
        **options: Any,
    ) -> None:
        values, rng = Values(7), np.random.default_rng(3)
        nh, nkv, d = heads
        width = max(context for _, context in rows) // block_size + 2
        blocks = width * len(rows)
        tables = rng.permutation(blocks).reshape(len(rows), width).astype(np.int32)
        self.rows, self.block_size, self._dtype = rows, block_size, dtype
        self.heads = Heads(nh, nkv, d, d**-0.5, Rope(None, None), **options)
        step = step_input(rows, block_size, tables)
        # Table entries beyond a context are undefined: here they point to a block of NaN.
        used = np.array([-(-context // block_size) for _, context in rows])
        self._step = replace(step, block_tables=np.where(np.arange(width) < used[:, None], tables, blocks))
        slots, latent = blocks * block_size, self.heads.latent
        q, k, v = values(len(step.positions), nh, d), values(slots, nkv, d - latent), values(slots, nkv, latent or d)
        everywhere = np.arange(slots, dtype=np.int32)
        oracle, shape = NumpyOps(), KVShape(1, nkv, d, block_size, kv, latent=latent)
        layer = oracle.allocate_kv(shape, blocks).layer(0)
        oracle.write_kv(layer, k, v, everywhere)
        self.expected = oracle.paged_attention(q, layer, self.heads, step)
        ops = make_ops()
        self.layer = CudaKVCache(shape, blocks, dtype, ops._cuda).layer(0)
        self.q, k, v = (torch.from_numpy(array).to(dtype) for array in (q, k, v))
        ops.write_kv(self.layer, k, v, torch.from_numpy(everywhere))
        for side in (self.layer.key_scales, self.layer.value_scales) if kv == "int8" else self.layer[:2]:
            side[slots:].view(torch.uint8).fill_(0xFF)  # NaN in every type

    def step(self, *rows: int) -> StepInput:
        """Return the step, or one of some rows only."""
        chosen = list(rows) or list(range(len(self.rows)))
        return self._step_of([self.rows[row] for row in chosen], chosen)

    def chunk(self, row: int, begin: int, end: int) -> StepInput:
        """Return a step of some tokens of one row."""
        tokens, context = self.rows[row]
        return self._step_of([(end - begin, context - tokens + end)], [row])

    def _step_of(self, rows: list[tuple[int, int]], chosen: list[int]) -> StepInput:
        tables = self._step.block_tables[chosen].astype(np.int32)
        some = step_input(rows, self.block_size, tables)
        host = HostStep(some.query_start, some.context_len, tables)
        return replace(on_device(TorchOps(), some), host=host)

    def tokens(self, row: int) -> slice:
        start = int(self._step.query_start[row])
        return slice(start, start + self.rows[row][0])

    def check(self, attend: Any) -> Any:
        found = attend(self.q, self.layer, self.heads, self.step())
        assert found.dtype == self._dtype
        tolerance = {torch.float16: 2e-3}.get(self._dtype, TOLERANCE[TYPES[self._dtype]])
        assert_near(TorchOps(), found.float(), self.expected, tolerance)
        return found


BATCHES = {
    "decodes": [(1, 5), (1, 20), (1, 1), (1, 300)],
    "decodes with drafts": [(3, 70), (3, 3), (3, 257), (3, 1300)],
    "more drafts than a tile holds": [(9, 70), (9, 600)],
    "prompts": [(10, 10), (70, 70)],
    "chunks after a context": [(20, 30), (65, 310)],
    "decodes between chunks": [(1, 9), (37, 40), (1, 1), (10, 600), (2, 300), (9, 9)],
}


OPTIONS: list[dict[str, Any]] = [{}, {"window": 300, "softcap": 5.0}, {"window": 40}, {"softcap": 2.0}]


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        # The sample takes the first two options in turn.
        pytest.param(batch, options, marks=() if place == number % 2 else AT_LENGTH)
        for number, batch in enumerate(BATCHES)
        for place, options in enumerate(OPTIONS)
    ],
    ids=str,
)
def test_every_kind_of_step(batch: str, options: dict[str, Any]) -> None:
    Batch(BATCHES[batch], **options).check(attention())


@pytest.mark.parametrize(
    ("heads", "latent", "kv"),
    [
        pytest.param(*sizes, kv, marks=() if kv == sample else AT_LENGTH)
        for sizes, sample in (
            (((4, 1, 40), 32), "auto"),
            (((17, 1, 29), 24), "int8"),
            (((32, 1, 24), 16), "auto"),
            (((20, 1, 80), 64), "int8"),
        )
        for kv in ("auto", "int8")
    ],
    ids=str,
)
def test_heads_share_latent_vectors(heads: tuple[int, int, int], latent: int, kv: str) -> None:
    """With few heads, a prime number of them, two groups of 16, and two of 10.

    Each program of a group takes the same walk over the keys, so many heads have short rows: of up to two chunks.
    """
    rows = [(1, 9), (37, 40), (1, 1300), (10, 600), (2, 300)] if heads[0] == 4 else [(1, 9), (5, 40), (1, 270), (2, 90)]
    Batch(rows, heads, latent=latent, kv=kv).check(attention())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
@pytest.mark.usefixtures("dots_in_order", "integers_become_bfloat16")
def test_latent_vectors_in_16_bits(dtype: Any, kv: str) -> None:
    Batch([(1, 9), (1, 600), (20, 50)], (4, 1, 40), latent=24, kv=kv, dtype=dtype).check(attention())


def test_latent_attention_composed_of_torch_operations() -> None:
    for kv in ("auto", "int8", "fp8"):
        Batch([(1, 9), (1, 30), (20, 50)], (4, 1, 40), latent=24, kv=kv).check(
            make_ops().alone(replace(PLAIN, attention=None)).paged_attention
        )


DECODES, PROMPTS = [(1, 9), (1, 1300), (3, 600)], [(37, 40), (20, 2100)]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (DECODES, {}),
        (PROMPTS, {"window": 300, "softcap": 5.0}),
        pytest.param(DECODES, {"window": 300, "softcap": 5.0}, marks=AT_LENGTH),
        pytest.param(PROMPTS, {}, marks=AT_LENGTH),
    ],
    ids=str,
)
def test_sinks_count_once_however_keys_are_divided(rows: list[tuple[int, int]], options: dict[str, Any]) -> None:
    sinks = np.array([4.0, -2.0, 0.5, 60.0], np.float32)
    batch = Batch(rows, sinks=sinks, **options)
    batch.heads = replace(batch.heads, sinks=torch.from_numpy(sinks))
    batch.check(attention())


@pytest.mark.parametrize(
    "heads",
    [
        *((3, 3, 80), (16, 2, 64), (2, 1, 256), (40, 1, 16)),
        *(pytest.param(each, marks=AT_LENGTH) for each in ((6, 1, 96), (4, 2, 192), (4, 4, 24))),
    ],
    ids=str,
)
def test_every_geometry(heads: tuple[int, int, int]) -> None:
    batch = Batch([(1, 290), (4, 37), (21, 60)], heads, block_size=32)
    batch.check(attention())
    batch.check(plain_attention)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv", ["auto", "int8", "fp8"])
@pytest.mark.usefixtures("dots_in_order", "integers_become_bfloat16")
def test_every_type_of_elements(dtype: Any, kv: str) -> None:
    """Compare with the oracle, which computes in float32."""
    Batch([(1, 290), (4, 37), (21, 70)], (4, 2, 64), dtype, kv, window=200).check(attention())


@pytest.mark.usefixtures("dots_in_order")
def test_heads_that_share_a_masked_tile_of_8_bits() -> None:
    Batch([(1, 290), (10, 37)], (8, 2, 96), torch.float16, "int8").check(attention())


@pytest.mark.parametrize(("width", "options"), [pytest.param(24, {}, marks=AT_LENGTH), (16, {"window": 1100})], ids=str)
def test_long_context_has_the_same_bits_on_every_device(width: int, options: dict[str, Any]) -> None:
    """Over small and large chunks: by one program a row, by two shares, and by one program for each chunk.

    A tile of a head that is masked has twice the keys of another in float32, and so the interpreter half the work.
    """
    batch = Batch([(1, 9301), (1, 700)], (4, 1, width), **options)
    undivided = attention(LONE)
    undivided._programs = 1
    whole = batch.check(undivided)
    for device in (LONE, H100):
        assert torch.equal(batch.check(attention(device)), whole)


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize("options", [{}, pytest.param({"window": 90}, marks=AT_LENGTH)], ids=str)
def test_row_alone_has_the_same_bits_as_in_any_batch(options: dict[str, Any]) -> None:
    """For a decode, drafts and a prompt, with any other rows in the batch."""
    rows = [(1, 600), (19, 40), (1, 3), (3, 300), (40, 90), (9, 700)]
    batch, attend = Batch(rows, (4, 1, 16), **options), attention((12, 99 * 1024))
    together = batch.check(attend)
    for rows in ((0,), (1,), (2,), (3,), (4,), (5,), (0, 2), (2, 3), (3, 5)):
        parts = [batch.tokens(row) for row in rows]
        q, expected = (torch.cat([array[part] for part in parts]) for array in (batch.q, together))
        assert torch.equal(attend(q, batch.layer, batch.heads, batch.step(*rows)), expected), rows


def test_padding_computes_in_the_spare_block() -> None:
    """Rows that pad a replayed step: one token over the spare block; the rest of the table is ignored."""
    batch = Batch([(1, 530), (1, 40), (1, 1), (1, 1)])
    batch.layer.keys[-batch.block_size :] = 0
    batch.layer.values[-batch.block_size :] = 0
    step = batch.step()
    step.block_tables[2:] = 2**20
    step.block_tables[2:, 0] = len(batch.layer.keys) // batch.block_size - 1
    found = attention()(batch.q, batch.layer, batch.heads, replace(step, max_context=1024))
    assert_near(TorchOps(), found[:2], batch.expected[:2])
    assert torch.equal(found[2:], torch.zeros_like(found[2:]))


def test_bound_of_a_graph_does_not_change_results() -> None:
    """A graph is captured for the longest context that the model has."""
    batch, attend = Batch([(1, 700), (1, 3)], (2, 1, 16)), attention((8, 99 * 1024))
    expected = batch.check(attend)
    for longest in (768, 131072):
        step = replace(batch.step(), max_context=longest)
        assert torch.equal(attend(batch.q, batch.layer, batch.heads, step), expected)


def test_counters_end_at_zero() -> None:
    attend = attention((12, 99 * 1024))
    Batch([(1, 700), (1, 2100), (1, 3)], (2, 1, 16)).check(attend)
    assert not attend._counters.any()


def test_default_drafts_of_a_grammar_are_a_decode() -> None:
    tokens = 1 + requested_sizes(EngineConfig(model="any"))["max_drafts"]
    batch = Batch([(tokens, 70), (tokens, 30)])
    attend, step = attention(), batch.step()
    with counted() as found:
        attend(batch.q, batch.layer, batch.heads, step)
    assert [name for name in found if name.startswith("triton")] == ["triton _decode"]


LONG_AMONG_SHORT = [*[(1, 200)] * 9, (1, 5120), *[(1, 256)] * 8]
"""37 pieces of 256 keys, of which the long row has 20, in more rows than the device `FOUR` has programs."""
FOUR = (4, 99 * 1024)
"""Eight programs."""


def counting_tiles(attend: PagedAttention, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Counter[int]]:
    """Return the result, and the number of tiles of keys that each program loads."""
    found, load_tile = Counter[int](), kernels.load_tile

    def counting(*arguments: Any) -> Any:
        found[int(kernels.tl.program_id(0).handle.data.item())] += 1
        return load_tile(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(kernels, "load_tile", counting)
        return batch.check(attend), found


def test_long_row_among_many_is_divided_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight shares none has more than five pieces: a short row takes one, whatever its length."""
    batch, attend, tiles_per_piece = Batch(LONG_AMONG_SHORT, (1, 1, 24)), attention(FOUR), 8
    _, found = counting_tiles(attend, batch, monkeypatch)
    assert found.total() == 9 * 7 + 28 * tiles_per_piece
    assert max(found.values()) == 5 * tiles_per_piece
    assert not attend._counters.any()


def test_row_whose_sums_exceed_the_workspace_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 20 chunks that crosses the ends of four shares needs memory for five chunks in each."""
    batch, attend, results = Batch(LONG_AMONG_SHORT, (1, 1, 24)), attention(FOUR), []
    shares, chunk_elements, undivided = 8, 32 + 4, 20 * 8 + 4 * 7
    for chunks, largest in ((5, 5 * 8), (4, undivided)):
        attend._sums = attend._sums[: shares * chunks * chunk_elements].clone()
        result, found = counting_tiles(attend, batch, monkeypatch)
        assert max(found.values()) == largest
        results.append(result)
    assert torch.equal(*results)


def test_bits_do_not_depend_on_the_rows_scanned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many rows, programs read the lengths in blocks."""
    batch, attend = Batch(LONG_AMONG_SHORT, (1, 1, 24)), attention(FOUR)
    expected = batch.check(attend)
    monkeypatch.setattr(kernels, "_SCANNED", 4)
    assert torch.equal(batch.check(attend), expected)


@pytest.mark.parametrize(
    ("rows", "context", "window", "shares"),
    [
        (1, 128, None, 1),
        (1, 1024, None, 4),
        (1, 32768, None, 33),
        (1, 32768, 500, 6),
        (256, 1024, None, 33),
    ],
)
def test_shares_fill_the_device_or_hold_a_piece_each(rows: int, context: int, window: int | None, shares: int) -> None:
    """Of Llama-3.1-8B on an H100."""
    space = PagedAttention(torch.device("meta"), *H100)
    heads = Heads(32, 8, 128, 1.0, Rope(None, None), window=window)
    assert space._shares(heads, rows, context) == shares


DIVIDED = [(12, 1100), (3, 40), (11, 9301), (14, 14)]
"""Prompts of which an H100 divides the first and the third."""


@pytest.mark.parametrize("options", [pytest.param({}, marks=AT_LENGTH), {"window": 2100}], ids=str)
def test_divided_prompt_has_the_same_bits_on_every_device(options: dict[str, Any]) -> None:
    """Over small and large spans: by one program, by one for several spans, and by one for each span."""
    batch = Batch(DIVIDED, (4, 1, 16), **options)
    whole = batch.check(attention(LONE))
    for device in ((3, 99 * 1024), H100):
        attend = attention(device)
        assert torch.equal(batch.check(attend), whole)
        assert not attend._prompt_counters.any()


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize("options", [{}, pytest.param({"window": 515}, marks=AT_LENGTH)], ids=str)
def test_prompt_in_chunks_has_the_same_bits_as_the_whole(options: dict[str, Any]) -> None:
    """Across the end of a span, where the number of programs differs between the chunks and the whole."""
    batch = Batch([(24, 1036)], (4, 1, 16), **options)
    whole = batch.check(attention(LONE))
    for device, cut in ((LONE, 11), (H100, 13)):
        parts = (0, cut), (cut, 24)
        found = [
            attention(device)(batch.q[begin:end], batch.layer, batch.heads, batch.chunk(0, begin, end))
            for begin, end in parts
        ]
        assert torch.equal(torch.cat(found), whole)


def test_each_divided_tile_has_its_own_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs the programs of a tile one after another, so shared sums would not be seen in results."""
    found, is_last = [], kernels.is_last

    def record(counters_at: Any, unit: Any, programs: Any) -> Any:
        if counters_at.handle.data.item() == attend._prompt_counters.data_ptr():
            found.append((int(unit.handle.data.item()), int(programs.handle.data.item())))
        return is_last(counters_at, unit, programs)

    monkeypatch.setattr(kernels, "is_last", record)
    attend = attention()
    Batch([(12, 1100), (3, 30), (40, 50), (12, 2100)], (4, 2, 16)).check(attend)
    tiles = 2 * (2 + 2)  # of 8 queries, for each KV head
    assert sorted({unit for unit, _ in found}) == list(range(tiles))
    assert all(count == programs for (_, programs), count in Counter(found).items())


def test_tiles_with_the_most_keys_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long program that starts last would leave the rest of the device idle."""
    begins, write = [], kernels._write_prompt

    def record(output_at: Any, query_start_at: Any, row: Any, begin: Any, *rest: Any) -> None:
        begins.append(int(begin.handle.data.item()))
        write(output_at, query_start_at, row, begin, *rest)

    monkeypatch.setattr(kernels, "_write_prompt", record)
    Batch([(70, 90)], (2, 1, 16)).check(attention())
    assert len(begins) > 2
    assert begins == sorted(begins, reverse=True)


CACHED = (64, 32 * 1024 + 64)
"""64 tokens after a prefix of 32 Ki, as (tokens, context)."""


@pytest.mark.parametrize(
    ("rows", "window", "programs"),
    [
        ([CACHED], None, 17),
        ([(1, 1024)] * 100 + [CACHED], None, 17),
        ([CACHED, (2048, 2048)], None, 9),
        ([CACHED], 1024, 2),
        ([(16, 4096)], None, 4),
        ([(2048, 2048)], None, 1),
        ([(8192, 8192)], None, 1),
        ([(512, 1536)] * 4, None, 1),
    ],
)
def test_keys_of_prompts_are_divided_until_the_device_is_full(
    rows: list[tuple[int, int]], window: int | None, programs: int
) -> None:
    """Of Llama-3.1-8B on an H100. A share of the keys is at least a span."""
    space, division = PagedAttention(torch.device("meta"), *H100), division_of(rows, window)
    assert division(space).programs == programs
    assert division(PagedAttention(torch.device("meta"), *LONE)).programs == 1


def test_keys_of_prompts_are_not_divided_where_the_workspace_is_too_small() -> None:
    space = PagedAttention(torch.device("meta"), *H100)
    assert division_of([(64, 120 * 1024)], None)(space).programs > 1
    assert division_of([(640, 120 * 1024)], None)(space).programs == 1


def division_of(rows: list[tuple[int, int]], window: int | None) -> Any:
    counts, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    host = HostStep(np.concatenate([[0], counts.cumsum()]).astype(np.int32), contexts, np.zeros((0, 0), np.int32))
    heads, tile = (
        Heads(32, 8, 128, 0.1, Rope(None, None), window=window),
        prefill_tile(HeadSizes(4, 128, 2, 2), H100[1]),
    )
    return lambda space: space.division(host, heads, tile)


def test_spans_lie_at_fixed_places() -> None:
    places = [span_of(key) for key in range(20000)]
    starts = [key for key in range(20000) if key == 0 or places[key] != places[key - 1]]
    assert starts == [*range(0, 8192, 1024), *range(8192, 20000, 4096)]
