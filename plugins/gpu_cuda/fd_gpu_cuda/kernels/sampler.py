"""Sampling, penalties, masks and log-probabilities with Triton kernels, as specified by `Ops`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from fd_core.ops.contract import Array, PenaltyInput, SampleInput
from fd_core.signals import EMPTY_TOKEN_ID, PREEMPTED_TOKEN_ID

from fd_gpu_cuda.kernel_table import SamplingKernels
from fd_gpu_cuda.kernels.entry import cdiv, next_power_of_2
from fd_gpu_cuda.kernels.logits import accept, add, count_before, mask, penalize, score, write_matrix
from fd_gpu_cuda.kernels.sampling import BINS, BOUNDS, draw, fill_bins, find_cuts, find_peaks

_TILE = 1024
"""Tokens per read of a program."""
_MOST_SPANS = 256
"""Programs that work on a row."""
_WAVES = 32
"""Programs of a launch per multiprocessor: about eight are resident, and the tail should be short."""
_COPIES = 4
_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
_ROOM = 8192
"""Listed tokens of a filtered row; 4 bytes each."""
_MOST_LISTED = 32
"""Maximum number of top tokens of a row."""
_MOST_TILES = 128
"""Tiles with listed top tokens, so that their 8-byte keys fit the memory above."""
_UNCONFIGURED_ROWS = 64
_MOST_ROWS = 512
"""Maximum rows of the workspace, 26 MiB."""
_ROW_ALIGN = 4
"""Alignment of row parts of 4-byte elements to 16 bytes, like the whole; others would compile other kernels."""


class TritonSampling(SamplingKernels):
    """Kernels for one device. They only allocate results and do not synchronize, so they may be captured.

    Calls share one workspace, so they must be queued on one stream at a time, or on streams that wait for each other.
    """

    def __init__(self, device: Any, multiprocessors: int) -> None:
        self._device = device
        self._multiprocessors = multiprocessors
        self.reserve(_UNCONFIGURED_ROWS)

    def reserve(self, rows: int) -> None:
        """Allocate the workspace, 51 KiB a row."""
        rows = min(cdiv(rows, _ROW_ALIGN) * _ROW_ALIGN, _MOST_ROWS)

        def zeros(*shape: int, dtype: Any = torch.int32) -> Array:
            return torch.zeros(rows, *shape, dtype=dtype, device=self._device)

        self._rows = rows
        self._counters, self._lengths = zeros(), zeros()
        self._peaks, self._masses = zeros(_MOST_SPANS, dtype=torch.float32), zeros(_MOST_SPANS, dtype=torch.float64)
        self._places, self._part_lows = zeros(_MOST_SPANS), zeros(_MOST_SPANS, dtype=torch.float32)
        self._bin_counts = zeros(_COPIES, BINS.value)
        self._bin_masses = zeros(_COPIES, BINS.value, dtype=torch.float64)
        self._bounds = zeros(BOUNDS.value, dtype=torch.float64)
        self._lows = zeros(dtype=torch.float32)
        self._cuts, self._ties = zeros(dtype=torch.float32), zeros()
        self._listed = zeros(_ROOM)

    def sample(self, logits: Array, rows: SampleInput) -> tuple[Array, Array]:
        """Sample tokens with one launch if all rows are greedy, two if some are random, four if some are filtered."""
        logits, count = _rows_of(logits), len(logits)
        chosen = torch.empty(count, dtype=torch.int32, device=logits.device)
        peaks = torch.empty(count, dtype=torch.float32, device=logits.device)
        if 0 < count <= self._rows:  # creating views dominates the host time here
            self._sample(logits, rows, chosen, peaks)
        else:
            for part in self._parts(count):
                columns = {name: getattr(rows, name)[part] for name in _COLUMNS}
                self._sample(logits[part], replace(rows, **columns), chosen[part], peaks[part])
        return chosen, peaks

    def _sample(self, logits: Array, rows: SampleInput, chosen: Array, peaks: Array) -> None:
        vocabulary, stride = logits.shape[1], logits.stride(0)
        tiles, spans = self._spans(len(logits), vocabulary)
        grid, size = (len(logits), spans), (vocabulary, tiles)
        parts = self._peaks, self._places, self._part_lows, self._counters
        find_peaks[grid](logits, stride, *parts, peaks, self._lows, chosen, *size, tile=_TILE, most_spans=_MOST_SPANS)
        if rows.all_greedy:
            return
        if rows.any_filter:
            # Where top_k and top_p cut each row.
            given = logits, stride, rows.temperature, rows.top_k, rows.top_p, peaks, self._lows
            bins = self._bin_counts, self._bin_masses, self._bounds, self._counters
            fill_bins[grid](*given, *bins, *size, tile=_TILE, copies=_COPIES)
            found = self._bounds, self._listed, self._lengths, self._cuts, self._ties, self._counters
            find_cuts[grid](*given, *found, *size, room=_ROOM, tile=_TILE, chunk=512, num_warps=8)
        columns = rows.temperature, rows.min_p, rows.seeds, rows.positions
        drawn = peaks, self._cuts, self._ties, self._masses, self._places, self._counters, chosen
        constants = {"filtered": rows.any_filter, "tile": _TILE, "most_spans": _MOST_SPANS}
        draw[grid](logits, stride, *columns, *drawn, *size, **constants)

    def add_at(self, x: Array, rows: Array, ids: Array, values: Array) -> Array:
        x = _rows_of(x)
        if len(rows):
            grid = (cdiv(len(rows), 128),)
            add[grid](x, x.stride(0), rows, ids, values, len(rows), tile=128, chunk=32)
        return x

    def penalize(self, logits: Array, penalties: PenaltyInput) -> Array:
        logits, vocabulary = _rows_of(logits), logits.shape[1]
        if len(penalties.rows):
            grid = len(penalties.rows), cdiv(vocabulary, _TILE)
            counts = penalties.counts, penalties.counts.stride(0), penalties.counts_rows
            drafts = penalties.draft_rows, penalties.draft_ids
            columns = penalties.repetition, penalties.presence, penalties.frequency
            given = logits, logits.stride(0), penalties.rows, *counts, *drafts, *columns
            penalize[grid](*given, vocabulary, len(drafts[0]), tile=_TILE, chunk=128, enable_fp_fusion=False)
        return logits

    def mask_logits(self, logits: Array, rows: Array, bits: Array) -> Array:
        logits, vocabulary = _rows_of(logits), logits.shape[1]
        if len(rows):
            grid = len(rows), cdiv(vocabulary, _TILE)
            mask[grid](logits, logits.stride(0), rows, bits, bits.stride(0), vocabulary, tile=_TILE)
        return logits

    def logprobs(self, logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
        if top_n > _MOST_LISTED:
            return super().logprobs(logits, tokens, top_n)
        logits, (count, vocabulary) = _rows_of(logits), logits.shape
        chosen = torch.empty(count, dtype=torch.float32, device=logits.device)
        wanted = min(top_n, vocabulary)
        top_ids = torch.empty(count, wanted, dtype=torch.int32, device=logits.device)
        top = torch.empty(count, wanted, dtype=torch.float32, device=logits.device)
        tile = max(_TILE, next_power_of_2(cdiv(vocabulary, _MOST_TILES)))
        tiles = cdiv(vocabulary, tile)
        constants = {"tile": tile, "most_tiles": _MOST_TILES, "most": _MOST_LISTED, "num_warps": 8}
        constants["listed"] = _MOST_LISTED * next_power_of_2(tiles)
        workspace = self._peaks, self._masses, self._listed.view(torch.int64), self._counters
        for part in self._parts(count):
            found = chosen[part], top_ids[part], top[part]
            given = logits[part], logits.stride(0), tokens[part]
            score[len(found[0]), tiles](*given, *workspace, *found, vocabulary, wanted, **constants)
        return chosen, top_ids, top

    def ranks(self, logits: Array, tokens: Array) -> Array:
        logits, (count, vocabulary) = _rows_of(logits), logits.shape
        ranks = torch.empty(count, dtype=torch.int32, device=logits.device)
        for part in self._parts(count):
            tiles, spans = self._spans(len(ranks[part]), vocabulary)
            given = logits[part], logits.stride(0), tokens[part], self._places, self._counters, ranks[part]
            count_before[len(ranks[part]), spans](*given, vocabulary, tiles, tile=_TILE, most_spans=_MOST_SPANS)
        return ranks

    def verify(self, sampled: Array, drafts: Array, num_drafts: Array) -> Array:
        count, k = drafts.shape
        accepted = torch.empty(count, dtype=torch.int32, device=drafts.device)
        if count:
            sampled, drafts = _rows_of(sampled), _rows_of(drafts)
            grid = (cdiv(count, 128),)
            accept[grid](sampled, sampled.stride(0), drafts, drafts.stride(0), num_drafts, accepted, count, k, tile=128)
        return accepted

    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array, num_slots: int) -> Array:
        sampled, width = _rows_of(sampled), sampled.shape[1]
        matrix = torch.empty(num_slots, width, dtype=torch.int32, device=sampled.device)
        grid = (cdiv(num_slots, 32),)
        arrays = sampled, sampled.stride(0), accepted, slots, revoked, matrix
        sizes = len(sampled), len(revoked), num_slots, width
        write_matrix[grid](*arrays, *sizes, empty=EMPTY_TOKEN_ID, preempted=PREEMPTED_TOKEN_ID, tile=32, chunk=128)
        return matrix

    def _parts(self, count: int) -> Iterator[slice]:
        """Split rows into parts that fit the workspace."""
        return (slice(begin, begin + self._rows) for begin in range(0, count, self._rows))

    def _spans(self, rows: int, vocabulary: int) -> tuple[int, int]:
        """Return the tiles per program and the programs per row that fill the device."""
        tiles = cdiv(vocabulary, _TILE)
        spans = min(tiles, _MOST_SPANS, cdiv(_WAVES * self._multiprocessors, rows))
        of_each = cdiv(tiles, spans)
        return of_each, cdiv(tiles, of_each)


def _rows_of(x: Array) -> Array:
    """Return [R, V] whose rows are contiguous."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
