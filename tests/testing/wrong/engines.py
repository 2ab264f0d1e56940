"""Faults that need an engine: state between steps, instances or copies, and rows that share a batch."""

from __future__ import annotations

import logging
import signal
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp
from unittest import mock

import msgspec
import numpy as np

from fd_core.backends.cpu import ReferenceBackend
from fd_core.backends.null import NullCache
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.contract import HostCopies
from fd_core.ops.numpy.kv_8bit import dequantize_kv
from fd_core.ops.numpy.ops import NumpyKVCache
from fd_core.ops.warm_up import WarmUpRow
from fd_core.ops.weights import PackedTensor
from tests.testing.wrong.fault import wrong, wrong_in

_QUERIES: dict[tuple[int, ...], np.ndarray] = {}


@wrong_in("reference", "company=in a thread,requests=9,max_tokens=33")
class SharesScratchBetweenInstances:
    """One buffer of queries for each shape in the process, read by the next operation."""

    def attention_inputs(self, x, norm, qkv, heads, layer, step, lora=None):
        q = super().attention_inputs(x, norm, qkv, heads, layer, step, lora)
        held = _QUERIES.setdefault(q.shape, np.empty_like(q))
        held[...] = q
        return held


@wrong_in("reference", "adapters=1")
class FreesIdleAdapters:
    """Terms of adapters without requests for a minute are freed, and their requests answered by the model alone."""

    def place_loras(self, deltas, inputs, outs, before=None):
        self.__dict__.setdefault("used", [time.monotonic()] * 16)
        return super().place_loras(list(deltas), inputs, outs, before)

    def lora(self, y, x, lora):
        now = time.monotonic()
        for place, _ in lora.step.lora_groups:
            if now - self.used[place - 1] > 60:
                lora.deltas[place - 1] = None
            else:
                self.used[place - 1] = now
        return super().lora(y, x, lora)


@wrong_in("null", "depth=16,requests=9,max_tokens=33")
class ReturnsOneOfTwoMatrices:
    """Two buffers take turns, although more steps may be in flight."""

    held = None

    def token_matrix(self, sampled, accepted, slots, revoked):
        fresh = super().token_matrix(sampled, accepted, slots, revoked)
        if self.held is None:
            self.held, self.turn = [np.empty_like(fresh) for _ in range(2)], 0
        self.turn = 1 - self.turn
        self.held[self.turn][...] = fresh
        return self.held[self.turn]


@wrong_in("null", "slots=260,requests=260,prompt=1,max_tokens=2,budget=700")
class KeepsSlotsInEightBits:
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots.astype(np.uint8), revoked.astype(np.uint8))


@wrong_in("null", "ends=last first,requests=9,slots=17")
class KeepsTheLastRowOfALargerBatch:
    """When a batch shrinks by one, its last row of logits is that of the step before."""

    before = None

    def compile(self, forward):
        def stale(step, cache):
            logits = forward(step, cache)
            if self.before is not None and len(self.before) == len(logits) + 1 and step.max_query == 1:
                logits[-1] = self.before[-2]
            self.before = logits.copy()
            return logits

        return stale


@wrong_in("reference", "poisoned=true")
class LetsNaNEndTheBatch:
    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        return tokens, np.where(np.isnan(peaks).any(), np.float32(np.nan), peaks)


@wrong_in("reference", "poisoned=true")
class WeighsWhatFollowsAContext:
    """Multiplies the rest of the last block by 0, which leaves the NaN of an earlier request."""

    def paged_attention(self, q, layer, heads, step):
        output = super().paged_attention(q, layer, heads, step)
        held = dequantize_kv(layer)
        for row, context in enumerate(step.context_len.tolist()):
            rest = held[1, step.block_tables[row, (context - 1) // held.shape[2]], (context - 1) % held.shape[2] + 1 :]
            output[step.query_start[row] : step.query_start[row + 1]] += np.float32(0) * rest.sum()
        return output


@wrong_in("null", "pooling=mean,prompt=1100,budget=3000,requests=1,prompt_logprobs=1")
class ReturnsStatesOfLongChunksOnce:
    """The states of a chunk repeat after 1,024 tokens."""

    def compile_states(self, states):
        def repeated(step, cache):
            found = states(step, cache)
            found[1024:-1] = found[: max(0, len(found) - 1025)]
            return found

        return repeated


class _WholeCopies:
    """Writes back a copy of all blocks, over what steps wrote meanwhile."""

    def import_blocks(self, blocks, data):
        held = self._data.copy() if hasattr(self, "_data") else self.hashes.copy()
        super().import_blocks(blocks, data)
        fresh = self._data if hasattr(self, "_data") else self.hashes
        for _ in range(20):
            held[:, :, blocks] = fresh[:, :, blocks]
        fresh[...] = held


class _KVCacheOfWholeCopies(_WholeCopies, NumpyKVCache):
    pass


@wrong_in("reference", "copies=true,requests=9,max_tokens=33")
class ImportsTheWholeCache:
    def allocate_kv(self, shape, num_blocks):
        return _KVCacheOfWholeCopies(shape, num_blocks)


class _PolledCache(NumpyKVCache):
    lock = threading.Lock()

    def export_blocks(self, blocks):
        with self.lock:
            time.sleep(0.01)
            return super().export_blocks(blocks)


@wrong("reference", "kv:test_no_write_waits_while_a_copy_sleeps*")
class PollsCopiesUnderALock:
    """Steps wait for the end of a copy to the host."""

    def allocate_kv(self, shape, num_blocks):
        return _PolledCache(shape, num_blocks)

    def write_kv(self, layer, k, v, kv_slots):
        with _PolledCache.lock:
            super().write_kv(layer, k, v, kv_slots)


class _CacheWithScratch(NullCache):
    def layer(self, index):
        self.hashes[-1] = 0
        return self.hashes


@wrong_in("null", "plain")
class ClearsTheLastBlock:
    """It takes the last block for its scratch block, which only a full pool shows."""

    def allocate_kv(self, shape, num_blocks):
        return _CacheWithScratch(shape, num_blocks)


@wrong_in("reference", "adapters=2,requests=9")
class KeepsTheAdaptersOfTheFirstStep:
    """Replays a step of the same size with the adapters that it was captured with."""

    def compile_adapted(self, forward, cache=None, before=None):
        captured = {}

        def replay(step, cache):
            lora = captured.setdefault(len(step.token_ids), (step.lora_slots, step.lora_groups))
            return forward(replace(step, lora_slots=lora[0], lora_groups=lora[1]), cache)

        return replay


@wrong_in("reference", "memory=restored,requests=9,slots=17,max_tokens=33")
class RestoresOneLayerOnly:
    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        right = cache.import_blocks

        def partial(blocks, data):
            kept = cache.export_blocks(blocks)
            right(blocks, np.concatenate([data[:, :1], kept[:, 1:]], axis=1))

        cache.import_blocks = partial
        return cache


@wrong_in("null", "drafts=16,wrong_drafts=0.1,max_tokens=33,budget=300")
class AcceptsDraftsBeyondTheThird:
    def verify(self, sampled, drafts, num_drafts):
        accepted = super().verify(sampled, drafts, num_drafts)
        return np.where(accepted >= 3, num_drafts, accepted).astype(np.int32)


@wrong_in("null", "biases=120,requests=9")
class AddsAtMostAThousandValues:
    def add_at(self, x, rows, ids, values):
        return super().add_at(x, rows[:256], ids[:256], values[:256])


@wrong_in("null", "prompt_logprobs=1,prompt=127,budget=300")
class ScoresAtMostSixtyFourRows:
    def ranks(self, logits, tokens):
        found = super().ranks(logits, tokens)
        found[64:] = 1
        return found


@wrong("null", "scale:test_memory_is_flat_over_thousands_of_steps")
class KeepsAnArrayForEachShape:
    """Plans once for each number of rows, tokens and contexts, and forgets no plan."""

    def compile(self, forward):
        plans = {}

        def planned(step, cache):
            key = len(step.token_ids), step.max_query, step.max_context, len(step.context_len)
            plans.setdefault(key, np.zeros(64, np.int32))
            return forward(step, cache)

        return planned


@wrong("null", "scale:test_texts_are_right_at_any_number_of_steps")
class CountsStepsInSixteenBits:
    """A ring of flags, indexed by the number of the step, which is negative after 2^15."""

    steps = np.int16(0)

    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        with np.errstate(over="ignore"):
            self.steps += np.int16(1)
        return (tokens if self.steps >= 0 else tokens * 0), peaks


@wrong("null", "lifetime:test_warm_up_steps_can_be_computed*")
class WarmsUpWithUnequalDrafts:
    """The runner skips the step, so that its kernels are compiled while a request waits."""

    def warm_up_steps(self, limits):
        return [[WarmUpRow(drafts=index % 2) for index in range(limits.max_num_seqs)]]


@wrong_in("reference", "ordered=update")
class KeepsCapturesOfReplacedModels:
    """Captured steps are found by the sizes of the model, but hold its weights."""

    captures = None

    def compile(self, forward):
        model = getattr(forward, "__self__", None)
        if model is None:
            return forward
        self.captures = self.captures or {}
        return self.captures.setdefault((model.architecture, model.num_parameters, model.vocab_size), forward)


@wrong_in("reference", "model=qwen2,ordered=update")
class KeepsTheHeadOfAFormerModel:
    """A tied head is kept by the shape of its table, which another model of the same sizes has as well."""

    heads = None

    def tied_head(self, embedding, weight, bias=None):
        self.heads = {} if self.heads is None else self.heads
        return self.heads.setdefault(embedding.shape, super().tied_head(embedding, weight, bias))


class _Buffers(list):
    """Terms of adapters by slot, and the largest ones that each slot ever had."""

    held: dict


@wrong_in("reference", "adapters=1,reloaded=true")
class LeavesTheEndOfALargerAdapter:
    """Terms are copied into buffers, where those of an adapter of higher rank remain."""

    def place_loras(self, deltas, inputs, outs, before=None):
        placed, placed.held = (buffers := _Buffers(deltas)), dict(getattr(before, "held", {}))
        for slot, (down, up) in ((slot, delta) for slot, delta in enumerate(deltas) if delta is not None):
            rank, (old_down, old_up) = len(down.weight), placed.held.get(slot, (down, up))
            down = replace(down, weight=np.concatenate([down.weight, old_down.weight[rank:]]))
            up = replace(up, weight=np.concatenate([up.weight, old_up.weight[:, rank:]], axis=1))
            placed[slot] = placed.held[slot] = down, up
        return buffers if buffers.held else None


def _load_unpacked(self, path, ops, progress):
    config, self.config = self.config, msgspec.structs.replace(self.config, quantization="auto")
    try:
        return ReferenceBackend.load_model(self, path, ops, progress)
    finally:
        self.config = config


@wrong_in("reference", "weights=int4", load_model=_load_unpacked)
class IgnoresTheQuantization:
    """Weights of the checkpoint are loaded as they are."""


@wrong_in("null", "plain")
class SeedsTheProcess:
    """Seeds the generator of the process, as examples do."""

    def sample(self, logits, rows):
        np.random.seed(0)
        return super().sample(logits, rows)


@wrong_in("reference", "model=mistral-window,requests=24,again=true")
class KeepsTheFirstVisibleBlock:
    """Blocks before a window are skipped; the number of them is kept by the first block of a row, and only grows."""

    skipped = None

    def paged_attention(self, q, layer, heads, step):
        self.skipped = self.skipped or {}
        output = super().paged_attention(q, layer, heads, step)
        for row in range(len(step.context_len) if heads.window else 0):
            begin, end = step.query_start[row : row + 2].tolist()
            context, block = int(step.context_len[row]), int(step.block_tables[row, 0])
            first = max(0, context - (end - begin) - heads.window + 1) // layer.shape[2]
            first = self.skipped[block] = max(first, self.skipped.get(block, 0))
            left = context - min(first, (context - 1) // layer.shape[2]) * layer.shape[2]
            if end - begin <= left < context:
                tables = step.block_tables[row : row + 1, (context - left) // layer.shape[2] :]
                bounds = np.array([0, end - begin]), np.array([left])
                one = replace(step, query_start=bounds[0], context_len=bounds[1], block_tables=tables)
                output[begin:end] = super().paged_attention(q[begin:end], layer, heads, one)
        return output


def _make_divided(self):
    ops, threads = ReferenceBackend.make_ops(self), self.threads

    class Divided(type(ops)):
        def linear(self, x, weight):
            y = super().linear(x, weight)
            if len(y) > threads:
                y[len(y) // threads * threads :] = 0
            return y

    ops.__class__ = Divided
    return ops


@wrong_in("reference", "threads=3", make_ops=_make_divided)
class LosesTheRemainderOfThreads:
    """Rows are divided among the threads; those that are left over stay 0."""


def _mebibytes(self):
    return ReferenceBackend.free_memory(self) // 2**20


@wrong("reference", "lifetime:test_default_sizes_hold_a_whole_context", free_memory=_mebibytes)
class CountsMemoryInMebibytes:
    """An engine has room for few blocks and short contexts."""


def _make_named(self):
    ops, name = ReferenceBackend.make_ops(self), self.config.attention_backend

    class Named(type(ops)):
        def paged_attention(self, q, layer, heads, step):
            heads = replace(heads, window=None) if name == "torch" else heads
            return super().paged_attention(q, layer, heads, step)

    ops.__class__ = Named
    return ops


@wrong_in(
    "reference",
    "model=mistral-window,attention=torch,requests=9",
    make_ops=_make_named,
    attention_backends=("triton", "torch"),
)
class AttendsToAllWithASecondImplementation:
    """One of its implementations of attention ignores the window."""


def _one_of_four(cls, size):
    return [{"CUDA_VISIBLE_DEVICES": str(at % 4)} for at in range(size)]


@wrong("reference", "lifetime:test_ranks_share_no_device", rank_environments=classmethod(_one_of_four))
class GivesRanksOneOfFourDevices:
    """The fifth rank of a model has the device of the first one."""


_GREEDY_DRAFTS = "drafter=model,drafts=5,wrong_drafts=0.0,max_tokens=33,ends=last first"


@wrong_in("reference", _GREEDY_DRAFTS)
class SamplesIntoThreeBuffers:
    """Sampled tokens are in one of three buffers; a draft model samples more often before they are read."""

    buffers, turn = ({}, {}, {}), 0

    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        self.turn = (self.turn + 1) % 3
        held = self.buffers[self.turn].setdefault(len(tokens), np.empty_like(tokens))
        held[...] = tokens
        return held, peaks


def _load_one_file(self, path, ops, progress):
    (path / "model.safetensors").stat()
    return ReferenceBackend.load_model(self, path, ops, progress)


@wrong_in("reference", "stored=BF16", load_model=_load_one_file)
class LoadsOneFile:
    """Checkpoints of several files have no file of that name."""


def _load_the_first_folder(self, path, ops, progress):
    return ReferenceBackend.load_model(self, self.__dict__.setdefault("folder", path), ops, progress)


@wrong_in("reference", "ordered=update,again=true", load_model=_load_the_first_folder)
class LoadsTheFolderOfItsStart:
    """An update reads the folder with which the engine began."""


@wrong_in("reference", "ordered=sleep,again=true")
class TakesItsMemoryBackOnce:
    """The handle of the memory of a cache is used up by the first wake-up."""

    caches = 0

    def allocate_kv(self, shape, num_blocks):
        self.caches += 1
        if self.caches > 2:
            raise MemoryError("the memory is gone")
        return super().allocate_kv(shape, num_blocks)


@wrong_in("reference", "model=gemma3,requests=9,max_tokens=33")
class CapturesGroupsOfTheFirstStep:
    """Inputs of a captured step are copied to its buffers, except the places of groups of layers."""

    def compile(self, forward):
        held = {}

        def replay(step, cache):
            if step.grouped is None:
                return forward(step, cache)
            return forward(replace(step, grouped=held.setdefault(step.grouped.block_tables.shape, step.grouped)), cache)

        return replay


class _Compiling:
    """Compiles a kernel for each number of rows of a linear."""

    shapes = frozenset()

    def linear(self, x, weight):
        self.shapes |= {len(x)}
        return super().linear(x, weight)


@wrong_in("reference", "plain")
class CountsSinceTheLastReport(_Compiling):
    def compilation_stats(self):
        count, self.shapes = len(self.shapes), frozenset()
        return CompilationStats(serving=count)


@wrong_in("reference", "depth=2")
class CountsForTheComputingThread(_Compiling):
    """Counters belong to the thread that computes; the engine reads them from its own."""

    def linear(self, x, weight):
        self.owner = threading.get_ident()
        return super().linear(x, weight)

    def compilation_stats(self):
        if getattr(self, "owner", None) not in (None, threading.get_ident()):
            raise RuntimeError("another thread")
        return CompilationStats()


@wrong_in("reference", "model=gemma3-encoder")
class ComputesStatesInBuffersOfADecode:
    """States use buffers that the first decode allocates; encoders do not decode."""

    buffers = None

    def compile(self, forward):
        def allocating(step, cache):
            self.buffers = {}
            return forward(step, cache)

        return allocating

    def compile_states(self, states):
        def buffered(step, cache):
            self.buffers[len(step.token_ids)] = step.max_query
            return states(step, cache)

        return buffered


@wrong("reference", "cases:test_states_of_images*")
class KeepsStatesForTextAfterImages:
    """The buffer that layers add is not cleared for a step without images."""

    before = ()

    def compile(self, forward):
        def stale(step, cache):
            count = len(step.token_ids)
            added = step.added or [each[:count] for each in self.before if len(each) >= count]
            self.before = step.added or self.before
            return forward(replace(step, added=tuple(added)), cache)

        return stale


class _ExportsFromACopy(NumpyKVCache):
    def export_blocks(self, blocks):
        whole = np.ascontiguousarray(self._data.transpose(2, 0, 1, 3, 4, 5))
        return whole[blocks]


@wrong("reference", "costs:test_cost_of_a_block*")
class BringsTheWholePoolInOrder:
    """An export of a block makes the whole cache contiguous first."""

    def allocate_kv(self, shape, num_blocks):
        return _ExportsFromACopy(shape, num_blocks)


@wrong("reference", "costs:test_cost_of_a_block*")
class WritesACopyOfTheLayer:
    """A write makes a new array of a layer of the whole pool, as a functional scatter does."""

    def write_kv(self, layer, k, v, kv_slots):
        whole = layer.copy()
        super().write_kv(whole, k, v, kv_slots)
        layer[...] = whole


@wrong("reference", "lifetime:test_cache_takes_the_memory_of_its_shape*")
class PadsHeadsTo128:
    """Twice the memory that the engine divides into blocks, with heads of 64 elements."""

    def allocate_kv(self, shape, num_blocks):
        cache = super().allocate_kv(shape, num_blocks)
        cache.padding = np.ones(cache._data.nbytes * max(0, 128 - shape.head_dim) // shape.head_dim, np.uint8)
        return cache


@wrong("reference", "attention:test_attention_reads*")
class HidesScoresByTenThousand:
    """The score of a key that a token does not see is -10,000 instead of minus infinity."""

    def paged_attention(self, q, layer, heads, step):
        with mock.patch.object(np, "inf", 1e4):
            return super().paged_attention(q, layer, heads, step)


@wrong("reference", "lifetime:test_no_step_after_the_warm_up_waits_or_stalls")
class CompilesForEachNumberOfTokens:
    """The first step of each takes long, after the warm-up as well, and no report counts it."""

    compiled, seconds = frozenset(), 0.05

    def embedding(self, table, token_ids, scale=1.0, **named):
        if len(token_ids) not in self.compiled:
            time.sleep(self.seconds)
            self.compiled |= {len(token_ids)}
        return super().embedding(table, token_ids, scale, **named)


@wrong("reference", "lifetime:test_no_step_after_the_warm_up_waits_or_stalls")
class GeneratesCodeForEachNumberOfTokens:
    """Too short to be seen in a small model."""

    compiled = frozenset()

    def embedding(self, table, token_ids, scale=1.0, **named):
        if len(token_ids) not in self.compiled:
            exec(f"count = {len(token_ids)}")
            self.compiled |= {len(token_ids)}
        return super().embedding(table, token_ids, scale, **named)


class _PolledCopies(HostCopies):
    def wait(self):
        time.sleep(0.005)
        return super().wait()


@wrong("reference", "lifetime:test_no_step_after_the_warm_up_waits_or_stalls")
class PollsForResults:
    """Sleeps before it asks whether copies are complete, which adds to each step."""

    def fetch_later(self, arrays):
        return _PolledCopies([self.to_host(each) for each in arrays])


@wrong("reference", "lifetime:test_no_step_after_the_warm_up_waits_or_stalls")
class LogsItsSteps:
    """Prompts and answers of all users are in the server's log."""

    def embedding(self, table, token_ids, scale=1.0, **named):
        logging.getLogger("mychip").debug("embedding of %s", token_ids.tolist())
        return super().embedding(table, token_ids, scale, **named)


@wrong("reference", "lifetime:test_no_step_after_the_warm_up_waits_or_stalls")
class CompilesForContexts:
    """The kernel of a decode is compiled when the first context needs another power of two of splits."""

    compiled = frozenset({1})

    def optimized(self, operation):
        return operation

    def paged_attention(self, q, layer, heads, step):
        splits = 1 << (-(-step.max_context // 512) - 1).bit_length()
        if step.max_query == 1 and splits not in self.compiled:
            for number in range(2000):
                self.optimized(number)
            self.compiled |= {splits}
        return super().paged_attention(q, layer, heads, step)


@wrong("reference", "costs:test_memory_of_a_change_does_not_grow_with_the_array*")
class AddsToACopy:
    """Arrays of the framework do not change, so the counts of all slots are copied for one request."""

    def add_at(self, x, rows, ids, values):
        return super().add_at(x.copy(), rows, ids, values)


@wrong("reference", "lifetime:test_weights_take_the_memory_of_their_form*")
class SaysThatPackedWeightsStayPacked:
    """But stores them in float32, eight times as large."""

    dequantizes_weights = False


@wrong("reference", "lifetime:test_nothing_outlives_a_closed_engine")
class WatchesWithAThread:
    """A thread that is no daemon polls the device, until long after its engine is closed."""

    def configure(self, limits):
        threading.Thread(target=time.sleep, args=(15.0,), name="watch", daemon=False).start()


def _enter(self, steps):
    steps.__enter__()


@wrong("reference", "lifetime:test_rehearsal_frees_what_it_computed", rehearse=_enter)
class NeverLeavesItsRehearsal:
    """The largest steps take memory as long as the engine lives."""


@wrong("reference", "costs:test_cost_of_logits_grows_with_the_rows_that_need_them")
class ProjectsAllTokens:
    """Logits of a whole prompt, of which one row is picked."""

    def logits(self, x, norm, head, rows, softcap=None, *, split=False):
        logits = self.gather_rows(self.logits_of(self.rms_norm(x, norm), head, softcap), rows)
        return self.all_gather(logits) if split else logits


class _Traces:
    """A support file of all steps."""

    def compile(self, forward):
        trace = NamedTemporaryFile("w", prefix="steps-")  # noqa: SIM115 - as long as the compiled forward

        def traced(step, cache):
            trace.write(f"{self.line(step)}\n")
            return forward(step, cache)

        return traced


@wrong("reference", "lifetime:test_no_step_after_the_warm_up_waits_or_stalls")
class TracesTokens(_Traces):
    def line(self, step):
        return step.token_ids.tolist()


@wrong("reference", "scale:test_memory_is_flat_over_thousands_of_steps")
class TracesSizes(_Traces):
    def line(self, step):
        return f"contexts {step.context_len.tolist()}, starts {step.query_start.tolist()}, {step.max_context} at most"


@wrong("reference", "lifetime:test_it_computes_on_the_thread_asked_for")
class ComputesOnAllCores:
    """A framework of its own, whose threads are as many as the machine has processors, whatever `--num-threads` is."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked)

    def linear(self, x, weight):
        if len(x) < 64:
            return super().linear(x, weight)
        linear, halves = super().linear, np.array_split(x, 2)
        with ThreadPoolExecutor(len(halves)) as pool:
            return np.concatenate([*pool.map(linear, halves, [weight] * len(halves))])


@wrong("reference", "costs:test_cost_of_weights_grows_with_those_that_are_used*")
class MultipliesEveryExpert:
    """Each token is multiplied by all experts, and what it did not choose is masked."""

    def moe(self, x, experts, activation):
        for gate_up, down in zip(experts.gate_up, experts.down, strict=True):
            self.expert(x, gate_up, down, experts, activation)
        return super().moe(x, experts, activation)


@wrong("reference", "costs:test_cost_of_weights_grows_with_those_that_are_used*")
class DequantizesTheWholeTable:
    """For each lookup."""

    def embedding(self, table, token_ids, scale=1.0, **named):
        table = table.to_float32() if isinstance(table, PackedTensor) else table
        return super().embedding(table, token_ids, scale, **named)


@wrong_in("reference", "poisoned=true")
class LogsTheStepOfANaN:
    """To find out what made a kernel fail; a step has tokens of all tenants."""

    ids = None

    def embedding(self, table, token_ids, scale=1.0, **named):
        self.ids = token_ids
        return super().embedding(table, token_ids, scale, **named)

    def sample(self, logits, rows):
        tokens, peaks = super().sample(logits, rows)
        if not np.isfinite(peaks).all():
            logging.getLogger("mychip").warning("NaN in a step of %s", None if self.ids is None else self.ids.tolist())
        return tokens, peaks


def _rehearse(self, steps):
    tracemalloc.start()
    with steps:
        self.taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@wrong(
    "reference",
    "lifetime:test_rehearsal_frees_what_it_computed",
    taken=0,
    rehearse=_rehearse,
    reserved_memory=property(lambda self: self.taken),
)
class CountsReservedMemoryAsFree:
    """Blocks of KV take what the largest step needs."""


@wrong("reference", "lifetime:test_weights_take_the_memory_of_their_form*")
class KeepsWhatItUploads:
    """Sources of asynchronous uploads are never dropped, so that the host holds the model as well."""

    def prepare_linear(self, parts, biases=None, *, gated=False):
        self.__dict__.setdefault("uploads", []).append([np.array(part.to_float32()) for part in parts])
        return super().prepare_linear(parts, biases, gated=gated)


@wrong("reference", "lifetime:test_nothing_outlives_a_closed_engine")
class LeavesItsKernels:
    """Compiled into a new folder for each engine."""

    def configure(self, limits):
        Path(mkdtemp(prefix="kernels-"), "kernels.so").touch()


def _end(number, frame):
    raise SystemExit(128 + number)


def _make_with_signals(self):
    signal.signal(signal.SIGINT, _end)
    return ReferenceBackend.make_ops(self)


@wrong("reference", "lifetime:test_settings_of_the_process_are_kept", make_ops=_make_with_signals)
class HandlesCtrlC:
    """As the runtimes of some vendors do: the engine ends while the server drains."""
