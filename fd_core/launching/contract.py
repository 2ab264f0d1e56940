"""The contract of launchers, which start processes on nodes, place them and supervise them.

A launched process

- is a module of the node's interpreter, run by `fd_core.launching.child`, and ends when its supervisor ends;
- has the working directory, the limits and the umask of its supervisor on the node;
- chooses its ports itself, binds them, and announces its address with `fd_core.launching.announcing.announce`:
  `fdcore serve` and `fdcore route` announce their URL once they are ready, so no free port must be guessed; a
  router's admin address follows after a space;
- has its output forwarded to the launcher's standard error, prefixed with its name, and its last lines in `reason`.
"""

from __future__ import annotations

import contextlib
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from fd_core.errors import FdError

__all__ = [
    "NODE_ADDRESS",
    "NODE_LOST",
    "LaunchError",
    "LaunchedProcess",
    "Launcher",
    "Node",
    "ProcessSpec",
    "how_ended",
    "require_startable",
]

NODE_ADDRESS: Final = "{node}"
"""An argument or a variable with this value becomes the address of the node, as in `("--host", NODE_ADDRESS)`."""
NODE_LOST: Final = 256
"""Exit code of a process whose node was lost; those of processes are less, and less than 0 for a signal."""


class LaunchError(FdError):
    """Processes cannot be started: the text names the missing resources and the available ones."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to run."""

    name: str
    """Name in logs and lists, such as `decode-0`; unique among the running processes of a launcher."""
    command: tuple[str, ...]
    """Arguments of the node's interpreter: `-m`, a module, and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the node."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that only the process may read: never in a command, a log or a list of the launcher."""
    cores: int = 1
    """Processors reserved for it; 0 for any share of the available ones."""
    devices: int = 0
    """Accelerators reserved for it, and the only ones that it sees."""
    group: str | None = None
    """Processes of one group are placed together: all or none."""
    spread: bool = False
    """True to place its group on as many nodes as possible; false for as few."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or a part of one, that runs processes."""

    id: str
    address: str
    """Host name or IP that processes on other nodes connect to."""
    cores: int
    """Total, including reserved ones."""
    devices: int
    alive: bool = True


class LaunchedProcess(Protocol):
    """A process that was started. Methods may be called from any thread, and none raises for a process that ended.

    It never reports what happened to another process of its name.
    """

    @property
    def name(self) -> str:
        """Name of its `ProcessSpec`."""

    @property
    def pid(self) -> int:
        """Its process id, on its node."""

    @property
    def node(self) -> str:
        """Id of its node."""

    @property
    def address(self) -> str:
        """Address of its node."""

    def announced(self) -> str | None:
        """Return its announced address, None until then; an end does not change it."""

    def exit_code(self) -> int | None:
        """Return None while it runs, then its exit code, less than 0 for a signal, or `NODE_LOST`."""

    def reason(self) -> str:
        """Return how it ended and its last lines, for operators; empty while it runs."""

    def terminate(self) -> None:
        """Send SIGTERM. Returns at once; the process ends when it wants to."""

    def kill(self) -> None:
        """Send SIGKILL. Returns at once."""

    def wait(self, seconds: float) -> int | None:
        """Wait for its end and return what `exit_code` returns then."""


class Launcher(ABC):
    """Starts processes and supervises them. Made without arguments; its settings are in the environment.

    Closing one launcher does not end the processes of another one, whose names may be the same.
    """

    @property
    def here(self) -> str | None:
        """Id of the node that this process is on; None if it is on none of them."""
        return None

    @abstractmethod
    def start(self, specs: Sequence[ProcessSpec]) -> tuple[LaunchedProcess, ...]:
        """Start processes, all or none, and return them in the same order.

        Their resources are reserved until they end. Raises `LaunchError` if the nodes have less left than is requested,
        or if a process cannot be started.
        """

    @abstractmethod
    def nodes(self) -> tuple[Node, ...]:
        """Return the known nodes, including lost ones."""

    @abstractmethod
    def close(self) -> None:
        """Kill all running processes. Idempotent."""


def require_startable(specs: Sequence[ProcessSpec], running: Iterable[str]) -> None:
    """Raise `LaunchError` for a command that is not a module, and for the name of a running process."""
    taken = set(running)
    for spec in specs:
        if spec.name in taken:
            raise LaunchError(f"a process named {spec.name} is already running")
        taken.add(spec.name)
        if spec.command[:1] != ("-m",) or len(spec.command) < 2:
            raise LaunchError(f"the command of {spec.name} must start with -m and a module")


def how_ended(code: int) -> str:
    """Describe how a process ended."""
    if code == NODE_LOST:
        return "was lost with its node"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
