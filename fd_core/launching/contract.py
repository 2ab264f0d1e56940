"""The contract of launchers: what starts processes on nodes, places them and watches over them.

A launched process

- is a module of the node's interpreter, run by `fd_core.launching.child`, and ends when nobody watches over it;
- chooses its ports itself, binds them, and announces where it is reached, with `fd_core.launching.announcing.announce`:
  `fdcore serve` and `fdcore route` announce their URL once they take requests, so nobody has to guess a free port; a
  router's admin address follows behind a space;
- has its output forwarded to the launcher's standard error behind its name, and its last lines kept for `reason`.
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
"""An argument or a variable that is this becomes the address of the node, as in `("--host", NODE_ADDRESS)`."""
NODE_LOST: Final = 256
"""The exit code of a process whose node is gone; those of processes are less, and less than 0 for a signal."""


class LaunchError(FdError):
    """Processes cannot be started: the text says what lacks, and what there is."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process that is to run somewhere."""

    name: str
    """Such as `decode-0`; in logs and lists, and unique among the processes of a launcher that run."""
    command: tuple[str, ...]
    """Behind the interpreter of the node: `-m`, a module, and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the node."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that nobody but the process reads: never in a command, a log or a list of the launcher."""
    cores: int = 1
    """Processors that are kept for it; 0 for any share of what is there."""
    devices: int = 0
    """Accelerators that are kept for it, and the only ones that it sees."""
    group: str | None = None
    """Processes of one group are placed together: all or none."""
    spread: bool = False
    """Whether its group is placed on as many nodes as there are; otherwise on as few."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or a part of one, that runs processes."""

    id: str
    address: str
    """Host name or IP that processes on other nodes connect to."""
    cores: int
    """In all, taken ones included."""
    devices: int
    alive: bool = True


class LaunchedProcess(Protocol):
    """A process that was started. Methods may be called from any thread, and none raises for a process that ended."""

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
        """Return where it says that it is reached, None until it does."""

    def exit_code(self) -> int | None:
        """Return None while it runs, then its exit code, less than 0 for a signal, or `NODE_LOST`."""

    def reason(self) -> str:
        """Return how it ended and its last lines, for operators; empty while it runs."""

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM. Returns at once."""

    def kill(self) -> None:
        """End it, by SIGKILL. Returns at once."""

    def wait(self, seconds: float) -> int | None:
        """Wait for its end and return what `exit_code` returns then."""


class Launcher(ABC):
    """Starts processes and watches over them. Made without arguments; its settings come from the environment."""

    @property
    def here(self) -> str | None:
        """Id of the node that this process is on; None if it is on none of them."""
        return None

    @abstractmethod
    def start(self, specs: Sequence[ProcessSpec]) -> tuple[LaunchedProcess, ...]:
        """Start processes, all or none, and return them in the same order.

        What they ask for is theirs until they end. Raises `LaunchError` if the nodes have less left than is asked for,
        or if a process cannot be started.
        """

    @abstractmethod
    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that are known, also those that are gone."""

    @abstractmethod
    def close(self) -> None:
        """End every process that runs, by force. Idempotent."""


def require_startable(specs: Sequence[ProcessSpec], running: Iterable[str]) -> None:
    """Raise `LaunchError` for a command that is no module, and for a name that a running process has."""
    taken = set(running)
    for spec in specs:
        if spec.name in taken:
            raise LaunchError(f"a process called {spec.name} runs already")
        taken.add(spec.name)
        if spec.command[:1] != ("-m",) or len(spec.command) < 2:
            raise LaunchError(f"the command of {spec.name} has to begin with -m and a module")


def how_ended(code: int) -> str:
    """Say how a process ended."""
    if code == NODE_LOST:
        return "is gone with its node"
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
