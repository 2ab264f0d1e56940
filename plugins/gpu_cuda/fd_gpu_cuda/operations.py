"""Who can compute each operation of the table of kernels, the best first.

A new field of the table needs one line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from fd_gpu_cuda.compositions import expanded_product
from fd_gpu_cuda.device import Cuda
from fd_gpu_cuda.kernel_table import SamplingKernels
from fd_gpu_cuda.probe import missing
from fd_gpu_cuda.providers import COMPOSITION, Operation, Provider

_FLAG = "--attention-backend"


def operations_on(cuda: Cuda, dtype: str, kv_dtype: str) -> tuple[Operation, ...]:
    """Return the operations of a pack of `dtype` whose KV is kept in `kv_dtype`, `auto` for the same."""

    def attention() -> Any:
        from fd_gpu_cuda.kernels.attention import PagedAttention

        return PagedAttention(cuda.device, cuda.multiprocessors, cuda.shared_memory_per_block)

    def product() -> Any:
        from fd_gpu_cuda.kernels import products

        return products.weight_product(products.ProductDevice(cuda.multiprocessors, cuda.shared_memory_per_block))

    def mixture() -> Any:
        from fd_gpu_cuda.kernels import experts, products

        device = products.ProductDevice(cuda.multiprocessors, cuda.shared_memory_per_block)
        return experts.expert_mixture(device, product())

    def adapters() -> Any:
        from fd_gpu_cuda.kernels import lora

        return lora.lora_addition()

    def sampling() -> Any:
        from fd_gpu_cuda.kernels import sampler

        return sampler.TritonSampling(cuda.device, cuda.multiprocessors)

    def flashinfer() -> Any:
        from fd_gpu_cuda.flash_infer import FlashInferAttention

        return FlashInferAttention(importlib.import_module("flashinfer"), cuda)

    def flashinfer_lacks() -> str:
        if missing("flashinfer"):
            return "flashinfer is not installed: pip install 'fd-gpu-cuda[flashinfer]'"
        if dtype == "float32" or kv_dtype != "auto":
            return f"it reads KV in 16 bits, not in {dtype if kv_dtype == 'auto' else kv_dtype}"
        return ""

    return (
        Operation("attention", "attention", (Provider("triton", attention),), flag=_FLAG),
        Operation(
            "planned_attention",
            "attention of steps with prompts",
            (Provider("flashinfer", flashinfer, flashinfer_lacks),),
            flag=_FLAG,
            covered_by="attention",
        ),
        Operation("write_kv", "the KV write", _triton("kv_write", "write_kv")),
        Operation("add_norm", "norms", _triton("norms", "add_norm")),
        Operation("rotate_and_store", "head norms and rope", _triton("heads", "rotate_and_store")),
        Operation("gate", "activations", _triton("activations", "gate")),
        Operation(
            "packed_product",
            "products with packed weights",
            (Provider("triton", product),),
            composition=expanded_product,
            rounds=True,
        ),
        Operation("experts", "mixtures of experts", (Provider("triton", mixture),), rounds=True),
        Operation("lora", "adapters", (Provider("triton", adapters),)),
        Operation(
            "sampling", "sampling", (Provider("triton", sampling),), composition=SamplingKernels(), of_logits=True
        ),
    )


def wanted_providers(attention: str) -> Mapping[str, str]:
    """Return the provider by field that `--attention-backend` asks for: FlashInfer has none for decodes."""
    return {
        "auto": {},
        "triton": {"attention": "triton", "planned_attention": COMPOSITION},
        "flashinfer": {"planned_attention": "flashinfer"},
        COMPOSITION: {"attention": COMPOSITION, "planned_attention": COMPOSITION},
    }[attention]


def _triton(module: str, name: str) -> tuple[Provider, ...]:
    """Return a kernel of `fd_gpu_cuda.kernels` as the one provider."""
    load: Callable[[], Any] = lambda: getattr(importlib.import_module(f"fd_gpu_cuda.kernels.{module}"), name)  # noqa: E731
    return (Provider("triton", load),)
