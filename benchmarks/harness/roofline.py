"""The least time of a step on a GPU: the bytes that it must move, the operations, the launches. Arithmetic only.

The shapes of models and the rates of memory are those that `fd_core.simulation` calculates with; the roofline is that
of Williams, Waterman and Patterson (2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from fd_core.ops.contract import KVShape
from fd_core.simulation.costs.calculating import ACCELERATORS, Accelerator, ModelShape

__all__ = ["CHIPS", "FORMATS", "Chip", "Floor", "Format", "Launching", "Step", "Work", "floor_of", "work_of"]

ITEM: Final = 2
"""Bytes of a value of bfloat16: activations, keys and values, the embedding and the output projection."""
WIDE: Final = 4
"""Bytes of a value of float32: logits and routers."""

LAUNCHES_DENSE: Final = 9
"""Of a dense layer's decode: norm with sum, product, heads, attention, product, norm with sum, product, activation,
product."""
LAUNCHES_EXPERTS: Final = 12
"""Of a layer with experts: six as above, then router, choice, order by expert, two products and the weighted sum."""
LAUNCHES_OUTSIDE_LAYERS: Final = 8
"""Of a step outside its layers: upload, filling the graph's memory, embedding, last norm, output projection, sampler
(2), and passing on tokens."""


@dataclass(frozen=True, slots=True)
class Launching:
    """Seconds that launches cost, as `gpu_first_hour.py` measured them on an H100 in a virtual machine."""

    eager: float = 35e-6
    """Of the host's time for a kernel of a step that is launched by itself: 10.3 ms for the 296 of a prefill."""
    graph: float = 15e-6
    """From the launch of a graph until its first kernel has ended."""
    node: float = 1e-6
    """Between the end of a small kernel and the beginning of the next one that needs its result."""


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU; rates are per second, dense, of multiplications and additions counted each."""

    base: Accelerator
    peaks: dict[str, float]
    """Of products in `bf16`, `fp8` and `int8`."""
    multiprocessors: int
    source: str
    launching: Launching = Launching()


_HOPPER: Final = {"bf16": 989.4e12, "fp8": 1978.9e12, "int8": 1978.9e12}
_SOURCE: Final = (
    "NVIDIA datasheets of H100 and H200 (SXM), whose figures for sparse matrices are halved here; "
    "multiprocessors: NVIDIA H100 Tensor Core GPU architecture whitepaper (132 in the SXM5 form)"
)
CHIPS: Final = {
    "h100": Chip(ACCELERATORS["h100"], _HOPPER, 132, _SOURCE),
    "h200": Chip(ACCELERATORS["h200"], _HOPPER, 132, _SOURCE),
}


@dataclass(frozen=True, slots=True)
class Format:
    """Format of the weights of layers in memory; embedding and output projection stay bfloat16."""

    weight: float
    """Bytes of a weight, its share of the scales included."""
    peak: Literal["bf16", "fp8", "int8"]
    """Unit that multiplies them."""


FORMATS: Final = {
    "bf16": Format(ITEM, "bf16"),
    "fp8": Format(1 + WIDE / 128**2, "fp8"),  # a scale for 128 x 128 weights
    "int8": Format(1 + ITEM / 128, "int8"),  # a scale for 128 weights
    "int4": Format(0.5 + ITEM / 128, "bf16"),  # the same; widened in registers
}


@dataclass(frozen=True, slots=True)
class Step:
    """A step of `rows` requests that each compute `queries` tokens; the last attends to `context`, itself included."""

    rows: int
    queries: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens that the step computes."""
        return self.rows * self.queries

    @property
    def decode(self) -> bool:
        """True if each request computes one token; such a step is replayed as a graph."""
        return self.queries == 1

    @property
    def pairs(self) -> float:
        """Pairs of a token and a key that it attends to."""
        return self.tokens * (self.context - (self.queries - 1) / 2)


@dataclass(frozen=True, slots=True)
class Work:
    """Least work of a step. Activations between kernels are not counted: they may stay in the caches."""

    weights: float
    """Bytes, each read once; of experts, those that are expected to be hit."""
    kv: float
    """Bytes: of earlier tokens read, of the step's own written."""
    logits: float
    """Bytes, written once and read once."""
    products: float
    """Operations with weights of layers."""
    wide_products: float
    """Operations in bfloat16 or wider with any format: output projection, routers, attention."""
    launches: int

    @property
    def bytes(self) -> float:
        """Bytes moved in all."""
        return self.weights + self.kv + self.logits

    @property
    def operations(self) -> float:
        """Multiplications and additions in all."""
        return self.products + self.wide_products


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds of a step, and of its parts."""

    memory: float
    compute: float
    gaps: float
    """Between kernels; before the first one, if they are a graph."""
    host: float
    """The host's, launching kernel by kernel while the device computes; 0 for a graph."""
    tokens: int

    @property
    def device(self) -> float:
        """Seconds of the device: the longer of memory and computing, and the gaps."""
        return max(self.memory, self.compute) + self.gaps

    @property
    def seconds(self) -> float:
        """The longer of device and host."""
        return max(self.device, self.host)

    @property
    def rate(self) -> float:
        """Tokens in a second."""
        return self.tokens / self.seconds

    @property
    def binds(self) -> str:
        """Resource that limits the step."""
        launches = self.host if self.host > self.device else self.gaps
        parts = {"memory": self.memory, "compute": self.compute, "launches": launches}
        return max(parts, key=lambda name: parts[name])


def kv_token_bytes(model: ModelShape, kv: str = "auto") -> int:
    """Return the bytes of one token's keys and values over all layers, in a dtype of `KVShape`."""
    return KVShape(model.layers, model.kv_heads, model.head_dim, 1, kv).bytes_per_block(ITEM)


def held_bytes(model: ModelShape, how: Format, tokens: int, kv: str = "auto") -> float:
    """Return the bytes of all weights, and of keys and values of `tokens` tokens."""
    tables = model.head_weights * (1 if model.tied else 2)
    routers = model.layers * model.hidden * model.experts
    layers = model.parameters - tables - routers
    return layers * how.weight + tables * ITEM + routers * WIDE + tokens * kv_token_bytes(model, kv)


def work_of(model: ModelShape, how: Format, step: Step, kv: str = "auto") -> Work:
    """Return the least work of a step, with one row of logits for each request."""
    router = model.hidden * model.experts
    read = model.attention_weights + model.experts_hit(step.tokens) * model.expert_weights
    active = model.attention_weights + max(1, model.experts_per_token) * model.expert_weights
    head = model.head_weights + step.tokens * model.hidden  # output projection and the embeddings of the tokens
    kv_tokens = step.rows * (step.context - step.queries) + step.tokens
    attended = 4 * model.heads * model.head_dim * step.pairs
    layer = LAUNCHES_EXPERTS if model.experts else LAUNCHES_DENSE
    return Work(
        weights=model.layers * (read * how.weight + router * WIDE) + head * ITEM,
        kv=kv_tokens * kv_token_bytes(model, kv),
        logits=2 * WIDE * step.rows * model.vocab_size,
        products=2 * step.tokens * model.layers * active,
        wide_products=2 * step.rows * model.head_weights + model.layers * (2 * step.tokens * router + attended),
        launches=model.layers * layer + LAUNCHES_OUTSIDE_LAYERS,
    )


def floor_of(work: Work, step: Step, how: Format, chip: Chip) -> Floor:
    """Return the least time of a step. A decode is one graph; anything else is launched kernel by kernel, ahead."""
    memory = work.bytes / chip.base.bandwidth
    compute = work.products / chip.peaks[how.peak] + work.wide_products / chip.peaks["bf16"]
    cost, gaps = chip.launching, work.launches * chip.launching.node
    if step.decode:
        return Floor(memory, compute, cost.graph + gaps, 0.0, step.tokens)
    return Floor(memory, compute, gaps, work.launches * cost.eager, step.tokens)
