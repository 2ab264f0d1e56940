"""A kernel beside the composition of torch's own operations, on the model itself and small random steps.

Each layer of another form is computed for each kind of step: decodes of several lengths, chunks of prompts beside
decodes, decodes with drafts, and contexts beyond a sliding window. Every fusion gets the inputs that the composition
made, so an error shows where it arises. Sampling is tried on logits as wide as the vocabulary. What is compiled for
the trial is what serving needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from fd_core.errors import PluginError
from fd_core.models.decoder import DecoderModel, Layer, Moe
from fd_core.ops.contract import Array, HostStep, KVCache, KVShape, Lora, PenaltyInput, SampleInput, StepInput
from fd_core.ops.weights import LowRank
from fd_core.runner.inputs.inputs import adapter_rows

from fd_gpu_cuda.kernel_table import Kernels
from fd_gpu_cuda.providers import Operation, Untried

if TYPE_CHECKING:
    from fd_gpu_cuda.ops import CudaOps


_FAR = 1100
"""A context beyond what one program of an attention that is split walks over."""
_ROWS = 7
"""Rows of logits."""

Kinds = Iterator[tuple[str, tuple[tuple[int, int], ...]]]
Call = Callable[["CudaOps"], tuple[Array, ...]]
"""Computes something of the same logits with any pack."""


def kinds_of_steps(longest: int, window: int | None) -> Kinds:
    """Return kinds of steps as rows of (tokens, context), none beyond `longest`, one at least beyond the window."""
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
    """Return a step of (tokens, context) rows over blocks of `size` tokens in random order, and how many blocks."""
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
    """Logits float32[R, V], and all that is done with logits."""

    def __init__(self, ops: CudaOps, vocabulary: int, random: np.random.Generator) -> None:
        self._host = ops.from_host
        self._random = random
        self._vocabulary = vocabulary
        self._logits = ops.from_host(3 * random.standard_normal((_ROWS, vocabulary), np.float32))

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Return what each call computes, and the call; it may write into its own copy of the logits."""
        for name, rows in self._samplings():
            yield name, self._call("sample", rows)
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
        """Return a call of one method with logits of its own."""

        def call(ops: CudaOps) -> tuple[Array, ...]:
            made = getattr(ops, method)(self._logits.clone(), *arguments)
            return made if isinstance(made, tuple) else (made,)

        return call

    def _samplings(self) -> Iterator[tuple[str, SampleInput]]:
        greedy = np.zeros(_ROWS, np.float32)
        random = np.array([0.7, 1, 0, 1.3, 0.2, 1, 5], np.float32)
        yield "greedy tokens", self._sampling(greedy, filters=False)
        yield "random tokens", self._sampling(random, filters=False)
        yield "filtered tokens", self._sampling(random, filters=True)

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
"""Largest error as a share of the largest result, by dtype; the mean may be an eighth of it."""
_PACKED_TOLERANCE = 1e-1
"""The same where activations may be rounded to 8 bits beside packed weights."""
_STRAY_SHARE = 0.1
"""Share of tokens that a mixture of experts may send elsewhere: two experts may be as good within rounding."""
_SMALL = 0.1
"""Scale of the residual stream in a trial, small beside what layers add to it, so that errors of this are seen."""


class Compared(NamedTuple):
    """One result of a kernel, and what it should be."""

    what: str
    found: Any
    expected: Any
    law: Literal["near", "exact", "experts"] = "near"


class _Composition:
    """A pack whose errors say nothing about a kernel: its calls raise `Untried` instead."""

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
            raise Untried(f"{type(error).__name__}: {error}") from error


class ModelTrial:
    """Steps of one model; see `providers.Trial`."""

    def __init__(self, model: DecoderModel, ops: CudaOps, composed: Kernels, block_size: int, kv_dtype: str) -> None:
        self._model = model
        self._ops = ops
        self._plain: Any = _Composition(ops.alone(composed))
        self._block_size = block_size
        self._kv_dtype = kv_dtype
        self._random = np.random.default_rng(0)

    def __call__(self, operation: Operation, table: Kernels) -> str:
        """Return what is wrong with the table's kernel, "" if nothing is. Raises whatever the kernel raises.

        Raises `PluginError` where the device does not answer any more: then nothing else can compute on it either.
        """
        try:
            return self._wrong_with(operation, table)
        except Exception as error:
            try:
                self._ops.wait()
            except RuntimeError:
                raise PluginError(
                    f"{operation.name}: a kernel broke the device, so nothing else can use it: {error}",
                    field=operation.flag,
                    hint="CUDA_LAUNCH_BLOCKING=1 names the kernel; please report it",
                ) from error
            raise

    def _wrong_with(self, operation: Operation, table: Kernels) -> str:
        ops = self._ops.alone(table)
        tolerance = _PACKED_TOLERANCE if operation.rounds else _TOLERANCE[ops.dtype]
        # Not in inference mode: what is kept from here, such as workspaces, could not be written outside of it.
        with torch.no_grad():
            for each in self._of_logits(ops) if operation.of_logits else self._of_layers(ops):
                if why := _unlike(each, tolerance):
                    return f"{each.what}: {why}"
        return ""

    def _of_layers(self, ops: CudaOps) -> Iterator[Compared]:
        seen = []
        for layer in self._model.decoder.layers:
            if (form := _form(layer)) in seen:
                continue
            seen.append(form)
            window = layer.attention.heads.window
            for kind, rows in kinds_of_steps(self._model.max_positions, window):
                where = kind if window is None else f"{kind}, window {window}"
                for each in self._of_layer(ops, layer, rows):
                    yield each._replace(what=f"{each.what} of {where}")

    def _of_layer(self, ops: CudaOps, layer: Layer, rows: Sequence[tuple[int, int]]) -> Iterator[Compared]:
        plain, model, attention = self._plain, self._model, layer.attention
        heads, block = attention.heads, layer.feed_forward
        step, num_blocks = random_step(plain, rows, self._block_size, model.vocab_size, self._random)
        own, reference = self._caches(layer, num_blocks)
        x = self._normal(len(step.positions), attention.norm.weight.shape[0]) * _SMALL

        q = plain.attention_inputs(x.clone(), attention.norm, attention.qkv, heads, reference, step)
        yield Compared("queries", ops.attention_inputs(x.clone(), attention.norm, attention.qkv, heads, own, step), q)
        yield Compared("written keys", own.keys, reference.keys)
        yield Compared("written values", own.values, reference.values)
        a = plain.attention(q, heads, reference, step)
        yield Compared("attention", ops.attention(q.clone(), heads, reference, step), a)
        if ops.adds_by_kernel:
            yield Compared("what adapters add", *(self._adapted(each, step, x) for each in (ops, plain)))
        y = plain.settle(plain.project_residual(a, attention.output, x.clone(), attention.post_norm))
        other = ops.project_residual(a, attention.output, x.clone(), attention.post_norm)
        expected = plain.rms_norm(y, block.norm)
        yield Compared("the norm behind attention", ops.rms_norm(other, block.norm), expected)
        activation, norm = model.decoder.activation, model.decoder.final_norm
        if isinstance(block, Moe):
            z = plain.settle(plain.moe_residual(y.clone(), block.norm, block.experts, activation))
            other = ops.moe_residual(y.clone(), block.norm, block.experts, activation)
        else:
            inner = plain.mlp_inputs(y.clone(), block.norm, block.gate_up, activation)
            yield Compared(
                "the activated products", ops.mlp_inputs(y.clone(), block.norm, block.gate_up, activation), inner
            )
            z = plain.settle(plain.project_residual(inner, block.down, y.clone(), block.post_norm))
            other = ops.project_residual(inner, block.down, y.clone(), block.post_norm)
        law: Literal["near", "experts"] = "experts" if isinstance(block, Moe) else "near"
        expected = plain.rms_norm(z, norm)
        yield Compared("the norm behind the feed-forward block", ops.rms_norm(other, norm), expected, law)
        if model.decoder.head is not None:
            head = (norm, model.decoder.head, step.logits_rows, model.decoder.softcap)
            yield Compared("logits", ops.logits(z.clone(), *head), plain.logits(z.clone(), *head))

    def _adapted(self, ops: Any, step: StepInput, x: Array) -> Array:
        """Return what two adapters of other ranks make of x, the same ones each time; some tokens have none."""
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

    def _caches(self, layer: Layer, num_blocks: int) -> tuple[Any, Any]:
        """Return two caches of one layer that hold the same random keys and values."""
        heads, size = layer.attention.heads, self._block_size
        shape = KVShape(1, heads.num_kv_heads, heads.head_dim, size, self._kv_dtype)
        caches: list[KVCache] = [self._plain.allocate_kv(shape, num_blocks) for _ in range(2)]
        k, v = (self._normal(num_blocks * size, heads.num_kv_heads, heads.head_dim) for _ in range(2))
        slots = self._plain.from_host(np.arange(num_blocks * size, dtype=np.int32))
        for cache in caches:
            self._plain.write_kv(cache.layer(0), k, v, slots)
        return caches[0].layer(0), caches[1].layer(0)

    def _normal(self, *shape: int) -> Array:
        values = self._random.standard_normal(shape, np.float32)
        return self._plain.from_host(values).to(self._plain.torch_dtype)


def _form(value: Any) -> Any:
    """Return what layers of one form share: types, numbers, shapes, but no elements of tensors."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape
    if is_dataclass(value):
        return type(value).__name__, tuple(_form(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, (tuple, list)):
        return tuple(map(_form, value))
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def _unlike(compared: Compared, tolerance: float) -> str:
    """Say how a result differs from what it should be, "" if it does not."""
    found, expected = compared.found, compared.expected
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if not found.numel():
        return ""
    if compared.law == "exact" or not found.is_floating_point():
        wrong = int((~((found == expected) | (found.isnan() & expected.isnan()))).sum())
        return f"{wrong} of {found.numel()} values are others" if wrong else ""
    found, expected = found.double(), expected.double()
    if not bool(found.isfinite().all()):
        return "not finite"
    scale = max(float(expected.abs().max()), 1e-3)
    errors = (found - expected).abs().reshape(len(found), -1)
    if compared.law == "experts":
        kept = math.ceil(len(errors) * (1 - _STRAY_SHARE))
        errors = errors[errors.amax(dim=1).argsort()[:kept]]
    largest, mean = float(errors.max()), float(errors.mean())
    if largest <= tolerance * scale and mean <= tolerance / 8 * scale:
        return ""
    return f"off by up to {largest:.2g} and {mean:.2g} on average where the largest value is {scale:.2g}"
