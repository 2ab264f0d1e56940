"""Contract of a postprocessor, which the hook `fd_register_postprocessors` registers."""

from __future__ import annotations

import abc
from typing import ClassVar

from fd_core.config import Limits
from fd_core.config.envelope import OperatingEnvelope
from fd_core.errors import PluginError
from fd_core.ops.contract import Array, Ops

__all__ = ["Postprocess", "require_fit"]


class Postprocess(abc.ABC):
    """Builds the token matrix of each step on the device. Created once per runner, and called on its thread.

    A runner may live for any number of steps; afterwards nothing holds the postprocessor or its pack.

    It implements section 1 of the invariants; `fdcore conformance --postprocess NAME` checks it, and
    `docs/extend/write-a-postprocessor.md` shows a complete plugin.
    """

    serves: ClassVar[tuple[str, ...]] = ()
    """Supported frameworks (`Ops.framework`) or names of supported backends."""
    envelope: ClassVar[OperatingEnvelope] = OperatingEnvelope()
    """Largest `max_num_seqs` and `max_drafts` that it supports, by default any."""

    def __init__(self, ops: Ops, limits: Limits) -> None:
        """Prepare for steps of at most `limits.max_num_seqs` slots and `limits.max_drafts` drafts. May block."""
        self.ops, self.limits = ops, limits

    @abc.abstractmethod
    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array) -> Array:
        """Build the token matrix int32[max_num_seqs, 1 + k] of a step with the values of `fd_core.signals`.

        sampled int32[N, 1 + k] and accepted int32[N] of the rows that yield tokens, slots int32[N] and revoked
        int32[M], all on the device, in no order, possibly views, `sampled` with strides: row i delivers
        sampled[i, :1 + accepted[i]] in row slots[i], whatever the tokens are; each slot in `revoked`, which has no row,
        carries PREEMPTED_TOKEN_ID in column 0; everything else is EMPTY_TOKEN_ID. N and M may be 0.

        Does not synchronize with the device, takes little time of the host whatever the other limits are, keeps no
        state between steps, and does not modify its inputs. The matrix shares no memory with them or with an earlier
        matrix: further steps may be computed before it is read.
        """


def require_fit(postprocess: type[Postprocess], name: str, framework: str, backend: str) -> None:
    """Raise `PluginError` unless the postprocessor `name` supports the framework or the backend."""
    if not isinstance(postprocess.serves, tuple) or not {framework, backend}.intersection(postprocess.serves):
        raise PluginError(
            f"the postprocessor {name} does not support the backend {backend} (framework {framework}): "
            f"it supports {postprocess.serves!r}",
            field="--postprocess",
            hint="omit it, or select one that supports the framework or the backend",
        )
