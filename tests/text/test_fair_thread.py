import asyncio
import threading

import pytest

from fd_core.text.fair_thread import CLIENT, FairThread


@pytest.fixture
def thread():
    made = FairThread("test")
    yield made
    made.close()


def order_of(thread, brought, cancelled=()):
    """Bring work of clients while the thread is held; return in which order it was done."""
    done, held = [], threading.Event()

    async def bring(client):
        CLIENT.set(client[0])
        await thread.run(lambda: done.append(client))

    async def scenario():
        holding = asyncio.create_task(thread.run(lambda: held.wait(10)))
        await asyncio.sleep(0)
        tasks = {}
        for client in brought:
            tasks[client] = asyncio.create_task(bring(client))
            await asyncio.sleep(0)
        for client in cancelled:
            tasks[client].cancel()
        await asyncio.sleep(0)
        held.set()
        await asyncio.gather(holding, *tasks.values(), return_exceptions=True)

    asyncio.run(scenario())
    return done


def test_who_brings_much_work_waits_for_whoever_brings_little(thread):
    assert order_of(thread, ["a1", "a2", "a3", "b1", "c1", "b2"]) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_work_whose_client_left_is_not_done(thread):
    assert order_of(thread, ["a1", "a2", "b1"], cancelled=["a1", "b1"]) == ["a2"]


def test_an_error_reaches_who_waits_and_the_thread_goes_on(thread):
    def wrong():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(thread.run(wrong))
    assert asyncio.run(thread.run(lambda: 3)) == 3


def test_an_end_cancels_what_waits(thread):
    held, began = threading.Event(), threading.Event()

    async def scenario():
        holding = asyncio.create_task(thread.run(lambda: (began.set(), held.wait(10))))
        waiting = asyncio.create_task(thread.run(lambda: None))
        await asyncio.to_thread(began.wait)
        thread.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.set()
        await holding

    asyncio.run(scenario())
