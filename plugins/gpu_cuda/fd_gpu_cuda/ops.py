"""The torch pack on CUDA: the core's, with kernels for attention and sampling, and no wait inside a step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from fd_core.config import Limits
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.contract import (
    Array,
    Forward,
    Heads,
    HostCopies,
    KVCache,
    KVShape,
    StepInput,
)
from fd_core.ops.parallel import RankGroup
from fd_core.ops.torch.ops import TorchLinear, widened
from fd_core.ops.warm_up import WarmUpStep
from fd_core.ops.weights import WEIGHT_FORMATS, PackedTensor, RawTensor, Weight

from fd_gpu_cuda.adapters import AdaptedOps
from fd_gpu_cuda.compilations import Compilations, warm_up_steps
from fd_gpu_cuda.compositions import scatter_kv, widened_layer
from fd_gpu_cuda.device import Cuda, upload_packed
from fd_gpu_cuda.experts import MixtureOps
from fd_gpu_cuda.fusions import FusedOps
from fd_gpu_cuda.graphs import DeviceGraphs, GraphedForward, GraphShapes
from fd_gpu_cuda.kernel_table import Kernels
from fd_gpu_cuda.kv_cache import CudaKVCache
from fd_gpu_cuda.packed import PackedLinear, pack_linear
from fd_gpu_cuda.sampling import SamplingOps

if TYPE_CHECKING:
    from fd_core.ops.torch.group import TorchCollectives


logger = logging.getLogger(__name__)


class CudaOps(SamplingOps, MixtureOps, AdaptedOps, FusedOps):
    """Operations on torch tensors of one CUDA device, which may be that of one rank of several."""

    name = "torch"
    weight_formats = WEIGHT_FORMATS
    kv_dtypes = ("int8",)
    queues = True
    compilations: Compilations | None = None
    """Kernels that were compiled so far; None for a table in which nothing compiles."""

    def __init__(self, dtype: str, cuda: Cuda, kernels: Kernels) -> None:
        super().__init__(dtype, str(cuda.device))
        self._cuda = cuda
        self._kernels = kernels
        self._graphs: DeviceGraphs | None = None
        self._rehearses = False
        self._collectives: TorchCollectives | None = None

    def warm_up_steps(self, limits: Limits) -> Sequence[WarmUpStep]:
        """Name the steps that compile what serving needs; none where nothing compiles."""
        if self.compilations is None:
            return ()
        return warm_up_steps(limits, drafts=self.stage.first and self.stage.last)

    def warmed_up(self) -> None:
        """Say what was compiled; from now on compiling is worth a warning."""
        if self.compilations is not None:
            self.compilations.begin_serving()

    def compilation_stats(self) -> CompilationStats | None:
        """Tell what was compiled by Triton."""
        return None if self.compilations is None else self.compilations.stats()

    def use(self, kernels: Kernels) -> None:
        """Compute with other kernels from now on; called before `configure`."""
        self._kernels = kernels

    def alone(self, kernels: Kernels) -> CudaOps:
        """Return a pack for the same arrays that computes with other kernels, and without other ranks."""
        other = copy.copy(self)
        other._kernels, other._group, other._planned = kernels, None, None
        return other

    def join(self, group: RankGroup) -> None:
        """Compute as one of several ranks, with a device each."""
        group.require_order()
        self.parallel, self._group = group.parallel, group

    def all_reduce(self, x: Array) -> Array:
        """Add up what the ranks hold, in their order and in float32."""
        return x if self._group is None else self._connected(self._group).all_reduce(x)

    def all_gather(self, x: Array) -> Array:
        """Join what the ranks hold."""
        return x if self._group is None else self._connected(self._group).all_gather(x)

    def _connected(self, group: RankGroup) -> TorchCollectives:
        """Return the ranks' collectives; they connect when they are first needed, which no capture is."""
        if self._collectives is None:
            from fd_core.ops.torch.group import TorchCollectives, shared_store

            connection = self._cuda.connect(shared_store(group), group.parallel, group.patience)
            self._collectives, self._cuda.ranks = TorchCollectives(connection, group.parallel), group
        return self._collectives

    def configure(self, limits: Limits) -> None:
        """Choose the shapes of decodes, and allocate what sampling needs."""
        self._kernels.sampling.reserve(limits.max_num_seqs * (1 + limits.max_drafts))
        if self._kernels.capturable:
            self._graphs = DeviceGraphs(self._cuda, GraphShapes.of(limits), limits, few=self._rehearses)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Return a context in which few graphs are captured; none is held behind it."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses, self._graphs = False, None

    @property
    def graph_bytes_to_come(self) -> int:
        """What the graphs that a rehearsal did not capture will take."""
        return 0 if self._graphs is None else self._graphs.bytes_to_come

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Queue a copy from pinned memory; the array may be changed at once."""
        return self.upload([array])[0]

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Array]:
        """Queue one copy of a pinned buffer that holds them all; they may be changed at once."""
        return upload_packed(self._cuda, arrays)

    def fetch_later(self, arrays: Sequence[Array]) -> HostCopies:
        """Queue copies to pinned memory, and an event behind them."""
        return self._cuda.download([widened(array) for array in arrays])

    def wait(self) -> None:
        """Wait for what was queued. Raises `RuntimeError` where the device cannot go on."""
        self._cuda.wait()

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        """Bring one array over."""
        return self.fetch([array])[0]

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        """Keep packed parts packed, but where a group is no multiple of 16 values or a part is not packed."""
        packed = pack_linear(parts, biases, self.device, self._multiplies_8_bits)
        return super().prepare_linear(parts, biases, gated=gated) if packed is None else packed

    def _multiplies_8_bits(self, fp8: bool) -> bool:
        """Say whether activations are rounded to 8 bits: where the device multiplies those, beside bfloat16 only."""
        return self.dtype == "bfloat16" and (not fp8 or self._cuda.multiplies_fp8)

    def _captured(self, tokens: int) -> bool:
        return self._graphs is not None and tokens <= self._graphs.shapes.most_tokens

    def tied_head(self, embedding: Array, weight: Weight) -> Any:
        """Share the embedding unless the projection is packed."""
        if isinstance(weight, PackedTensor):
            return self.prepare_linear([weight])
        return super().tied_head(embedding, weight)

    def linear(self, x: Array, weight: Any) -> Array:
        """Multiply by the transposed weight and add the bias."""
        if isinstance(weight, PackedLinear):
            return weight(x, self._kernels.packed_product)
        return super().linear(x, weight)

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        """Allocate blocks, and one more for padding."""
        return CudaKVCache(shape, num_blocks, self.torch_dtype, self._cuda)

    def write_kv(self, layer: Any, k: Array, v: Array, kv_slots: Array) -> None:
        """Scatter keys and values to the slots of a `CudaLayer`."""
        if self._kernels.write_kv is not None:
            self._kernels.write_kv(k, v, layer, kv_slots)
        else:
            scatter_kv(k, v, layer, kv_slots)

    def paged_attention(self, q: Array, layer: Any, heads: Heads, step: StepInput) -> Array:
        """Attend over the blocks of a `CudaLayer` in place."""
        planned = self._kernels.planned_attention
        if planned is not None and step.host is not None and not layer.quantized:
            return planned(q, layer, heads, step)
        if self._kernels.attention is None:
            return super().paged_attention(q, *widened_layer(layer, heads, step, q.dtype))
        return self._kernels.attention(q, layer, heads, step)

    def logits_of(self, x: Array, head: Any, softcap: float | None) -> Array:
        """Project to the vocabulary; while a decode is captured, into the memory that its graph writes.

        A copy that widens is the launch that `float` would be.
        """
        output = None if self._graphs is None else self._graphs.head_output
        if output is None or self.parallel.size > 1:  # what ranks have is joined first
            return super().logits_of(x, head, softcap)
        if isinstance(head, TorchLinear) and head.bias is None and x.dtype == output.dtype:
            torch.mm(x, head.weight.t(), out=output)
        else:
            output.copy_(self.linear(x, head))
        return output if softcap is None else output.div_(softcap).tanh_().mul_(softcap)

    def padded(self, rows: int, width: int) -> tuple[int, int] | None:
        """Return the smallest shape that holds the step and has a graph."""
        return None if self._graphs is None else self._graphs.shapes.fitting(rows, width)

    def compile(self, forward: Forward) -> Forward:
        """Replay graphs for decodes."""
        return forward if self._graphs is None else GraphedForward(forward, self._graphs)

    def compile_adapted(self, forward: Forward, cache: KVCache | None = None, before: Forward | None = None) -> Forward:
        """Replay graphs for decodes of tokens with adapters, captured here, so that no request waits for that."""
        if self._graphs is None or cache is None or not self.tables_made:
            return forward
        if isinstance(before, GraphedForward):
            found = before.following(forward, self._graphs, self.tables_made)
        else:
            found = GraphedForward(forward, self._graphs, self.tables_made)
        if self.parallel.size == 1:  # ranks do not come here together, and a capture adds up what all have
            found.prepare(cache)
        return found
