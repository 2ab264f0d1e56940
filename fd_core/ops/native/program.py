"""Programs of fused operations: recorded from a model's forward, or built for one call."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from types import TracebackType
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from fd_core.config.layer_groups import MAX_GROUPS
from fd_core.errors import ConfigError
from fd_core.ops.contract import Array, GroupTables, StepInput
from fd_core.ops.native.library import MEET, Step, checked, invoke
from fd_core.ops.parallel import HEADER_BYTES, SLOT_BYTES, RankExchangeError, RankGroup, SharedMemoryGroup
from fd_core.ops.symbol import UnknownArray

ROW_ALIGN = 64
"""Row alignment in elements, so that vector loads may cross the end of a row."""
CACHE_LINE = 64
"""Alignment of a matrix in bytes."""
RowsOf = Literal["tokens", "logits"]
"""Row unit of a buffer: tokens of a step, or rows of its logits."""
NO_STEP = StepInput(None, None, None, None, None, None, None, max_query=0, max_context=0)


class CaptureError(Exception):
    """A forward used a symbolic array in an unsupported way."""


def address(name: str, array: Array | None, count: int, dtype: npt.DTypeLike = np.int32) -> int | None:
    """Return the address of an array of at least `count` contiguous elements; raises `ValueError` otherwise."""
    if array is None:
        return None
    if array.dtype != dtype or array.size < count or not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: expected {count} contiguous elements of {np.dtype(dtype)}, got "
            f"{array.size} of {array.dtype}, shape {array.shape}, strides {array.strides}"
        )
    found: int = array.ctypes.data
    return found


def narrowed(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; return its bits. A NaN stays one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def widened(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    """Return the values of bfloat16 bits."""
    values: npt.NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


class Runtime:
    """Library, thread team and element type of programs."""

    def __init__(self, library: ctypes.CDLL, dtype: str, threads: int) -> None:
        self.library = library
        self.wide = dtype == "float32"
        self.type_code = 0 if self.wide else 1
        self.row_slack = library.fd_row_slack()
        self.lanes = library.fd_lanes()
        """Columns of a vector; a gated weight interleaves vectors of gate and up."""
        self.threads = threads
        self.group: RankGroup | None = None
        """Group of ranks that compute the same model, if any."""
        self.group_handle: Any = None
        self._meet = MEET()
        """Exchange of slots without shared memory; None if ranks share memory."""
        self.team = checked(library.fd_team_new(threads), f"{threads} threads")

    def __del__(self) -> None:
        if hasattr(self, "team"):
            self.library.fd_group_free(self.group_handle)
            self.library.fd_team_free(self.team)

    def join(self, group: RankGroup) -> None:
        """Enable exchanges between ranks in operations."""
        ranks = (group.parallel.rank, group.parallel.size)
        if isinstance(group, SharedMemoryGroup):
            group.fence = self.library.fd_fence
        else:
            self._meet = MEET(group.meet)
        handle = self.library.fd_group_new(group.address, *ranks, HEADER_BYTES, SLOT_BYTES, group.timeout, self._meet)
        self.group, self.group_handle = group, checked(handle, "a group of ranks")

    def starts(self, width: int) -> Any:
        """Return the first column of each rank and the total width, for rows of which this rank has `width` columns.

        None for a single rank. All ranks must call it at the same time.
        """
        if self.group is None:
            return None
        ends = np.cumsum(self.group.all_gather(np.array([[width]], np.int32))[0]).tolist()
        return (ctypes.c_int * (len(ends) + 1))(0, *ends)

    def matrix(self, rows: int, width: int, wide: bool) -> npt.NDArray[Any]:
        """Return a matrix [rows, width] of float32, or of the bits of the dtype unless it is `wide`.

        Rows are padded with zeros to the kernels' alignment.
        """
        dtype = np.dtype(np.float32 if wide or self.wide else np.uint16)
        padded = -(-width // ROW_ALIGN) * ROW_ALIGN
        count = (rows + self.row_slack) * padded
        memory = np.empty(count * dtype.itemsize + CACHE_LINE, np.uint8)
        start = -memory.ctypes.data % CACHE_LINE
        whole = memory[start : start + count * dtype.itemsize].view(dtype).reshape(-1, padded)
        if width < padded:
            whole[:, width:] = 0
        return whole[:rows, :width]


class Program:
    """A list of operations over numbered buffers; owns the memory that its operations reference."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._library = runtime.library
        self.handle = checked(self._library.fd_program_new(runtime.type_code), "a program")
        self._kept: list[Any] = []

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.fd_program_free(self.handle)

    def add(self, operation: str, *arguments: Any) -> None:
        """Append an operation: the C function's arguments after the program."""
        invoke(self._library, f"fd_add_{operation}", self.handle, *arguments, what=operation)

    def keep(self, *owners: Any) -> None:
        """Hold a reference to an operation's data for the lifetime of the program."""
        self._kept.extend(owners)

    def pointer(self, array: Array | None) -> int | None:
        """Return the address of a contiguous float32 array, which the program then holds."""
        if array is None:
            return None
        self.keep(array)
        return address("a vector", array, array.size, dtype=np.float32)

    def bind(self, buffer: int, matrix: npt.NDArray[Any]) -> None:
        """Bind a buffer to the memory of a matrix."""
        place = (buffer, matrix.ctypes.data, len(matrix), matrix.strides[0] // matrix.itemsize)
        invoke(self._library, "fd_program_bind", self.handle, *place, what="a buffer")

    def run(self, step: StepInput, tokens: int) -> None:
        """Run all operations on a step."""
        contexts, slots, tables, count = step.context_len, step.kv_slots, step.block_tables, 1
        if step.grouped is not None:
            slots, tables = step.grouped.kv_slots, step.grouped.block_tables
            count = len(slots)
        rows = 0 if contexts is None else len(contexts)
        logits = 0 if step.logits_rows is None else len(step.logits_rows)
        most_blocks = 0 if tables is None else tables.shape[-1]
        batch = Step(
            tokens,
            rows,
            logits,
            most_blocks,
            count,
            address("token_ids", step.token_ids, tokens),
            address("positions", step.positions, tokens),
            address("kv_slots", slots, count * tokens),
            address("query_start", step.query_start, rows + 1),
            address("context_len", contexts, rows),
            address("block_tables", tables, count * rows * most_blocks),
            address("logits_rows", step.logits_rows, logits),
            address("lora_slots", step.lora_slots, tokens),
            address("ends", step.ends, tokens),
        )
        result = invoke(
            self._library, "fd_program_run", self.handle, ctypes.byref(batch), self.runtime.team, what="a step"
        )
        if result < 0:
            self._refuse_step(tokens, apart=result == -1)

    @property
    def exchanges(self) -> int:
        """Operations that exchange rows with other ranks."""
        count: int = self._library.fd_program_exchanges(self.handle)
        return count

    def _refuse_step(self, tokens: int, *, apart: bool) -> NoReturn:
        if not apart:
            raise ConfigError(
                f"a step of {tokens} tokens exceeds the exchange buffers of the ranks",
                field="--max-num-batched-tokens",
                hint="lower it",
            )
        group = self.runtime.group
        if group is None:
            raise RankExchangeError("the other ranks are lost")
        group.refuse(self._library.fd_group_failed(self.runtime.group_handle) - 1)

    def times(self) -> list[tuple[str, float]]:
        """Return name and seconds of each operation since timing was switched on."""
        count = self._library.fd_program_length(self.handle)
        return [
            (self._library.fd_program_name(self.handle, i).decode(), self._library.fd_program_seconds(self.handle, i))
            for i in range(count)
        ]

    def set_timed(self, timed: bool) -> None:
        """Switch timing of operations on or off."""
        self._library.fd_program_time(self.handle, timed)


class ProgramSymbol(UnknownArray):
    """Symbolic activation matrix of a program that is being recorded, passed between operations."""

    __slots__ = ("buffer", "key", "recorder")

    def __init__(self, recorder: ProgramRecorder, buffer: int, key: tuple[int, bool, RowsOf]) -> None:
        self.recorder = recorder
        self.buffer = buffer
        self.key = key
        """Width, True for float32 regardless of the dtype, and row unit: a buffer is only reused for the same key."""

    @property
    def width(self) -> int:
        """Columns of the matrix."""
        return self.key[0]

    @property
    def wide(self) -> bool:
        """True if it is float32 regardless of the dtype."""
        return self.key[1]

    def __del__(self) -> None:
        # No later operation can read a symbol that the forward pass dropped, so its buffer may serve again.
        if self.buffer >= 0:
            self.recorder.release(self)

    def _refuse(self, what: str) -> NoReturn:
        raise CaptureError(f"the forward uses {what} of an array, which only eager packs support")


class ProgramRecorder(Program):
    """A program under construction: results are symbols."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.yields_logits = False
        """True if it ends with logits of some tokens; else with states of all."""
        self.logits_from_ranks = False
        """True if ranks write parts of the logits directly to each other."""
        self.logits_in_parts = False
        """True if the logits are only this rank's part."""
        self._free: dict[tuple[int, bool, RowsOf], list[int]] = {}

    def table(self, step: StepInput) -> int:
        """Return the group of layers whose tables an operation reads, of those of each run."""
        return step.group

    def input(self, x: Any, width: int, wide: bool) -> int:
        """Return the buffer of a symbol."""
        if not isinstance(x, ProgramSymbol) or x.recorder is not self or x.key != (width, wide, "tokens"):
            raise CaptureError("the forward passes an unsupported array to an operation")
        return x.buffer

    def inout(self, x: Any, width: int) -> tuple[int, Any]:
        """Return the buffer of a residual that is updated in place, and the symbol of the sum."""
        return self.input(x, width, True), x

    def output(self, like: Any, width: int, wide: bool, rows_of: RowsOf = "tokens") -> tuple[int, Any]:
        """Return a buffer and its symbol."""
        key = (width, wide, rows_of)
        free = self._free.get(key)
        buffer = free.pop() if free else self._library.fd_program_buffer(self.handle, width, wide, rows_of == "logits")
        return buffer, ProgramSymbol(self, buffer, key)

    def release(self, symbol: ProgramSymbol) -> None:
        """Recycle the buffer of an unreferenced symbol."""
        self._free.setdefault(symbol.key, []).append(symbol.buffer)


class Eager(Program):
    """A program of one operation on arrays; it runs when the `with` block ends, which fills its results.

    They are float32, or, like the input, the bits of bfloat16.
    """

    def __init__(self, runtime: Runtime, step: StepInput | None) -> None:
        super().__init__(runtime)
        self._step = NO_STEP if step is None else step
        self._tokens = 0
        self._of_bits = False
        self._narrow: list[tuple[npt.NDArray[np.uint16], npt.NDArray[np.float32]]] = []
        """Results in the pack's dtype, and the arrays that show them."""

    def __enter__(self) -> Eager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.run(self._step, self._tokens)
            for bits, shown in self._narrow:
                shown[:] = widened(bits)

    def table(self, step: StepInput) -> int:
        """Return 0: the step has the tables of one group of layers."""
        return 0

    def input(self, x: Array, width: int, wide: bool) -> int:
        """Return a buffer with a padded copy of an array [T, ...], rounded to the pack's dtype unless it is `wide`."""
        matrix = self.runtime.matrix(len(x), width, wide)
        rows = x.reshape(len(x), math.prod(x.shape[1:]))
        self._of_bits = rows.dtype == np.uint16
        if rows.dtype != matrix.dtype:
            rows = widened(rows) if self._of_bits else narrowed(rows)
        matrix[:] = rows
        return self._bound(matrix, width, wide)

    def inout(self, x: Array, width: int) -> tuple[int, Array]:
        """Return a buffer with a padded float32 copy of a residual, and the copy."""
        matrix = self.runtime.matrix(len(x), width, True)
        matrix[:] = x
        return self._bound(matrix, width, True), matrix

    def output(self, like: Array, width: int, wide: bool) -> tuple[int, Array]:
        """Return a buffer, and its float32 array with as many rows as `like`."""
        matrix = self.runtime.matrix(len(like), width, wide)
        shown = matrix
        if matrix.dtype != np.float32 and not self._of_bits:
            shown = np.empty(matrix.shape, np.float32)
            self._narrow.append((matrix, shown))
        return self._bound(matrix, width, wide), shown

    def _bound(self, matrix: npt.NDArray[Any], width: int, wide: bool) -> int:
        self._tokens = max(self._tokens, len(matrix))
        buffer: int = self._library.fd_program_buffer(self.handle, width, wide, False)
        self.bind(buffer, matrix)
        self.keep(matrix)
        return buffer


def symbolic_step(recorder: ProgramRecorder) -> StepInput:
    """Return a step whose arrays are symbols: operations read the step of each run."""

    unknown = ProgramSymbol(recorder, -1, (0, False, "tokens"))
    arrays = dict.fromkeys((field.name for field in dataclasses.fields(StepInput)), unknown)
    grouped = GroupTables([unknown] * MAX_GROUPS, [unknown] * MAX_GROUPS)
    known = {"group": 0, "grouped": grouped, "host": None, "states": None, "added": (), "kinds": ()}
    return StepInput(**arrays | known)  # type: ignore[arg-type]  # `max_query` raises like an array
