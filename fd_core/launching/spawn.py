"""The launcher `spawn`: child processes on this machine, its only node."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fd_core.launching.contract import Launcher, LaunchError, Node, ProcessSpec, require_startable
from fd_core.launching.owned import OwnedProcess

_DEVICES: Final = "CUDA_VISIBLE_DEVICES"


class SpawnLauncher(Launcher):
    """Reserves processors and devices for each process, as many as it requests; one may name its device itself."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._devices = _devices()
        self._lock = threading.Lock()
        self._running: list[tuple[OwnedProcess, frozenset[int], frozenset[str]]] = []

    @property
    def here(self) -> str:
        """The only node."""
        return "local"

    def start(self, specs: Sequence[ProcessSpec]) -> tuple[OwnedProcess, ...]:
        """Start processes, all or none."""
        with self._lock:
            for process, _, _ in self._running:
                if process.exit_code() is not None:
                    process.close()
            self._running = [one for one in self._running if one[0].exit_code() is None]
            self._require(specs)
            cores = [core for core in self._cores if not any(core in taken for _, taken, _ in self._running)]
            devices = [device for device in self._devices if not any(device in taken for *_, taken in self._running)]
            started = []
            try:
                for spec in specs:
                    own, cores = cores[: spec.cores], cores[spec.cores :]
                    shown, devices = devices[: spec.devices], devices[spec.devices :]
                    chosen = not self._devices or _DEVICES in spec.environment
                    environment = {} if chosen else {_DEVICES: ",".join(shown)}
                    process = OwnedProcess(spec, "local", "127.0.0.1", cores=own, environment=environment)
                    started.append((process, frozenset(own), frozenset(shown)))
            except OSError as error:
                for process, _, _ in started:
                    process.close()
                raise LaunchError(f"starting {spec.name} failed: {error}") from error
            self._running += started
        return tuple(process for process, _, _ in started)

    def nodes(self) -> tuple[Node, ...]:
        """Return this machine."""
        return (Node("local", "127.0.0.1", len(self._cores), devices=len(self._devices)),)

    def close(self) -> None:
        """End every process that runs."""
        with self._lock:
            for process, _, _ in self._running:
                process.kill()
            for process, _, _ in self._running:
                process.close()
            self._running = []

    def _require(self, specs: Sequence[ProcessSpec]) -> None:
        require_startable(specs, [process.name for process, _, _ in self._running])
        for what, there, asked, held in (
            ("processors", self._cores, [spec.cores for spec in specs], [len(one[1]) for one in self._running]),
            ("devices", self._devices, [spec.devices for spec in specs], [len(one[2]) for one in self._running]),
        ):
            if sum(asked) + sum(held) > len(there):
                names = ", ".join(spec.name for spec in specs)
                taken = f"{sum(held)} of {len(there)} on this machine are in use"
                raise LaunchError(f"{names} need {sum(asked)} {what}, but {taken}")


def _devices() -> tuple[str, ...]:
    """Return the NVIDIA devices that this process sees."""
    shown = os.environ.get(_DEVICES)
    if shown is not None:
        return tuple(word.strip() for word in shown.split(",") if word.strip())
    found = sorted(int(path.name[6:]) for path in Path("/dev").glob("nvidia[0-9]*"))
    return tuple(map(str, found))
