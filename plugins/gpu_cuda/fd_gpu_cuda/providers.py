"""Who computes what: each operation takes the first provider that can be made and computes right.

A provider is tried on the model itself before the first step, on its layers and on logits as wide as its vocabulary;
see `trial`. What cannot be imported, made or compiled, raises, or computes other values than torch's own operations,
gives way to the next one, with a line in the log; the last one, the composition of torch's own operations, is not
tried. So what is wrong with a provider costs speed, never the start. Only what people ask for by name ends it, and a
kernel behind which the device does not answer any more.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from fd_core.backends.probing import missing
from fd_core.errors import PluginError

from fd_gpu_cuda.device import Cuda
from fd_gpu_cuda.kernel_table import Kernels, SamplingKernels, expanded_product

logger = logging.getLogger(__name__)

COMPOSITION = "torch"
"""The name of the provider that composes torch's own operations."""


class Untried(Exception):
    """A trial could not be made, for reasons that lie outside what was to be tried."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One way to compute an operation."""

    name: str
    make: Callable[[], Any]
    """Returns what the table of kernels holds; may raise anything."""
    lacks: Callable[[], str] = lambda: ""
    """Says what is not here that it needs: it then offers nothing, and nobody is told unless it was asked for."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A field of the table of kernels, and who fills it, the best first."""

    field: str
    name: str
    """What people call it."""
    providers: tuple[Provider, ...]
    flag: str = ""
    """The setting that names one of the providers."""
    composition: Any = None
    """What the table holds where torch's own operations compute it."""
    of_logits: bool = False
    """Whether it works on logits; others are tried in layers."""
    rounds: bool = False
    """Whether it may round activations to 8 bits."""
    covered_by: str = ""
    """The field of the operation that does its work where no provider is left."""


Trial = Callable[[Operation, Kernels], str]
"""Takes an operation and a table in which nothing else is a kernel; returns what is wrong with it, "" if nothing is.

Raises what the kernel raises, `Untried`, or `PluginError` to end the start."""


class Providers:
    """The choice for each operation. What was found wrong once is not tried again."""

    def __init__(self, operations: Sequence[Operation], wanted: Mapping[str, str] | None = None) -> None:
        """`wanted` has the name of a provider by field, where one was asked for. Raises `PluginError` for those."""
        self._operations = tuple(operations)
        self._wanted = dict(wanted or {})
        self._left = {each.field: list(self._offered(each)) for each in operations}
        self._made: dict[str, Any] = {}
        for each in operations:
            self._make_next(each)

    @property
    def composed(self) -> Kernels:
        """The table without any kernel."""
        return Kernels(**{each.field: each.composition for each in self._operations})

    @property
    def kernels(self) -> Kernels:
        """The table as it was chosen so far."""
        return Kernels(**self._made)

    def settle(self, trial: Trial) -> Kernels:
        """Try what is in use, and whatever takes its place. Raises `PluginError` for what was asked for by name."""
        for operation in self._operations:
            while self._left[operation.field]:
                table = replace(self.composed, **{operation.field: self._made[operation.field]})
                why = _tried(trial, operation, table)
                if not why:
                    break
                self._refuse(operation, why)
                self._make_next(operation)
        return self.kernels

    def name(self, field: str) -> str:
        """Return who computes an operation."""
        if self._left[field]:
            return self._left[field][0].name
        covered_by = next(each.covered_by for each in self._operations if each.field == field)
        return self.name(covered_by) if covered_by else COMPOSITION

    def describe(self) -> str:
        """Name who computes what: the provider of most operations, then the others."""
        there = [each for each in self._operations if self._left[each.field] or not each.covered_by]
        names = {each.name: self.name(each.field) for each in there}
        usual = max(names.values(), key=list(names.values()).count)
        others = [f"{name} by {provider}" for name, provider in names.items() if provider != usual]
        return ", ".join([f"computed by {usual}", *others])

    def _offered(self, operation: Operation) -> Sequence[Provider]:
        wanted = self._wanted.get(operation.field)
        if wanted is None:
            return [each for each in operation.providers if not each.lacks()]
        chosen = [each for each in operation.providers if each.name == wanted]
        for each in chosen:
            if lack := each.lacks():
                raise _unusable(operation, wanted, lack)
        return chosen

    def _make_next(self, operation: Operation) -> None:
        """Make the first provider that is left, or take the composition."""
        left = self._left[operation.field]
        while left:
            try:
                self._made[operation.field] = left[0].make()
            except Exception as error:  # noqa: BLE001 - a library of others, or a compiler, may raise anything
                self._refuse(operation, f"it cannot be made: {_line(error)}")
            else:
                return
        self._made[operation.field] = operation.composition

    def _refuse(self, operation: Operation, why: str) -> None:
        """Give up the first provider that is left, with a word in the log."""
        left = self._left[operation.field]
        refused = left.pop(0).name
        if self._wanted.get(operation.field) == refused:
            raise _unusable(operation, refused, why)
        logger.warning(
            "%s is not computed by %s but by %s: %s", operation.name, refused, self.name(operation.field), why
        )


def _tried(trial: Trial, operation: Operation, table: Kernels) -> str:
    try:
        return trial(operation, table)
    except Untried as error:
        logger.warning("%s is computed without a trial, which is not possible: %s", operation.name, _line(error))
        return ""
    except PluginError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        return f"it fails: {_line(error)}"


def _line(error: Exception) -> str:
    """Return an error in one line, however long a compiler's message is."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _unusable(operation: Operation, name: str, why: str) -> PluginError:
    return PluginError(
        f"{operation.name} cannot be computed by {name}: {why}",
        field=operation.flag,
        hint="leave it out, and the first one that computes right is taken",
    )


_FLAG = "--attention-backend"


def operations_on(cuda: Cuda, dtype: str, kv_dtype: str) -> tuple[Operation, ...]:
    """Return the operations of a pack of `dtype` whose KV is kept in `kv_dtype`, `auto` for the same."""

    def device(products: Any) -> Any:
        return products.ProductDevice(cuda.multiprocessors, cuda.shared_memory_per_block)

    def mixture(experts: Any) -> Any:
        from fd_gpu_cuda.kernels import products

        return experts.expert_mixture(device(products), products.weight_product(device(products)))

    def attention(kernels: Any) -> Any:
        return kernels.PagedAttention(cuda.device, cuda.multiprocessors, cuda.shared_memory_per_block)

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
        Operation("attention", "attention", _triton("attention", attention), flag=_FLAG),
        Operation(
            "planned_attention",
            "attention of steps with prompts",
            (Provider("flashinfer", flashinfer, flashinfer_lacks),),
            flag=_FLAG,
            covered_by="attention",
        ),
        Operation("write_kv", "the KV write", _triton("heads", attrgetter("write_kv"))),
        Operation("add_norm", "norms", _triton("norms", attrgetter("add_norm"))),
        Operation("rotate_and_store", "head norms and rope", _triton("heads", attrgetter("rotate_and_store"))),
        Operation("gate", "activations", _triton("norms", attrgetter("gate"))),
        Operation(
            "packed_product",
            "products with packed weights",
            _triton("products", lambda products: products.weight_product(device(products))),
            composition=expanded_product,
            rounds=True,
        ),
        Operation("experts", "mixtures of experts", _triton("experts", mixture), rounds=True),
        Operation("lora", "adapters", _triton("lora", lambda lora: lora.lora_addition())),
        Operation(
            "sampling",
            "sampling",
            _triton("sampler", lambda sampler: sampler.TritonSampling(cuda.device, cuda.multiprocessors)),
            composition=SamplingKernels(),
            of_logits=True,
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


def _triton(module: str, make: Callable[[Any], Any]) -> tuple[Provider, ...]:
    """Return what is made of a module of `fd_gpu_cuda.kernels` as the one provider."""
    return (Provider("triton", lambda: make(importlib.import_module(f"fd_gpu_cuda.kernels.{module}"))),)
