"""Division of a model's layers into groups of equal size, by the window of their attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fd_core.config.layer_groups import MAX_GROUPS, ONE_GROUP, LayerGroups


def divide_layers(windows: Sequence[int | None], longest: int, *, chunked: bool = False) -> LayerGroups:
    """Divide layers with these windows, None for no window, into as few groups as the rarer kind of layer has layers.

    A window of at least `longest` tokens, the longest context, counts as none. `chunked` windows are chunks.
    """
    sliding = [window for window in windows if window is not None and window < longest]
    whole = len(windows) - len(sliding)
    if not sliding:
        return ONE_GROUP
    size = max(min(whole or len(sliding), len(sliding)), -(-len(windows) // MAX_GROUPS))
    return LayerGroups(whole=-(-whole // size), sliding=-(-len(sliding) // size), window=max(sliding), chunked=chunked)


@lru_cache(maxsize=64)
def places_of(windows: tuple[int | None, ...], groups: LayerGroups) -> tuple[tuple[int, int], ...]:
    """Return group and index, among the layers of a block, of each layer of a model or a stage."""
    places, counts = [], [0, 0]
    for window in windows:
        slides = groups.sliding > 0 and window is not None and window <= groups.window
        of_kind = groups.sliding if slides else groups.whole
        index, group = divmod(counts[slides], of_kind)
        places.append((group + (groups.whole if slides else 0), index))
        counts[slides] += 1
    return tuple(places)
