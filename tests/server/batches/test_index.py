"""The index: pages of one owner, newest or oldest first, at a cost independent of the stored total."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.server.batches.accounts import OwnedIndex

CHANGE = st.tuples(st.sampled_from(["put", "put", "remove"]), st.sampled_from("ab"), st.sampled_from("xy"))


@given(changes=st.lists(CHANGE, max_size=40), limit=st.integers(1, 5), oldest_first=st.booleans())
@settings(max_examples=60, derandomize=True)
def test_pages_match_a_plain_list(changes: list[tuple[str, str, str]], limit: int, oldest_first: bool) -> None:
    index: OwnedIndex[str] = OwnedIndex()
    plain: list[tuple[str, str, str]] = []
    for number, (what, owner, kind) in enumerate(changes):
        if what == "put":
            index.put(f"{number}", owner, f"{number}", kind)
            plain.append((f"{number}", owner, kind))
        elif plain:
            index.remove(plain.pop(number % len(plain))[0])
    for owner in "abc":
        for kind in (None, "x", "z"):
            wanted = [name for name, whose, of in plain if whose == owner and kind in (None, of)]
            wanted = wanted if oldest_first else wanted[::-1]
            seen: list[str] = []
            after = None
            while (page := index.page(owner, limit, after, kind, oldest_first=oldest_first)) is not None:
                seen += page[0]
                if not page[1]:
                    break
                after = page[0][-1]
            assert seen == wanted
    assert index.page("c", 1, plain[0][0] if plain else "0") is None, "another owner's entry is not a cursor"


@pytest.mark.timing
def test_page_cost_is_independent_of_the_stored_total() -> None:
    def cost(stored: int) -> float:
        index: OwnedIndex[str] = OwnedIndex()
        for number in range(stored):
            index.put(f"{number}", "a", f"{number}")
        times = []
        for _ in range(50):
            begun = time.perf_counter()
            index.page("a", 20, f"{stored // 2}")
            times.append(time.perf_counter() - begun)
        return min(times)

    few = cost(1_000)
    assert cost(4_000) < 5 * few and cost(16_000) < 5 * few
