"""Load or recompute: which brings a prefix back sooner, from what both have been measured to cost.

Both costs are estimates, so a way that was declined is doubted a little less each time: sooner or later it is tried and
measured again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fd_core.kv.effects import LoadPaceMeasured, PrefillPaceMeasured
from fd_core.metrics import gauge

__all__ = ["Choice", "Pace", "Tradeoff"]

_DOUBT = 0.9
"""What each decline leaves of the estimate of loading."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What was measured so far, in seconds; None where nothing was."""

    prefill_token: Annotated[
        float | None, gauge("kv_pace_prefill_token_seconds", "Measured time to compute one prompt token, in seconds.")
    ] = None
    host_block: Annotated[
        float | None,
        gauge("kv_pace_host_block_seconds", "Measured time to load one KV block from the host tier, in seconds."),
    ] = None
    store_block: Annotated[
        float | None,
        gauge("kv_pace_store_block_seconds", "Measured time to load one KV block from the store, in seconds."),
    ] = None
    store_latency: float = 0.0
    """Until the store's first block is on its way."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One decision and its inputs, for traces."""

    request_id: str
    load: bool
    host_blocks: int
    store_blocks: int
    tokens: int
    """Tokens that need not be computed if the blocks are loaded."""
    load_seconds: float | None
    recompute_seconds: float | None
    """None while unknown; what is unknown is tried."""


class Tradeoff:
    """Decides for one request at a time."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._trust = 1.0

    def measured(self, pace: LoadPaceMeasured | PrefillPaceMeasured) -> None:
        """Take in what loading or computing costs at present."""
        match pace:
            case PrefillPaceMeasured(token):
                self.pace = replace(self.pace, prefill_token=token)
            case LoadPaceMeasured(host_block, store_block, latency):
                self.pace = Pace(self.pace.prefill_token, host_block, store_block, latency or 0.0)

    def choose(self, request_id: str, host_blocks: int, store_blocks: int, block_size: int) -> Choice:
        """Weigh bringing `host_blocks` and `store_blocks` back against computing their tokens."""
        tokens = (host_blocks + store_blocks) * block_size
        recompute = None if self.pace.prefill_token is None else self.pace.prefill_token * tokens
        load = self._load_seconds(host_blocks, store_blocks)
        worth = load is None or recompute is None or load * self._trust < recompute
        self._trust = 1.0 if worth else self._trust * _DOUBT
        return Choice(request_id, worth, host_blocks, store_blocks, tokens, load, recompute)

    def _load_seconds(self, host_blocks: int, store_blocks: int) -> float | None:
        total = 0.0
        for blocks, each in ((host_blocks, self.pace.host_block), (store_blocks, self.pace.store_block)):
            if blocks and each is None:
                return None
            total += blocks * (each or 0.0)
        return total + (self.pace.store_latency if store_blocks else 0.0)
