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
from fd_core.ops.contract import Array, KVCache, KVShape, Lora, StepInput
from fd_core.ops.weights import LowRank
from fd_core.runner.inputs.inputs import adapter_rows

from fd_gpu_cuda.kernel_table import Kernels
from fd_gpu_cuda.providers import Operation, Untried
from fd_gpu_cuda.trial_steps import RandomLogits, kinds_of_steps, random_step

if TYPE_CHECKING:
    from fd_gpu_cuda.ops import CudaOps


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
