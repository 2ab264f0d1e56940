"""Contract of a postprocessor: the hook `fd_register_postprocessors` offers classes of this contract."""

from __future__ import annotations

import abc
from typing import ClassVar

from fd_core.config import Limits
from fd_core.errors import PluginError
from fd_core.ops.contract import Array, Ops

__all__ = ["Postprocess", "require_fit"]


class Postprocess(abc.ABC):
    """Writes the token matrix of each step, on the device. Made once for each runner, and called on its thread.

    It keeps section 1 of the law; `fdcore conformance --postprocess NAME` proves it,
    `docs/extend/write-a-postprocessor.md` shows a whole plugin.
    """

    serves: ClassVar[tuple[str, ...]] = ()
    """Frameworks (`Ops.framework`) whose arrays it takes, or names of backends that it is for."""

    def __init__(self, ops: Ops, limits: Limits) -> None:
        """Prepare for steps of at most `limits.max_num_seqs` slots and `limits.max_drafts` drafts. May wait."""
        self.ops, self.limits = ops, limits

    @abc.abstractmethod
    def token_matrix(self, sampled: Array, accepted: Array, slots: Array, revoked: Array) -> Array:
        """Build the token matrix int32[max_num_seqs, 1 + k] of a step with the values of `fd_core.signals`.

        sampled int32[N, 1 + k] and accepted int32[N] of the rows that yield tokens, slots int32[N] and revoked
        int32[M], all on the device, in no order: row i delivers sampled[i, :1 + accepted[i]] in row slots[i], whatever
        the tokens are; each slot in `revoked`, which has no row, carries PREEMPTED_TOKEN_ID in column 0; everything
        else is EMPTY_TOKEN_ID. N and M may be 0.

        Does not wait for the device, keeps nothing of a step for the next one, and leaves its inputs as they are. The
        matrix shares no memory with them or with an earlier matrix: other steps may be computed before it is read.
        """


def require_fit(postprocess: type[Postprocess], name: str, framework: str, backend: str) -> None:
    """Raise `PluginError` unless the postprocessor called `name` is for the framework or for the backend."""
    if not isinstance(postprocess.serves, tuple) or not {framework, backend}.intersection(postprocess.serves):
        raise PluginError(
            f"the postprocessor {name} is not for the backend {backend}, whose arrays are those of {framework}: "
            f"it serves {postprocess.serves!r}",
            field="--postprocess",
            hint="leave it out, or name one that serves the framework or the backend",
        )
