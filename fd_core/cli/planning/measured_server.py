"""CPU time of a server process per request and per delivered token, measured over HTTP on this machine."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from fd_core.errors import FdError
from fd_core.simulation.costs.calibrating import usual
from fd_core.simulation.costs.profile import RequestTerms

_START_SECONDS: Final = 600.0
_TOKENS: Final = 48
_TEXT: Final = "The quick brown fox jumps over the lazy dog, and 42 others watch it. " * 60


def serving_times(flags: Sequence[str], request: RequestTerms, max_model_len: int) -> RequestTerms:
    """Return `request` with the measured CPU time of a server process, without its engine. Raises `FdError`."""
    if not hasattr(time, "clock_gettime"):
        raise FdError("this system does not support reading the CPU time of another process")
    from fd_core.http.connections.listening import bind_socket

    with bind_socket("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    fdcore = [sys.executable, "-P", "-m", "fd_core.cli"]
    command = [*fdcore, "serve", *flags, "--port", str(port), "--host", "127.0.0.1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FD_API_KEY")}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        server = _ServerUnderTest(process, port)
        server.wait()
        long_text = _TEXT[: max_model_len // 2]  # a text has at most as many tokens as characters
        tokens = max(2, min(_TOKENS, max_model_len // 4))
        server.take(long_text, tokens)  # not timed: imports and compilations of the first request
        # Alternate, so that other work of the server affects all three equally.
        kinds = (("A fox.", 1), (long_text, 1), ("A fox.", tokens))
        taken = [[server.take(f"{number} {text}", count) for text, count in kinds] for number in range(5)]
        short, long, talking = zip(*taken, strict=True)
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise FdError(f"the test server did not respond: {error}") from error
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
    once, long_seconds, talking_seconds = (usual([seconds for seconds, _ in kind]) for kind in (short, long, talking))
    prompt, long_prompt = short[0][1], long[0][1]
    delivery = max(0.0, talking_seconds - once) / (tokens - 1)
    per_token = max(0.0, long_seconds - once) / (long_prompt - prompt)
    receive = max(0.0, once - delivery - per_token * prompt)
    return msgspec.structs.replace(request, receive=receive, receive_per_token=per_token, delivery=delivery)


class _ServerUnderTest:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process = process
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120.0)
        # The id of another process's CPU-time clock on Linux.
        self._clock = ~process.pid << 3 | 2

    def wait(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise FdError("the test server did not become ready")
            try:
                self._connection.request("GET", "/ready")
                answer = self._connection.getresponse()
                answer.read()
                if answer.status == 200:
                    return
            except OSError:
                self._connection.close()
            time.sleep(0.1)

    def take(self, text: str, tokens: int) -> tuple[float, int]:
        """Stream a continuation of `tokens` tokens; return its CPU time in seconds and the prompt's tokens."""
        asked = {"prompt": text, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        body = json.dumps(asked | {"stream_options": {"include_usage": True}})
        begun = time.clock_gettime(self._clock)
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        lines = answer.read().decode().splitlines()
        seconds = time.clock_gettime(self._clock) - begun
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {' '.join(lines)[:200]}")
        usage = [event["usage"] for line in lines if line.startswith("data: {") if (event := json.loads(line[6:]))]
        return seconds, [each for each in usage if each][-1]["prompt_tokens"]
