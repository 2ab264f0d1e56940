"""Ray actor that owns one process on its node."""

from __future__ import annotations

import os
import time
from typing import Final

import ray
from fd_core.launching.contract import ProcessSpec
from fd_core.launching.owned import OwnedProcess

from fd_launcher_ray.cores import ReservedCores

_POLL_SECONDS: Final = 0.05


class Agent:
    """Starts a process on its node and reports its exit. If the actor dies, the process exits."""

    def __init__(self) -> None:
        self._process: OwnedProcess | None = None

    def start(self, spec: ProcessSpec) -> tuple[str, str, int]:
        """Start the process, with its secrets; return id and address of the node, and the PID. Raises `OSError`."""
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._cores = ReservedCores(spec.cores)
        if not spec.cores:
            os.environ.pop("OMP_NUM_THREADS", None)  # set by Ray for actors without CPUs
        devices = {} if spec.devices else {"CUDA_VISIBLE_DEVICES": ""}
        self._process = OwnedProcess(spec, node, address, cores=self._cores.numbers, environment=devices)
        return node, address, self._process.pid

    def announcement(self) -> str | None:
        """Wait for the announcement of the process; None if it exits before."""
        process = self._process
        while process is not None and (announced := process.announced()) is None:
            if process.exit_code() is not None:
                return process.announced()
            time.sleep(_POLL_SECONDS)
        return announced

    def end(self) -> tuple[int, str]:
        """Wait for the exit of the process; return exit code and reason."""
        process = self._process
        while process is None or (code := process.exit_code()) is None:
            time.sleep(_POLL_SECONDS)
        return code, process.reason()

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            self._process.kill()
