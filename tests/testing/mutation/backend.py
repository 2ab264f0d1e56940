"""The backend `mutant`: the reference backend on a pack that `trial` edits; offered through a folder on the path."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

from fd_core.backends.cpu import ReferenceBackend
from fd_core.hookspecs import CONTRACT_VERSION, Entry, hookimpl
from fd_core.ops.contract import Ops

FD_CONTRACT = CONTRACT_VERSION


class MutantBackend(ReferenceBackend):
    """The reference backend, whose pack is another module than that of the oracle."""

    name: ClassVar[str] = "mutant"
    limits = MappingProxyType(ReferenceBackend.limits | {"own_process": "only the process of the trial has its pack"})

    def make_ops(self) -> Ops:
        super().make_ops()
        from fd_mutant.ops import NumpyOps  # type: ignore[import-not-found]

        pack: Ops = NumpyOps()
        return pack


@hookimpl
def fd_register_backends() -> list[Entry]:
    return [Entry("mutant", f"{__name__}:MutantBackend", "the reference backend with one edit")]
