"""Profiles of hardware that is not here, from a device's numbers and a model's sizes: calculated, never measured.

A step takes the longer of two times, that of reading weights and that of multiplying them; keys and values are read,
and attention is multiplied, on top. So do the rooflines of InferSim and of vLLM's documentation on performance; what
kernels reach of a maker's numbers is a factor that has a name here and may be set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fd_core.config import Limits
from fd_core.errors import ConfigError
from fd_core.simulation.costs.architectures import ModelShape
from fd_core.simulation.costs.devices import Accelerator, Efficiency
from fd_core.simulation.costs.profile import (
    CostCurve,
    CostProfile,
    KVLink,
    ProfiledModel,
    RequestTerms,
    StepTerms,
)

__all__ = ["ASSUMED_REQUEST", "ASSUMED_STORE_READ", "ASSUMED_STORE_WRITE", "Calculation", "calculated_profile"]

_MOST_TOKENS: Final = 1 << 20
_ITEM_BYTES: Final = {"bf16": 2, "fp8": 1, "int8": 1}
_DTYPES: Final = {"bf16": "bfloat16", "fp8": "float8", "int8": "int8"}
_RESERVE: Final = 2e9
"""Bytes of each device for activations and the framework."""

ASSUMED_REQUEST: Final = RequestTerms(
    turn=150e-6, turn_per_row=3e-6, receive=1.5e-3, receive_per_token=2e-6, delivery=300e-6
)
"""This engine's own times beside steps, rounded, as they were seen on a server's processor."""
ASSUMED_STORE_READ: Final = KVLink(latency=200e-6, bandwidth=3e9, source="assumed: a local NVMe disk, 3 GB/s")
ASSUMED_STORE_WRITE: Final = KVLink(latency=200e-6, bandwidth=1.5e9, source="assumed: a local NVMe disk, 1.5 GB/s")
_NETWORK: Final = KVLink(latency=100e-6, bandwidth=0.8 * 50e9, source="calculated: 400 Gbit/s network, four fifths")


@dataclass(frozen=True, slots=True)
class Calculation:
    """What a profile is calculated from, beside device and model."""

    ranks: int = 1
    """Devices that share every layer."""
    kv_dtype: str = "bf16"
    """`bf16`, `fp8` or `int8`."""
    efficiency: Efficiency = field(default_factory=Efficiency)


def calculated_profile(name: str, device: Accelerator, model: ModelShape, how: Calculation) -> CostProfile:
    """Return the profile of a model on a device. Raises `ConfigError` if it does not fit there."""
    ranks, reached = how.ranks, how.efficiency
    _require_ranks(device, model, ranks)
    kv_token = 2 * model.layers * model.kv_heads * model.head_dim * _ITEM_BYTES[how.kv_dtype]
    # Each rank keeps whole heads, so heads are kept twice where there are more ranks than heads.
    kv_rank_token = kv_token * max(1, ranks // model.kv_heads) / ranks
    weights = 2 * model.parameters
    block_size = 32
    blocks = _blocks(device, weights, kv_rank_token * block_size, how)
    if not blocks:
        fits = [n for n in _ranks(device, model) if n > ranks and 0.8 * n * device.memory > weights]
        raise ConfigError(
            f"{model.title} has {weights / 1e9:,.0f} GB of weights in bf16, and {ranks} x {device.title} leave no room "
            "for KV beside them",
            field="PROFILE",
            hint=f"use tp={fits[0]}" if fits else "use a device with more memory",
        )
    bandwidth = device.bandwidth * reached.bandwidth
    operations = device.operations * reached.compute

    def layers(tokens: float) -> float:
        return max(_bytes_read(model, tokens) / bandwidth, 2 * tokens * _active(model) / operations) / ranks

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
        notes=_notes(device, reached),
        model=ProfiledModel(
            name=model.title,
            layers=model.layers,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            dtype="bfloat16",
            kv_dtype=_DTYPES[how.kv_dtype],
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
        ),
        step=StepTerms(
            constant=steps,
            by_tokens=_roofline(lambda tokens: layers(tokens) + tokens * collective, ridge),
            by_sampled_rows=CostCurve(counts=(0.0, *head_curve.counts), seconds=(0.0, *head_curve.seconds)),
            per_row=0.0,
            per_context_token=kv_rank_token / bandwidth,
            per_query_key=attended / (device.operations * reached.attention),
            per_draft=0.0,
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


def _bytes_read(model: ModelShape, tokens: float) -> float:
    """Return the bytes of weights that a pass reads: of experts only those that some token goes to."""
    experts = model.experts_hit(tokens) * model.expert_weights
    return 2 * model.layers * (model.attention_weights + experts + model.hidden * model.experts)


def _active(model: ModelShape) -> int:
    """Return the parameters that one token is multiplied with, without the output projection."""
    return model.layers * (model.attention_weights + max(1, model.experts_per_token) * model.expert_weights)


def _roofline(seconds: Callable[[float], float], corners: list[float]) -> CostCurve:
    """Return a function as a curve through powers of two and its corners."""
    powers = [float(1 << exponent) for exponent in range(int(math.log2(_MOST_TOKENS)) + 1)]
    counts = sorted({*powers, *(corner for corner in corners if 1 < corner < _MOST_TOKENS)})
    return CostCurve(counts=tuple(counts), seconds=tuple(seconds(count) for count in counts))


def _ridge(layers: Callable[[float], float]) -> list[float]:
    """Return where multiplying begins to take longer than reading: the last place where the time grows slower."""
    low, high = 1.0, float(_MOST_TOKENS)
    slope = (layers(2 * high) - layers(high)) / high  # all of it is multiplying there
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if layers(middle) > slope * middle * (1 + 1e-9) else (low, middle)
    return [high]


def _blocks(device: Accelerator, weights: float, block_bytes: float, how: Calculation) -> int:
    """Return how many KV blocks fit beside the weights, 0 if hardly any."""
    reserve = _RESERVE if device.most_ranks > 1 else 0.0
    room = device.memory * how.efficiency.memory - reserve - weights / how.ranks
    return max(int(room / block_bytes), 0) if room > 64 * block_bytes else 0


def _ranks(device: Accelerator, model: ModelShape) -> list[int]:
    """Return the numbers of ranks that can share the model's heads."""
    return [
        n
        for n in (1, 2, 4, 8)
        if n <= device.most_ranks and model.heads % n == 0 and (model.kv_heads % n == 0 or n % model.kv_heads == 0)
    ]


def _require_ranks(device: Accelerator, model: ModelShape, ranks: int) -> None:
    fits = _ranks(device, model)
    if ranks not in fits:
        raise ConfigError(
            f"{model.title} with {model.heads} heads and {model.kv_heads} of keys and values is not calculated on "
            f"{ranks} x {device.title}",
            field="PROFILE",
            hint=f"tp may be {', '.join(map(str, fits))}",
        )


def _notes(device: Accelerator, reached: Efficiency) -> tuple[str, ...]:
    return (
        "Calculated from the maker's numbers, never measured: nobody knows how far it is from the truth.",
        device.source,
        f"Shares assumed: bandwidth {reached.bandwidth:g}, compute {reached.compute:g}, attention "
        f"{reached.attention:g}, link {reached.link:g}, memory {reached.memory:g}.",
        f"Assumed as well: {device.step_overhead * 1e6:g} us a step, {device.layer_overhead * 1e6:g} us a layer, "
        f"{device.link_latency * 1e6:g} us a collective, and this engine's own times beside steps.",
        "Prices of drafts are their tokens alone: guessing them costs nothing here.",
    )
