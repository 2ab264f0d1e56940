"""The C functions of `csrc/api.cpp` with their types."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

from fd_core.ops.native.build import BuildError


def _all(kind: Any, *names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names]


class Step(Structure):
    """`fd::Step`: the flattened batch."""

    _fields_ = (
        *_all(c_int, "tokens", "rows", "logits", "max_blocks", "tables"),
        *_all(c_void_p, "token_ids", "positions", "kv_slots", "query_start", "context_len"),
        *_all(c_void_p, "block_tables", "logits_rows", "lora_slots", "ends"),
    )


class AttentionShape(Structure):
    """`fd::AttentionShape`: attention geometry of one layer."""

    _fields_ = (
        *_all(
            c_int,
            *("heads", "kv_heads", "d", "window", "chunked", "half", "interleaved"),
            *("causal", "norms_rotated", "joint_norms", "table", "latent"),
        ),
        *_all(c_float, "scale", "softcap"),
        ("sinks", c_void_p),
    )


class RecurrentShape(Structure):
    """`fd::RecurrentShape`: the recurrence of one layer."""

    _fields_ = (
        *_all(c_int, "rule", "taps", "channels", "key_heads", "value_heads", "key_dim", "value_dim", "table"),
        *_all(c_float, "eps", "least_time", "most_time"),
        *_all(c_void_p, "conv", "bias", "decay", "time_bias", "norm", "skip"),
    )


class LoraDelta(Structure):
    """`fd::LoraDelta`: one adapter on one linear."""

    _fields_ = (*_all(c_void_p, "down", "up"), ("starts", c_int * 3))


class LoraTable(Structure):
    """`fd::LoraTable`: all adapters on one linear."""

    _fields_ = (("places", c_int), ("ends", c_int * 3), ("deltas", POINTER(LoraDelta)))


class PackedForm(Structure):
    """`PackedForm`: storage format of a packed linear."""

    _fields_ = (*_all(c_int, "bits", "group", "offset", "minima", "scales", "fp4"),)


class MoeGeometry(Structure):
    """Parameters of a mixture of experts."""

    _fields_ = (
        *_all(c_int, "experts", "top_k", "normalize", "sigmoid", "weighs_inputs", "groups", "top_groups"),
        *_all(c_float, "norm_floor", "weight_scale"),
    )


class SampleRows(Structure):
    """`fd::SampleRows`: inputs of sampling."""

    _fields_ = (
        *_all(c_int, "rows", "vocabulary"),
        ("logits", c_void_p),
        ("stride", c_size_t),
        *_all(c_void_p, "temperature", "top_k", "top_p", "min_p", "uniform", "tokens", "peaks"),
    )


class PenaltyRows(Structure):
    """`fd::PenaltyRows`: inputs of penalties."""

    _fields_ = (
        *_all(c_int, "rows", "drafts", "vocabulary", "logits_count", "counts_count"),
        ("logits", c_void_p),
        ("stride", c_size_t),
        *_all(c_void_p, "logits_rows", "counts", "counts_rows", "draft_rows", "draft_ids"),
        *_all(c_void_p, "repetition", "presence", "frequency"),
    )


class MaskRows(Structure):
    """`fd::MaskRows`: masks of allowed tokens."""

    _fields_ = (
        *_all(c_int, "rows", "vocabulary", "logits_count"),
        ("logits", c_void_p),
        ("stride", c_size_t),
        *_all(c_void_p, "logits_rows", "bits"),
    )


MEET = ctypes.CFUNCTYPE(c_int, c_uint64, c_size_t)
"""`fd::Meet`: exchange of slots between ranks without shared memory."""
_REFUSED = -3
_NORM = (c_void_p, c_float)
_LORA = (POINTER(LoraTable), c_int)
_STARTS = POINTER(c_int)
_EXPERTS = (POINTER(c_void_p), POINTER(c_void_p), c_void_p, c_void_p, c_int, c_void_p, *(_STARTS,) * 4, c_int)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fd_instruction_set": (c_char_p, ()),
    "fd_packed_products": (c_char_p, ()),
    "fd_usable": (c_int, ()),
    "fd_row_slack": (c_int, ()),
    "fd_lanes": (c_int, ()),
    "fd_refusal": (c_char_p, ()),
    "fd_team_new": (c_void_p, (c_int,)),
    "fd_team_free": (None, (c_void_p,)),
    "fd_group_new": (c_void_p, (c_void_p, c_int, c_int, c_size_t, c_size_t, c_double, MEET)),
    "fd_group_free": (None, (c_void_p,)),
    "fd_fence": (None, ()),
    "fd_group_failed": (c_int, (c_void_p,)),
    "fd_arena_new": (c_void_p, ()),
    "fd_arena_free": (None, (c_void_p,)),
    "fd_linear_new": (c_void_p, (c_void_p, c_int, c_int, c_int, c_int, c_int)),
    "fd_linear_pack": (None, (c_void_p, c_int, c_int, c_void_p, c_int, c_int, c_void_p)),
    "fd_linear_squeeze": (c_int, (c_void_p, c_void_p, c_void_p)),
    "fd_packed_new": (c_void_p, (c_void_p, c_int, c_int, c_int, POINTER(PackedForm), c_int)),
    "fd_packed_pack": (None, (c_void_p, c_int, c_int, *[c_void_p] * 4, c_int, c_int, c_void_p)),
    "fd_linear_biased": (c_void_p, (c_void_p, c_void_p)),
    "fd_linear_bias": (None, (c_void_p, c_int, c_int, c_void_p, c_int, c_int)),
    "fd_kv_new": (c_void_p, (c_int,) * 8),
    "fd_kv_free": (None, (c_void_p,)),
    "fd_kv_transfer": (None, (c_void_p, c_void_p, c_int, c_void_p, c_int)),
    "fd_kv_write": (c_int, (c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int)),
    "fd_program_new": (c_void_p, (c_int,)),
    "fd_program_free": (None, (c_void_p,)),
    "fd_program_buffer": (c_int, (c_void_p, c_int, c_int, c_int)),
    "fd_program_bind": (c_int, (c_void_p, c_int, c_void_p, c_int, c_size_t)),
    "fd_program_run": (c_int, (c_void_p, POINTER(Step), c_void_p)),
    "fd_program_exchanges": (c_int, (c_void_p,)),
    "fd_program_time": (None, (c_void_p, c_int)),
    "fd_program_length": (c_int, (c_void_p,)),
    "fd_program_name": (c_char_p, (c_void_p, c_int)),
    "fd_program_seconds": (c_double, (c_void_p, c_int)),
    "fd_add_embedding": (c_int, (c_void_p, c_void_p, c_float, c_int, c_int)),
    "fd_add_positions": (c_int, (c_void_p, c_void_p, c_int)),
    "fd_add_norm": (c_int, (c_void_p, c_int, *_NORM, c_void_p, c_int, c_int)),
    "fd_add_linear": (c_int, (c_void_p, c_int, *_NORM, c_void_p, c_int, *_LORA)),
    "fd_add_attention_inputs": (
        c_int,
        (
            *(c_void_p, c_int, *_NORM, c_void_p, POINTER(AttentionShape), *_NORM, *_NORM),
            *(c_void_p,) * 4,
            *(c_int, c_void_p, c_int, *_LORA),
        ),
    ),
    "fd_add_attention": (c_int, (c_void_p, POINTER(AttentionShape), c_void_p, c_int, c_int, c_int)),
    "fd_add_heads": (c_int, (c_void_p, c_int, POINTER(c_void_p), c_int, c_int, c_int)),
    "fd_add_write_latent": (
        c_int,
        (c_void_p, c_int, c_int, *_NORM, POINTER(AttentionShape), *(c_void_p,) * 2, c_int, c_void_p, c_int, c_int),
    ),
    "fd_add_recur": (c_int, (c_void_p, POINTER(RecurrentShape), c_void_p, c_int, c_int, c_int)),
    "fd_add_activate": (c_int, (c_void_p, c_int, c_int, c_int, c_int)),
    "fd_add_gate_heads": (c_int, (c_void_p, c_int, c_int, c_int, c_int)),
    "fd_add_gather": (c_int, (c_void_p, c_void_p, _STARTS, c_int, c_int)),
    "fd_add_project_residual": (c_int, (c_void_p, c_void_p, *_NORM, c_void_p, _STARTS, c_int, *_LORA)),
    "fd_add_logits": (c_int, (c_void_p, c_int, *_NORM, c_void_p, c_float, c_void_p, c_int)),
    "fd_add_moe_residual": (
        c_int,
        (c_void_p, c_int, *_NORM, c_int, POINTER(MoeGeometry), *(c_void_p,) * 4, *_EXPERTS),
    ),
    "fd_sample": (c_int, (POINTER(SampleRows), c_void_p)),
    "fd_penalize": (c_int, (POINTER(PenaltyRows), c_void_p)),
    "fd_mask_logits": (c_int, (POINTER(MaskRows), c_void_p)),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of all functions. Raises `BuildError` if the library was built from other sources."""
    for name, (result, arguments) in _SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise BuildError(f"the library has no {name}") from error
        function.restype = result
        function.argtypes = arguments
    return library


def checked(result: Any, what: str) -> Any:
    """Return the result of a C function, or raise `MemoryError` if it is null or 0."""
    if not result:
        raise MemoryError(f"not enough memory for {what}")
    return result


def invoke(library: ctypes.CDLL, name: str, *arguments: Any, what: str) -> int:
    """Call a C function that computes, and return its result.

    Raises `IndexError` if an index or a size is out of bounds, and `MemoryError`.
    """
    result: int = getattr(library, name)(*arguments)
    if result == _REFUSED:
        raise IndexError(f"{what}: {library.fd_refusal().decode()}")
    checked(result, what)
    return result
