"""Which part of a decoder's weights a rank holds, or a stage.

Ranks divide heads and inner width, and with `Parallel.gathers` what the residual stream is given; everything else is
whole. Stages divide the layers, each of which is whole.
Shares need not be equal: three KV heads on two ranks are two and one. Where there are more ranks than KV heads, several
ranks hold the same KV head and divide the query heads that share it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from fd_core.errors import ConfigError
from fd_core.models.spec import AttentionSpec, DecoderSpec, LayerSpec, LinearSpec, MlpSpec
from fd_core.ops.parallel import Parallel, Stage

_GRAIN: Final = 32
"""Values of a row that share a scale where activations are quantized: cutting between them changes no value."""


@dataclass(frozen=True, slots=True)
class LinearShare:
    """What a rank holds of a linear: of each of its parts these rows of the weight, or these columns; None for all."""

    rows: tuple[slice, ...] | None = None
    columns: slice | None = None
    """The products of ranks are then added up."""


def times(share: slice, size: int) -> slice:
    """Return the elements of some units of `size` elements each."""
    return slice(share.start * size, share.stop * size)


def head_shares(spec: AttentionSpec, parallel: Parallel) -> tuple[slice, slice]:
    """Return the query heads and the KV heads of a rank. Raises `ConfigError` if there is not one for each."""
    query, kv, size = spec.num_heads, spec.num_kv_heads, parallel.size
    group = query // kv
    if size <= kv:
        share = parallel.share(kv)
        return times(share, group), share
    copies = size // kv
    if size % kv or group % copies:
        raise ConfigError(
            f"the model's {query} query heads, which share {kv} KV heads, cannot be divided over {size} ranks",
            field="--tensor-parallel-size",
        )
    each = group // copies
    return slice(parallel.rank * each, (parallel.rank + 1) * each), slice(
        parallel.rank // copies, parallel.rank // copies + 1
    )


def attention_shares(spec: AttentionSpec, parallel: Parallel) -> tuple[LinearShare, LinearShare]:
    """Return a rank's share of q/k/v and of the output projection."""
    queries, kv = (times(heads, spec.head_dim) for heads in head_shares(spec, parallel))
    return LinearShare(rows=(queries, kv, kv)), _leading_back(spec.output, queries, parallel)


def feed_forward_shares(down: LinearSpec, parallel: Parallel) -> tuple[LinearShare, LinearShare]:
    """Return a rank's share of gate and up, and of `down`."""
    inner = width_share(down.ins, parallel)
    return LinearShare(rows=(inner, inner)), _leading_back(down, inner, parallel)


def _leading_back(linear: LinearSpec, held: slice, parallel: Parallel) -> LinearShare:
    """Return a rank's share of a linear into the residual stream; it holds `held` of its inputs."""
    if parallel.gathers:
        return LinearShare(rows=tuple(width_share(out, parallel) for out in linear.outs))
    return LinearShare(columns=held)


def adaptable_shares(layer: LayerSpec, parallel: Parallel) -> tuple[LinearShare, ...]:
    """Return a rank's share of each of `layer.adaptable`."""
    block = layer.feed_forward
    more = feed_forward_shares(block.down, parallel) if isinstance(block, MlpSpec) else ()
    return (*attention_shares(layer.attention, parallel), *more)


def width_share(width: int, parallel: Parallel) -> slice:
    """Return a rank's share of the width of a feed-forward block. Raises `ConfigError` if it is too narrow."""
    if width < parallel.size:
        raise ConfigError(
            f"a feed-forward block of width {width} cannot be divided over {parallel.size} ranks",
            field="--tensor-parallel-size",
        )
    grain = _GRAIN
    while width % grain or width // grain < parallel.size:
        grain //= 2
    return times(parallel.share(width // grain), grain)


def vocabulary_share(size: int, parallel: Parallel) -> slice | None:
    """Return the tokens whose logits a rank computes; None where each computes all."""
    return parallel.share(size) if parallel.size > 1 and size % parallel.size == 0 else None


def stage_layers(spec: DecoderSpec, stage: Stage) -> slice:
    """Return the layers of a stage. Raises `ConfigError` if there is not one for each.

    Stages have about as many weights to read as each other; the last one also has the output projection.
    """
    count = len(spec.layers)
    if stage.count > count:
        raise ConfigError(
            f"the model's {count} layers cannot be divided into {stage.count} stages",
            field="--pipeline-parallel-size",
            hint=f"use at most {count}",
        )
    sizes = [sum(math.prod(shape) for _, shape in layer.tensors()) for layer in spec.layers]
    reached = list(accumulate(sizes, initial=0))
    each = (reached[-1] + math.prod(spec.embedding.shape)) / stage.count
    ends = [0]
    for index in range(1, stage.count):
        nearest = min(range(count + 1), key=lambda end: abs(reached[end] - index * each))
        ends.append(min(max(nearest, ends[-1] + 1), count - stage.count + index))
    ends.append(count)
    return slice(ends[stage.index], ends[stage.index + 1])


def require_division(spec: DecoderSpec, ranks: int, stages: int) -> None:
    """Raise `ConfigError`, with what works, for a model that cannot be divided over so many ranks, or stages."""
    stage_layers(spec, Stage(0, stages))
    refused = _refusal(spec, ranks)
    if refused is not None:
        sizes = [size for size in range(2, spec.layers[0].attention.num_heads + 1) if _refusal(spec, size) is None]
        refused.hint = f"use {_listed(sizes)}" if sizes else "leave it out"
        raise refused


def _refusal(spec: DecoderSpec, ranks: int) -> ConfigError | None:
    parallel = Parallel(0, ranks)
    try:
        for layer in spec.layers:
            block = layer.feed_forward
            head_shares(layer.attention, parallel)
            for down in block.downs:
                width_share(down.ins, parallel)
    except ConfigError as error:
        return error
    return None


def _listed(sizes: list[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
