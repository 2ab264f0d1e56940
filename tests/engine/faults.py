"""A null backend that fails on purpose, for engines in processes of their own.

It is installed like a plugin, through a folder on the path; an environment variable says what goes wrong, because that
is what a child process inherits.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fd_core.backends.null import NullBackend, NullModel
from fd_core.hookspecs import CONTRACT_VERSION, ENTRY_POINT_GROUP, Entry, hookimpl
from fd_core.ops.contract import KVCache, StepInput
from fd_core.plugins import installed_plugins

FD_CONTRACT = CONTRACT_VERSION
ROOT = Path(__file__).parents[2]
_VARIABLE = "FDCORE_TEST_FAULT"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong in a step that computes a position from `position` on, or `token` at exactly that position."""

    hows: list[str]
    """One after the other: `kill`, `exit`, `raise`, `stall`; `load` is a model that cannot be loaded a second time."""
    folder: str
    """Keeps count, over all epochs."""
    position: int = 0
    token: int | None = None
    every: int = 0
    """How much later it happens the next time."""

    @property
    def count(self) -> int:
        """How often it happened."""
        return len(list(Path(self.folder).iterdir()))

    def strikes(self, step: StepInput) -> bool:
        done = self.count
        at = self.position + done * self.every
        met = step.positions >= at if self.token is None else (step.positions == at) & (step.token_ids == self.token)
        return done < len(self.hows) and bool(met.any())

    def happen(self) -> None:
        done = self.count
        Path(self.folder, str(done)).touch()
        match self.hows[done]:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "stall":
                time.sleep(60)
        raise ArithmeticError("the device is on fire")


class FaultyModel(NullModel):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault
        self._steps = -2
        """Steps since the two of the warm-up."""

    def forward(self, step: StepInput, cache: KVCache) -> Any:
        self._steps += 1
        if self._steps > 0 and self._fault.strikes(step):
            self._fault.happen()
        return super().forward(step, cache)


class FaultyBackend(NullBackend):
    name = "faulty"

    def load_model(self, path: Any, ops: Any, progress: Any) -> NullModel:
        fault = msgspec.json.decode(os.environ[_VARIABLE], type=Fault)
        if fault.hows == ["load"]:
            if fault.count == 0:
                Path(fault.folder, "loaded").touch()
                return NullModel()
            raise ArithmeticError("the model is gone")
        return FaultyModel(fault)


@hookimpl
def fd_register_backends() -> list[Entry]:
    return [Entry("faulty", "tests.engine.faults:FaultyBackend", "fails on purpose")]


class Faults:
    """Installs the backend for the time of a test; `arm` says what it does."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._marks = folder / "marks"
        self._marks.mkdir()
        self._patch = patch
        info = folder / "fd_faulty-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-faulty\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nfaulty = tests.engine.faults\n")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT)]))
        patch.syspath_prepend(str(folder))
        installed_plugins.cache_clear()

    def arm(self, *hows: str, **when: int) -> None:
        fault = Fault(hows=list(hows), folder=str(self._marks), **when)
        self._patch.setenv(_VARIABLE, msgspec.json.encode(fault).decode())

    @property
    def count(self) -> int:
        """How often it happened."""
        return len(list(self._marks.iterdir()))
