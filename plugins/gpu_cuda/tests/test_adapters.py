"""Decodes with adapters are replayed, and equal those of the core's pack while adapters are loaded and unloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from extent import AT_LENGTH  # noqa: E402
from fd_core.models.loading.adapter import read_adapter  # noqa: E402 - only where torch is installed
from fd_core.ops.torch.ops import TorchOps  # noqa: E402
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess  # noqa: E402
from fd_core.runner.runner import Runner  # noqa: E402
from fd_core.testing.models.adapters import write_adapter  # noqa: E402
from fd_core.testing.models.checkpoints import write_checkpoint  # noqa: E402
from processor import Processor, make_ops  # noqa: E402
from test_steps import LIMITS, MIXED, conversation, load  # noqa: E402

from fd_gpu_cuda.kernel_table import AdapterCapacity  # noqa: E402


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3-yarn", marks=AT_LENGTH)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(request.param, tmp_path_factory.mktemp(request.param) / "model")


def adapters_of(folder: Path, model: Any) -> list[Any]:
    """One that changes everything, one that leaves parts alone, and one of a larger rank."""
    kinds: list[dict[str, Any]] = [{"rank": 4}, {"rank": 8, "targets": ("q_proj", "down_proj")}, {"rank": 20}]
    places = [folder.parent / f"adapter {seed}" for seed in range(len(kinds))]
    for seed, (place, kind) in enumerate(zip(places, kinds, strict=True)):
        write_adapter(folder, place, seed=seed, **kind)
    return [read_adapter(place, model.spec.adaptable(), 64) for place in places]


def outputs(runner: Runner, adapters: list[Any]) -> list[Any]:
    """Serve a conversation whose slots use these adapters in turn; None: no adapter."""
    plans = conversation(MIXED)
    admissions = tuple(
        replace(each, adapter="" if (mine := adapters[slot % len(adapters)]) is None else mine.digest)
        for slot, each in enumerate(plans[0].admissions)
    )
    plans[0] = replace(plans[0], admissions=admissions)
    return [runner.execute(each).tokens.tolist() for each in plans]


def test_decodes_replay_with_new_adapters_without_a_new_capture(folder: Path) -> None:
    processor, found = Processor(), []
    for ops in (TorchOps(), make_ops(processor)):
        model: Any = load(folder, ops)
        runner = Runner(ops, model, LIMITS, TorchPostprocess)
        first, second, third = adapters_of(folder, model)
        texts = []
        for held, served in (
            ([], [None]),
            ([second], [second, None]),
            ([first, second], [first, None, second]),
            ([third], [third]),
            ([], [None]),
            ([third, first, second], [second, third, None, first]),
        ):
            if held or texts:
                runner.adapters.replace(held)
            else:
                runner.adapters.prepare()
            if ops.queues:  # plain decodes are captured at the first of them
                assert processor.captured == (8 if texts else 4), "captured before an adapter is loaded"
            texts.append(outputs(runner, served))
        found.append(texts)
    assert found[0] == found[1]
    assert len({str(text) for text in found[0]}) > 1, "adapters change texts"
    assert processor.captured == 8, "plain decodes, and those with adapters, once"
    assert processor.replays == 30, "five decodes of each"


def test_adapter_beyond_the_capacity_gets_new_tables(folder: Path) -> None:
    processor = Processor()
    ops = make_ops(processor)
    runner = Runner(ops, load(folder, ops), LIMITS, TorchPostprocess)
    ops.adapter_capacity = AdapterCapacity(1, 4)
    adapters = adapters_of(folder, runner.adapters._model)
    texts = []
    for held in (adapters[:1], adapters[:1], adapters[1:2], adapters):
        runner.adapters.replace(held)
        texts.append((processor.captured, outputs(runner, held[:1])))
    assert [captured for captured, _ in texts] == [4, 4, 4, 8], "rank 8 fits into 16"
    assert texts[0][1] == texts[1][1] == texts[3][1] != texts[2][1]
    assert processor.replays == 20


def test_oversized_adapter_raises_a_memory_error_for_its_load_only(folder: Path) -> None:
    ops = make_ops()
    model: Any = load(folder, ops)
    runner = Runner(ops, model, LIMITS, TorchPostprocess)
    first, second, _ = adapters_of(folder, model)
    runner.adapters.replace([first])

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        with pytest.raises(MemoryError):
            runner.adapters.replace([first, second])
    assert runner.adapters.held == [first]
