"""Backends with injected faults, for engines in separate processes.

It is installed like a plugin, through a folder on the path; an environment variable selects the fault, because child
processes inherit it.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fd_core.backends.cpu import ReferenceBackend
from fd_core.backends.null import NullBackend
from fd_core.hookspecs import CONTRACT_VERSION, ENTRY_POINT_GROUP, Entry, hookimpl
from fd_core.ops.contract import KVCache, StepInput
from fd_core.plugins import installed_plugins

FD_CONTRACT = CONTRACT_VERSION
ROOT = Path(__file__).parents[2]
_VARIABLE = "FDCORE_TEST_FAULT"


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Fault in a step that computes a position from `position` on, or `token` at exactly that position."""

    hows: list[str]
    """Kinds, used one after the other: `kill`, `exit`, `raise`, `hold`; `load` fails the second load of the model.

    `hold` suspends the step until the test releases it; a hold that is never released is a stall.
    """
    folder: str
    """File that counts strikes over all epochs."""
    position: int = 0
    token: int | None = None
    every: int = 0
    """Offset added to `position` after each strike."""

    @property
    def count(self) -> int:
        """Return the number of strikes so far."""
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
            case "hold":
                self._hold(done)
                return
        raise ArithmeticError("the device is on fire")

    def _hold(self, strike: int) -> None:
        released, ends = _released(Path(self.folder)), time.monotonic() + 60
        while released.stat().st_size <= strike:
            if time.monotonic() > ends:
                raise TimeoutError("the test released no step for 60 s")
            time.sleep(0.005)


def _released(marks: Path) -> Path:
    """File with a byte for each released strike."""
    return marks.with_name("released")


class _Faulty:
    def load_model(self, path: Any, ops: Any, progress: Any) -> Any:
        fault = msgspec.json.decode(os.environ[_VARIABLE], type=Fault)
        model: Any = super().load_model(path, ops, progress)  # type: ignore[misc]
        if fault.hows == ["load"]:
            if fault.count == 0:
                Path(fault.folder, "loaded").touch()
                return model
            raise ArithmeticError("the model is gone")
        forward, steps = model.forward, itertools.count(-1)  # since the two steps of the warm-up

        def faulty(step: StepInput, cache: KVCache) -> Any:
            if next(steps) > 0 and fault.strikes(step):
                fault.happen()
            return forward(step, cache)

        model.forward = faulty
        return model


class FaultyBackend(_Faulty, NullBackend):
    name = "faulty"


class FaultyReference(_Faulty, ReferenceBackend):
    name = "faulty_reference"


@hookimpl
def fd_register_backends() -> list[Entry]:
    kinds = (FaultyBackend, FaultyReference)
    return [Entry(kind.name, f"tests.engine.faults:{kind.__name__}", "fails on purpose") for kind in kinds]


class Faults:
    """Installs the backends for the duration of a test; `arm` selects the fault."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._marks = folder / "marks"
        self._marks.mkdir()
        _released(self._marks).touch()
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

    def release(self, strikes: int = 1) -> None:
        """Release the next strikes that hold, or will."""
        with _released(self._marks).open("ab") as file:
            file.write(b"." * strikes)

    @property
    def count(self) -> int:
        """Return the number of strikes so far."""
        return len(list(self._marks.iterdir()))
