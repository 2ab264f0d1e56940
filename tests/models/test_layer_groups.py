"""Division of layers into groups, and their places in a block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fd_core.config.layer_groups import MAX_GROUPS, ONE_GROUP, LayerGroups
from fd_core.models.layer_groups import divide_layers, places_of

WINDOWS = st.lists(st.sampled_from([None, 8, 32]), min_size=1, max_size=70)


@given(windows=WINDOWS, longest=st.sampled_from([8, 9, 32, 100]))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind(windows: list[int | None], longest: int) -> None:
    groups = divide_layers(windows, longest)
    places = places_of(tuple(windows), groups)
    assert len(set(places)) == len(windows)
    assert groups.count <= MAX_GROUPS + 1
    for window, (group, _) in zip(windows, places, strict=True):
        slides = window is not None and window < longest
        assert (group >= groups.whole) == (slides and groups.sliding > 0)
        assert group < groups.count
        assert not slides or window <= groups.window


def test_layers_per_block_are_those_of_the_rarer_kind() -> None:
    gemma = ([512] * 5 + [None]) * 3
    assert divide_layers(gemma, 32768) == LayerGroups(whole=1, sliding=5, window=512)
    assert divide_layers([128, None] * 12, 131072) == LayerGroups(whole=1, sliding=1, window=128)
    assert divide_layers([4096] * 32, 32768) == LayerGroups(whole=0, sliding=1, window=4096)


def test_window_of_the_whole_context_divides_nothing() -> None:
    assert divide_layers([4096] * 32, 4096) == ONE_GROUP


@given(windows=WINDOWS, cut=st.integers(0, 70))
def test_stages_place_their_layers_in_the_same_groups(windows: list[int | None], cut: int) -> None:
    groups = divide_layers(windows, 100)
    for stage in (tuple(windows[:cut]), tuple(windows[cut:])):
        assert len(set(places_of(stage, groups))) == len(stage)
