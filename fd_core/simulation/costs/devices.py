"""Devices by the numbers of their makers, and what of such numbers is reached in practice.

Nothing here was measured by this project but the processor's rates. Sources: NVIDIA's datasheets of H100 (SXM), H200
(SXM), A100 80GB (SXM) and L40S, dense figures, not those for sparse matrices; AMD's datasheet of Instinct MI300X;
`benchmarks/NOTES.md` for two cores of AMD Zen 4. Rates of links are for one direction, as the PCI Express and NVLink
specifications state them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ACCELERATORS", "Accelerator", "Efficiency"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a maker's numbers that good kernels reach; all are assumptions, and may be set."""

    bandwidth: float = 0.85
    """Of memory, where weights and KV are read in long runs."""
    compute: float = 0.65
    """Of operations, in products with weights."""
    attention: float = 0.45
    """Of operations, in attention over chunks of a prompt."""
    link: float = 0.7
    """Of links between devices, and of those to the host."""
    memory: float = 0.9
    """Of memory that weights and KV may take together."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """What a maker promises of one device; rates are per second."""

    title: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes read from its memory."""
    operations: float
    """Dense bf16 multiplications and additions."""
    link: float
    """Bytes to other devices of the machine, one direction."""
    link_latency: float
    """Seconds of an all-reduce of few bytes."""
    host_link: float
    """Bytes to the host's memory, one direction."""
    step_overhead: float
    """Seconds of a step beside its kernels: launching a graph, sampling, one transfer to the host."""
    layer_overhead: float
    """Seconds that the kernels of a layer lose at their beginnings and ends."""
    source: str
    efficiency: Efficiency | None = None
    """Where the usual shares do not fit."""
    most_ranks: int = 8
    """Devices that one machine holds."""


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
