"""The other side of a transfer in a separate process: `python -m tests.disagg.other prefill|decode ...`."""

from __future__ import annotations

import sys
import time

from tests.kv.tiers.scripted import ScriptedCache

from .pair import Computer, Fetches, make_receiver, make_sender


def prefill(pause: float) -> None:
    """Compute prompts, one chunk every `pause` seconds; print the port."""
    cache = ScriptedCache(200)
    sender = make_sender(cache)
    computer = Computer(sender, cache)
    print(sender.port, flush=True)
    while True:
        computer.step()
        time.sleep(pause)


def decode(port: int, idle_timeout: float) -> None:
    """Fetch long prompts, slowly."""
    cache = ScriptedCache(200)
    cache.between = lambda: time.sleep(0.02)
    fetches = Fetches(make_receiver(cache, idle_timeout=idle_timeout, window=2), cache)
    for number in range(3):
        fetches.fetch(f"127.0.0.1:{port}", 4 * 60, salt=f"{number}")
    while True:
        fetches.step()
        time.sleep(0.01)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "prefill":
        prefill(float(arguments[0]))
    else:
        decode(int(arguments[0]), float(arguments[1]))
