"""Images of prompts in prefix keys and in the budget of a step."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.kv.blocks import BlockPool
from fd_core.scheduling.images import ImageBudget, identity, salted, whole_blocks
from fd_core.scheduling.operations import kv_transferring
from fd_core.scheduling.operations.kv_transferring import KVTransferring
from fd_core.scheduling.operations.registry import Operations
from fd_core.scheduling.requests import Request
from fd_core.types import Image
from tests.engine.stepping import greedy


def image(start: int, count: int, kind: int = 0) -> Image:
    return Image(start, count, bytes((kind,)) * 16, (1, 1), b"rgb")


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Image, ...]:
    """Return images with gaps of any length between them."""
    images, end = [], 0
    for gap, count in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=5)):
        images.append(image(end + gap, count, draw(st.integers(0, 2))))
        end += gap + count
    return tuple(images)


@given(images=prompts(), size=st.integers(1, 9), blocks=st.integers(0, 20))
def test_hit_is_the_longest_one_that_divides_no_image(images: tuple[Image, ...], size: int, blocks: int) -> None:
    whole = [count for count in range(blocks + 1) if not any(each.start < count * size < each.end for each in images)]
    assert whole_blocks(images, blocks, size) == max(whole)


@given(images=prompts(), limit=st.integers(12, 30), chunk=st.integers(1, 40), whole=st.booleans())
def test_every_image_is_charged_once_and_no_step_encodes_more(
    images: tuple[Image, ...], limit: int, chunk: int, whole: bool
) -> None:
    """Every image fits into a step, so that a prompt always advances; a model may need it in one chunk."""
    chunk += 11 * whole
    at, length, charged = 0, 110, list[Image]()
    while at < length:
        taken = ImageBudget(limit, whole=whole).cut(images, at, min(chunk, length - at))
        assert taken
        assert not (whole and any(each.start < at + taken < each.end for each in images))
        begun = [each for each in images if at <= each.start < at + taken]
        assert sum(each.num_tokens for each in begun) <= limit
        charged += begun
        at += taken
    assert charged == list(images)


def test_budget_is_shared_by_the_requests_of_a_step() -> None:
    budget = ImageBudget(20)
    assert budget.cut((image(2, 12),), 0, 30) == 30
    assert budget.cut((image(0, 12),), 0, 30) == 0
    assert budget.cut((image(4, 8),), 0, 30) == 30


def test_identity_follows_from_digest_and_place_alone() -> None:
    tokens = np.full(30, 7, np.int32)
    first, other = identity(tokens, (image(3, 9, 1),)), identity(tokens, (image(3, 9, 2),))
    assert (first[3:12] < 0).all()
    assert (first[3:12] != other[3:12]).all()
    assert (np.delete(first, np.s_[3:12]) == 7).all()
    assert (identity(tokens, (image(15, 9, 1),))[15:24] == first[3:12]).all()
    assert (tokens == 7).all()


def test_salt_renames_images_and_nothing_else() -> None:
    (plain,) = images = (image(3, 9),)
    assert salted(images, "") is images
    (mine,), (theirs,) = salted(images, "a"), salted(images, "b")
    assert len({plain.digest, mine.digest, theirs.digest}) == 3
    assert (mine.start, mine.num_tokens, mine.pixels) == (plain.start, plain.num_tokens, plain.pixels)


def test_prompt_with_too_many_pixels_is_computed_by_the_decode_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transferring, "MAX_JOB_PIXELS", 3)
    transfers = KVTransferring(Operations(BlockPool(4)), 4, paired=True)
    for images, wanted in (((), True), ((image(1, 2),), True), ((image(1, 2), image(3, 2)), False)):
        spec = msgspec.structs.replace(greedy("r", range(9), 5), images=images, prefill_at="peer")
        assert transfers.wants(Request(spec, 0, 20, b"")) is wanted
