"""Postprocessors with one fault each: a few lines on top of a right one, and the case that names the fault."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import torch

from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID
from tests.testing.witnesses import Witnesses

WRONG = Witnesses()
breaks = WRONG.breaks
MANY = "matrix:slots=3,k=1,steps=9000,before=shrinking,order=kept,revoked=one"


# Contents of a matrix -----------------------------------------------------------------------------------------


@breaks("1.2", "matrix")
class AcknowledgesNothingWithoutRows(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked if len(slots) else revoked[:0])


@breaks("1.2", "matrix")
class AcknowledgesTheFirstRevocationOnly(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[:1])


@breaks("1.3", "matrix")
class ReleasesInEveryColumn(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        matrix[revoked] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1.2", "matrix")
class TakesIdleForRevoked(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        idle = np.setdiff1d(np.arange(self.limits.max_num_seqs), slots)
        return super().token_matrix(sampled, accepted, slots, idle)


@breaks("1", "flight:test_few_numbers_of_rows_are_compiled")
class CompilesEachNumberOfRows(NumpyPostprocess):
    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._compiled = set()

    def token_matrix(self, sampled, accepted, slots, revoked):
        if len(slots) not in self._compiled:
            self._compiled.add(len(slots))
            end = time.thread_time() + 0.05
            while time.thread_time() < end:
                pass
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1.1", "matrix")
class DropsRowsNextToARevocation(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        if len(revoked):
            sampled, accepted, slots = sampled[:0], accepted[:0], slots[:0]
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1.1", "matrix")
class DeliversRejectedDrafts(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, np.full_like(accepted, self.limits.max_drafts), slots, revoked)


@breaks("1.1", "matrix")
class DeliversAcceptedDraftsOnly(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted - 1, slots, revoked)


@breaks("1.1", "matrix")
class IgnoresTokenZero(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(np.where(sampled > 0, sampled, EMPTY_TOKEN_ID), accepted, slots, revoked)


@breaks("1.1", "matrix")
class RoundsThroughFloats(NumpyPostprocess):
    """A kernel library without integers: float32 holds them up to 2^24."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled.astype(np.float32).astype(np.int64) % 2**31, accepted, slots, revoked)


@breaks("1.1", "matrix")
class WritesRowsInOrder(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, np.sort(slots), revoked)


@breaks("1.1", "matrix")
class WritesATileOf32(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled[:32], accepted[:32], slots[:32], revoked)


@breaks("1.2", "matrix")
class LosesTheLastSlot(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[revoked < max(32, self.limits.max_num_seqs - 1)])


@breaks("1.1", "matrix:slots=65536,k=16,rows=all-but-one,revoked=rest")
class CountsCellsInSixteenBits(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        matrix.reshape(-1)[2**16 :] = EMPTY_TOKEN_ID
        matrix[revoked, 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1.2", "flight:test_an_ordinary_day_of_a_server[large]")
class StoresARevokedSlotInAByte(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[revoked < 256])


@breaks("1.1", "matrix")
class StoresSixDrafts(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, np.minimum(accepted, 6), slots, revoked)


@breaks("1", "flight:test_an_ordinary_day_of_a_server[defaults]")
class SavesEachHour(NumpyPostprocess):
    """Waits in the first step of each hour until the disk has its counters."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self.saved = time.monotonic()

    def token_matrix(self, sampled, accepted, slots, revoked):
        if time.monotonic() - self.saved > 3600:
            self.saved = time.monotonic()
            os.sync()
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("8", "flight:test_an_ordinary_day_of_a_server[defaults]")
class LogsARow(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        logging.getLogger("post").debug("row 0: %s", sampled[:1].tolist())
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "matrix")
class OmitsIdleSlots(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        return matrix[np.union1d(slots, revoked).astype(np.int32)]


# State between steps ------------------------------------------------------------------------------------------


class Rotating(NumpyPostprocess):
    """Writes into several buffers in turn."""

    buffers = 1

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._kept, self._turn = [np.empty((limits.max_num_seqs, 1 + limits.max_drafts), np.int32)] * 1, 0
        self._kept += [self._kept[0].copy() for _ in range(self.buffers - 1)]

    def token_matrix(self, sampled, accepted, slots, revoked):
        self._turn = (self._turn + 1) % self.buffers
        matrix = self._kept[self._turn]
        matrix[:] = super().token_matrix(sampled, accepted, slots, revoked)
        return matrix


@breaks("1.1", "matrix")
class ReusesItsMatrix(Rotating):
    pass


@breaks("1.1", "matrix")
class LeavesIdleRowsUnwritten(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = np.empty((self.limits.max_num_seqs, sampled.shape[1]), np.int32)
        right = super().token_matrix(sampled, accepted, slots, revoked)
        matrix[slots], matrix[revoked] = right[slots], right[revoked]
        return matrix


@breaks("1.2", "matrix")
class ReleasesOneStepLate(NumpyPostprocess):
    late = np.empty(0, np.int32)

    def token_matrix(self, sampled, accepted, slots, revoked):
        now, self.late = self.late, revoked.copy()
        return super().token_matrix(sampled, accepted, slots, np.setdiff1d(now, slots))


@breaks("1.[12]", "matrix")
class ReplaysTheStepOfItsShape(NumpyPostprocess):
    """A graph that is replayed with the inputs of its capture."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._captured = {}

    def token_matrix(self, *given):
        shapes = tuple(each.shape for each in given)
        return super().token_matrix(*self._captured.setdefault(shapes, given))


@breaks("1.2", "matrix")
class CompilesANumberOfRevocations(NumpyPostprocess):
    """A function for each number of rows, which is compiled for the revocations of its first step."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._compiled = {}

    def token_matrix(self, sampled, accepted, slots, revoked):
        compute = super().token_matrix

        def make(count):
            return lambda *rows, revoked: compute(*rows, revoked[:count])

        made = self._compiled.setdefault(len(slots), make(len(revoked)))
        return made(sampled, accepted, slots, revoked=revoked)


@breaks("8", "matrix")
class WritesIntoTheSampledTokens(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        sampled[np.arange(sampled.shape[1]) > accepted[:, None]] = EMPTY_TOKEN_ID
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1.1", "matrix")
class ReturnsTheSampledTokens(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        whole = len(slots) == self.limits.max_num_seqs and (slots == np.arange(len(slots))).all()
        if whole and (accepted == self.limits.max_drafts).all():
            return sampled
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "device:test_nothing_of_a_step_is_kept")
class KeepsEveryMatrix(NumpyPostprocess):
    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._all = []

    def token_matrix(self, sampled, accepted, slots, revoked):
        self._all.append(super().token_matrix(sampled, accepted, slots, revoked))
        return self._all[-1]


# Place of computation -----------------------------------------------------------------------------------------


@breaks("1", "device:test_the_host_waits_for_nothing[3]")
class ReturnsInt64(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked).long()


@breaks("1", "device:test_its_own_arrays_are_on_the_device")
class KeepsItsColumnsOnTheHost(TorchPostprocess):
    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._columns = torch.from_numpy(np.arange(1 + limits.max_drafts, dtype=np.int32))

    def token_matrix(self, sampled, accepted, slots, revoked):
        delivered = self._columns[: sampled.shape[1]] <= accepted[:, None]
        return super().token_matrix(torch.where(delivered, sampled, EMPTY_TOKEN_ID), accepted, slots, revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[3]")
class GetsTheRowsFromThePack(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(self.ops.to_host(sampled), accepted, slots, revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[0]")
class SelectsRowsByAMask(TorchPostprocess):
    """The number of rows that a mask selects is known only after the device has counted them."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        kept = accepted >= 0
        return super().token_matrix(sampled[kept], accepted[kept], slots[kept], revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[3]")
class WritesAtSlotsOneByOne(TorchPostprocess):
    """Reads no number explicitly: indexing by an array with one number does so."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = torch.full((self.limits.max_num_seqs, sampled.shape[1]), EMPTY_TOKEN_ID, dtype=torch.int32)
        for row in range(len(slots)):
            delivered = torch.arange(sampled.shape[1]) <= accepted[row]
            matrix[slots[row], :] = torch.where(delivered, sampled[row], EMPTY_TOKEN_ID)
        matrix[revoked.long(), 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1", "flight:test_it_is_made_on_one_thread_and_computes_on_another")
class BelongsToAThread(NumpyPostprocess):
    """Its library keeps a context for each thread."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._context = threading.local()
        self._context.width = 1 + limits.max_drafts

    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled[:, : self._context.width], accepted, slots, revoked)


# Sizes, history and other instances: the part `matrix` -----------------------------------------------------------


@breaks("1.1", "matrix:steps=17,before=kept,counted=65536")
class CountsStepsInAClosure(NumpyPostprocess):
    """Takes the step with number 0 for a warm-up, also after 2^16 steps; its count is in no attribute."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        count = itertools.count(1)
        self._warms_up = lambda: next(count) % 2**16 == 0

    def token_matrix(self, sampled, accepted, slots, revoked):
        if self._warms_up():
            sampled, accepted, slots = sampled[:0], accepted[:0], slots[:0]
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1.1", "matrix")
class ComparesStepsInThirtyTwoBits(NumpyPostprocess):
    """An event counter that overflows after 2^31 steps, a month of serving."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self.events = {"queued": 0}

    def token_matrix(self, sampled, accepted, slots, revoked):
        self.events["queued"] += 1
        if self.events["queued"] >= 2**31:
            sampled, accepted, slots = sampled[:0], accepted[:0], slots[:0]
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1.[12]", "matrix")
class SharesScratchMemory(NumpyPostprocess):
    """Memory of the class, in which each step is built before it is copied out."""

    scratch: ClassVar[dict[tuple[int, ...], np.ndarray]] = {}

    def token_matrix(self, sampled, accepted, slots, revoked):
        scratch = self.scratch.setdefault(sampled.shape[1:], np.empty((2**16, sampled.shape[1]), np.int32))
        part = scratch[: self.limits.max_num_seqs]
        part.fill(EMPTY_TOKEN_ID)
        part[slots] = np.where(np.arange(sampled.shape[1]) <= accepted[:, None], sampled, EMPTY_TOKEN_ID)
        part[revoked, 0] = PREEMPTED_TOKEN_ID
        return part.copy()


@breaks("1.1", "matrix")
class KeepsTheLastRowOfALargerBatch(NumpyPostprocess):
    """A buffer of rows that is cleared only if more than one row is gone."""

    rows = None

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        if self.rows is not None and len(self.rows[0]) == len(slots) + 1 and len(slots):
            slot = self.rows[0][-1]
            if slot not in slots and slot not in revoked:
                matrix[slot, 0] = self.rows[1][-1, 0]
        self.rows = slots.copy(), sampled.copy()
        return matrix


@breaks("1.[13]", "matrix:slots=32769,rows=all")
class StoresSlotsInSixteenBits(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots.astype(np.int16), revoked)


@breaks("1.2", "matrix")
class FindsRevocationsInRejectedDrafts(NumpyPostprocess):
    """Marks a row as released if any of its cells has that value, also one that is not delivered."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        matrix[slots[(sampled == PREEMPTED_TOKEN_ID).any(axis=1)], 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1.1", "matrix")
class StopsAtANegativeDraft(NumpyPostprocess):
    """Delivers drafts up to the first negative one instead of counting the accepted ones."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        negative = sampled < 0
        length = np.where(negative.any(axis=1), negative.argmax(axis=1) - 1, accepted)
        return super().token_matrix(sampled, length, slots, revoked)


@breaks("1.1", "matrix")
class TrustsTheMemoryOfItsInputs(NumpyPostprocess):
    """Keeps the mask of delivered drafts for the memory that counts them."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._masks = {}

    def token_matrix(self, sampled, accepted, slots, revoked):
        key = accepted.ctypes.data, accepted.shape, sampled.shape
        if accepted.base is None:
            return super().token_matrix(sampled, accepted, slots, revoked)
        return super().token_matrix(sampled, self._masks.setdefault(key, accepted.copy()), slots, revoked)


@breaks("1.[123]", "matrix:slots=33,tables=overwritten")
class MarksRows(NumpyPostprocess):
    """Keeps a table without clearing it: a row counts if it has the mark of the step, which repeats."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._rows = np.zeros((limits.max_num_seqs, 1 + limits.max_drafts), np.int32)
        self._marks, self._steps = np.full(limits.max_num_seqs, -1), 0

    def token_matrix(self, sampled, accepted, slots, revoked):
        self._steps = (self._steps + 1) % 2**16
        right = super().token_matrix(sampled, accepted, slots, revoked)
        written = np.concatenate([slots, revoked])
        self._rows[written], self._marks[written] = right[written], self._steps
        return np.where((self._marks == self._steps)[:, None], self._rows, np.int32(EMPTY_TOKEN_ID))


@breaks("1", "flight:test_nothing_remains_of_many_different_steps")
class CachesLayouts(NumpyPostprocess):
    """Keeps the inverse of each assignment of slots that it has seen, because batches rarely change."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._layouts = {}

    def token_matrix(self, sampled, accepted, slots, revoked):
        key, width = slots.tobytes(), sampled.shape[1]
        if key not in self._layouts:
            self._layouts[key] = inverse = np.full(self.limits.max_num_seqs, len(slots))
            inverse[slots] = np.arange(len(slots))
        rows = np.where(np.arange(width) <= accepted[:, None], sampled, EMPTY_TOKEN_ID).astype(np.int32)
        matrix = np.concatenate([rows, np.full((1, width), EMPTY_TOKEN_ID, np.int32)])[self._layouts[key]]
        matrix[revoked, 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1", "flight:test_cost_on_the_host_does_not_grow_with_the_rows")
class LooksForEachSlot(NumpyPostprocess):
    """Searches the rows for each slot: quadratic."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = np.full((self.limits.max_num_seqs, sampled.shape[1]), EMPTY_TOKEN_ID, np.int32)
        for slot in range(self.limits.max_num_seqs):
            for row in np.flatnonzero(slots == slot):
                matrix[slot, : 1 + accepted[row]] = sampled[row, : 1 + accepted[row]]
        matrix[revoked, 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1", "flight:test_it_is_freed_with_its_runner")
class IsKeptByACache(NumpyPostprocess):
    """A cache on a method holds the instance, and with it the pack and its KV cache, after a restart."""

    @cache  # noqa: B019 - the fault
    def columns(self, width):
        return np.arange(width)

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = np.full((self.limits.max_num_seqs, sampled.shape[1]), EMPTY_TOKEN_ID, np.int32)
        matrix[slots] = np.where(self.columns(sampled.shape[1]) <= accepted[:, None], sampled, EMPTY_TOKEN_ID)
        matrix[revoked, 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1", "matrix")
class TakesTheLimitsOfTheLargestInstance(NumpyPostprocess):
    most: ClassVar[list[int]] = [0]

    def __init__(self, ops, limits):
        self.most[0] = max(self.most[0], limits.max_num_seqs)
        super().__init__(ops, msgspec.structs.replace(limits, max_num_seqs=self.most[0]))


@breaks("1.1", "matrix:memory=strided")
class AssumesContiguousTokens(NumpyPostprocess):
    """A kernel that is given the address of the tokens, and not their strides."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        flat = np.lib.stride_tricks.as_strided(sampled, (sampled.size,), (4,))
        return super().token_matrix(flat.reshape(sampled.shape), accepted, slots, revoked)


@breaks("1.1", MANY)
class RotatesFiveHundredMatrices(Rotating):
    """As many as an observer's queue may hold."""

    buffers = 512


@breaks("1", MANY)
class KeepsAMatrixOfThousandSteps(TorchPostprocess):
    kept: ClassVar[list[torch.Tensor]] = []
    steps = 0

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        type(self).steps += 1
        if self.steps % 1000 == 0:
            self.kept.append(matrix.clone())
        return matrix


@breaks("8", "flight:test_threads_are_left_to_the_backend")
class ComputesOnOneThread(TorchPostprocess):
    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        torch.set_num_threads(1)


@breaks("1", "matrix:test_matrix_on_each_framework_that_it_serves")
class ServesTorchAndReadsANumber(NumpyPostprocess):
    """Does not wait on numpy, but on the second of its frameworks."""

    serves = ("numpy", "torch")

    def token_matrix(self, sampled, accepted, slots, revoked):
        if not isinstance(sampled, torch.Tensor):
            return super().token_matrix(sampled, accepted, slots, revoked)
        most = accepted.max().item() if len(accepted) else 0
        return TorchPostprocess.token_matrix(self, sampled, accepted.clamp(max=most), slots, revoked)


@breaks("1.1", "matrix")
class ServesTorchInTilesOfSixteen(NumpyPostprocess):
    """Serves two frameworks; on the second one, a kernel for three drafts computes whole tiles of rows."""

    serves = ("numpy", "torch")

    def token_matrix(self, sampled, accepted, slots, revoked):
        if not isinstance(sampled, torch.Tensor):
            return super().token_matrix(sampled, accepted, slots, revoked)
        count = len(slots) // 16 * 16 if sampled.shape[1] == 4 and len(slots) > 16 else len(slots)
        return TorchPostprocess.token_matrix(self, sampled[:count], accepted[:count], slots[:count], revoked)


@breaks("1.1", "matrix")
class StoresSmallVocabulariesInSixteenBits(NumpyPostprocess):
    """The sign takes one of the bits."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        return matrix.astype(np.int16).astype(np.int32) if self.limits.vocab_size <= 2**16 else matrix


@breaks("1.1", "matrix")
class HasRoomForRowsWithDrafts(NumpyPostprocess):
    """The budget of a step has room for more rows if they have no drafts."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        rows = self.limits.max_num_batched_tokens // (1 + self.limits.max_drafts)
        return super().token_matrix(sampled[:rows], accepted[:rows], slots[:rows], revoked)


@breaks("8", "matrix:plain")
class RaisesOnOverflow(NumpyPostprocess):
    """Turns errors of floating point into exceptions, also those of other parts of the process."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        np.seterr(all="raise")


@breaks("1", "flight:test_it_is_freed_with_its_runner")
class KeepsItsPackInTheModule(NumpyPostprocess):
    """The postprocessor is freed, its pack is not."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        _room(ops, limits.max_num_seqs)


@cache
def _room(ops, slots):
    return ops.from_host(np.zeros(slots, np.int32))


@breaks("1.[12]", "matrix:held=copies")
class TakesMatricesFromAPool(TorchPostprocess):
    """Uses a matrix again when no object refers to it, though copies for the host share its memory."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._pool, self._users = [], []

    def token_matrix(self, sampled, accepted, slots, revoked):
        right = super().token_matrix(sampled, accepted, slots, revoked)
        free = [number for number, user in enumerate(self._users) if user() is None]
        if not free:
            free = [len(self._pool)]
            self._pool.append(torch.empty_like(right))
            self._users.append(None)
        matrix = self._pool[free[0]][:]
        self._users[free[0]] = weakref.ref(matrix)
        return matrix.copy_(right)


@breaks("1", "flight:test_nothing_remains_of_many_different_steps")
class KeepsWorkspacesOfLargeSteps(TorchPostprocess):
    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._spaces = {}

    def token_matrix(self, sampled, accepted, slots, revoked):
        if len(slots) >= 32:
            self._spaces.setdefault((len(slots), len(revoked)), torch.empty_like(sampled))
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "flight:test_nothing_remains_of_many_different_steps")
class SavesEachThousandthStep(NumpyPostprocess):
    steps = 0

    def token_matrix(self, sampled, accepted, slots, revoked):
        self.steps += 1
        if self.steps % 1000 == 0:
            Path(os.devnull).write_text(str(self.steps))
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "flight:test_cost_on_the_host_does_not_grow_with_the_rows")
class FillsATableOfPositions(NumpyPostprocess):
    """With a column for each position of the context, which is short in a test and long in production."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        np.zeros((self.limits.max_num_seqs, self.limits.max_model_len), np.int32).fill(EMPTY_TOKEN_ID)
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "flight:test_a_step_takes_little_time_of_the_host")
class SumsItsLimits(NumpyPostprocess):
    """Takes as long for few rows as for many."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        self._sum = sum(range(60_000))
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[3]")
class ReadsWhatALargeBatchAccepts(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        most = accepted.max().item() if len(accepted) > 256 else sampled.shape[1]
        return super().token_matrix(sampled, accepted.clamp(max=most), slots, revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[3]")
class ReadsAnErrorNowAndThen(TorchPostprocess):
    """Each fiftieth step waits for the device, to report an error of it."""

    steps = 0

    def token_matrix(self, sampled, accepted, slots, revoked):
        self.steps += 1
        if self.steps % 50 == 0 and len(accepted) and accepted.min().item() < 0:
            raise RuntimeError("a row accepted less than no draft")
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "flight:test_cost_on_the_host_does_not_grow_with_the_rows")
class KeepsATableOfPositions(TorchPostprocess):
    """Memory that the KV cache lacks."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._texts = torch.zeros((limits.max_num_seqs, limits.max_model_len), dtype=torch.int32)
