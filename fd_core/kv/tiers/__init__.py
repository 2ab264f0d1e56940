"""Copies of KV outside the device: the host tier, the way to the store, and what both have been worth."""

from fd_core.kv.tiers.rates import LoadRates
from fd_core.kv.tiers.stats import TierStats
from fd_core.kv.tiers.tiers import KVTiers

__all__ = ["KVTiers", "LoadRates", "TierStats"]
