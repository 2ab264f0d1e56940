"""Faults in caches."""

from __future__ import annotations

import threading

import numpy as np

from fd_core.ops.numpy.ops import NumpyKVCache
from tests.testing.wrong.fault import ANSWERED, IN_ENGINES, wrong


def changed(cache, **methods):
    """Replace methods of a cache."""
    cache.__class__ = type("WrongCache", (type(cache),), methods)
    return cache


@wrong("reference", "kv:test_exports_stay_as_they_are_after_others*")
class ExportsRounded:
    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        get = cache.export_blocks
        return changed(cache, export_blocks=lambda self, blocks: get(blocks).astype(np.float16).astype(np.float32))


@wrong("reference", ANSWERED, spreads_to=IN_ENGINES)
class NeverWritesTwice:
    """A slot of the cache keeps its first value, even in a reused block."""

    def write_kv(self, layer, k, v, kv_slots):
        flat = layer.reshape(2, -1, *layer.shape[3:])
        blank = ~flat[0][kv_slots].any(axis=(1, 2))
        super().write_kv(layer, k[blank], v[blank], kv_slots[blank])


@wrong("reference", "cases:test_operation[kv:*")
class SwapsKeysAndValuesOfExports:
    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        get, put = cache.export_blocks, cache.import_blocks
        return changed(
            cache,
            export_blocks=lambda self, blocks: np.ascontiguousarray(get(blocks)[:, :, ::-1]),
            import_blocks=lambda self, blocks, data: put(blocks, data[:, :, ::-1]),
        )


@wrong("reference", "kv:test_blocks_of_another_type_are_refused")
class TakesBlocksOfAnyType:
    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        put = cache.import_blocks
        return changed(cache, import_blocks=lambda self, blocks, data: put(blocks, data.astype(np.float32)))


class _Locked(NumpyKVCache):
    def __init__(self, shape, num_blocks):
        super().__init__(shape, num_blocks)
        self.lock = threading.Lock()

    def import_blocks(self, blocks, data):
        if not self.lock.acquire(timeout=0.5):
            raise RuntimeError("the lock is held")
        super().import_blocks(blocks, data)
        self.lock.release()


@wrong("reference", "kv:test_blocks_of_another_type_are_refused")
class KeepsItsLockAfterAnError:
    def allocate_kv(self, shape, num_blocks):
        return _Locked(shape, num_blocks)


@wrong("reference", "cases:test_operation[kv:*")
class ImportsThroughAPointer:
    """Data is taken to be contiguous; a rank's share of the heads is not."""

    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        put = cache.import_blocks

        def through_a_pointer(self, blocks, data):
            strides = np.empty(data.shape, data.dtype).strides
            put(blocks, np.lib.stride_tricks.as_strided(data, data.shape, strides))

        return changed(cache, import_blocks=through_a_pointer)


@wrong("reference", "scale:test_unloaded_adapters_are_freed")
class NeverFreesAdapters:
    """An arena holds what was prepared, also inside `replaceable_weights`."""

    def prepare_lora(self, parts, outs, *, gated=False):
        made = super().prepare_lora(parts, outs, gated=gated)
        self.__dict__.setdefault("arena", []).append(made)
        return made


@wrong("reference", "lifetime:test_closed_or_sleeping_engine_frees_its_cache_and_weights*")
class HoldsTheCacheOfItsCaptures:
    """The cache given for captures with adapters is kept, so that sleep frees no KV memory once there are adapters."""

    def compile_adapted(self, forward, cache=None, before=None):
        if cache is not None:
            self.captured_cache = cache
        return super().compile_adapted(forward, cache, before)


@wrong("reference", "lifetime:test_closed_or_sleeping_engine_frees_its_cache_and_weights*")
class HoldsItsWeights:
    """Prepared weights are kept for a summary, also those of a model that sleeps or was replaced."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        prepared = super().prepare_linear(parts, biases, gated=gated)
        self.__dict__.setdefault("every", []).append(prepared)
        return prepared


@wrong("reference", "lifetime:test_closed_or_sleeping_engine_frees_its_cache_and_weights*")
class KeepsTheLayerOfItsPlan:
    """A layer is a view of the memory of the whole cache, which a sleeping engine should release."""

    planned = None

    def paged_attention(self, q, layer, heads, step):
        self.planned = step, layer
        return super().paged_attention(q, layer, heads, step)
