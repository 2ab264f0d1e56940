"""Postprocessors with one fault each: a few lines on top of a right one, and the case that names the fault."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fd_core.runner.postprocess.contract import Postprocess
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID

WRONG: dict[str, WrongPostprocess] = {}


@dataclass(frozen=True)
class WrongPostprocess:
    """A postprocessor, the rule that it breaks, and the case that detects it."""

    cls: type[Postprocess]
    rule: str
    noticed_by: str


def breaks(rule: str, noticed_by: str) -> Callable[[type], type]:
    def register(cls: type) -> type:
        WRONG[cls.__name__] = WrongPostprocess(cls, rule, noticed_by)
        return cls

    return register


# Contents of a matrix -----------------------------------------------------------------------------------------


@breaks("1.2", "matrix:test_every_combination_of_rows[0]")
class AcknowledgesNoRevocation(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[:0])


@breaks("1.2", "matrix:test_a_batch_that_is_revoked_as_a_whole_is_answered[0]")
class AcknowledgesNothingWithoutRows(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked if len(slots) else revoked[:0])


@breaks("1.2", "matrix:test_every_combination_of_rows[0]")
class AcknowledgesTheFirstRevocationOnly(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[:1])


@breaks("1.3", "matrix:test_every_combination_of_rows[3]")
class ReleasesInEveryColumn(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        matrix[revoked] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1.2", "matrix:test_every_combination_of_rows[0]")
class TakesIdleForRevoked(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        idle = np.setdiff1d(np.arange(self.limits.max_num_seqs), slots)
        return super().token_matrix(sampled, accepted, slots, idle)


@breaks("1.1", "matrix:test_every_combination_of_rows[0]")
class DropsRowsNextToARevocation(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        if len(revoked):
            sampled, accepted, slots = sampled[:0], accepted[:0], slots[:0]
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1.1", "matrix:test_every_combination_of_rows[1]")
class DeliversRejectedDrafts(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, np.full_like(accepted, self.limits.max_drafts), slots, revoked)


@breaks("1.1", "matrix:test_every_combination_of_rows[1]")
class DeliversAcceptedDraftsOnly(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted - 1, slots, revoked)


@breaks("1.1", "matrix:test_every_combination_of_rows[2]")
class CutsAfterAnEndOfText(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        ends = sampled == 2
        first = np.where(ends.any(axis=1), ends.argmax(axis=1), accepted)
        return super().token_matrix(sampled, np.minimum(accepted, first), slots, revoked)


@breaks("1.1", "matrix:test_token_of_any_id_is_delivered[0]")
class IgnoresTokenZero(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(np.where(sampled > 0, sampled, EMPTY_TOKEN_ID), accepted, slots, revoked)


@breaks("1.1", "matrix:test_token_of_any_id_is_delivered[0]")
class RoundsThroughFloats(NumpyPostprocess):
    """A kernel library without integers: float32 holds them up to 2^24."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled.astype(np.float32).astype(np.int64) % 2**31, accepted, slots, revoked)


@breaks("1.1", "matrix:test_every_combination_of_rows[0]")
class WritesRowsInOrder(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, np.sort(slots), revoked)


@breaks("1.1", "matrix:test_many_slots_in_no_order[0-40]")
class WritesATileOf32(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled[:32], accepted[:32], slots[:32], revoked)


@breaks("1.2", "matrix:test_every_slot[0-33]")
class LosesTheLastSlot(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[revoked < max(32, self.limits.max_num_seqs - 1)])


@breaks("1.1", "matrix:test_many_slots_in_no_order[16-4099]")
class CountsCellsInSixteenBits(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        matrix.reshape(-1)[2**16 :] = EMPTY_TOKEN_ID
        matrix[revoked, 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1.2", "matrix:test_many_slots_in_no_order[0-1023]")
class StoresARevokedSlotInAByte(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked[revoked < 256])


@breaks("1.1", "matrix:test_every_combination_of_rows[7]")
class StoresSixDrafts(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, np.minimum(accepted, 6), slots, revoked)


@breaks("1", "matrix:test_every_combination_of_rows[0]")
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


@breaks("1", "flight:test_later_steps_leave_earlier_matrices_alone[0]")
class ReusesItsMatrix(Rotating):
    pass


@breaks("1", "flight:test_later_steps_leave_earlier_matrices_alone[3]")
class RotatesThreeMatrices(Rotating):
    buffers = 3


@breaks("1", "flight:test_two_runners_do_not_meet")
class SharesABufferOfItsShape(NumpyPostprocess):
    shared: ClassVar[dict[tuple[int, ...], np.ndarray]] = {}

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        shared = self.shared.setdefault(matrix.shape, matrix)
        shared[:] = matrix
        return shared


@breaks("1.1", "flight:test_matrix_contains_only_its_step[1]")
class LeavesAStaleToken(NumpyPostprocess):
    last = None

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        if self.last is not None:
            idle = np.setdiff1d(np.arange(len(matrix)), np.union1d(slots, revoked))
            idle = idle[self.last[idle, 0] != PREEMPTED_TOKEN_ID]
            matrix[idle] = self.last[idle]
        self.last = matrix.copy()
        return matrix


@breaks("1.1", "flight:test_matrix_contains_only_its_step[8]")
class LeavesIdleRowsUnwritten(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = np.empty((self.limits.max_num_seqs, sampled.shape[1]), np.int32)
        right = super().token_matrix(sampled, accepted, slots, revoked)
        matrix[slots], matrix[revoked] = right[slots], right[revoked]
        return matrix


@breaks("1.2", "flight:test_matrix_contains_only_its_step[0]")
class ReleasesOneStepLate(NumpyPostprocess):
    late = np.empty(0, np.int32)

    def token_matrix(self, sampled, accepted, slots, revoked):
        now, self.late = self.late, revoked.copy()
        return super().token_matrix(sampled, accepted, slots, np.setdiff1d(now, slots))


@breaks("1", "flight:test_later_steps_leave_earlier_matrices_alone[1]")
class ReplaysTheStepOfItsShape(NumpyPostprocess):
    """A graph that is replayed with the inputs of its capture."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._captured = {}

    def token_matrix(self, *given):
        shapes = tuple(each.shape for each in given)
        return super().token_matrix(*self._captured.setdefault(shapes, given))


@breaks("8", "flight:test_the_inputs_are_left_as_they_are[3]")
class WritesIntoTheSampledTokens(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        sampled[np.arange(sampled.shape[1]) > accepted[:, None]] = EMPTY_TOKEN_ID
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "flight:test_the_matrix_shares_no_memory_with_what_was_sampled[0]")
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


@breaks("1", "device:test_the_matrix_is_an_array_of_the_device[1-3-2]")
class ReturnsInt64(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked).long()


@breaks("1", "device:test_the_matrix_is_an_array_of_the_device[0-3-2]")
class ComputesOnTheHost(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled, accepted, slots, revoked).numpy()


@breaks("1", "device:test_the_host_waits_for_nothing[1-3-2]")
class GetsTheRowsFromThePack(NumpyPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(self.ops.to_host(sampled), accepted, slots, revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[8-3-2]")
class WritesSlotBySlot(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = torch.full((self.limits.max_num_seqs, sampled.shape[1]), EMPTY_TOKEN_ID, dtype=torch.int32)
        for row, slot in enumerate(slots.tolist()):
            matrix[slot, : 1 + int(accepted[row])] = sampled[row, : 1 + int(accepted[row])]
        matrix[revoked.long(), 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1", "device:test_the_host_waits_for_nothing[1-6-0]")
class ReadsWhetherADraftWasAccepted(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        if sampled.shape[1] > 1 and not accepted.any():
            return super().token_matrix(sampled[:, :1], accepted, slots, revoked)
        return super().token_matrix(sampled, accepted, slots, revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[0-3-2]")
class SelectsRowsByAMask(TorchPostprocess):
    """The number of rows that a mask selects is known only after the device has counted them."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        kept = accepted >= 0
        return super().token_matrix(sampled[kept], accepted[kept], slots[kept], revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[1-3-2]")
class CopiesToTheHost(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled.to("cpu"), accepted, slots, revoked)


@breaks("1", "device:test_the_host_waits_for_nothing[1-3-2]")
class SearchesTheRowsWithDrafts(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = super().token_matrix(sampled, accepted, slots, revoked)
        none = torch.nonzero(accepted == 0)[:, 0]
        matrix[slots[none].long(), 1:] = EMPTY_TOKEN_ID
        return matrix


@breaks("1", "device:test_the_host_waits_for_nothing[1-3-2]")
class WritesAtSlotsOneByOne(TorchPostprocess):
    """Reads no number explicitly: indexing by an array with one number does so."""

    def token_matrix(self, sampled, accepted, slots, revoked):
        matrix = torch.full((self.limits.max_num_seqs, sampled.shape[1]), EMPTY_TOKEN_ID, dtype=torch.int32)
        for row in range(len(slots)):
            delivered = torch.arange(sampled.shape[1]) <= accepted[row]
            matrix[slots[row], :] = torch.where(delivered, sampled[row], EMPTY_TOKEN_ID)
        matrix[revoked.long(), 0] = PREEMPTED_TOKEN_ID
        return matrix


@breaks("1", "device:test_the_host_waits_for_nothing[1-3-2]")
class CopiesTheRowsOfAMask(TorchPostprocess):
    def token_matrix(self, sampled, accepted, slots, revoked):
        kept = torch.arange(sampled.shape[1]) <= accepted[:, None]
        tokens = torch.full_like(sampled, EMPTY_TOKEN_ID)
        tokens[kept] = sampled.flatten().index_select(0, torch.where(kept.flatten())[0])
        return super().token_matrix(tokens, accepted, slots, revoked)


@breaks("1", "flight:test_it_is_made_on_one_thread_and_computes_on_another")
class BelongsToAThread(NumpyPostprocess):
    """Its library keeps a context for each thread."""

    def __init__(self, ops, limits):
        super().__init__(ops, limits)
        self._context = threading.local()
        self._context.width = 1 + limits.max_drafts

    def token_matrix(self, sampled, accepted, slots, revoked):
        return super().token_matrix(sampled[:, : self._context.width], accepted, slots, revoked)
