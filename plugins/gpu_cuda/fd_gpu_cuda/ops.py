"""The torch pack on CUDA: the core's pack with kernels for attention and sampling, without synchronization in a
step."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from fd_core.config import Limits
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.contract import (
    Activation,
    Array,
    Experts,
    Forward,
    Heads,
    HostCopies,
    KVCache,
    KVShape,
    Lora,
    Norm,
    PenaltyInput,
    Recurrent,
    SampleInput,
    StepInput,
)
from fd_core.ops.parallel import RankGroup
from fd_core.ops.torch.ops import TorchLinear, TorchOps, route, widened
from fd_core.ops.warm_up import WarmUpStep
from fd_core.ops.weights import WEIGHT_FORMATS, LowRank, RawTensor, Weight

from fd_gpu_cuda import composed
from fd_gpu_cuda.compilations import Compilations, warm_up_steps
from fd_gpu_cuda.composed import ComposedPart
from fd_gpu_cuda.device import Cuda, out_of_memory, upload_packed
from fd_gpu_cuda.graphs import DeviceGraphs, GraphedForward, GraphShapes
from fd_gpu_cuda.kernel_table import AdapterCapacity, AddNorm, DeviceLora, Kernels, LoraTable, scatter_kv, widened_layer
from fd_gpu_cuda.kv_cache import CudaKVCache, CudaLayer
from fd_gpu_cuda.packed import PackedLinear, StackedExperts, pack_linear, pack_stack

if TYPE_CHECKING:
    from fd_core.ops.torch.group import TorchCollectives


class Residual:
    """The residual stream: its value, and a product whose addition is deferred to the next norm.

    The sum overwrites the value once; later readers find no pending product.
    """

    __slots__ = ("_add_norm", "_post_norm", "_product", "_states")

    def __init__(self, add_norm: AddNorm, states: Array, product: Array, post_norm: Norm | None) -> None:
        self._add_norm = add_norm
        self._states = states
        self._product: Array | None = product
        self._post_norm = post_norm

    def read(self, norm: Norm | None) -> Array:
        """Add the pending product, and return the norm of the sum [T, H], or the sum without a norm."""
        if self._product is None and norm is None:
            return self._states
        found = self._add_norm(self._states, norm, self._product, self._post_norm)
        self._product = None
        return found

    def rows(self, norm: Norm, rows: Array) -> Array:
        """Return the norm of some rows of the sum [R, H]; the addition stays pending."""
        return self._add_norm(self._states, norm, self._product, self._post_norm, rows)


class CudaOps(TorchOps):
    """Operations on torch tensors of one CUDA device, which may be that of one rank of several.

    Each uses the kernel of the table, or else a composition of torch operations.
    """

    name = "torch"
    weight_formats = WEIGHT_FORMATS
    table_formats = frozenset()
    encodes = True
    chunks = True
    any_experts = True
    latents = True
    recurs = True
    biased_experts = True
    ungated_experts = True
    expert_parallel = True
    sinks = True
    queues = True
    compilations: Compilations | None = None
    """Kernels compiled so far; None for a table without compiled kernels."""
    adapter_capacity: AdapterCapacity | None = None
    """None without adapters."""
    composed: tuple[ComposedPart, ...] = ()
    """Parts of the model without a kernel."""
    tables_made = 0
    """Number of tables created. Graphs captured before the last one may read stale tables."""

    def __init__(self, dtype: str, cuda: Cuda, kernels: Kernels) -> None:
        super().__init__(dtype, str(cuda.device))
        self._cuda = cuda
        self._kernels = kernels
        self._graphs: DeviceGraphs | None = None
        self._rehearses = False
        self._collectives: TorchCollectives | None = None
        # Triton converts float8_e4m3fn only where the device does.
        self.kv_dtypes = ("int8", "fp8") if cuda.multiplies_fp8 else ("int8",)

    def warm_up_steps(self, limits: Limits) -> Sequence[WarmUpStep]:
        if self.compilations is None:
            return ()
        return warm_up_steps(limits, drafts=self.stage.first and self.stage.last)

    def warmed_up(self) -> None:
        """Log the compilations; later ones log a warning."""
        if self.compilations is not None:
            self.compilations.begin_serving()

    def compilation_stats(self) -> CompilationStats | None:
        return None if self.compilations is None else self.compilations.stats()

    @property
    def kernels(self) -> Kernels:
        """The kernels in use."""
        return self._kernels

    def use(self, kernels: Kernels) -> None:
        """Compute with other kernels from now on; called before `configure`."""
        self._kernels = kernels

    def alone(self, kernels: Kernels) -> CudaOps:
        """Return a pack for the same arrays with other kernels and without ranks."""
        other = copy.copy(self)
        other._kernels, other._group, other._planned = kernels, None, {}
        return other

    def join(self, group: RankGroup) -> None:
        group.require_order()
        self.parallel, self._group = group.parallel, group

    def all_reduce(self, x: Array) -> Array:
        return x if self._group is None else self._connected(self._group).all_reduce(x)

    def all_gather(self, x: Array) -> Array:
        return x if self._group is None else self._connected(self._group).all_gather(x)

    def _connected(self, group: RankGroup) -> TorchCollectives:
        """Return the ranks' collectives, which connect on first use, outside any capture."""
        if self._collectives is None:
            from fd_core.ops.torch.group import TorchCollectives, shared_store

            connection = self._cuda.connect(shared_store(group), group.parallel, group.timeout)
            self._collectives = TorchCollectives(connection, group.parallel, self.add_ranks)
            self._cuda.ranks = group
        return self._collectives

    def add_ranks(self, parts: Array) -> Array:
        """[ranks, n] -> [n], in float32 in the order of ranks, rounded once."""
        from fd_core.ops.torch.group import add_in_rank_order

        return (self._kernels.add_ranks or add_in_rank_order)(parts)

    def configure(self, limits: Limits) -> None:
        """Choose the shapes of decodes, and allocate what sampling needs."""
        self._kernels.sampling.reserve(limits.max_num_seqs * (1 + limits.max_drafts))
        if self.captures:
            self._graphs = DeviceGraphs(self._cuda, GraphShapes.of(limits), limits, few=self._rehearses)

    @property
    def captures(self) -> bool:
        """True if decodes are captured."""
        return self._kernels.capturable and all(part.captured for part in self.composed)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Return a context in which few graphs are captured and freed at exit."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses, self._graphs = False, None

    @property
    def graph_bytes_to_come(self) -> int:
        """Memory that the graphs not captured by a rehearsal will take."""
        return 0 if self._graphs is None else self._graphs.bytes_to_come

    def states_from_host(self, states: npt.NDArray[np.float32]) -> Array:
        return self.from_host(states).to(self.torch_dtype)

    def from_host(self, array: npt.NDArray[Any]) -> Array:
        """Queue a copy from pinned memory; the array may be changed at once."""
        return self.upload([array])[0]

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Array]:
        """Queue one copy of a pinned buffer with all arrays; they may be changed at once."""
        return upload_packed(self._cuda, arrays)

    def fetch_later(self, arrays: Sequence[Array]) -> HostCopies:
        """Queue copies to pinned memory, followed by an event."""
        return self._cuda.download([widened(array) for array in arrays])

    def wait(self) -> None:
        """Wait for the queued work. Raises `RuntimeError` if the device failed."""
        self._cuda.wait()

    def to_host(self, array: Array) -> npt.NDArray[Any]:
        return self.fetch([array])[0]

    def prepare_linear(
        self, parts: Sequence[Weight], biases: Sequence[RawTensor] | None = None, *, gated: bool = False
    ) -> Any:
        """Keep packed parts packed, unless a group is not a multiple of 16 values or a part is not packed."""
        packed = pack_linear(parts, biases, self.device, self._multiplies_8_bits)
        return super().prepare_linear(parts, biases, gated=gated) if packed is None else packed

    def _multiplies_8_bits(self, fp8: bool) -> bool:
        """Return True if activations are quantized to 8 bits: only with bfloat16, on devices with 8-bit tensor
        cores."""
        return self.dtype == "bfloat16" and (not fp8 or self._cuda.multiplies_fp8)

    def linear(self, x: Array, weight: Any) -> Array:
        if isinstance(weight, PackedLinear):
            return weight(x, self._kernels.packed_product)
        return super().linear(x, weight)

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> KVCache:
        """Allocate blocks, and one more for padding."""
        return CudaKVCache(shape, num_blocks, self.torch_dtype, self._cuda)

    def write_kv(self, layer: Any, k: Array, v: Array, kv_slots: Array) -> None:
        if self._kernels.write_kv is not None:
            self._kernels.write_kv(k, v, layer, kv_slots)
        else:
            scatter_kv(k, v, layer, kv_slots)

    def paged_attention(self, q: Array, layer: Any, heads: Heads, step: StepInput) -> Array:
        """Attend over the blocks of a `CudaLayer` in place; in both directions, and to chunks of rows of several
        tokens, over copies."""
        kernel = self._kernels.attention
        forwards = heads.causal and step.ends is None
        if kernel and forwards and heads.chunked and step.uniform and not (heads.window or 0) % layer.block_size:
            return kernel(q, layer, *composed.rows_of_chunks(step, heads, layer.block_size))
        directed = forwards and not heads.chunked
        planned = self._kernels.planned_attention
        lacking = layer.keys.dtype != q.dtype or heads.sinks is not None or heads.latent or not directed
        if planned is not None and step.host is not None and not lacking:
            return planned(q, layer, heads, step)
        if kernel is None or not directed:
            return super().paged_attention(q, *widened_layer(layer, heads, step, q.dtype))
        return kernel(q, layer, heads, step)

    def recur(self, x: Array, recurrent: Recurrent, layer: CudaLayer, step: StepInput) -> Array:  # type: ignore[override]  # as `attention_inputs`
        if self._kernels.recur is not None:
            return self._kernels.recur(x, recurrent, layer, step)
        return composed.recur(x, recurrent, layer, step, self.from_host)

    def logits_of(self, x: Array, head: Any, softcap: float | None) -> Array:
        """Project to the vocabulary; during a capture, into the memory of the graph's logits.

        The widening copy replaces the launch of `float`.
        """
        output = None if self._graphs is None else self._graphs.head_output
        if output is None or self.parallel.size > 1:  # gathered over ranks first
            return super().logits_of(x, head, softcap)
        if isinstance(head, TorchLinear) and head.bias is None and x.dtype == output.dtype:
            torch.mm(x, head.weight.t(), out=output)
        else:
            output.copy_(self.linear(x, head))
        return output if softcap is None else output.div_(softcap).tanh_().mul_(softcap)

    def padded(self, rows: int, width: int) -> tuple[int, int] | None:
        return None if self._graphs is None else self._graphs.shapes.fitting(rows, width)

    def compile(self, forward: Forward) -> Forward:
        return forward if self._graphs is None else GraphedForward(forward, self._graphs)

    def compile_adapted(self, forward: Forward, cache: KVCache | None = None, before: Forward | None = None) -> Forward:
        """Return a forward that replays graphs for decodes with adapters, captured here, before requests."""
        if self._graphs is None or cache is None or not self.tables_made:
            return forward
        found = GraphedForward(forward, self._graphs, self.tables_made)
        if isinstance(before, GraphedForward):
            found.take_graphs(before)
        if self.parallel.size == 1:  # ranks are not synchronized here, and a capture includes collectives
            found.prepare(cache)
        return found

    def prepare_experts(
        self, parts: Sequence[Sequence[Weight]], biases: Sequence[Sequence[RawTensor]] | None = None, *, gated: bool
    ) -> Any:
        """Stack the experts; they stay packed if all have the same format."""
        weights = [weight for expert in parts for weight in expert]
        packed = pack_stack(weights, self.device, self._multiplies_8_bits)
        bias = None if biases is None else self._stack([part for expert in biases for part in expert])
        return StackedExperts(self._stack(weights) if packed is None else packed, len(parts), bias)

    def moe(self, x: Array, experts: Experts, activation: Activation) -> Array:
        """Run each expert on its tokens.

        Without the kernel every expert runs on every token, because a capture cannot depend on the routing.
        """
        if self._kernels.experts is not None:
            return self._kernels.experts(x, experts, activation, self.shared(x, experts, activation))
        if self._graphs is None or len(x) > self._graphs.shapes.most_tokens:
            return super().moe(x, experts, activation)
        chosen, weights = route(x, experts)
        share = weights.new_zeros(len(x), len(experts.router)).scatter_(1, chosen, weights).to(x.dtype)
        output = torch.zeros_like(x)
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True), experts.first):
            weight = share[:, expert, None]
            given, weight = (x * weight, (weight != 0).to(x.dtype)) if experts.weighs_inputs else (x, weight)
            output += self.expert(given, gate_up, down, experts, activation) * weight
        return self.add_shared(output, x, experts, activation)

    @property
    def adds_by_kernel(self) -> bool:
        """True if a kernel adds the adapters' terms."""
        return self._kernels.lora is not None

    def prepare_lora(self, parts: Sequence[LowRank | None], outs: Sequence[int], *, gated: bool = False) -> Any:
        """Upload each part separately. Raises `MemoryError` if they do not fit."""
        if self._kernels.lora is None:
            with _memory_error():
                return super().prepare_lora(parts, outs, gated=gated)

        def placed(matrix: np.ndarray) -> Array:
            return torch.from_numpy(np.array(matrix, np.float32, order="C")).to(self.device, self.torch_dtype)

        with _memory_error():
            there = [None if part is None else (placed(part.down), placed(part.up.T)) for part in parts]
        inputs = next(part.down.shape[1] for part in parts if part is not None)
        return DeviceLora(tuple(there), inputs, tuple(outs))

    def place_loras(
        self, deltas: Sequence[Any | None], inputs: int, outs: Sequence[int], before: Any | None = None
    ) -> Any | None:
        """Write the table of a linear, even if no adapter changes it, because graphs must work for later adapters, too.

        Raises `MemoryError` if a new table is needed and does not fit.
        """
        if self._kernels.lora is None:
            return super().place_loras(deltas, inputs, outs, before)
        table = before
        if not isinstance(table, LoraTable) or not table.fits(deltas):
            room = self.adapter_capacity or AdapterCapacity()
            with _memory_error():
                table = LoraTable.empty(deltas, inputs, tuple(outs), room, self.device)
            # Without tokens, to compile before requests.
            x = torch.empty((0, inputs), dtype=self.torch_dtype, device=self.device)
            self._kernels.lora(x.new_empty(0, sum(outs)), x, table, table.entries.new_empty(0, dtype=torch.int32))
            self.tables_made += 1
        entries = np.zeros(tuple(table.entries.shape), np.int64)
        for place, delta in enumerate(deltas):
            for part, each in enumerate(() if delta is None else delta.parts):
                if each is not None:
                    down, up = each
                    entries[place, part] = down.data_ptr(), up.data_ptr(), len(down)
        table.entries.copy_(self.from_host(entries))
        table.held = list(deltas)
        return table

    def lora(self, y: Array, x: Array, lora: Lora) -> Array:
        """Add to y in place, in two launches."""
        kernel, places = self._kernels.lora, lora.step.lora_slots
        if kernel is None:
            return super().lora(y, x, lora)
        table = lora.deltas
        if not isinstance(table, LoraTable):  # deltas without a table
            some = next((delta for delta in table if delta is not None), None)
            table = None if some is None else self.place_loras(table, some.inputs, some.outs)
        if table is not None and places is not None:
            kernel(y, x if x.stride(1) == 1 else x.contiguous(), table, places)
        return y

    def settle(self, residual: Any) -> Array:
        return residual.read(None) if isinstance(residual, Residual) else residual

    def rms_norm(self, x: Any, norm: Norm) -> Array:
        if isinstance(x, Residual):
            return x.read(norm)
        add_norm = self._kernels.add_norm
        if add_norm is None or x.dim() != 2 or not x.is_contiguous():
            return super().rms_norm(x, norm)
        return add_norm(x, norm)

    def layer_norm(self, x: Any, norm: Norm) -> Array:
        return super().layer_norm(self.settle(x), norm)

    def gate(self, gate_up: Array, activation: Activation) -> Array:
        kernel = self._kernels.gate
        return super().gate(gate_up, activation) if kernel is None else kernel(gate_up, activation)

    def attention_inputs(
        self,
        x: Any,
        norm: Norm | None,
        qkv: Any,
        heads: Heads,
        layer: CudaLayer,
        step: StepInput,
        lora: Lora | None = None,
    ) -> Array:
        kernel = self._kernels.rotate_and_store
        unusual = heads.norms_rotated or heads.joint_widths is not None or heads.query_rope is not None
        unusual = unusual or not heads.causal
        if kernel is None or unusual:
            return super().attention_inputs(x, norm, qkv, heads, layer, step, lora)
        normed = self.normalize(x, norm)
        projected = self.linear(normed, qkv)
        if lora is not None:
            projected = self.lora(projected, normed, lora)
        return kernel(projected, layer, heads, step)

    def project_residual(
        self, x: Array, weight: Any, residual: Any, post_norm: Norm | None = None, lora: Lora | None = None
    ) -> Any:
        """Multiply; the addition is deferred to the next norm."""
        add_norm = self._kernels.add_norm
        if add_norm is None:
            return super().project_residual(x, weight, residual, post_norm, lora)
        y = self.linear(x, weight)
        if lora is not None:
            y = self.lora(y, x, lora)
        return Residual(add_norm, self.settle(residual), self.all_reduce(y), post_norm)

    def moe_residual(self, x: Any, norm: Norm, experts: Experts, activation: Activation) -> Any:
        """Norm and experts; the addition is deferred to the next norm."""
        add_norm = self._kernels.add_norm
        if add_norm is None:
            return super().moe_residual(x, norm, experts, activation)
        y = self.moe(self.rms_norm(x, norm), experts, activation)
        return Residual(add_norm, self.settle(x), self.all_reduce(y), None)

    def logits(
        self, x: Any, norm: Norm, head: Any, rows: Array, softcap: float | None = None, *, split: bool = False
    ) -> Array:
        add_norm = self._kernels.add_norm
        if add_norm is None:
            return super().logits(x, norm, head, rows, softcap, split=split)
        normed = x.rows(norm, rows) if isinstance(x, Residual) else add_norm(x, norm, rows=rows)
        logits = self.logits_of(normed, head, softcap)
        return self.all_gather(logits) if split else logits

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        return self._kernels.sampling.sample(logits, rows)

    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        return self._kernels.sampling.add_at(x, rows, ids, values)

    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        return self._kernels.sampling.penalize(logits, penalties)

    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        return self._kernels.sampling.mask_logits(logits, rows, bits)

    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        return self._kernels.sampling.logprobs(logits, tokens, top_n)

    def ranks(self, logits: Array, tokens: Array) -> Array:
        return self._kernels.sampling.ranks(logits, tokens)

    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        return self._kernels.sampling.verify(sampled, drafts, num_drafts)

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array, num_slots: int) -> Array:
        """Return the token matrix of a step, for `CudaPostprocess`."""
        return self._kernels.sampling.token_matrix(sampled, accepted, slots, revoked, num_slots)


@contextmanager
def _memory_error() -> Iterator[None]:
    """Raise `MemoryError`, which fails the loading of an adapter, if the device is out of memory."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise MemoryError("not enough device memory for its matrices") from error
