"""How the sides of leases reach each other, whatever carries what they say; `connections` of each side is ZeroMQ.

Everything here belongs to the loop of the side that made it. What is said may be lost, repeated and reordered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fd_core.disagg.messages import FromDecode, FromPrefill
from fd_core.disagg.wire import Wire
from fd_core.kv.stores.contract import Bytes
from fd_core.kv.tally import Tally

__all__ = ["DecodeLinks", "MakeDecodeLinks", "MakePrefillLinks", "PrefillLink", "PrefillLinks"]


class PrefillLink(ABC):
    """One prefill worker, as a decode worker reaches it. A link that was lost stays lost."""

    def __init__(self) -> None:
        self.leases: set[str] = set()
        self.idle_since = 0.0
        """When the last lease ended."""

    @abstractmethod
    def say(self, message: FromDecode) -> None:
        """Send a message; it may be lost."""


class PrefillLinks(Protocol):
    """The prefill workers of a decode worker by address, with one link for all leases at each."""

    def __len__(self) -> int: ...

    def get(self, address: str) -> PrefillLink:
        """Return the link to `host:port`, a new one if the last was lost. Raises `ValueError` for no address."""

    def tidy(self, now: float) -> float:
        """Give up links that were long without a lease; return the seconds until the next one may have to be."""

    def close(self) -> None:
        """Give up every link."""


class MakePrefillLinks(Protocol):
    """Makes the links of a decode worker."""

    def __call__(
        self,
        loop: Any,
        wire: Wire,
        tally: Tally,
        /,
        *,
        hear: Callable[[PrefillLink, FromPrefill, Sequence[Bytes]], None],
        reopen: Callable[[str], None],
        gone: Callable[[str, str], None],
    ) -> PrefillLinks:
        """`loop` is of the kind that goes with these links; `hear` takes a message and the frames behind it.

        `reopen` takes the name of each lease whose `Open` has to be said again, `gone` the name of each lease whose
        link is lost, and why.
        """


class DecodeLinks(Protocol):
    """The decode workers of a prefill worker. A route is how a link names the one that a message came from."""

    port: int
    """Where decode workers reach this worker."""

    def say(self, route: bytes, message: FromPrefill, frames: Sequence[Bytes] = ()) -> bool:
        """Send a message and frames behind it, which are not copied; return whether it left."""

    def close(self) -> None:
        """Stop listening; what was said last may still leave."""


class MakeDecodeLinks(Protocol):
    """Makes the links of a prefill worker, and listens."""

    def __call__(
        self,
        loop: Any,
        wire: Wire,
        tally: Tally,
        host: str,
        port: int,
        /,
        *,
        hear: Callable[[bytes, FromDecode], object],
        turn_down: Callable[[bytes, str, str], object],
    ) -> DecodeLinks:
        """Listen at `host:port`, 0 for any free port. Raises `ConfigError` if that is not possible.

        `loop` is of the kind that goes with these links; `hear` takes the route and each message. `turn_down` takes
        route, lease and reason where a message is sealed but beyond a limit.
        """
