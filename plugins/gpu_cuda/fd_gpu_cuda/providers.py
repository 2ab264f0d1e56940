"""Selection of providers: each operation uses the first one that works and computes correctly.

A provider is tried on the model itself before the first step, on its layers and on logits as wide as its vocabulary;
see `ModelTrial`. What cannot be imported, made or compiled, raises, or computes other values than torch itself, is
replaced by the next one, with a log line; the last one, the composition of torch operations, is not tried. So a broken
provider costs speed, but does not prevent the start. Only a provider that the user selected by name does, or a kernel
that breaks the device.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from fd_core.backends.probing import missing
from fd_core.errors import PluginError
from fd_core.models.decoder import Attention, DecoderModel, Mlp, Moe, Recurrence
from fd_core.ops.contract import (
    MAX_JOURNAL,
    Array,
    Heads,
    HostStep,
    KVCache,
    KVShape,
    Lora,
    PenaltyInput,
    Recurrent,
    SampleInput,
    StepInput,
)
from fd_core.ops.weights import ITEM_BYTES, LowRank
from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.types import IntArray

from fd_gpu_cuda.composed import DeviceStates
from fd_gpu_cuda.device import Cuda
from fd_gpu_cuda.kernel_table import Kernels, SamplingKernels, expanded_product
from fd_gpu_cuda.kv_cache import CudaLayer

if TYPE_CHECKING:
    from fd_gpu_cuda.ops import CudaOps


logger = logging.getLogger(__name__)

COMPOSITION = "torch"
"""Name of the provider that composes torch operations."""


class TrialSkipped(Exception):
    """A trial was not possible, for reasons unrelated to the provider."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of an operation."""

    name: str
    make: Callable[[], Any]
    """Returns the entry of the kernel table; may raise anything."""
    lacks: Callable[[], str] = lambda: ""
    """Returns a missing requirement; the provider is then skipped silently unless it was selected by name."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A field of the kernel table, and its providers, the best first."""

    field: str
    name: str
    """Display name."""
    providers: tuple[Provider, ...]
    flag: str = ""
    """The setting that names one of the providers."""
    composition: Any = None
    """Table entry for the composition of torch operations."""
    of_logits: bool = False
    """True if it works on logits; others are tried in layers."""
    rounds: bool = False
    """True if it may quantize activations to 8 bits."""
    covered_by: str = ""
    """Field of the fallback operation if no provider is left."""


Trial = Callable[[Operation, Kernels], str]
"""Tries an operation with a table without other kernels; returns the error, or "".

Raises exceptions of the kernel, `TrialSkipped`, or `PluginError` to abort the start."""


class Providers:
    """Selected provider per operation. A rejected provider is not tried again."""

    def __init__(self, operations: Sequence[Operation], wanted: Mapping[str, str] | None = None) -> None:
        """`wanted` has the provider by field if the user selected one; errors of those raise `PluginError`."""
        self._operations = tuple(operations)
        self._wanted = dict(wanted or {})
        self._left = {each.field: list(self._offered(each)) for each in operations}
        self._made: dict[str, Any] = {}
        self.rejected = False
        """True if a provider failed."""
        for each in operations:
            self._make_next(each)

    @property
    def composed(self) -> Kernels:
        """The table without any kernel."""
        return Kernels(**{each.field: each.composition for each in self._operations})

    @property
    def kernels(self) -> Kernels:
        """The table with the current selection."""
        return Kernels(**self._made)

    def settle(self, trial: Trial) -> Kernels:
        """Try the selected providers and their replacements. Raises `PluginError` for one selected by name."""
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
        """Return the provider of an operation."""
        if self._left[field]:
            return self._left[field][0].name
        covered_by = next(each.covered_by for each in self._operations if each.field == field)
        return self.name(covered_by) if covered_by else COMPOSITION

    def describe(self) -> str:
        """Return a summary: the provider of most operations, then the others."""
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
        """Create the first remaining provider, or use the composition."""
        left = self._left[operation.field]
        while left:
            try:
                self._made[operation.field] = left[0].make()
            except Exception as error:  # noqa: BLE001 - an external library or a compiler may raise anything
                self._refuse(operation, f"it cannot be made: {_line(error)}")
            else:
                return
        self._made[operation.field] = operation.composition

    def _refuse(self, operation: Operation, why: str) -> None:
        """Reject the first remaining provider, with a log line."""
        left = self._left[operation.field]
        refused, self.rejected = left.pop(0).name, True
        if self._wanted.get(operation.field) == refused:
            raise _unusable(operation, refused, why)
        logger.warning(
            "%s is not computed by %s but by %s: %s", operation.name, refused, self.name(operation.field), why
        )


def _tried(trial: Trial, operation: Operation, table: Kernels) -> str:
    try:
        return trial(operation, table)
    except TrialSkipped as error:
        logger.warning("%s is used without a trial, which is not possible: %s", operation.name, _line(error))
        return ""
    except PluginError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        return f"it fails: {_line(error)}"


def _line(error: Exception) -> str:
    """Return an error in one line, truncated."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _unusable(operation: Operation, name: str, why: str) -> PluginError:
    return PluginError(
        f"{operation.name} cannot be computed by {name}: {why}",
        field=operation.flag,
        hint="omit it to use the first one that computes correctly",
    )


_FLAG = "--attention-backend"


def operations_on(cuda: Cuda, dtype: str, kv_dtype: str, ranks: int = 1) -> tuple[Operation, ...]:
    """Return the operations of a pack of `dtype` with KV in `kv_dtype`, `auto` for the same, on one of `ranks`."""

    def device(products: Any) -> Any:
        return products.ProductDevice(cuda.multiprocessors, cuda.shared_memory_per_block)

    def mixture(experts: Any) -> Any:
        from fd_gpu_cuda.kernels import products

        return experts.expert_mixture(device(products), products.weight_product(device(products)))

    def attention(kernels: Any) -> Any:
        return kernels.PagedAttention(cuda.device, cuda.multiprocessors, cuda.shared_memory_per_block)

    def flashinfer() -> Any:
        return FlashInferAttention(importlib.import_module("flashinfer"), cuda)

    def flashinfer_lacks() -> str:
        if missing("flashinfer"):
            return "flashinfer is not installed: pip install 'fd-gpu-cuda[flashinfer]'"
        if dtype == "float32" or kv_dtype != "auto":
            return f"it needs KV in 16 bits, got {dtype if kv_dtype == 'auto' else kv_dtype}"
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
        Operation("recur", "recurrent layers", _triton("recurrent", attrgetter("recur"))),
        *([Operation("add_ranks", "sums of ranks", _triton("norms", attrgetter("add_ranks")))] if ranks > 1 else []),
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
    """Return the provider by field for `--attention-backend`; FlashInfer has none for decodes.

    It is used only if it is selected: its tiles, and so the order of sums, depend on the other rows (FlashInfer 2424).
    """
    return {
        "auto": {"planned_attention": COMPOSITION},
        "triton": {"attention": "triton", "planned_attention": COMPOSITION},
        "flashinfer": {"planned_attention": "flashinfer"},
        COMPOSITION: {"attention": COMPOSITION, "planned_attention": COMPOSITION},
    }[attention]


def _triton(module: str, make: Callable[[Any], Any]) -> tuple[Provider, ...]:
    """Return a module of `fd_gpu_cuda.kernels` as the only provider."""
    return (Provider("triton", lambda: make(importlib.import_module(f"fd_gpu_cuda.kernels.{module}"))),)


_FAR = 1100
"""A context longer than one program of split attention covers."""
_ROWS = 7
"""Rows of logits."""

Kinds = Iterator[tuple[str, tuple[tuple[int, int], ...]]]
Call = Callable[["CudaOps"], tuple[Array, ...]]
"""Runs an operation on the same logits with any pack."""


def kinds_of_steps(longest: int, window: int | None) -> Kinds:
    """Return kinds of steps as rows of (tokens, context), up to `longest`, at least one beyond the window."""
    far = min(_FAR if window is None else max(window + 21, 70), longest)
    kinds = {
        "a decode": ((1, 1), (1, 37), (1, far)),
        "chunks of prompts": ((20, 50), (1, 33), (7, 7), (1, far), (70, far)),
        "a decode with drafts": ((4, 40), (4, 9), (4, far)),
    }
    for kind, rows in kinds.items():
        contexts = [min(context, longest) for _, context in rows]
        yield kind, tuple((min(tokens, context), context) for (tokens, _), context in zip(rows, contexts, strict=True))


def random_step(
    ops: CudaOps, rows: Sequence[tuple[int, int]], size: int, vocabulary: int, random: np.random.Generator
) -> tuple[StepInput, int]:
    """Return a step of (tokens, context) rows over blocks of `size` tokens in random order, and the number of
    blocks."""
    counts, contexts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    query_start = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    entries = -(-contexts // size)
    num_blocks = int(entries.sum())
    tables = np.zeros((len(rows), entries.max()), np.int32)
    tables[np.arange(tables.shape[1]) < entries[:, None]] = random.permutation(num_blocks)
    positions = np.concatenate([np.arange(context - count, context, dtype=np.int32) for count, context in rows])
    row_of = np.repeat(np.arange(len(rows)), counts)
    slots = tables[row_of, positions // size] * size + positions % size
    token_ids = random.integers(0, vocabulary, len(positions)).astype(np.int32)
    width = int(counts.max())
    host = HostStep(query_start, contexts, tables)
    arrays = {
        "token_ids": token_ids,
        "positions": positions,
        "kv_slots": slots.astype(np.int32),
        "query_start": query_start,
        "context_len": contexts,
        "block_tables": tables,
        "logits_rows": query_start[1:] - 1,
    }
    placed = dict(zip(arrays, ops.upload(list(arrays.values())), strict=True))
    step = StepInput(
        **placed, max_query=width, max_context=int(contexts.max()), uniform=bool((counts == width).all()), host=host
    )
    return step, num_blocks


class RandomLogits:
    """Logits float32[R, V], and all operations on them."""

    def __init__(self, ops: CudaOps, vocabulary: int, random: np.random.Generator) -> None:
        self._host = ops.from_host
        self._random = random
        self._vocabulary = vocabulary
        self._logits = ops.from_host(3 * random.standard_normal((_ROWS, vocabulary), np.float32))

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Return names and calls; each may write into its copy of the logits."""
        greedy = np.zeros(_ROWS, np.float32)
        random = np.array([0.7, 1, 0, 1.3, 0.2, 1, 5], np.float32)
        for name, temperature in (("greedy", greedy), ("random", random), ("filtered", random)):
            rows = self._sampling(temperature, filters=name == "filtered")
            yield f"{name} tokens", self._call("sample", rows)
        yield "penalties", self._call("penalize", self._penalties())
        rows = self._host(np.array([5, 0, 2], np.int32))
        words = self._random.integers(-(2**31), 2**31, (3, -(-self._vocabulary // 32))).astype(np.int32)
        yield "masked logits", self._call("mask_logits", rows, self._host(words))
        tokens = self._tokens(_ROWS)
        for top_n in (0, min(5, self._vocabulary)):
            yield "log-probabilities", self._call("logprobs", tokens, top_n)
        yield "ranks", self._call("ranks", tokens)
        cells = self._host(np.array([0, 3, 3, 6], np.int32)), self._tokens(4)
        yield "biased logits", self._call("add_at", *cells, self._host(np.array([1, 2, -4, 8], np.float32)))
        sampled, drafts = (self._random.integers(0, 2, (_ROWS, width)).astype(np.int32) for width in (4, 3))
        given = self._random.integers(0, 4, _ROWS).astype(np.int32)
        arrays = tuple(map(self._host, (sampled, drafts, given)))
        yield "accepted drafts", lambda ops: (ops.verify(*arrays),)
        slots, revoked = (self._host(np.array(each, np.int32)) for each in ([8, 1, 0, 3, 5, 6, 7], [2, 9]))
        matrix = arrays[0], self._host(given), slots, revoked, 11
        yield "the token matrix", lambda ops: (ops.token_matrix(*matrix),)

    def _call(self, method: str, *arguments: object) -> Call:
        """Return a call of one method with a copy of the logits."""

        def call(ops: CudaOps) -> tuple[Array, ...]:
            made = getattr(ops, method)(self._logits.clone(), *arguments)
            return made if isinstance(made, tuple) else (made,)

        return call

    def _sampling(self, temperature: np.ndarray, *, filters: bool) -> SampleInput:
        top_k = np.array([5, 0, 3, 0, 40, 0, 1], np.int32) if filters else np.zeros(_ROWS, np.int32)
        top_p = np.array([1, 0.8, 0.5, 1, 0.95, 1, 0.1] if filters else [1] * _ROWS, np.float32)
        min_p = np.array([0, 0, 0, 0.1, 0.02, 0, 0] if filters else [0] * _ROWS, np.float32)
        seeds = self._random.integers(0, 2**63, _ROWS).astype(np.uint64)
        positions = self._random.integers(0, 9999, _ROWS).astype(np.int32)
        columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        columns |= {"seeds": seeds, "positions": positions}
        placed = {name: self._host(column) for name, column in columns.items()}
        return SampleInput(**placed, all_greedy=not temperature.any(), any_filter=filters)

    def _penalties(self) -> PenaltyInput:
        counts = self._random.integers(0, 5, (4, self._vocabulary)).astype(np.int32)
        counts *= self._random.random(counts.shape) < 0.3
        arrays = {
            "rows": np.array([0, 2, 3], np.int32),
            "counts": counts,
            "counts_rows": np.array([1, 3, 0], np.int32),
            "draft_rows": np.array([0, 0, 2], np.int32),
            "draft_ids": self._random.integers(0, self._vocabulary, 3).astype(np.int32),
            "repetition": np.array([1.2, 1, 0.7], np.float32),
            "presence": np.array([0, 0.5, -0.25], np.float32),
            "frequency": np.array([0.3, 0, 0.1], np.float32),
        }
        return PenaltyInput(**{name: self._host(array) for name, array in arrays.items()})

    def _tokens(self, count: int) -> Array:
        return self._host(self._random.integers(0, self._vocabulary, count).astype(np.int32))


_TOLERANCE: Mapping[str, float] = {"float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""Maximum error relative to the largest result, by dtype; the mean may be an eighth of it."""
_PACKED_TOLERANCE = 1e-1
"""The same if activations may be quantized to 8 bits for packed weights."""
_STRAY_SHARE = 0.1
"""Share of tokens that may be routed differently, because two experts may be equal within rounding."""
_SMALL = 0.1
"""Scale of the residual stream in a trial, small compared with the layers' outputs, so that their errors are
visible."""


class Compared(NamedTuple):
    """One result of a kernel, and the expected one."""

    what: str
    found: Any
    expected: Any
    comparison: Literal["near", "exact", "experts"] = "near"


class _Composition:
    """A reference pack whose calls raise `TrialSkipped`, because its errors are unrelated to the kernel."""

    def __init__(self, ops: CudaOps) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        return partial(self._call, found) if callable(found) else found

    @staticmethod
    def _call(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        except Exception as error:
            raise TrialSkipped(f"{type(error).__name__}: {error}") from error


class ModelTrial:
    """Trial of a kernel against the composition of torch operations, on the model and small random steps.

    Each distinct layer form is computed for each kind of step: decodes of several lengths, prompt chunks with decodes,
    decodes with drafts, and contexts beyond a sliding window. Every fusion gets the inputs of the composition, so
    errors are localized. Sampling is tried on logits as wide as the vocabulary. The trial compiles the same kernels as
    serving.
    """

    def __init__(self, model: DecoderModel, ops: CudaOps, composed: Kernels, block_size: int, kv_dtype: str) -> None:
        self._model = model
        self._ops = ops
        self._plain: Any = _Composition(ops.alone(composed))
        self._block_size = block_size
        self._kv_dtype = kv_dtype
        self._random = np.random.default_rng(0)

    def __call__(self, operation: Operation, table: Kernels) -> str:
        """Return the error of the table's kernel, or "". Raises exceptions of the kernel.

        Raises `PluginError` if the device fails, because then no other kernel can use it either.
        """
        try:
            return self._wrong_with(operation, table)
        except Exception as error:
            try:
                self._ops.wait()
            except RuntimeError:
                raise PluginError(
                    f"{operation.name}: a kernel broke the device: {error}",
                    field=operation.flag,
                    hint="CUDA_LAUNCH_BLOCKING=1 names the kernel; please report it",
                ) from error
            raise

    def _wrong_with(self, operation: Operation, table: Kernels) -> str:
        ops = self._ops.alone(table)
        tolerance = _PACKED_TOLERANCE if operation.rounds else _TOLERANCE[ops.dtype]
        # Not in inference mode, because workspaces created here must be writable outside of it.
        with torch.no_grad():
            for each in self._of_logits(ops) if operation.of_logits else self._of_layers(ops):
                if why := _unlike(each, tolerance):
                    return f"{each.what}: {why}"
        return ""

    def _of_layers(self, ops: CudaOps) -> Iterator[Compared]:
        seen = []
        for layer in self._model.decoder.layers:
            attention = layer.attention
            form = _form(attention.recurrent if isinstance(attention, Recurrence) else layer)
            if form in seen:
                continue
            seen.append(form)
            if isinstance(attention, Recurrence):
                if ops.kernels.recur is not None:
                    yield from self._of_recurrence(ops, attention.recurrent)
                continue
            window = attention.heads.window
            for kind, rows in kinds_of_steps(self._model.max_positions, window):
                where = kind if window is None else f"{kind}, window {window}"
                for each in self._of_layer(ops, attention, layer.feed_forward, rows):
                    yield each._replace(what=f"{each.what} of {where}")

    def _of_layer(
        self, ops: CudaOps, attention: Attention, block: Mlp | Moe | None, rows: Sequence[tuple[int, int]]
    ) -> Iterator[Compared]:
        plain, model, heads = self._plain, self._model, attention.heads
        step, num_blocks = random_step(plain, rows, self._block_size, model.vocab_size, self._random)
        own, reference = self._caches(heads, num_blocks)
        x = self._normal(len(step.positions), model.spec.embedding.shape[1]) * _SMALL

        def queries(pack: Any, cache: CudaLayer) -> Array:
            given = x.clone(), attention.norm, attention.qkv
            if attention.latent is None:
                return pack.attention_inputs(*given, heads, cache, step)
            return pack.latent_inputs(*given, attention.latent, heads, cache, step)

        q = queries(plain, reference)
        yield Compared("queries", queries(ops, own), q)
        yield Compared("written keys", own.keys, reference.keys)
        yield Compared("written values", own.values, reference.values)
        a = plain.attention(q, heads, reference, step)
        yield Compared("attention", ops.attention(q.clone(), heads, reference, step), a)
        if attention.latent is not None:
            a = plain.expand(a, attention.latent.expand, heads)
        if ops.parallel.size > 1:
            parts = self._normal(ops.parallel.size, q.numel())
            yield Compared("sums of ranks", ops.add_ranks(parts), plain.add_ranks(parts), "exact")
        if ops.adds_by_kernel:
            yield Compared("the adapters' terms", *(self._adapted(each, step, x) for each in (ops, plain)))
        z = y = plain.settle(plain.project_residual(a, attention.output, x.clone(), attention.post_norm))
        other = ops.project_residual(a, attention.output, x.clone(), attention.post_norm)
        activation, norm = model.decoder.activation, model.decoder.final_norm
        if block is not None:
            expected = plain.normalize(y, block.norm)
            yield Compared("the norm after attention", ops.normalize(other, block.norm), expected)
        if isinstance(block, Moe):
            z = plain.settle(plain.moe_residual(y.clone(), block.norm, block.experts, activation))
            other = ops.moe_residual(y.clone(), block.norm, block.experts, activation)
        elif block is not None:
            method = "mlp_inputs" if block.gated else "plain_mlp_inputs"
            each, inner = (getattr(it, method)(y.clone(), block.norm, block.gate_up, activation) for it in (ops, plain))
            yield Compared("the activated products", each, inner)
            z = plain.settle(plain.project_residual(inner, block.down, y.clone(), block.post_norm))
            other = ops.project_residual(inner, block.down, y.clone(), block.post_norm)
        law: Literal["near", "experts"] = "experts" if isinstance(block, Moe) else "near"
        if norm is None:
            return
        expected = plain.rms_norm(z, norm)
        yield Compared("the norm after the layer", ops.rms_norm(other, norm), expected, law)
        if model.decoder.head is not None:
            head = (norm, model.decoder.head, step.logits_rows, model.decoder.softcap)
            yield Compared("logits", ops.logits(z.clone(), *head), plain.logits(z.clone(), *head))

    def _of_recurrence(self, ops: CudaOps, recurrent: Recurrent) -> Iterator[Compared]:
        """Compare two steps of some rows, and the states after each; the second one replays a journal."""
        plain, model = self._plain, self._model
        state, journal = recurrent.sizes
        shape = replace(model.kv_shape(1), num_layers=1, dtype=self._kv_dtype, state=state, journal=journal)
        size = -(-shape.least_block_size(ITEM_BYTES[ops.dtype], MAX_JOURNAL) // 16) * 16
        prompts, more = (min(19, model.max_positions - 5), 3, 1), (1, 5, 2)
        rows = [(tokens, before + tokens) for before, tokens in zip(prompts, more, strict=True)]
        last, num_blocks = random_step(plain, rows, size, model.vocab_size, self._random)
        first, _ = random_step(plain, [(each, each) for each in prompts], size, model.vocab_size, self._random)
        caches = [plain.allocate_kv(replace(shape, block_size=size), num_blocks).layer(0) for _ in range(2)]
        blocks = last.block_tables.new_tensor(range(num_blocks)).long()
        for kind, step in (("prompts", first), ("the tokens after them", last)):
            step = replace(step, block_tables=last.block_tables, host=None)
            x = self._normal(len(step.positions), recurrent.inputs)
            y, expected = (
                pack.recur(x.clone(), recurrent, layer, step) for pack, layer in zip((ops, plain), caches, strict=True)
            )
            yield Compared(f"a recurrence over {kind}", y, expected)
            (consumed, state, _), expected = (DeviceStates(layer, recurrent).read(blocks) for layer in caches)
            yield Compared(f"the tokens in the states of {kind}", consumed, expected[0])
            yield Compared(f"the states of {kind}", state, expected[1])

    def _adapted(self, ops: Any, step: StepInput, x: Array) -> Array:
        """Return the terms of two fixed adapters of different ranks for x; some tokens have none."""
        random, width = np.random.default_rng(1), x.shape[1]
        places = np.arange(len(x), dtype=np.int32) // 2 % 3

        def matrix(rows: int, columns: int) -> np.ndarray:
            return random.standard_normal((rows, columns), np.float32) * columns**-0.5

        outs = (width, width // 2)
        adapters = [[LowRank(matrix(rank, width), matrix(out, rank)) for out in outs] for rank in (8, 33)]
        deltas = [ops.prepare_lora(parts, outs) for parts in ([*adapters[0]], [None, adapters[1][1]])]
        lora = Lora(ops.place_loras(deltas, width, outs), replace(step, **adapter_rows(places, ops)))
        y = ops.from_host(random.standard_normal((len(x), sum(outs)), np.float32)).to(x.dtype)
        return ops.lora(y, x, lora)

    def _of_logits(self, ops: CudaOps) -> Iterator[Compared]:
        made = RandomLogits(self._plain, self._model.vocab_size, self._random)
        for name, call in made.calls():
            found, expected = call(ops), call(self._plain)
            law: Literal["near", "exact"] = "near" if name == "log-probabilities" else "exact"
            for one, other in zip(found, expected, strict=True):
                yield Compared(name, one, other, law)

    def _caches(self, heads: Heads, num_blocks: int) -> tuple[Any, Any]:
        """Return two caches of one layer that hold the same random keys and values."""
        size = self._block_size
        shape = KVShape(1, heads.num_kv_heads, heads.head_dim, size, self._kv_dtype, latent=heads.latent)
        caches: list[KVCache] = [self._plain.allocate_kv(shape, num_blocks) for _ in range(2)]
        widths = heads.head_dim - heads.latent, heads.latent or heads.head_dim
        k, v = (self._normal(num_blocks * size, heads.num_kv_heads, width) for width in widths)
        slots = self._plain.from_host(np.arange(num_blocks * size, dtype=np.int32))
        for cache in caches:
            self._plain.write_kv(cache.layer(0), k, v, slots)
        return caches[0].layer(0), caches[1].layer(0)

    def _normal(self, *shape: int) -> Array:
        values = self._random.standard_normal(shape, np.float32)
        return self._plain.from_host(values).to(self._plain.torch_dtype)


def _form(value: Any) -> Any:
    """Return the form of a layer: types, numbers and shapes, without tensor elements."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if is_dataclass(value):
        return type(value).__name__, tuple(_form(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def _unlike(compared: Compared, tolerance: float) -> str:
    """Return the difference of a result from the expected one, or ""."""
    found, expected = compared.found, compared.expected
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"expected {expected.dtype}{list(expected.shape)}, got {found.dtype}{list(found.shape)}"
    if not found.numel():
        return ""
    if compared.comparison == "exact" or not found.is_floating_point():
        wrong = int((~((found == expected) | (found.isnan() & expected.isnan()))).sum())
        return f"{wrong} of {found.numel()} values differ" if wrong else ""
    found, expected = found.double(), expected.double()
    if not bool(found.isfinite().all()):
        return "not finite"
    scale = max(float(expected.abs().max()), 1e-3)
    errors = (found - expected).abs().reshape(len(found), -1)
    if compared.comparison == "experts":
        kept = math.ceil(len(errors) * (1 - _STRAY_SHARE))
        errors = errors[errors.amax(dim=1).argsort()[:kept]]
    largest, mean = float(errors.max()), float(errors.mean())
    if largest <= tolerance * scale and mean <= tolerance / 8 * scale:
        return ""
    return f"maximum error {largest:.2g}, mean {mean:.2g}, largest value {scale:.2g}"


_WORKSPACE_BYTES = 128 * 2**20


class FlashInferAttention:
    """FlashInfer attention of steps that are not replayed; it plans on the host, from the host's metadata.

    There is one plan per layer geometry and group of layers of a step, created by the first such layer.

    Its calls match the releases recorded in `tests/test_flash_infer_calls.py`.
    """

    def __init__(self, flashinfer: Any, cuda: Cuda) -> None:
        self._flashinfer = flashinfer
        self._cuda = cuda
        self._workspace: Array | None = None
        self._wrappers: dict[tuple[Any, ...], Any] = {}
        self._rows: Array | None = None
        """`query_start` of the last step, which its groups of layers share."""
        self._planned: set[tuple[Any, ...]] = set()
        self._copied: dict[tuple[Any, ...], Callable[[], None]] = {}
        """By geometry, a function that waits for the copy of its last plan."""

    def __call__(self, q: Array, layer: CudaLayer, heads: Heads, step: StepInput) -> Array:
        """Attend with q [T, nh, d], float16 or bfloat16; returns [T, nh * d]. Needs `step.host`."""
        if step.query_start is not self._rows:
            self._rows = step.query_start
            self._planned.clear()
        sizes = (heads.num_heads, heads.num_kv_heads, heads.head_dim, layer.block_size)
        geometry = (sizes, heads.scale, heads.window, heads.softcap, q.dtype, step.group)
        if geometry not in self._wrappers:
            if self._workspace is None:
                self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._cuda.device)
            made = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[geometry] = made
        wrapper = self._wrappers[geometry]
        if geometry not in self._planned:
            if step.host is None:
                raise RuntimeError("FlashInfer plans on the host, but the step has no metadata there")
            if geometry in self._copied:
                # A plan is copied from pinned memory of its wrapper, which the next plan overwrites: where steps are
                # launched ahead, the copy may still be queued. All that is before it belongs to older steps.
                self._copied[geometry]()
            lists = (
                step.host.query_start.copy(),
                *page_lists(step.host.within(heads, layer.block_size), layer.block_size),
            )
            wrapper.plan(
                *map(torch.from_numpy, lists),
                *sizes,
                causal=True,
                sm_scale=heads.scale,
                window_left=-1 if heads.window is None else heads.window - 1,
                logits_soft_cap=heads.softcap,
                q_data_type=q.dtype,
                kv_data_type=q.dtype,
            )
            self._copied[geometry] = self._cuda.mark()
            self._planned.add(geometry)
        pages = (-1, layer.block_size)
        output = wrapper.run(q.contiguous(), (layer.keys.unflatten(0, pages), layer.values.unflatten(0, pages)))
        return output.flatten(1)


def page_lists(host: HostStep, block_size: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return the start of each row's pages int32[N + 1], all pages int32, and the tokens in each last page int32[N]."""
    counts = -(-host.context_len // block_size)
    starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
    used = np.arange(host.block_tables.shape[1]) < counts[:, None]
    last = host.context_len - (counts - 1) * block_size
    return starts, host.block_tables[used].astype(np.int32), last.astype(np.int32)
