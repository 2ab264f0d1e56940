"""The drafters that come with the core, offered through the same hook as a stranger's."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_drafters() -> list[Entry]:
    """Offer `ngram` and `suffix`."""
    return [
        Entry("ngram", "fd_core.runner.drafting:NgramDrafter", "what followed the same n tokens last time"),
        Entry("suffix", "fd_core.runner.drafting:SuffixDrafter", "what followed the longest suffix seen before"),
    ]
