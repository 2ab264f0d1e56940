"""CPU instead of a CUDA device, and plain torch instead of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from capture import RecordedGroup, record, require_no_capture
from fd_core.ops.contract import Activation, Array, Experts, Heads, HostCopies, StepInput
from fd_core.ops.parallel import Parallel
from fd_core.ops.torch.group import add_in_rank_order, gloo_group
from fd_core.ops.torch.ops import TorchOps, route
from plain_adapters import plain_lora
from plain_fusions import plain_add_norm, plain_gate, plain_rotate_and_store
from torch.utils._python_dispatch import TorchDispatchMode

from fd_gpu_cuda.backend import CudaBackend
from fd_gpu_cuda.device import CopyLane, Cuda, QueuedCopies, Replay
from fd_gpu_cuda.kernel_table import Kernels, SamplingKernels, expanded
from fd_gpu_cuda.kernel_table import expanded_product as plain_product
from fd_gpu_cuda.kv_cache import CudaLayer
from fd_gpu_cuda.ops import CudaOps
from fd_gpu_cuda.packed import PackedPart

torch.set_num_threads(1)

WAITING_METHODS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique")
WAITING_OPERATIONS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "bincount",
    "repeat_interleave.Tensor",
)


class AtOnce(CopyLane):
    """A lane whose work is done when it is queued."""

    def __init__(self) -> None:
        pass

    def pinned(self, shape: Sequence[int], dtype: Any) -> Array:
        return torch.empty(*shape, dtype=dtype)

    def empty(self, shape: Sequence[int], dtype: Any) -> Array:
        return torch.empty(*shape, dtype=dtype)

    @contextmanager
    def queueing(self) -> Iterator[None]:
        yield

    def wait(self) -> None:
        pass


class Processor(Cuda):
    """`Cuda` without a GPU, synchronous. A replay repeats the captured operations."""

    name = "processor"  # type: ignore[assignment]  # a property of the class above
    # Here every intermediate result would be rounded to bfloat16.
    has_bfloat16 = has_float16 = False  # type: ignore[assignment]  # as above
    multiplies_fp8 = False  # type: ignore[assignment]  # as above

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.waits = 0
        self.uploads = 0
        self.captured = 0
        self.replays = 0
        self.free = 0

    def pinned(self, count: int) -> Array:
        require_no_capture("pinned memory")
        return torch.empty(count, dtype=torch.uint8)

    def upload(self, host: Array) -> Array:
        self.uploads += 1
        return host.clone()

    def download(self, arrays: Sequence[Array]) -> HostCopies:
        require_no_capture("a download")
        looks = iter([False])  # the copies are complete at the second poll
        return QueuedCopies([array.detach().clone() for array in arrays], lambda: next(looks, True), self.wait)

    def wait(self) -> None:
        require_no_capture("a wait")
        self.waits += 1
        if self.ranks is not None:
            self.ranks.wait_until(lambda: True)

    def mark(self) -> Callable[[], None]:
        require_no_capture("a mark")
        return lambda: None

    def copy_lane(self) -> CopyLane:
        require_no_capture("another stream")
        return AtOnce()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        yield

    def capture(self, compute: Callable[[], None]) -> Replay:
        require_no_capture("a capture")
        recorded = record(compute)
        self.captured += 1

        def replay() -> None:
            self.replays += 1
            recorded.replay()

        return replay

    def connect(self, store: Any, parallel: Parallel, seconds: float) -> Any:
        return RecordedGroup(gloo_group(store, parallel, "127.0.0.1", seconds))

    def release_unused(self) -> None:
        pass

    def free_on_driver(self) -> int:
        return self.free

    def free_bytes(self) -> int:
        return self.free_on_driver()


def plain_attention(q: Array, layer: CudaLayer, heads: Heads, step: StepInput) -> Array:
    """Attend with every token to every position of its row's table; reads no value on the host."""
    size = layer.block_size
    token = torch.arange(len(q), dtype=torch.int32, device=q.device)
    row = torch.searchsorted(step.query_start[1:], token, right=True)
    context, place = step.context_len[row, None], torch.arange(step.block_tables.shape[1] * size, device=q.device)
    own = context[:, 0] - step.query_start[row + 1] + token
    distance = own[:, None] - place
    seen = (distance >= 0) & (distance < (heads.window or 2**30))
    slots = step.block_tables.long()[row][:, place // size] * size + place % size
    slots = torch.where(
        seen, slots, slots.gather(1, own[:, None].long())
    )  # others may be NaN, which no weight of 0 hides
    grouped = q.unflatten(1, (heads.num_kv_heads, -1)).float()
    keys, values = layer.keys[slots].float(), layer.values[slots].float()
    if layer.keys.dtype == torch.int8:
        keys, values = keys * layer.key_scales[slots][..., None], values * layer.value_scales[slots][..., None]
    if heads.latent:
        keys = torch.cat((keys, values), dim=-1)
    scores = torch.einsum("tkgd,tskd->tkgs", grouped, keys) * heads.scale
    if heads.softcap is not None:
        scores = (scores / heads.softcap).tanh() * heads.softcap
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.float().reshape(1, heads.num_kv_heads, -1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : seen.shape[-1]]
    return torch.einsum("tkgs,tskd->tkgd", weights, values).flatten(1).to(q.dtype)


def plain_experts(x: Array, experts: Experts, activation: Activation, shared: Array | None) -> Array:
    """Compute every expert on every token; reads no value on the host."""
    chosen, weights = route(x, experts)
    share = weights.new_zeros(len(x), len(experts.router)).scatter_(1, chosen, weights).to(x.dtype)
    share = share[:, experts.first : experts.first + experts.gate_up.experts]
    gate_up, down = (
        (expanded(each.weight) if isinstance(each.weight, PackedPart) else each.weight).to(x.dtype)
        for each in (experts.gate_up, experts.down)
    )
    given, weight = x[:, None].expand(-1, share.shape[1], -1), share[..., None]
    if experts.weighs_inputs:
        given, weight = given * weight, (weight != 0).to(x.dtype)
    both = torch.einsum("teh,eoh->teo", given, gate_up.unflatten(0, (-1, experts.gate_up.out)))
    if experts.gate_up.bias is not None:
        both += experts.gate_up.bias.unflatten(0, (-1, experts.gate_up.out)).to(x.dtype)
    inner = TorchOps().gate(both, activation) if experts.ungated is None else TorchOps().activate(both, experts.ungated)
    each = torch.einsum("tei,ehi->teh", inner, down.unflatten(0, (-1, experts.down.out)))
    if experts.down.bias is not None:
        each += experts.down.bias.unflatten(0, (-1, experts.down.out)).to(x.dtype)
    y = (each * weight).sum(1)
    return y if shared is None else y + shared


PLAIN = Kernels(
    attention=plain_attention,
    sampling=SamplingKernels(),
    packed_product=plain_product,
    add_norm=plain_add_norm,
    rotate_and_store=plain_rotate_and_store,
    gate=plain_gate,
    experts=plain_experts,
    lora=plain_lora,
    add_ranks=add_in_rank_order,
)


def make_ops(processor: Processor | None = None, dtype: str = "float32") -> CudaOps:
    return CudaOps(dtype, processor or Processor(), PLAIN)


class OnProcessor(CudaBackend):
    """The backend as it is, but for the device and the kernels."""

    processor: Processor

    def make_ops(self) -> CudaOps:
        self.processor = Processor()
        self.processor.free = 2**30 + 2**28
        self._cuda = self.processor
        wanted = self.requested_dtype("float32", "bfloat16", "float16")
        return make_ops(self.processor, wanted or self._fastest_dtype(self.processor))


class _Watch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Answer torch as a recording does."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name.startswith(WAITING_OPERATIONS):
            raise AssertionError(f"{name} waits for the device")
        if name.startswith("index.Tensor") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            raise AssertionError("indexing by a mask waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_waits(monkeypatch: Any) -> Iterator[None]:
    """Fail if torch on CUDA would wait for the device to read a value."""
    with monkeypatch.context() as patch:
        for name in WAITING_METHODS:

            def refuse(*_: Any, name: str = name) -> Any:
                raise AssertionError(f"Tensor.{name} waits for the device")

            patch.setattr(torch.Tensor, name, refuse)
        with _Watch():
            yield


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)
