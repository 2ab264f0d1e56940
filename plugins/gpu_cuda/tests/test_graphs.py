"""Decodes with drafts are replayed, padded, and generate the same texts as the core's pack token by token."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from extent import AT_LENGTH  # noqa: E402
from fd_core.backends.contract import Model  # noqa: E402 - only where torch is installed
from fd_core.config import EngineConfig, Limits  # noqa: E402
from fd_core.ops.contract import KVShape, Ops, StepInput  # noqa: E402
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess  # noqa: E402
from fd_core.runner.runner import Runner  # noqa: E402
from fd_core.testing.models.checkpoints import write_checkpoint  # noqa: E402
from fd_core.types import Admission, BlockGrant, SamplingParams, StepPlan  # noqa: E402
from processor import OnProcessor, Processor, ids, make_ops  # noqa: E402

from fd_gpu_cuda.graphs import GraphInputs, GraphShapes  # noqa: E402

K = 3
TOKENS = 16
BLOCKS = 8
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "top_p": 0.9, "logprobs": 2},
    {"temperature": 1.2, "seed": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0},
]


def limits(max_drafts: int = 0, **changes: int) -> Limits:
    usual = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 32, "block_size": 4}
    return Limits(**(usual | changes), num_kv_blocks=BLOCKS * 6, vocab_size=160, max_drafts=max_drafts)


@pytest.fixture(scope="module", params=["llama", "qwen3-yarn", "gemma3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, place)
    return place


def load(folder: Path, ops: Ops, **settings: Any) -> Model:
    return OnProcessor(EngineConfig(model=str(folder), **settings)).load_model(folder, ops, lambda done, total: None)


def begin(runner: Runner, at_once: int = 5) -> dict[int, list[int]]:
    """Prefill a prompt for each slot, so many in a step; return the sampled tokens."""
    lengths = [4 + slot for slot in range(len(PARAMS))]
    admissions = tuple(
        Admission(
            slot,
            1,
            np.random.default_rng(slot).integers(0, 160, length, np.int32),
            length,
            SamplingParams(**PARAMS[slot]),
            (),
            0,
        )
        for slot, length in enumerate(lengths)
    )
    grants = tuple(BlockGrant(slot, 0, np.arange(BLOCKS, dtype=np.int32) + BLOCKS * slot) for slot in range(5))
    texts = {}
    for first in range(0, len(PARAMS), at_once):
        some = slice(first, first + at_once)
        rows = [(slot, 0, length, 0) for slot, length in enumerate(lengths)][some]
        output = runner.execute(plan(0, rows, admissions=admissions[some], grants=grants[some]))
        texts |= {slot: [int(output.tokens[slot, 0])] for slot, *_ in rows}
    return texts


def plan(step: int, rows: list[tuple[int, int, int, int]], **more: Any) -> StepPlan:
    """Rows of (slot, start, own tokens, drafts)."""
    slots, starts, own, drafts = (ids(*column) for column in zip(*rows, strict=True))
    ones = np.ones(len(rows), np.int32)
    return StepPlan(1, step, slots, ones, starts, own + drafts, drafts, ones.astype(np.bool_), **more)


def texts_alone(folder: Path) -> dict[int, list[int]]:
    """Return the texts of the core's pack, token by token."""
    ops = TorchOps()
    runner = Runner(ops, load(folder, ops), limits(), TorchPostprocess)
    texts = begin(runner)
    for step in range(1, TOKENS):
        rows = [(slot, int(runner.batch.length[slot]) - 1, 1, 0) for slot in texts]
        output = runner.execute(plan(step, rows))
        for slot, text in texts.items():
            text.append(int(output.tokens[slot, 0]))
    return texts


def drafted_texts(runner: Runner, wanted: dict[int, list[int]], seed: int) -> dict[int, list[int]]:
    """Draft up to k tokens of the wanted texts, or others, until all texts are there."""
    rng, texts, step = np.random.default_rng(seed), begin(runner), 0
    while live := [slot for slot, text in texts.items() if len(text) < TOKENS]:
        rows = []
        for slot in live:
            begun = len(texts[slot])
            drafts = min(int(rng.integers(0, K + 1)), TOKENS - begun - 1)
            guess = np.array([*wanted[slot][begun : begun + drafts], *([0] * K)][:K], np.int32)
            wrong = rng.random(K) < 0.25
            runner.batch.guess(
                ids(slot), np.where(wrong, rng.integers(0, 160, K), guess)[None].astype(np.int32), ids(drafts)
            )
            rows.append((slot, int(runner.batch.length[slot]) - 1, 1, drafts))
        step += 1
        output = runner.execute(plan(step, rows))
        for slot in live:
            texts[slot].extend(token for token in output.tokens[slot].tolist() if token >= 0)
    return texts


@pytest.mark.parametrize("quantization", ["auto", pytest.param("int8", marks=AT_LENGTH)])
def test_drafted_decodes_are_replayed_and_deliver_the_same_texts(folder: Path, quantization: str) -> None:
    processor = Processor()
    ops = make_ops(processor)
    runner = Runner(ops, load(folder, ops, quantization=quantization), limits(K), TorchPostprocess)
    steps: list[StepInput] = []
    runner.watch_forward(steps.append)
    if quantization == "auto":
        wanted = texts_alone(folder)
    else:  # the core's pack does not round activations, so compare with this pack's texts without drafts
        plain = make_ops()
        other = Runner(plain, load(folder, plain, quantization=quantization), limits(K), TorchPostprocess)
        wanted = drafted_texts(other, {slot: [0] * TOKENS for slot in range(5)}, seed=2)
    assert drafted_texts(runner, wanted, seed=1) == wanted
    assert processor.captured == len(list(GraphShapes.of(limits(K))))
    assert processor.replays == len(steps) - 1, "all but the prefill"
    shapes = {(len(step.context_len), step.max_query) for step in steps[1:]}
    assert {width for _, width in shapes} == {1, 1 + K}
    assert all(step.uniform for step in steps[1:])


def test_device_may_compute_at_each_replay_instead_of_capturing(folder: Path) -> None:
    class Computing(Processor):
        """As in `kit_in_interpreter`."""

        def capture(self, compute: Any) -> Any:
            return compute

    ops, wanted = make_ops(Computing()), texts_alone(folder)
    runner = Runner(ops, load(folder, ops), limits(K), TorchPostprocess)
    assert drafted_texts(runner, wanted, seed=1) == wanted


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["torch's", "the driver's"])
def test_shapes_without_memory_left_run_without_a_graph(
    folder: Path, caplog: pytest.LogCaptureFixture, error: type[RuntimeError]
) -> None:
    class Full(Processor):
        """There is room for two graphs."""

        def capture(self, compute: Any) -> Any:
            if self.captured == 2:
                raise error("CUDA error: out of memory")
            return super().capture(compute)

    processor, wanted = Full(), texts_alone(folder)
    ops = make_ops(processor)
    runner = Runner(ops, load(folder, ops), limits(K), TorchPostprocess)
    assert drafted_texts(runner, wanted, seed=1) == wanted
    assert processor.captured == 2
    assert "fewer are not replayed: CUDA error: out of memory" in caplog.text


def test_capture_that_fails_for_another_reason_ends_the_step(folder: Path) -> None:
    class Failing(Processor):
        def capture(self, compute: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    ops = make_ops(Failing())
    runner = Runner(ops, load(folder, ops), limits(), TorchPostprocess)
    begin(runner)
    with pytest.raises(RuntimeError, match="not permitted"):
        runner.execute(plan(1, [(0, int(runner.batch.length[0]) - 1, 1, 0)]))


@pytest.mark.parametrize("held_by", ["a rehearsal", "ranks"])
def test_rehearsal_and_ranks_fail_without_memory(folder: Path, held_by: str) -> None:
    class Full(Processor):
        def capture(self, compute: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    processor = Full()
    ops = make_ops(processor)
    if held_by == "ranks":
        processor.ranks = SimpleNamespace(wait_until=lambda done: None)  # type: ignore[assignment]  # the only method in use
    with ops.rehearsing() if held_by == "a rehearsal" else nullcontext():
        runner = Runner(ops, load(folder, ops), limits(), TorchPostprocess)
        begin(runner)
        with pytest.raises(torch.OutOfMemoryError):
            runner.execute(plan(1, [(slot, int(runner.batch.length[slot]) - 1, 1, 0) for slot in range(2)]))


def test_step_whose_padding_exceeds_the_budget_is_not_padded(folder: Path) -> None:
    processor, outputs = Processor(), []
    tight = limits(K, max_num_batched_tokens=18)
    for ops in (TorchOps(), make_ops(processor)):
        runner = Runner(ops, load(folder, ops), tight, TorchPostprocess)
        texts = begin(runner, at_once=1)
        replays = processor.replays
        outputs.append([texts])
        for step, rows in enumerate((4, 5), start=1):
            runner.batch.guess(ids(0), np.full((1, K), 7, np.int32), ids(K))
            drafts = [K, *([0] * (rows - 1))]
            live = [(slot, int(runner.batch.length[slot]) - 1, 1, drafts[slot]) for slot in range(rows)]
            outputs[-1].append(runner.execute(plan(step, live)).tokens.tolist())
    assert outputs[0] == outputs[1]
    assert processor.replays == replays + 1, "five rows of four tokens are more than 18"


def test_padding_does_not_touch_other_blocks(folder: Path) -> None:
    ops = make_ops()
    runner = Runner(ops, load(folder, ops), limits(K), TorchPostprocess)
    texts = texts_alone(folder)
    idle = np.arange(5 * BLOCKS, 6 * BLOCKS, dtype=np.int32)
    before = runner.cache.export_blocks(idle)
    drafted_texts(runner, texts, seed=3)
    np.testing.assert_array_equal(runner.cache.export_blocks(idle), before)


def test_graphs_of_all_shapes_read_the_same_memory() -> None:
    shapes, cache = GraphShapes.of(limits(K)), KVShape(1, 1, 8, 4)
    inputs = GraphInputs(shapes, limits(K), torch.device("cpu"))
    steps = {shape: inputs.of(shape, 48, cache) for shape in shapes}
    for name in ("token_ids", "positions", "kv_slots", "context_len", "block_tables"):
        assert len({getattr(step, name).data_ptr() for step in steps.values()}) == 1, name
    assert len({step.logits_rows.data_ptr() for step in steps.values()}) == len(steps)
    step = inputs.of((2, 1 + K), 48, cache)
    assert step.positions.tolist() == [0, 1, 2, 3] * 2
    assert step.query_start.tolist() == [0, 4, 8]
    assert step.context_len.tolist() == [4, 4]
    assert step.kv_slots.tolist() == [192] * 8
    assert (step.block_tables == 48).all()


def test_logits_of_all_graphs_share_one_buffer_without_a_copy(folder: Path) -> None:
    ops = make_ops()
    runner = Runner(ops, load(folder, ops), limits(K), TorchPostprocess)
    begin(runner)
    addresses = set()
    forward = runner._forward

    def watched(step: StepInput, cache: Any) -> Any:
        logits = forward(step, cache)
        addresses.add(logits.data_ptr())
        return logits

    runner._forward = watched
    for step, slots in enumerate([[0, 1], [2], [0, 3, 4]], start=1):
        runner.execute(plan(step, [(slot, int(runner.batch.length[slot]) - 1, 1, 0) for slot in slots]))
    assert len(addresses) == 1
