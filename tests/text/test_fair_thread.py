import asyncio
import threading

import pytest

from fd_core.text.fair_thread import CLIENT, FairThread


@pytest.fixture
def thread():
    made = FairThread("test")
    yield made
    made.close()


def order_of(thread, clients, cancelled=()):
    """Queue work of clients while the thread is blocked; return the order of execution."""
    done, held = [], threading.Event()

    async def submit(client):
        CLIENT.set(client[0])
        await thread.run(lambda: done.append(client))

    async def scenario():
        holding = asyncio.create_task(thread.run(lambda: held.wait(10)))
        await asyncio.sleep(0)
        tasks = {}
        for client in clients:
            tasks[client] = asyncio.create_task(submit(client))
            await asyncio.sleep(0)
        for client in cancelled:
            tasks[client].cancel()
        await asyncio.sleep(0)
        held.set()
        await asyncio.gather(holding, *tasks.values(), return_exceptions=True)

    asyncio.run(scenario())
    return done


def test_clients_are_served_round_robin(thread):
    assert order_of(thread, ["a1", "a2", "a3", "b1", "c1", "b2"]) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_work_of_a_disconnected_client_is_skipped(thread):
    assert order_of(thread, ["a1", "a2", "b1"], cancelled=["a1", "b1"]) == ["a2"]


def test_error_is_raised_to_the_caller_and_thread_continues(thread):
    def wrong():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(thread.run(wrong))
    assert asyncio.run(thread.run(lambda: 3)) == 3


def test_close_cancels_queued_work(thread):
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
