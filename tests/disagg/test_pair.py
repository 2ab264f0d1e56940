"""Receiver and sender over loopback in one process: what is transferred, and every way in which it is not."""

from .pair import Pair


def test_a_prompt_is_transferred_block_by_block() -> None:
    with Pair() as pair:
        fetched = pair.answer(pair.fetch(4 * 9 + 1))
        assert (fetched.outcome, fetched.cached) == ("transferred", 3)
        pair.idle()
        assert pair.receiver.stats().pieces == pair.sender.stats().pieces == 10
        assert pair.sender.stats().ended == {"confirmed": 1}
