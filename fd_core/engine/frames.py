"""Outputs as frames, for devices that send them; both ends are in one process."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.errors import EngineDead
from fd_core.types import StepOutput

__all__ = ["decode_output", "encode_output"]


class _Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    reason: str
    field: str | None


def _encode_array(array: npt.NDArray[Any]) -> tuple[tuple[int, ...], str, bytes]:
    """Return shape, type character and values in C order."""
    return array.shape, array.dtype.char, array.tobytes()


def _decode_array(_: type, packed: tuple[tuple[int, ...], str, bytes]) -> npt.NDArray[Any]:
    shape, dtype, values = packed
    return np.frombuffer(values, dtype).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_DECODER: msgspec.msgpack.Decoder[StepOutput | _Failure] = msgspec.msgpack.Decoder(
    StepOutput | _Failure, dec_hook=_decode_array
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
