"""The drafters that come with the core, offered through the same hook as a stranger's."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

_HERE = "fd_core.runner.drafting"


@hookimpl
def fd_register_drafters() -> list[Entry]:
    """Offer `ngram`, `suffix` and `draft_model`."""
    return [
        Entry("ngram", f"{_HERE}.ngram:NgramDrafter", "what followed the same n tokens last time"),
        Entry("suffix", f"{_HERE}.suffix:SuffixDrafter", "what followed the longest suffix seen before"),
        Entry("draft_model", f"{_HERE}.draft_model:DraftModelDrafter", "what a smaller model would say"),
    ]
