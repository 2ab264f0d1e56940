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

from fd_core.cli.bench.compare.engines import ENVIRONMENTS, ComparedEngine, PeerServer, RunLimits, environment_variables
from fd_core.cli.bench.compare.openai_stream import Dialect, send_all
from fd_core.cli.bench.compare.processes import ANSWER_SECONDS, EngineFailedError, Worker, end, end_with_parent
from fd_core.cli.bench.compare.stats import PeerRun, RequestResult
from fd_core.cli.bench.compare.weights import PeerWeights
from fd_core.cli.bench.compare.workloads import PromptSet


class PeerSession(Protocol):
    """Interface of a started engine for the rounds."""

    engine: ComparedEngine
    version: str
    load_s: float
    notes: dict[str, Any]

    def run(self, workload: PromptSet, round_number: int) -> PeerRun:
        """Compute one workload; raise EngineFailedError where the engine breaks."""

    def close(self) -> None:
        """End the engine's process."""


class WorkerSession:
    """An engine called as a library, in a process of the engine's environment."""

    def __init__(
        self, engine: ComparedEngine, python: Path, checkpoint: PeerWeights, limits: RunLimits, log: Path
    ) -> None:
        self.engine = engine
        self._worker = Worker(
            [str(python), str(Path(__file__).with_name("adapters") / "worker.py")],
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

    def run(self, workload: PromptSet, round_number: int) -> PeerRun:
        """See `PeerSession`."""
        reply = self._worker.ask(op="run", prompts=workload.prompts, max_tokens=workload.max_tokens)
        requests = tuple(RequestResult(tuple(r["token_ids"]), r["ttft_s"], r["end_s"]) for r in reply["requests"])
        return PeerRun(self.engine.name, workload.name, round_number, reply["wall_s"], requests, reply["counters"])

    def close(self) -> None:
        """See `PeerSession`."""
        self._worker.close()


class ServerSession:
    """An engine with an HTTP server on a free loopback port, measured by the one streaming client."""

    def __init__(
        self, engine: ComparedEngine, python: Path, checkpoint: PeerWeights, limits: RunLimits, log: Path
    ) -> None:
        if engine.server is None:
            raise EngineFailedError("it has no HTTP server")
        self.engine = engine
        self.notes: dict[str, Any] = {"measured": "over HTTP"}
        self._server: PeerServer = engine.server
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
                with urllib.request.urlopen(self._url + self._server.health, timeout=5) as answer:  # noqa: S310 - its own server
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        raise EngineFailedError(f"its server was not healthy within {ANSWER_SECONDS} s; see {self._log}")

    def run(self, workload: PromptSet, round_number: int) -> PeerRun:
        """See `PeerSession`."""
        wall_s, results = self.send(self._server.dialect, workload.prompts, workload.max_tokens)
        return PeerRun(self.engine.name, workload.name, round_number, wall_s, tuple(results))

    def send(
        self, dialect: Dialect, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
    ) -> tuple[float, list[RequestResult]]:
        """Send every prompt at once; return the wall seconds and the results. Raises EngineFailedError."""
        try:
            return asyncio.run(send_all(self._url, self._model, dialect, prompts, max_tokens))
        except (aiohttp.ClientError, OSError, RuntimeError, ValueError) as error:
            raise EngineFailedError(f"{type(error).__name__}: {error}; see {self._log}") from error

    def close(self) -> None:
        """See `PeerSession`."""
        end(self._process)


def start(
    engine: ComparedEngine, python: Path, checkpoint: PeerWeights, limits: RunLimits, log: Path, *, http: bool
) -> PeerSession:
    """Start an engine as a library, or as a server with `http` or if it has no library."""
    if http or engine.adapter is None:
        return ServerSession(engine, python, checkpoint, limits, log)
    return WorkerSession(engine, python, checkpoint, limits, log)


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _installed_version(python: Path, engine: ComparedEngine) -> str:
    environment = ENVIRONMENTS[engine.environment]
    if python.name == environment.program:
        answer = subprocess.run([str(python), "--version"], capture_output=True, text=True, check=False)
        return " ".join((answer.stdout or answer.stderr).split()[:2])
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    command = [str(python), "-c", code, environment.package]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{environment.package} {answer.stdout.strip() or 'unknown'}"
