"""KV outside the device: the host tier, the way to the store, and what loading from either costs."""

from fd_core.kv.tiers.offload import KVOffload, SealedStore
from fd_core.kv.tiers.stats import TierStats

__all__ = ["KVOffload", "SealedStore", "TierStats"]
