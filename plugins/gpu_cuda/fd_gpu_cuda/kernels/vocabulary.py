"""What the kernels over rows of logits share: weights of tokens, keys that order logits, the last program of a row.

Several programs work on a row. Each leaves what it found in a workspace, and the last one to arrive puts it together,
so that it takes no launch of its own. This is right in the memory model of PTX: the barrier orders the writes of all
threads of a program before its atomic addition, and the addition, which releases and acquires at the scope of the
device, passes that on to whoever adds later (causality order is transitive: PTX ISA, "Memory Consistency Model"). The
last one reads beyond the caches of its multiprocessor, and sets the counter back to 0 for the next launch on the
stream.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_last(counters_at, row, programs):
    """Say whether all other programs of a row have come here before. What they wrote may be read then."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counters_at + row, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    last = arrived == programs - 1
    if last:
        tl.store(counters_at + row, 0)
    return last


@triton.jit
def weight_of(logit, peak, temperature):
    """Return rint(2^32 * exp((logit - peak) / temperature)) in float64, of float64 arguments."""
    weight = tl.exp((logit - peak) / temperature) * 4294967296.0
    # Numbers from 2^52 on are whole, so adding 2^52 rounds to a whole number, to the even one if it is halfway.
    return (weight + 4503599627370496.0) - 4503599627370496.0


@triton.jit
def key_of(logit):
    """Return int64 keys in the order of float32 logits; -0.0 and 0.0 have the same one."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def logit_of(key):
    """Return the float32 logits of int64 keys."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
