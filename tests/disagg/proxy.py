"""Proxy between two workers that delays, loses, repeats and alters messages like a bad network."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import zmq

Parts = list[bytes]
Verdict = Iterable[tuple[float, Parts]]
"""Delays in seconds, each with the frames to forward after it."""
Judge = Callable[[str, Parts], Verdict]
"""Receives "up" (to the prefill side) or "down", and the frames of a message."""


def fair(direction: str, parts: Parts) -> Verdict:
    return [(0.0, parts)]


def hostile(
    seed: int, *, drop: float = 0.0, repeat: float = 0.0, delay: float = 0.0, flip: float = 0.0, longest: float = 0.05
) -> Judge:
    """Each message meets each fate with its own probability; delayed ones are overtaken by others."""
    chance = random.Random(seed)

    def judge(direction: str, parts: Parts) -> Verdict:
        if chance.random() < drop:
            return
        for _ in range(2 if chance.random() < repeat else 1):
            passed = list(parts)
            if chance.random() < flip:
                at = chance.randrange(len(passed))
                if passed[at]:
                    bit = chance.randrange(8 * len(passed[at]))
                    changed = bytearray(passed[at])
                    changed[bit // 8] ^= 1 << bit % 8
                    passed[at] = bytes(changed)
            yield (chance.random() * longest if chance.random() < delay else 0.0), passed

    return judge


class Proxy:
    """A ROUTER for decode sides, with a separate DEALER to the prefill side for each of them."""

    def __init__(self, target: str, judge: Judge = fair) -> None:
        self.judge = judge
        self.seen: list[str] = []
        self._target = target
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.linger = 0
        self.address = f"127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._backs: dict[bytes, zmq.Socket] = {}
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        finally:
            self._context.destroy(linger=0)

    def _turn(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        poller = zmq.Poller()
        for socket in (self._front, *self._backs.values()):
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(2 if self._later else 20))
        if self._front in ready:
            route, *parts = self._front.recv_multipart()
            self._pass("up", parts, self._back(route).send_multipart)
        for route, back in self._backs.items():
            if back in ready:
                self._pass("down", back.recv_multipart(), partial(self._forward, route))

    def _back(self, route: bytes) -> zmq.Socket:
        if route not in self._backs:
            back = self._backs[route] = self._context.socket(zmq.DEALER)
            back.linger = 0
            back.connect(f"tcp://{self._target}")
        return self._backs[route]

    def _forward(self, route: bytes, parts: Parts) -> None:
        self._front.send_multipart([route, *parts])

    def _pass(self, direction: str, parts: Parts, send: Callable[[Parts], object]) -> None:
        self.seen.append(direction)
        for delay, passed in self.judge(direction, parts):
            entry = (time.monotonic() + delay, next(self._numbers), lambda passed=passed: send(passed))
            heapq.heappush(self._later, entry)
