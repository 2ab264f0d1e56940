"""Load or recompute: which of the two brings a prefix back sooner, by the measured costs of both.

Both costs are estimates. Each time loading is declined its estimate shrinks a little, so that sooner or later loading
is tried and measured again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from fd_core.effects.operations import LoadDecision, LoadPaceMeasured, PrefillPaceMeasured
from fd_core.types.metrics import gauge

_DOUBT = 0.9
"""Share of the estimated load time that remains after each decline."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Measured costs in seconds; None while nothing was measured."""

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
    """Time until the first block of the store is on its way."""


class LoadOrRecompute:
    """Decides for one request at a time."""

    def __init__(self) -> None:
        self.pace = Pace()
        self._trust = 1.0

    def prefill_measured(self, pace: PrefillPaceMeasured) -> None:
        """Learn what computing costs at present."""
        self.pace = replace(self.pace, prefill_token=pace.token)

    def load_measured(self, pace: LoadPaceMeasured) -> None:
        """Learn what loading costs at present."""
        latency = pace.store_latency or 0.0
        self.pace = Pace(self.pace.prefill_token, pace.host_block, pace.store_block, latency)

    def decide(self, request_id: str, host_blocks: int, store_blocks: int, block_size: int) -> LoadDecision:
        """Weigh bringing `host_blocks` and `store_blocks` back against computing their tokens."""
        tokens = (host_blocks + store_blocks) * block_size
        recompute = None if self.pace.prefill_token is None else self.pace.prefill_token * tokens
        load = self._load_seconds(host_blocks, store_blocks)
        worth = load is None or recompute is None or load * self._trust < recompute
        self._trust = 1.0 if worth else self._trust * _DOUBT
        return LoadDecision(request_id, worth, host_blocks, store_blocks, tokens, load, recompute)

    def _load_seconds(self, host_blocks: int, store_blocks: int) -> float | None:
        total = 0.0
        for blocks, each in ((host_blocks, self.pace.host_block), (store_blocks, self.pace.store_block)):
            if blocks and each is None:
                return None
            total += blocks * (each or 0.0)
        return total + (self.pace.store_latency if store_blocks else 0.0)
