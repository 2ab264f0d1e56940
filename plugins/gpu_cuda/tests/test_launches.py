"""Launches of a decode, counted on the processor with the kernels in Triton's interpreter; see `launches`."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from extent import AT_LENGTH  # noqa: E402
from fd_core.config import EngineConfig, Limits  # noqa: E402 - only where both are installed
from fd_core.models.loading.adapter import read_adapter  # noqa: E402
from fd_core.ops.parallel import Parallel  # noqa: E402
from fd_core.ops.torch.group import TorchCollectives  # noqa: E402
from fd_core.runner.inputs.inputs import adapter_rows  # noqa: E402
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess  # noqa: E402
from fd_core.runner.runner import Runner  # noqa: E402
from fd_core.testing.models.adapters import write_adapter  # noqa: E402
from fd_core.testing.models.arrays import on_device, step_input  # noqa: E402
from fd_core.testing.models.checkpoints import write_checkpoint  # noqa: E402
from launches import counted  # noqa: E402
from processor import PLAIN, OnProcessor, Processor  # noqa: E402
from test_steps import LIMITS as LIMITS_OF_STEPS  # noqa: E402
from test_steps import conversation  # noqa: E402

import fd_gpu_cuda.kernels  # noqa: E402
from fd_gpu_cuda.kernels.attention import PagedAttention  # noqa: E402
from fd_gpu_cuda.kernels.experts import expert_mixture  # noqa: E402
from fd_gpu_cuda.kernels.heads import rotate_and_store  # noqa: E402
from fd_gpu_cuda.kernels.lora import lora_addition  # noqa: E402
from fd_gpu_cuda.kernels.norms import add_norm, add_ranks, gate  # noqa: E402
from fd_gpu_cuda.kernels.products import ProductDevice, weight_product  # noqa: E402
from fd_gpu_cuda.kernels.sampler import TritonSampling  # noqa: E402
from fd_gpu_cuda.ops import CudaOps  # noqa: E402

DEVICE = ProductDevice(4, 99 * 1024)
PRODUCT = weight_product(DEVICE)
KERNELS = replace(
    PLAIN,
    attention=PagedAttention(torch.device("cpu"), *DEVICE),
    packed_product=PRODUCT,
    experts=expert_mixture(DEVICE, PRODUCT),
    add_norm=add_norm,
    rotate_and_store=rotate_and_store,
    gate=gate,
    lora=lora_addition(),
)
COMPOSED = replace(KERNELS, add_norm=None, rotate_and_store=None, gate=None)
LIMITS = Limits(
    max_num_seqs=6, max_num_batched_tokens=40, max_model_len=40, block_size=4, num_kv_blocks=20, vocab_size=160
)
LAYER = ("attention norm", "qkv", "heads", "attention", "output", "feed-forward norm", "gate-up", "activation", "down")
"""Maximum launches of one dense layer."""
LINEARS = ("qkv", "output", "gate-up", "down")
"""Those of them that adapters change."""


def of_a_decode(folder: Path, case: str, layers: int, kernels: Any = KERNELS, **options: Any) -> list[str]:
    """Return the launches of a decode of three rows in a model of so many layers; `adapters` are the rows' slots."""
    quantization, adapters = options.pop("quantization", "auto"), options.pop("adapters", ())
    if case == "gemma3":
        options["layer_types"] = ["sliding_attention", "full_attention"][:layers]
    write_checkpoint(case, folder, num_hidden_layers=layers, **options)
    ops = CudaOps("float32", Processor(), kernels)
    ops.configure(LIMITS)
    config = EngineConfig(model=str(folder), quantization=quantization)
    model = OnProcessor(config).load_model(folder, ops, lambda done, total: None)
    cache = ops.allocate_kv(model.kv_shape(4), 20)
    tables = np.arange(12, dtype=np.int32).reshape(3, 4)
    step = on_device(ops, step_input([(1, 5), (1, 13), (1, 1)], 4, tables))
    if adapters:
        step = replace(step, **adapter_rows(np.array(adapters, np.int32), ops))
        places = [write_adapter(folder, folder / f"adapter {seed}", seed=seed) for seed in range(max(adapters))]
        model = model.with_adapters([read_adapter(place, model.spec.adaptable(), 64) for place in places])
    model.forward(step, cache)  # one-time set-up
    with counted() as found:
        model.forward(step, cache)
    return found


def of_a_layer(folder: Path, case: str, kernels: Any = KERNELS, **options: Any) -> Counter[str]:
    one, two = (folder / str(layers) for layers in (1, 2))
    for each in (one, two):
        each.mkdir()
    more = Counter(of_a_decode(two, case, 2, kernels, **options))
    return more - Counter(of_a_decode(one, case, 1, kernels, **options))


DENSE = ("llama", "llama-biases-wide-heads", "qwen3-yarn", "gemma3", "ernie", "mistral-window")


@pytest.mark.parametrize("case", DENSE)
def test_dense_layer_takes_nine_launches(case: str, tmp_path: Path) -> None:
    found = of_a_layer(tmp_path, case)
    assert found.total() == len(LAYER), found


def test_packed_weights_need_no_more_launches(tmp_path: Path) -> None:
    found = of_a_layer(tmp_path, "llama", quantization="int8")
    assert found.total() <= len(LAYER), found


@pytest.mark.parametrize("adapters", [pytest.param((1, 1, 1), marks=AT_LENGTH), (1, 0, 2)])
def test_any_number_of_adapters_adds_two_launches_a_linear(adapters: tuple[int, ...], tmp_path: Path) -> None:
    found = of_a_layer(tmp_path, "llama", adapters=adapters)
    assert found.total() == len(LAYER) + 2 * len(LINEARS), found
    assert found["triton _shrink"] == found["triton _expand"] == len(LINEARS)


def test_launches_of_a_decode_outside_its_layers(tmp_path: Path) -> None:
    """The token rows, then the final norm of the wanted rows and the output projection."""
    assert len(of_a_decode(tmp_path, "llama", 1)) == len(LAYER) + 3


@pytest.mark.parametrize(("temperature", "sampling"), [(0.0, 1), (1.0, 2)])
def test_whole_step_has_few_launches_outside_its_layers(temperature: float, sampling: int, tmp_path: Path) -> None:
    """Upload, rows of tokens, final norm and projection, sampling, the token matrix (4), and the fetch (3)."""
    write_checkpoint("llama", tmp_path, num_hidden_layers=1)
    ops = CudaOps("float32", Processor(), replace(KERNELS, sampling=TritonSampling(torch.device("cpu"), 4)))
    model = OnProcessor(EngineConfig(model=str(tmp_path))).load_model(tmp_path, ops, lambda done, total: None)
    ops.compile = lambda forward: forward  # type: ignore[method-assign]  # launches of a replay are not counted
    runner = Runner(ops, model, LIMITS_OF_STEPS, TorchPostprocess)
    *earlier, last = conversation([{"temperature": temperature, "seed": slot} for slot in range(3)])
    for each in earlier:
        runner.execute(each)
    with counted() as found:
        runner.execute(last)
    assert len(found) <= len(LAYER) + 1 + 3 + sampling + 4 + 3, found


class _Loopback:
    """Process group whose ranks all have the same part."""

    def _allgather_base(self, whole: Any, part: Any) -> _Loopback:
        whole.view(-1, len(part)).copy_(part)
        return self

    def alltoall_base(self, found: Any, parts: Any, *sizes: Any) -> _Loopback:
        found.copy_(parts)
        return self

    def wait(self) -> None:
        """Complete at once."""


@pytest.mark.parametrize(("tokens", "exchanges"), [(3, 1), (100, 2)])
def test_sum_of_eight_ranks_is_one_launch_between_exchanges(tokens: int, exchanges: int) -> None:
    ops = CudaOps("float32", Processor(), replace(KERNELS, add_ranks=add_ranks))
    collectives = TorchCollectives(_Loopback(), Parallel(0, 8), ops.add_ranks)
    x = torch.ones(tokens, 4096)
    with counted() as found:
        total = collectives.all_reduce(x)
    assert found == ["copy_", "triton _add_ranks", "copy_"][: 1 + exchanges]
    assert total.shape == x.shape and (total[0] == 8).all()


def test_without_kernels_each_operation_is_a_launch(tmp_path: Path) -> None:
    """The difference is the saving of the fusions. In bfloat16 it would be more: torch widens in extra operations."""
    assert of_a_layer(tmp_path, "qwen3-yarn", COMPOSED).total() > 40


MIXTURE = ("router", "choice", "order by expert", "gate-up with activation", "down", "weighted sum")
"""Launches of a layer with experts, none of them shared, instead of the last three launches of a dense layer."""


def test_layer_with_experts_takes_six_launches_for_them(tmp_path: Path) -> None:
    found = of_a_layer(tmp_path, "qwen3-moe", mlp_only_layers=[])
    assert found.total() == len(LAYER) - 3 + len(MIXTURE), found


def test_counter_leaves_out_views_and_allocations_and_names_the_rest() -> None:
    x = torch.ones(4, 6)
    with counted() as found:
        (
            torch.empty(3, 3),
            x.new_empty(2),
            x.t(),
            x[1:, ::2],
            x.view(2, 12),
            x.unflatten(1, (2, 3)),
            x.split(2),
            x.detach(),
        )
        assert found == []
        y = x + 1
        x[1:] = y[1:]
        gate(x, "silu")
    assert found == ["add", "copy_", "triton _gate"]


def test_every_launched_function_has_compile_options() -> None:
    launched, plain = set(), set()
    for file in Path(fd_gpu_cuda.kernels.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
            if isinstance(node, ast.FunctionDef):
                plain |= {node.name for each in node.decorator_list if ast.unparse(each).startswith("triton.jit")}
    assert {"_decode", "score"} <= launched
    assert launched & plain == set(), "use `entry.kernel`"
