"""Groups of layers: the blocks that they hold, and the entries that a token reads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups

GROUPS = st.builds(LayerGroups, st.integers(0, 3), st.integers(1, 5), st.integers(1, 70), st.booleans())
SIZES = st.integers(1, 20)


@given(groups=GROUPS, size=SIZES, position=st.integers(0, 300))
def test_first_block_that_a_token_reads_holds_the_begin_of_its_window(
    groups: LayerGroups, size: int, position: int
) -> None:
    first = groups.first_read(position, size)
    begin = position // groups.window * groups.window if groups.chunked else max(position - groups.window + 1, 0)
    assert first == begin // size
    assert groups.first_read(np.array([position], np.int32), size).tolist() == [first]


@given(groups=GROUPS, size=SIZES, tokens=st.integers(1, 300))
def test_blocks_suffice_for_every_token_of_a_request(groups: LayerGroups, size: int, tokens: int) -> None:
    held = groups.blocks(tokens, size)
    assert groups.blocks(np.array([tokens]), size).tolist() == [held]
    for position in range(tokens):
        sliding = position // size + 1 - groups.first_read(position, size)
        assert groups.whole * (position // size + 1) + groups.sliding * sliding <= held
        kept = position // size + 1 - groups.first_kept(position, size)
        assert sliding <= kept and groups.whole * (position // size + 1) + groups.sliding * kept <= held


@given(groups=st.one_of(GROUPS, st.just(ONE_GROUP)), size=SIZES, blocks=st.integers(0, 500))
def test_longest_request_uses_the_pool_and_a_longer_one_does_not_fit(
    groups: LayerGroups, size: int, blocks: int
) -> None:
    longest = groups.longest(blocks, size)
    if longest:
        assert groups.blocks(min(longest, 10**6), size) <= blocks
    if longest < 2**31 // size * size - size:
        assert groups.blocks(longest + 1, size) > blocks


def test_one_group_counts_blocks_of_tokens() -> None:
    assert (ONE_GROUP.count, ONE_GROUP.blocks(33, 16), ONE_GROUP.longest(3, 16)) == (1, 3, 48)
