"""One layer with random weights, identical on all packs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from fd_core.models.families.spec import width_share
from fd_core.ops.contract import (
    Activation,
    Experts,
    Heads,
    HostStep,
    KVShape,
    Lora,
    Norm,
    Ops,
    PlainActivation,
    Rope,
)
from fd_core.ops.numpy.kv_8bit import quantize_kv
from fd_core.ops.weights import LowRank, Weight
from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.testing.kit.requirements import require_sizes
from fd_core.testing.models.arrays import (
    TURNED,
    Values,
    activations,
    generator,
    on_device,
    packed_weight,
    raw,
    step_input,
    stored_weight,
    turned,
)
from fd_core.types import IntArray


@dataclass(frozen=True, slots=True)
class Geometry:
    """Differences between layers of models."""

    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    hidden: int = 48
    inner: int = 72
    block_size: int = 8
    rotary: int | None = None
    interleaved: bool = False
    turned: str = TURNED[0]
    """Kind of positions in the step."""
    window: int | None = None
    chunked: bool = False
    """The window is the size of chunks."""
    causal: bool = True
    softcap: float | None = None
    sinks: bool = False
    head_norms: bool = False
    norms_rotated: bool = False
    """Norms of heads follow rope."""
    query_rope: bool = False
    """Queries are rotated by other tables than keys."""
    joint_norms: bool = False
    """All heads of a token have one norm, before rope."""
    pre_norm: bool = True
    """The inputs of attention, and of a dense feed-forward block, are normalized."""
    post_norm: bool = False
    biases: bool = False
    activation: Activation = "silu"
    ungated: PlainActivation | None = None
    """Activation of a feed-forward block without a gate."""
    experts: int = 0
    top_k: int = 2
    normalize: bool = True
    shared_expert: bool = False
    shared_gate: bool = False
    correction_bias: bool = False
    norm_floor: float = 1e-12
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    weighs_inputs: bool = False
    expert_groups: int = 1
    """Groups of experts; those of a token are in the best half of them."""
    weight_scale: float = 1.0
    expert_biases: bool = False
    """The router and the experts have biases."""
    ungated_experts: PlainActivation | None = None
    """Activation of experts without a gate."""
    clamped: bool = False
    """The activation of experts is `clamped_swiglu`."""
    scale: float = 1.0
    """Scale of scores as a multiple of d ** -0.5."""
    eps: float = 1e-5
    packed: str | None = None
    """Format of all linear layers; None for float32."""
    source: str = "F32"
    """Dtype of raw weights in the checkpoint."""
    stored: str = "usual"
    """Form of weights, one of `arrays.STORED`."""
    packed_down: str | None = None
    """Format of the last linear of experts, if not `packed`."""
    packed_group: int | None = None
    """Values that share a scale; None for the usual number of the format."""
    kv_dtype: str = "auto"
    adapter_ranks: tuple[int, ...] = ()
    """Ranks of the adapters that tokens have."""
    spare_blocks: int = 0
    """Blocks of the pool that no row owns; those of the rows lie among them."""
    shared_blocks: int = 0
    """Blocks that rows have in common at most: those before their tokens of the step."""
    uniform: bool = False
    """Value of `StepInput.uniform`."""
    host_copy: bool = False
    """Set `StepInput.host`."""
    image_tokens: int = 0
    """Tokens of images in all rows, each of which attends to its whole image; 0 for none."""

    @property
    def expert_activation(self) -> Activation:
        """Activation of experts."""
        return "clamped_swiglu" if self.clamped else self.activation


ROWS: Final = [(1, 150), (40, 40), (1, 9), (3, 137), (1, 1), (20, 33)]
"""(tokens, context): decodes, prefills from the start and chunks in the middle, across the 128-token chunks."""

NOWHERE: Final = 2**20
"""Arbitrary entry of a block table beyond the context."""


def half_of(groups: int) -> int:
    """Return half of a number of groups, rounded up."""
    return (groups + 1) // 2


def sizes_of_layer(g: Geometry, rows: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return the sizes of a layer and of a step over it under the names of `OperatingEnvelope`."""
    return {
        "max_num_seqs": len(rows),
        "max_num_batched_tokens": sum(count for count, _ in rows),
        "max_model_len": max((context for _, context in rows), default=0),
        "block_size": g.block_size,
        "max_loras": len(g.adapter_ranks),
        "max_lora_rank": max(g.adapter_ranks, default=0),
        "hidden": g.hidden,
        "inner": g.inner,
        "head_dim": g.d,
        "group": g.heads // g.kv_heads,
        "experts": g.experts,
        "top_k": g.top_k if g.experts else 0,
    }


def ends_of_images(rows: Sequence[tuple[int, int]], size: int) -> IntArray:
    """Return `StepInput.ends` for images of `size` tokens, or as many as a row has: pairs without a gap between."""
    parts = []
    for count, context in rows:
        ends, size_here = np.arange(context - count, context) + 1, min(size, count)
        begin = min(1, count - size_here)
        for first in (place for pair in range(begin, count, 2 * size_here + 3) for place in (pair, pair + size_here)):
            if first + size_here <= count:
                ends[first : first + size_here] = ends[first + size_here - 1]
        parts.append(ends)
    return np.concatenate(parts).astype(np.int32)


class LayerOn:
    """A layer's weights and a cache on one pack, and a step over `rows`."""

    def __init__(self, ops: Ops, g: Geometry, rows: list[tuple[int, int]] | None = None) -> None:
        rows = ROWS if rows is None else rows
        self.ops, self.g, self.rows = ops, g, rows
        require_sizes(sizes_of_layer(g, rows))
        make, parallel = Values(), ops.parallel
        self.inner = width_share(g.inner, parallel)
        """This rank's share of the inner width, of which `down` and the experts have a part; all else is whole."""
        self._outs, self._ins = slice(0, g.hidden), self.inner
        if parallel.gathers:
            self._outs, self._ins = width_share(g.hidden, parallel), slice(0, g.inner)

        def linear(*shapes: tuple[int, int], gated: bool = False, back: bool | None = None) -> Any:
            biases = [raw(make(shape[0])) for shape in shapes] if g.biases else None
            parts = self._parts(make, *shapes, back=back)
            if back and biases is not None:
                biases = None if parallel.rank and not parallel.gathers else [biases[0].take_rows(self._outs)]
            return ops.prepare_linear(parts, biases, gated=gated)

        def norm(*shape: int) -> Norm:
            return Norm(ops.prepare_vector(1 + make(*shape, scale=0.1)), g.eps)

        def head_norm(heads: int) -> Norm | None:
            if g.joint_norms:
                return norm(heads, g.d)
            return norm(g.d) if g.head_norms or g.norms_rotated else None

        half = (g.rotary or g.d) // 2
        self.tokens = sum(count for count, _ in rows)
        longest = max(256, *(context for _, context in rows))
        # Position 0 is rotated, too: no table may be left out.
        table = np.arange(longest + (0 if g.turned == TURNED[0] else self.tokens))[:, None]
        angles = (0.4 + table) / 100.0 ** (np.arange(half) / half)

        def rope(factor: npt.NDArray[Any]) -> Rope:
            cos, sin = (ops.prepare_vector((of(angles) * factor).astype(np.float32)) for of in (np.cos, np.sin))
            return Rope(cos, sin, g.interleaved)

        self.norm = norm(g.hidden)
        self.qkv = linear(*[(n * g.d, g.hidden) for n in (g.heads, g.kv_heads, g.kv_heads)])
        self.heads = Heads(
            g.heads,
            g.kv_heads,
            g.d,
            g.scale * g.d**-0.5,
            rope(np.ones(1)),
            head_norm(g.heads),
            head_norm(g.kv_heads),
            g.window,
            g.softcap,
            norms_rotated=g.norms_rotated and not g.joint_norms,
            joint_widths=(g.heads * g.d, g.kv_heads * g.d) if g.joint_norms else None,
            causal=g.causal,
            chunked=g.chunked,
            query_rope=rope(1 + table / longest) if g.query_rope else None,
            # Some exceed all scores, some are far below.
            sinks=ops.prepare_vector(make(g.heads, scale=4.0)) if g.sinks else None,
        )
        self.output = linear((g.hidden, g.heads * g.d))
        self.post_norm = norm(g.hidden) if g.post_norm else None
        gated = g.ungated is None
        self.gate_up = linear(*[(g.inner, g.hidden)] * (1 + gated), gated=gated)
        self.down = linear((g.hidden, g.inner), back=True)
        self.experts = self._experts(make) if g.experts else None
        used = -(-np.array([context for _, context in rows]) // g.block_size)
        count = int(used.sum()) + g.spare_blocks
        tables = np.full((len(rows), used.max()), NOWHERE, np.int32)
        tables[np.arange(used.max()) < used[:, None]] = generator(7).permutation(count)[: used.sum()]
        self._share_blocks(tables, rows)
        self.blocks = tables
        self.cache = ops.allocate_kv(KVShape(2, g.kv_heads, g.d, block_size=g.block_size, dtype=g.kv_dtype), count)
        shape = count, 2, 2, g.block_size, g.kv_heads, g.d
        # The period is a prime, so that values at wrong addresses differ.
        history: npt.NDArray[Any] = np.resize(make(min(math.prod(shape), 250_007)), shape)
        free = np.ones(count, np.bool_)
        for (tokens, context), table in zip(rows, tables, strict=True):
            first = max(0, self.heads.first_key(context - tokens)) // g.block_size
            free[table[first : -(-(context - tokens) // g.block_size)]] = False
        history[free] = np.nan  # as a failed request leaves blocks, until a token is written
        if g.kv_dtype != "auto":
            history = quantize_kv(history, g.kv_dtype)
        elif ops.dtype == "bfloat16":
            history = (history.view(np.uint32) >> 16).astype(np.uint16)
        elif ops.dtype == "float16":
            history = history.astype(np.float16)
        self.cache.import_blocks(np.arange(count, dtype=np.int32), history)
        self.kv = self.cache.layer(1)
        step = turned(step_input(rows, g.block_size, tables), g.turned, longest)
        host = HostStep(step.query_start, step.context_len, tables) if g.host_copy else None
        if g.image_tokens:
            step = replace(step, ends=ends_of_images(rows, g.image_tokens))
        self.step = replace(on_device(ops, step), uniform=g.uniform, host=host)
        # Adapters also change within rows, which no request does, to cover every split of a block.
        self.places = (np.arange(self.tokens) // 3 % (len(g.adapter_ranks) + 1)).astype(np.int32)
        if g.adapter_ranks:
            self.step = replace(self.step, **adapter_rows(self.places, ops))
        self.x = make(self.tokens, g.hidden)
        self.written: npt.NDArray[Any] | None = None

    def _share_blocks(self, tables: IntArray, rows: Sequence[tuple[int, int]]) -> None:
        """Let rows begin with the same blocks, as requests with a common prefix do.

        A third of them, but neither the first nor the last one, share half of it with the others and more with each
        other, as those with another document after a system prompt.
        """
        full = np.array([(context - count) // self.g.block_size for count, context in rows])
        shared, first = np.minimum(full, self.g.shared_blocks), int(full.argmax())
        others = [row for row in range(len(rows) - 1) if row % 3 == 1 + len(rows) % 2 and row != first]
        second, half = max(others, key=full.__getitem__, default=first), int(shared.max()) // 2
        for row, blocks in enumerate(shared):
            common = min(half, blocks) if row in others else blocks
            tables[row, :common] = tables[first, :common]
            tables[row, common:blocks] = tables[second, common:blocks]

    def _parts(
        self,
        make: Values,
        *shapes: tuple[int, int],
        kind: str | None = None,
        back: bool | None = None,
        size: float = 1.0,
    ) -> list[Weight]:
        """Return random weights, or this rank's shards of those from the inner width `back`, or to it."""
        kind, group, stored = kind or self.g.packed, self.g.packed_group, self.g.stored
        parts: list[Weight]
        if kind is not None:
            parts = [
                packed_weight(kind, *shape, group, size * shape[1] ** -0.5, stored, make.seed()) for shape in shapes
            ]
        else:
            parts = [
                stored_weight(make(*shape, scale=size * shape[1] ** -0.5), self.g.source, stored) for shape in shapes
            ]
        if back is None or self.ops.parallel.size == 1:
            return parts
        rows, columns = (self._outs, self._ins) if back else (self.inner, slice(None))
        return [each.take_rows(rows).take_columns(columns) for each in parts]

    def loras(self) -> list[Lora | None]:
        """Return the low-rank terms of q, k and v, of the output, of gate and up, and of down."""
        g = self.g
        heads, hidden, inner = [n * g.d for n in (g.heads, g.kv_heads, g.kv_heads)], g.hidden, g.inner
        up = [inner, inner] if g.ungated is None else [inner]
        shapes = (heads, hidden), ([hidden], g.heads * g.d), (up, hidden), ([hidden], inner)
        whole = [self._lora(outs, ins, gated=outs == [inner, inner]) for outs, ins in shapes[:-1]]
        return [*whole, self._lora(*shapes[-1], back=True)]

    def _lora(self, outs: Sequence[int], ins: int, *, gated: bool = False, back: bool = False) -> Lora | None:
        """Return the adapters on a linear; every second one does not change the first of several parts.

        Those from the inner width `back` have this rank's share of the terms.
        """
        if not self.g.adapter_ranks:
            return None
        make = Values(ins)

        rows, columns = (self._outs, self._ins) if back else (slice(None), slice(None))

        def delta(rank: int, out: int) -> LowRank:
            down, up = make(rank, ins, scale=ins**-0.5), make(out, rank, scale=rank**-0.5)
            return LowRank(down[:, columns], up[rows])

        adapters: list[list[LowRank | None]] = [[delta(rank, out) for out in outs] for rank in self.g.adapter_ranks]
        for parts in adapters[1::2] if outs[1:] else ():
            parts[0] = None
        given = [len(range(out)[rows]) for out in outs]
        return Lora([self.ops.prepare_lora(each, given, gated=gated) for each in adapters], self.step)

    def _experts(self, make: Values) -> Experts:
        ops, g, parallel = self.ops, self.g, self.ops.parallel
        up, down = [(g.inner, g.hidden)] * (1 if g.ungated_experts else 2), (g.hidden, g.inner)
        whole = parallel.expert_parallel
        held = parallel.share(g.experts) if whole else slice(0, g.experts)

        def shared(*shapes: tuple[int, int], back: bool) -> Any:
            return ops.prepare_linear(
                self._parts(make, *shapes, back=back), gated=not back and g.ungated_experts is None
            )

        def stacked(*shapes: tuple[int, int], back: bool, kind: str | None = None) -> Any:
            size = 4.0 if g.clamped and not back else 1.0  # so that some values exceed the limit
            to = None if whole else back
            parts = [self._parts(make, *shapes, kind=kind, back=to, size=size) for _ in range(g.experts)]
            if not g.expert_biases:
                return ops.prepare_experts(parts[held], gated=not back and g.ungated_experts is None)
            rows = slice(None) if whole else self._outs if back else self.inner
            biases = [[raw(make(shape[0], scale=0.5)).take_rows(rows) for shape in shapes] for _ in parts]
            elsewhere = back and parallel.rank and not parallel.gathers and not whole
            return ops.prepare_experts(
                parts[held], None if elsewhere else biases[held], gated=not back and g.ungated_experts is None
            )

        return Experts(
            # Scores of similar size, so that all chosen experts matter.
            router=ops.prepare_vector(make(g.experts, g.hidden, scale=g.hidden**-0.5)),
            gate_up=stacked(*up, back=False),
            ungated=g.ungated_experts,
            down=stacked(down, back=True, kind=g.packed_down),
            top_k=g.top_k,
            normalize=g.normalize,
            correction_bias=ops.prepare_vector(make(g.experts, scale=0.1)) if g.correction_bias else None,
            norm_floor=g.norm_floor,
            shared_gate_up=shared(*up, back=False) if g.shared_expert else None,
            shared_down=shared(down, back=True) if g.shared_expert else None,
            shared_gate=ops.prepare_vector(make(g.hidden, scale=g.hidden**-0.5)) if g.shared_gate else None,
            scoring=g.scoring,
            weighs_inputs=g.weighs_inputs,
            groups=g.expert_groups,
            top_groups=half_of(g.expert_groups),
            weight_scale=g.weight_scale,
            router_bias=ops.prepare_vector(make(g.experts, scale=0.5)) if g.expert_biases else None,
            first=held.start,
        )

    def decided(self, x: npt.NDArray[np.float32], margin: float) -> npt.NDArray[np.bool_]:
        """Return True for each token [T, H] whose last chosen expert leads the next one by a share of their scores.

        So does its last chosen group. Rounding does not change the choice of these. For a layer on numpy with experts.
        """
        experts = self.experts
        assert experts is not None
        scores = x @ experts.router.T
        if experts.router_bias is not None:
            scores = scores + experts.router_bias
        if experts.scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-scores))
        else:
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            scores /= scores.sum(axis=1, keepdims=True)
        if experts.top_k >= scores.shape[1]:
            return np.ones(len(x), np.bool_)
        total = scores if experts.correction_bias is None else scores + experts.correction_bias
        within = np.ones(len(x), np.bool_)
        if experts.top_groups < experts.groups:
            groups = np.sort(total.reshape(len(x), experts.groups, -1), axis=2)
            best = groups[..., -1 if experts.correction_bias is None else -2 :].sum(axis=2)
            ends = -np.sort(-best, axis=1)[:, experts.top_groups - 1 : experts.top_groups + 1]
            within = -np.diff(ends)[:, 0] > margin * np.abs(ends[:, 0])
            total = np.where((best >= ends[:, :1]).repeat(groups.shape[2], axis=1), total, -np.inf)
        last = np.argsort(-total, axis=1)[:, experts.top_k - 1 : experts.top_k + 1]
        lead = -np.diff(np.take_along_axis(total, last, axis=1))[:, 0]
        found: npt.NDArray[np.bool_] = lead > margin * np.take_along_axis(scores, last, axis=1).max(axis=1)
        return found & within

    def exported(self) -> npt.NDArray[Any]:
        """Return the whole cache as the pack keeps it: block, layer, key or value, position, head, element."""
        return self.cache.export_blocks(np.arange(self.cache.num_blocks, dtype=np.int32))

    def run(
        self,
        fusions: type[Ops] | Ops,
        given: Sequence[npt.NDArray[np.float32]] = (),
        held: npt.NDArray[Any] | None = None,
    ) -> list[npt.NDArray[np.float32]]:
        """Run the layer with the fusions of a pack, or of a class (`Ops` composes them); return the result of each.

        Results in float32: queries, attention output, the residual after it, and output of the feed-forward block.
        With the results of another pack `given`, each fusion reads those before it instead of its own, and attention
        the cache `held` by that pack, so that differences do not add up; `written` is then the cache of this one.
        """
        ops = self.ops

        def call(name: str, *arguments: Any) -> Any:
            return getattr(fusions, name)(*([ops] if isinstance(fusions, type) else []), *arguments)

        def result(value: Any) -> Any:
            """Return the input of the next fusion; later operations may write into it."""
            results.append(np.array(ops.to_host(ops.settle(value)), np.float32))
            if not given:
                return value
            other = given[len(results) - 1]
            rows = activations(ops, other.reshape(len(other), -1))
            return rows.reshape(other.shape)

        results: list[npt.NDArray[np.float32]] = []
        x = activations(ops, self.x)
        qkv, output, gate_up, down = self.loras()
        norm = self.norm if self.g.pre_norm else None
        q = result(call("attention_inputs", x, norm, self.qkv, self.heads, self.kv, self.step, qkv))
        if held is not None:
            self.written = self.exported()
            self.cache.import_blocks(np.arange(self.cache.num_blocks, dtype=np.int32), held)
        a = result(call("attention", q, self.heads, self.kv, self.step))
        y = result(call("project_residual", a, self.output, x, self.post_norm, output))
        if self.experts is not None:
            result(call("moe_residual", y, self.norm, self.experts, self.g.expert_activation))
        else:
            name = "plain_mlp_inputs" if self.g.ungated else "mlp_inputs"
            inner = result(call(name, y, norm, self.gate_up, self.g.ungated or self.g.activation, gate_up))
            result(call("project_residual", inner, self.down, y, self.post_norm, down))
        return results
