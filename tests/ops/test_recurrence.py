"""States of recurrent layers: neither chunks, rejected drafts nor copies of blocks change an output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

from fd_core.config.layer_groups import LayerGroups
from fd_core.errors import ConfigError
from fd_core.ops.contract import KVCache, KVShape, Norm, Ops, Recurrent
from fd_core.ops.native import load_native_ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.torch.ops import TorchOps
from fd_core.testing.models.arrays import on_device, step_input

Floats = Any
PACKS: Final = {
    "numpy": NumpyOps,
    "torch": TorchOps,
    "torch, bfloat16": lambda: TorchOps("bfloat16"),
    "native": lambda: load_native_ops("float32", 2),
    "native, bfloat16": lambda: load_native_ops("bfloat16", 2),
}
TOKENS: Final = 70
DRAFTS: Final = 3


class Layer:
    """One recurrent layer of a pack, with random weights, and the inputs of a request."""

    def __init__(self, ops: Ops, rule: str, dtype: str, block_size: int, *, kv_heads: int = 2) -> None:
        rng = np.random.default_rng(7)

        def vector(*shape: int) -> Any:
            return ops.prepare_vector(rng.normal(size=shape).astype(np.float32))

        each = 5 if rule == "scan" else 2  # so that several threads have heads of values of one of keys
        heads = {"key_heads": 2, "value_heads": 2 * each, "key_dim": 7, "value_dim": 18} if rule != "gate" else {}
        channels = 2 * 14 + 36 * each if heads else 150
        more = {"decay": vector(2 * each), "time_bias": vector(2 * each)} if heads else {}
        if heads:
            more["norm"] = Norm(vector(18 if rule == "delta" else 36 * each), 1e-5)
        if rule == "scan":
            more |= {"skip": vector(2 * each), "time_limits": (0.1, 2.0)}
        bias = None if rule == "delta" else vector(channels)
        self.ops = ops
        self.recurrent = Recurrent(rule, vector(4, channels), bias, **heads, **more)  # type: ignore[arg-type]
        state, journal = self.recurrent.sizes
        self.shape = KVShape(
            1, kv_heads, 16, block_size, dtype, groups=LayerGroups(1, 1, 2), state=state, journal=journal
        )
        self.blocks = -(-TOKENS // block_size)
        self.inputs = rng.normal(size=(TOKENS, self.recurrent.inputs)).astype(np.float32)
        self.rng = np.random.default_rng(3)

    def cache(self) -> KVCache:
        """Return a cache with values in all blocks, which must not be read."""
        cache = self.ops.allocate_kv(self.shape, self.blocks + 2)
        used = np.arange(self.blocks + 2, dtype=np.int32)
        cache.import_blocks(used, cache.export_blocks(used) + cache.export_blocks(used).dtype.type(1))
        return cache

    def compute(self, cache: KVCache, start: int, upto: int, wrong: int = 0) -> Floats:
        """Compute tokens, followed by `wrong` ones that will be rejected; return the outputs of the former."""
        x = np.concatenate([self.inputs[start:upto], self.rng.normal(size=(wrong, self.inputs.shape[1]))])
        table = np.arange(self.blocks + 1, dtype=np.int32)[::-1].copy()
        host = step_input([(len(x), upto + wrong)], self.shape.block_size, table[None])
        step = on_device(self.ops, host)
        given = self.ops.from_host(x.astype(np.float32))
        if self.ops.name == "torch" and self.ops.dtype == "bfloat16":
            given = given.bfloat16()
        return np.array(self.ops.to_host(self.ops.recur(given, self.recurrent, cache.layer(0), step)))[: upto - start]


@pytest.mark.parametrize("rule", ["gate", "delta", "scan"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.in_turn(4)
def test_outputs_do_not_depend_on_chunks_and_rejected_drafts(pack: str, dtype: str, rule: str) -> None:
    ops = PACKS[pack]()
    size = 4 * -(-Layer(ops, rule, dtype, 1).shape.least_block_size(2 if "bfloat16" in pack else 4, DRAFTS) // 4)
    layer = Layer(ops, rule, dtype, size, kv_heads=2)
    whole = layer.compute(layer.cache(), 0, TOKENS)
    for most in (1, 5, 40):
        cache, found, start = layer.cache(), [], 0
        while start < TOKENS:
            upto = min(TOKENS, start + int(layer.rng.integers(1, most + 1)))
            wrong = min(int(layer.rng.integers(0, DRAFTS + 1)), TOKENS - upto)
            outputs = layer.compute(cache, start, upto, wrong)
            if start and most == 5 and len(outputs) - 1 + wrong <= DRAFTS:  # they were drafts, and are rejected
                outputs, upto = outputs[:1], start + 1
            found.append(outputs)
            start = upto
            if most == 1:
                cache, before = layer.cache(), cache
                used = np.arange(layer.blocks + 2, dtype=np.int32)
                cache.import_blocks(used, before.export_blocks(used))
        np.testing.assert_array_equal(np.concatenate(found), whole)
    reference = Layer(NumpyOps(), rule, "auto", 256)
    expected = reference.compute(reference.cache(), 0, TOKENS)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=0.2 if "bfloat16" in pack else 2e-5)


@pytest.mark.parametrize("pack", ["numpy", "native"])
def test_tokens_after_a_state_that_is_not_theirs_are_nan(pack: str) -> None:
    layer = Layer(PACKS[pack](), "gate", "auto", 24)
    cache = layer.cache()
    layer.compute(cache, 0, 30)
    assert np.isnan(layer.compute(cache, 48, 50)).all()


def test_block_sizes_that_waste_memory_of_states_are_refused() -> None:
    ops = load_native_ops("bfloat16", 1)
    shape = KVShape(1, 1, 16, 30, "int8", state=9, journal=4)
    with pytest.raises(ConfigError, match="block_size=30 is not a multiple of 4") as refused:
        ops.allocate_kv(shape, 4)
    assert refused.value.field == "--block-size"
    ops.allocate_kv(replace(shape, block_size=32), 4)
