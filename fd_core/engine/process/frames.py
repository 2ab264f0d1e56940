"""Arrays in frames, and outputs as frames for devices that send them; both ends run the same version on one machine."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.errors import EngineDead
from fd_core.types import StepOutput


class _Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    reason: str
    field: str | None


def encode_array(array: npt.NDArray[Any]) -> tuple[tuple[int, ...], str, bytes]:
    """Be msgspec's `enc_hook` for messages with arrays: return shape, type character and values in C order."""
    return array.shape, array.dtype.char, array.tobytes()


def decode_array(_: type, packed: tuple[tuple[int, ...], str, bytes]) -> npt.NDArray[Any]:
    """Be msgspec's `dec_hook`: return the array of which `encode_array` made `packed`."""
    shape, dtype, values = packed
    return np.frombuffer(values, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=encode_array)
_DECODER: msgspec.msgpack.Decoder[StepOutput | _Failure] = msgspec.msgpack.Decoder(
    StepOutput | _Failure, dec_hook=decode_array
)


def encode_output(output: StepOutput | EngineDead) -> bytes:
    """Return the frame of an output, or of the reason why there is none."""
    if isinstance(output, EngineDead):
        return _ENCODER.encode(_Failure(output.message, output.field))
    return _ENCODER.encode(output)


def decode_output(frame: bytes) -> StepOutput | EngineDead:
    """Return what `encode_output` was given. Raises `msgspec.DecodeError` or `ValueError` for anything else."""
    read = _DECODER.decode(frame)
    return EngineDead(read.reason, field=read.field) if isinstance(read, _Failure) else read
