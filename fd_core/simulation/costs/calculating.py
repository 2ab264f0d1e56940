"""Profiles of absent hardware, from a device's numbers and a model's sizes: calculated, never measured.

A step takes the longer of two times, that of reading weights and that of multiplying them; reading keys and values,
and the products of attention, are added. So do the rooflines of InferSim and of vLLM's documentation on performance;
the share of a vendor's numbers that kernels reach is a factor that has a name here and can be set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from fd_core.config import Limits
from fd_core.simulation.costs.profile import (
    CostCurve,
    CostProfile,
    KVLink,
    ProfiledModel,
    RequestTerms,
    StepTerms,
    wrong_profile,
)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a vendor's numbers that good kernels reach; all are assumptions and can be set."""

    bandwidth: float = 0.85
    """Of memory bandwidth, where weights and KV are read sequentially."""
    compute: float = 0.65
    """Of operations, in products with weights."""
    attention: float = 0.45
    """Of operations, in attention over chunks of a prompt."""
    link: float = 0.7
    """Of links between devices, and of those to the host."""
    memory: float = 0.9
    """Of memory available to weights and KV together."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Data sheet of one device; sizes in bytes, rates per second."""

    title: str
    memory: float
    bandwidth: float
    operations: float
    """Dense bf16 multiplications and additions."""
    link: float
    """Bytes to other devices of the machine, one direction."""
    link_latency: float
    """Seconds of a small all-reduce."""
    host_link: float
    """Bytes to the host's memory, one direction."""
    step_overhead: float
    """Seconds of a step besides its kernels: launching a graph, sampling, one transfer to the host."""
    layer_overhead: float
    """Seconds that the kernels of a layer lose at their starts and ends."""
    source: str
    efficiency: Efficiency | None = None
    """Overrides for devices that the usual shares do not fit."""
    most_ranks: int = 8


_GPU_STEP: Final = 300e-6
_GPU_LAYER: Final = 8e-6

ACCELERATORS: Final = {
    "h100": Accelerator(
        "NVIDIA H100 SXM 80GB", 80e9, 3.35e12, 989.4e12, 450e9, 8e-6, 64e9, _GPU_STEP, _GPU_LAYER,
        "NVIDIA H100 datasheet: 3.35 TB/s, 989.4 Tflop/s, NVLink 900 GB/s both ways, PCIe 5.0 x16",
    ),
    "h200": Accelerator(
        "NVIDIA H200 SXM 141GB", 141e9, 4.8e12, 989.4e12, 450e9, 8e-6, 64e9, _GPU_STEP, _GPU_LAYER,
        "NVIDIA H200 datasheet: 4.8 TB/s, 989.4 Tflop/s, NVLink 900 GB/s both ways, PCIe 5.0 x16",
    ),
    "a100": Accelerator(
        "NVIDIA A100 SXM 80GB", 80e9, 2.039e12, 312e12, 300e9, 10e-6, 32e9, _GPU_STEP, _GPU_LAYER,
        "NVIDIA A100 80GB datasheet: 2,039 GB/s, 312 Tflop/s, NVLink 600 GB/s both ways, PCIe 4.0 x16",
    ),
    "l40s": Accelerator(
        "NVIDIA L40S 48GB", 48e9, 864e9, 362e12, 32e9, 30e-6, 32e9, _GPU_STEP, _GPU_LAYER,
        "NVIDIA L40S datasheet: 864 GB/s, 362 Tflop/s, no NVLink, PCIe 4.0 x16",
    ),
    "mi300x": Accelerator(
        "AMD Instinct MI300X 192GB", 192e9, 5.3e12, 1307.4e12, 448e9, 12e-6, 64e9, _GPU_STEP, _GPU_LAYER,
        "AMD Instinct MI300X datasheet: 5.3 TB/s, 1,307.4 Tflop/s, 7 Infinity Fabric links of 128 GB/s both ways, "
        "PCIe 5.0 x16",
        Efficiency(bandwidth=0.75, compute=0.45, attention=0.3),
    ),
    "zen4-2c": Accelerator(
        "two cores of AMD Zen 4 with AVX-512 BF16", 16e9, 42e9, 450e9, 10e9, 30e-6, 10e9, 100e-6, 20e-6,
        "benchmarks/NOTES.md: 34 to 57 GB/s and 450 Gflop/s for two cores",
        Efficiency(bandwidth=0.95, compute=0.93, attention=0.5),
        most_ranks=1,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated feed-forward layers, dense or mixture of experts."""

    title: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of a feed-forward layer, or of one expert."""
    vocab_size: int
    max_model_len: int
    tied: bool = False
    """True if embedding and output projection share one weight."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0

    @property
    def attention_weights(self) -> int:
        """Parameters of the projections of one layer's attention."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Parameters of one feed-forward layer, or of one expert."""
        return 3 * self.hidden * self.inner

    @property
    def head_weights(self) -> int:
        """Parameters of the output projection."""
        return self.vocab_size * self.hidden

    def experts_hit(self, tokens: float) -> float:
        """Return the experts of a layer that `tokens` tokens are expected to read if all are as likely, 1 if dense."""
        if not self.experts:
            return 1.0
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1 - missed)

    @property
    def parameters(self) -> int:
        """Total parameters, without norms and biases."""
        feed_forward = self.expert_weights * max(self.experts, 1) + self.hidden * self.experts
        return self.layers * (self.attention_weights + feed_forward) + self.head_weights * (1 if self.tied else 2)


ARCHITECTURES: Final = {
    "llama-8b": ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-70b": ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "llama-1b": ModelShape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
    "qwen2.5-7b": ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 131072),
    "qwen3-30b-a3b": ModelShape(
        "Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151936, 40960, experts=128, experts_per_token=8
    ),
    "smollm2": ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True),
}


_MOST_TOKENS: Final = 1 << 20
KV_DTYPES: Final = {"bf16": ("bfloat16", 2), "fp8": ("float8", 1), "int8": ("int8", 1)}
"""Name and bytes of a number, by its key in options."""
_ENCODER_PARAMETERS: Final = 400e6
_PATCHES_PER_TOKEN: Final = 4
_LARGEST_IMAGE: Final = 1296
"""Tokens of the largest image, as in Qwen's processors here."""
_RESERVE: Final = 2e9
"""Bytes of each device for activations and the framework."""

ASSUMED_REQUEST: Final = RequestTerms(
    turn=150e-6, turn_per_row=3e-6, receive=1.5e-3, receive_per_token=2e-6, delivery=300e-6
)
"""Overheads of this engine outside steps, rounded, as measured on a server processor."""
ASSUMED_STORE_READ: Final = KVLink(latency=200e-6, bandwidth=3e9, source="assumed: a local NVMe disk, 3 GB/s")
ASSUMED_STORE_WRITE: Final = KVLink(latency=200e-6, bandwidth=1.5e9, source="assumed: a local NVMe disk, 1.5 GB/s")
_NETWORK: Final = KVLink(latency=100e-6, bandwidth=0.8 * 50e9, source="calculated: 400 Gbit/s network, four fifths")


def calculated_profile(
    name: str, device: Accelerator, model: ModelShape, *, ranks: int, kv_dtype: str, reached: Efficiency
) -> CostProfile:
    """Return the profile of a model on a device. Raises `ConfigError` if it does not fit there.

    `ranks`: devices that share every layer. `kv_dtype`: `bf16`, `fp8` or `int8`.
    """
    fits = [
        n
        for n in (1, 2, 4, 8)
        if n <= device.most_ranks and model.heads % n == 0 and (model.kv_heads % n == 0 or n % model.kv_heads == 0)
    ]
    if ranks not in fits:
        what = f"{model.title} with {model.heads} heads and {model.kv_heads} of keys and values is not calculated on"
        raise wrong_profile(f"{what} {ranks} x {device.title}", f"tp may be {', '.join(map(str, fits))}")
    kv_token = 2 * model.layers * model.kv_heads * model.head_dim * KV_DTYPES[kv_dtype][1]
    # Each rank holds whole heads, so heads are replicated where there are more ranks than heads.
    kv_rank_token = kv_token * max(1, ranks // model.kv_heads) / ranks
    weights = 2 * model.parameters
    block_size = 32
    room = device.memory * reached.memory - (_RESERVE if device.most_ranks > 1 else 0.0) - weights / ranks
    block_bytes = kv_rank_token * block_size
    blocks = max(int(room / block_bytes), 0) if room > 64 * block_bytes else 0
    if not blocks:
        fits = [n for n in fits if n > ranks and 0.8 * n * device.memory > weights]
        raise wrong_profile(
            f"{model.title} has {weights / 1e9:,.0f} GB of weights in bf16, and {ranks} x {device.title} leave no "
            "memory for KV",
            f"use tp={fits[0]}" if fits else "use a device with more memory",
        )
    bandwidth = device.bandwidth * reached.bandwidth
    operations = device.operations * reached.compute

    active = model.layers * (model.attention_weights + max(1, model.experts_per_token) * model.expert_weights)

    def layers(tokens: float) -> float:
        experts = model.experts_hit(tokens) * model.expert_weights  # only experts that some token is routed to
        read = 2 * model.layers * (model.attention_weights + experts + model.hidden * model.experts)
        return max(read / bandwidth, 2 * tokens * active / operations) / ranks

    collective = 2 * model.layers * 2 * (ranks - 1) / ranks * 2 * model.hidden / (device.link * reached.link)
    head = 2 * model.head_weights / ranks
    head_curve = _roofline(lambda rows: max(head / bandwidth, rows * head / operations), [operations / bandwidth])
    ridge = _ridge(layers)
    attended = 4 * model.layers * model.heads * model.head_dim / ranks
    steps = device.step_overhead + model.layers * (
        device.layer_overhead + (2 * device.link_latency if ranks > 1 else 0.0)
    )
    return CostProfile(
        name=name,
        origin="calculated",
        device=f"{ranks} x {device.title}" if ranks > 1 else device.title,
        ranks=ranks,
        notes=(
            "Calculated from the vendor's numbers, never measured: the error is unknown.",
            device.source,
            f"Shares assumed: bandwidth {reached.bandwidth:g}, compute {reached.compute:g}, attention "
            f"{reached.attention:g}, link {reached.link:g}, memory {reached.memory:g}.",
            f"Assumed as well: {device.step_overhead * 1e6:g} us a step, {device.layer_overhead * 1e6:g} us a layer, "
            f"{device.link_latency * 1e6:g} us a collective, and this engine's overhead outside steps.",
            "The cost of drafts is that of their tokens: proposing them is free here.",
            f"Images: an encoder of {_ENCODER_PARAMETERS / 1e6:g} million parameters on every rank, without its "
            f"attention, with {_PATCHES_PER_TOKEN} patches for a token.",
        ),
        model=ProfiledModel(
            name=model.title,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype="bfloat16",
            kv_dtype=KV_DTYPES[kv_dtype][0],
            weights_bytes=weights,
            kv_bytes_per_token=round(kv_rank_token * ranks),
        ),
        limits=Limits(
            max_num_seqs=256 if device.most_ranks > 1 else 32,
            max_num_batched_tokens=8192 if device.most_ranks > 1 else 512,
            max_model_len=min(model.max_model_len, blocks * block_size),
            block_size=block_size,
            num_kv_blocks=min(blocks, 1 << 20),
            vocab_size=model.vocab_size,
            pipeline_depth=2 if device.most_ranks > 1 else 1,
            max_image_tokens=2048 if device.most_ranks > 1 else _LARGEST_IMAGE,
        ),
        step=StepTerms(
            constant=steps,
            by_tokens=_roofline(lambda tokens: layers(tokens) + tokens * collective, ridge),
            by_sampled_rows=CostCurve(counts=(0.0, *head_curve.counts), seconds=(0.0, *head_curve.seconds)),
            per_row=0.0,
            per_context_token=kv_rank_token / bandwidth,
            per_query_key=attended / (device.operations * reached.attention),
            per_draft=0.0,
            per_image_token=2 * _ENCODER_PARAMETERS * _PATCHES_PER_TOKEN / operations,
        ),
        request=ASSUMED_REQUEST,
        host_copy=KVLink(
            latency=20e-6,
            bandwidth=device.host_link * reached.link * ranks,
            source=f"calculated: {ranks} x {device.host_link / 1e9:.0f} GB/s to the host, {reached.link:.0%} of it",
        ),
        store_read=ASSUMED_STORE_READ,
        store_write=ASSUMED_STORE_WRITE,
        transfer=_NETWORK,
    )


def _roofline(seconds: Callable[[float], float], corners: list[float]) -> CostCurve:
    """Return a function as a curve through powers of two and its corners."""
    powers = [float(1 << exponent) for exponent in range(int(math.log2(_MOST_TOKENS)) + 1)]
    counts = sorted({*powers, *(corner for corner in corners if 1 < corner < _MOST_TOKENS)})
    return CostCurve(counts=tuple(counts), seconds=tuple(seconds(count) for count in counts))


def _ridge(layers: Callable[[float], float]) -> list[float]:
    """Return the ridge point, beyond which multiplying takes longer than reading: the last point of a lower slope."""
    low, high = 1.0, float(_MOST_TOKENS)
    slope = (layers(2 * high) - layers(high)) / high  # compute-bound throughout
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if layers(middle) > slope * middle * (1 + 1e-9) else (low, middle)
    return [high]
