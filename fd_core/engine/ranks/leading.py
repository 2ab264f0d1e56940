"""Rank 0's side: it starts the other ranks, sends them orders, and compares their results.

    plan --frame--> ranks           every rank executes it; sums and gathers keep them together
    output, digests <-- ranks       equal, or the engine is at fault and restarts with all ranks

A rank that ends abandons the group, so that no other rank waits for it; one that stalls is detected by the rank that
waits for it, within `EngineConfig.rank_seconds`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from fd_core.backends.contract import LoadProgress, Model
from fd_core.config import EngineConfig, Limits
from fd_core.effects.sockets import Context, Socket, open_socket
from fd_core.engine.process.messages import Fault
from fd_core.engine.ranks import messages
from fd_core.engine.ranks.groups import opened_group
from fd_core.errors import ConfigError, EngineDead, FdError, ModelError
from fd_core.launching.contract import NODE_LOST, LaunchedProcess, Launcher, LaunchError, ProcessSpec
from fd_core.ops.contract import KVCache, KVShape, Ops
from fd_core.ops.parallel import RankExchangeError, RankRendezvous
from fd_core.ops.polled_timeout import PolledTimeout
from fd_core.ops.weights import Adapter
from fd_core.plugins import LAUNCHER, installed_plugins
from fd_core.runner.runner import Runner, RunnerAdapters
from fd_core.types import IntArray, StepOutput, StepPlan

CHILD: Final = ("-m", "fd_core.engine.ranks.child")
_ON_PROCESSORS: Final = ("cpu", "reference", "null")
"""Backends whose ranks Ray may place."""
_WATCH_SECONDS: Final = 1.0
_POLL_MS: Final = 50
_CONNECT_MS: Final = 1000
"""Interval at which a wait for a rank checks that its process still runs."""
_FINAL_MESSAGES_SECONDS: Final = 1.0
"""Timeout for the error message of a rank that ended, in seconds."""
_IDLE_SECONDS: Final = 1.0
"""Idle time after which a rank without work gets a liveness check, in seconds."""
_LOAD_SECONDS: Final = 300.0
"""Time that a live rank may make no progress while it loads, after rank 0 has loaded itself; less than the silence
that its client allows rank 0."""
_RANK: Final = re.compile(r"rank \d+")
_Message = TypeVar("_Message", messages.RankLoaded, messages.RankReady, messages.StepDigest, messages.RankChanged)


def require_ranks(config: EngineConfig) -> None:
    """Raise `ConfigError` for settings that contradict several ranks."""
    executor, size = config.distributed_executor_backend, config.num_ranks
    if config.enable_expert_parallel and config.tensor_parallel_size == 1:
        raise ConfigError(
            "expert parallelism divides experts among tensor-parallel ranks, but there is one rank",
            field="--enable-expert-parallel",
            hint="add --tensor-parallel-size 2, or omit it",
        )
    if size == 1:
        return
    if executor == "ray" and (name := installed_plugins().choose_backend(config.backend).name) not in _ON_PROCESSORS:
        raise ConfigError(
            f"ranks of backend {name} cannot be placed by Ray yet",
            field="--distributed-executor-backend",
            hint="use mp, which starts them on this machine",
        )
    if executor == "uni":
        raise ConfigError(
            f"uni runs one process, not {size} ranks", field="--distributed-executor-backend", hint="use mp"
        )
    if config.pipeline_parallel_size == 1:
        return
    flag = "--pipeline-parallel-size"
    refused = (
        ("--tensor-parallel-size", config.tensor_parallel_size > 1, "a stage has one rank"),
        ("--speculative-config", config.speculative is not None, "only the last stage could propose drafts"),
        ("--lora-modules", bool(config.lora_modules) or config.lora_folder is not None, "stages have no adapters yet"),
        ("--distributed-executor-backend ray", executor == "ray", "stages use shared memory of one machine"),
        ("--rank-transport gloo", config.rank_transport != "shared_memory", "stages use shared memory"),
    )
    for other, given, reason in refused:
        if given:
            raise ConfigError(
                f"{flag} cannot be combined with {other}: {reason}", field=flag, hint=f"remove {flag} or {other}"
            )


class RankProcesses:
    """The other ranks of an engine, one process each. Used from the thread that executes steps, except to copy KV."""

    def __init__(self, config: EngineConfig, path: Path | None, environments: Sequence[Mapping[str, str]]) -> None:
        """Start them; they load while rank 0 does. `environments`: variables that select each rank's device."""
        self._sockets_in_use = threading.Lock()
        """A stage receives plans while the thread that executes them sends the outcomes of others."""
        self._seconds = config.rank_seconds
        self._closing = False
        self._folder = Path(tempfile.mkdtemp(prefix="fdcore-ranks-"))
        self._context: Context = zmq.Context(1)
        self._steps: list[Socket] = []
        self._copies: list[Socket] = []
        self._processes: tuple[LaunchedProcess, ...] = ()
        self._launcher: Launcher | None = None
        self._memory: int | None = None
        """Descriptor of the memory that ranks share, by which the others open it."""
        self._ended: list[tuple[int, int]] = []
        """Ranks whose process ended, the first one first, with exit codes."""
        self.wake: Callable[[], None] = lambda: None
        """Called on another thread when a rank ends."""
        self._unchecked: set[int] = set()
        """Ranks with a liveness check that is pending."""
        self._liveness_timeout = PolledTimeout(self._seconds)
        """Timeout of these checks."""
        self._last_response = time.monotonic()
        self._timeout_error = ""
        """Error message for a rank whose copy timed out."""
        try:
            self._start(config, path, environments)
        except (OSError, RuntimeError, LaunchError) as error:
            self.close()
            raise EngineDead(f"starting the ranks' processes failed: {error}") from error
        except FdError:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the other ranks, from rank 1 on."""
        return tuple(process.pid for process in self._processes)

    def loaded(self) -> list[messages.RankLoaded]:
        """Wait until the other ranks have their weights. Raises the errors of loading on one of them."""
        loaded = [self._receive_while_loading(rank, messages.RankLoaded) for rank in self._ranks]
        if all(socket.poll(_CONNECT_MS, zmq.POLLOUT) for socket in self._copies):
            # No further rank connects, and a killed engine must not leave files.
            shutil.rmtree(self._folder, ignore_errors=True)
        return loaded

    def allocate(self, limits: Limits) -> None:
        """Have the other ranks allocate memory within the limits. Raises the errors of one of them."""
        self.broadcast(msgspec.msgpack.encode(limits))
        for rank in self._ranks:
            self._receive_while_loading(rank, messages.RankReady)

    def broadcast(self, frame: bytes) -> None:
        """Send a frame to all other ranks. Any thread. A lost rank is detected by the next wait for it."""
        with self._sockets_in_use:
            for socket in self._steps:
                with contextlib.suppress(zmq.Again):
                    socket.send(frame, zmq.NOBLOCK)

    def compare(self, step: int, digest: bytes) -> None:
        """Wait until the other ranks have executed a step. Raises `EngineDead` if the result of one differs."""
        for rank in self._ranks:
            result = self._receive_within_timeout(rank, messages.StepDigest)
            if (result.step, result.digest) != (step, digest):
                raise _dead(f"rank {rank} computed a different result of step {step} than rank 0")
        self._last_response = time.monotonic()

    def await_ready(self) -> None:
        """Wait until the other ranks have warmed up: their warm-up then overwrites blocks that are copied to."""
        for rank in self._ranks:
            self._receive_within_timeout(rank, messages.RankReady)

    def check_liveness(self) -> None:
        """Send liveness checks to idle ranks; never blocks. Raises `EngineDead` if one died or timed out."""
        if self.group.abandoned:
            raise RankExchangeError("a rank died")
        now = time.monotonic()
        if self._unchecked:
            for rank in sorted(self._unchecked):
                if self._steps[rank - 1].poll(0):
                    self._expect(rank, self._receive(rank), messages.RankReady)
                    self._unchecked.remove(rank)
            self._last_response = now
            if self._liveness_timeout.expired() and self._unchecked:
                raise _dead(f"rank {min(self._unchecked)} did not respond within {self._seconds:g} s")
        elif now - self._last_response > _IDLE_SECONDS:
            self.broadcast(messages.LIVENESS_CHECK)
            self._unchecked = set(self._ranks)
            self._liveness_timeout.renew()

    def hold(self, adapters: Sequence[Adapter], known: Collection[Adapter]) -> str | None:
        """Load exactly these adapters into the other ranks; return the error of a rank that kept the `known` ones."""
        there = {adapter.digest for adapter in known}
        new = tuple(adapter for adapter in adapters if adapter.digest not in there)
        asked = messages.HoldAdapters(tuple(adapter.digest for adapter in adapters), new)
        with self.fail_together():
            self.broadcast(messages.encode_order(asked))
            return self._first_error([self._receive_within_timeout(rank, messages.RankChanged) for rank in self._ranks])

    def change_model(self, order: messages.ChangeModel, own: Callable[[], str]) -> str:
        """Change the model of all ranks, `own` that of rank 0; return the digest of the weights on all of them.

        Raises `ModelError` or `MemoryError` once all ranks have responded, if one could not change or loaded other
        weights; any other exception ends the ranks.
        """
        with self.fail_together():
            self.broadcast(messages.encode_order(order))
            try:
                digest, failure = own(), None
            except (ModelError, MemoryError) as error:
                digest, failure = "", error
            answers = [self._receive_within_timeout(rank, messages.RankChanged, _LOAD_SECONDS) for rank in self._ranks]
        if failure is not None:
            raise failure
        if (reason := self._first_error(answers)) is not None:
            raise ModelError(reason)
        if any(answer.digest != digest for answer in answers):
            raise ModelError("the ranks read different weights; were they written meanwhile?")
        return digest

    @staticmethod
    def _first_error(answers: Sequence[messages.RankChanged]) -> str | None:
        errors = (f"rank {rank}: {answer.error}" for rank, answer in enumerate(answers, 1) if answer.error is not None)
        return next(errors, None)

    def copy(self, requests: Sequence[tuple[int, list[bytes]]]) -> list[list[bytes]]:
        """Have some ranks copy blocks, at the same time, and return their responses. One call at a time, any thread.

        Raises `EngineDead` if one does not respond: a later copy must not get its response, nor may it write into
        blocks that have other owners by then.
        """
        for rank, parts in requests:
            self._copies[rank - 1].send_multipart(parts)
        answers = []
        for rank, _ in requests:
            socket, timeout = self._copies[rank - 1], PolledTimeout(self._seconds)
            parts = [messages.SIGN]  # a heartbeat of its start that was not read yet
            while parts[0].startswith(messages.SIGN):
                while self.group.abandoned or not socket.poll(_POLL_MS):
                    if not self.group.abandoned and timeout.expired():
                        self._timeout_error = f"rank {rank} did not respond within {self._seconds:g} s"
                        self.group.abandon()
                    if self.group.abandoned:
                        raise _dead(self._timeout_error or f"rank {rank} died")
                parts = socket.recv_multipart()
            answers.append(parts)
        return answers

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """End all ranks if one fails: they restart together."""
        try:
            yield
        except RankExchangeError as error:
            failure = self._failure(str(error))
            self.kill()
            raise failure from error
        except BaseException:
            self.kill()
            raise

    def _failure(self, otherwise: str) -> FdError:
        """Return the error of the rank at fault, if it sent one, `EngineDead` with `otherwise` if none ended."""
        if self._timeout_error:
            return _dead(self._timeout_error)
        deadline = time.monotonic() + _FINAL_MESSAGES_SECONDS
        while self.group.abandoned and time.monotonic() < deadline:
            with self._sockets_in_use:
                for rank in self._ranks:
                    while self._steps[rank - 1].poll(0):
                        if isinstance(message := self._receive(rank), Fault):
                            return _error_of(rank, message)
            if self._ended and not 0 <= self._ended[0][1] < NODE_LOST:
                break  # by a signal, or with its node: it sent no message
            time.sleep(_POLL_MS / 1000)
        if not self._ended:
            return _dead(otherwise)
        rank = self._ended[0][0]
        return _dead(f"rank {rank} {self._processes[rank - 1].reason()}")

    def kill(self) -> None:
        """End the processes at once, including stalled ones."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._launcher is not None:
            self._launcher.close()
        if self._memory is not None:
            os.close(self._memory)
        for socket in (*self._steps, *self._copies):
            socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _ranks(self) -> range:
        return range(1, len(self._processes) + 1)

    def _start(self, config: EngineConfig, path: Path | None, environments: Sequence[Mapping[str, str]]) -> None:
        """Launch the ranks, and send them their `RankStart` once their addresses are known."""
        size, network = config.num_ranks, config.distributed_executor_backend == "ray"
        launcher = self._launcher = installed_plugins().load(LAUNCHER, "ray" if network else "spawn")()
        host = next((node.address for node in launcher.nodes() if node.id == launcher.here), None)
        if host is None:
            raise LaunchError("this machine is not a node of the launcher, so ranks could not connect to it")
        cores = (config.num_threads or max(1, len(os.sched_getaffinity(0)) // size)) if network else 0
        settings = {name: value for name, value in os.environ.items() if name.startswith("FD_")}
        specs = []
        for rank in range(1, size):
            endpoint = self._open_endpoint(rank, host if network else None)
            secrets = settings | {messages.RANK_ENDPOINT: msgspec.json.encode(endpoint).decode()}
            shown = environments[rank]
            specs.append(ProcessSpec(f"rank-{rank}", CHILD, shown, secrets=secrets, cores=cores, group="ranks"))
        self._processes = launcher.start(specs)
        together = all(process.node == launcher.here for process in self._processes)
        transport = config.rank_transport if together else "gloo"
        self.group, address = opened_group(size, config.rank_seconds, transport, host=host)
        """Rank 0's end of sums and gathers."""
        if isinstance(address, int):
            self._memory = address
        shared = address if isinstance(address, RankRendezvous) else f"/proc/{os.getpid()}/fd/{address}"
        own = msgspec.structs.replace(config, num_threads=cores or config.num_threads)
        for rank, process in enumerate(self._processes, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"fdcore-rank-{rank}", daemon=True).start()
        for rank in self._ranks:
            start = messages.RankStart(own, None if path is None else str(path), rank, group_address=shared)
            silent = PolledTimeout(2 * self._seconds)
            while not self._ready_to(zmq.POLLOUT, rank):  # until it has connected
                self._require_heartbeats(rank, silent)
            self._steps[rank - 1].send(msgspec.json.encode(start))

    def _open_endpoint(self, rank: int, host: str | None) -> messages.RankEndpoint:
        """Open a rank's sockets: for this machine, or at an address for clients with the keys generated here."""
        keys, addresses = None, []
        if host is not None:
            (public, secret), (own, own_secret) = zmq.curve_keypair(), zmq.curve_keypair()
            keys = (public.decode(), own.decode(), own_secret.decode())
        for kind, sockets in (("steps", self._steps), ("copies", self._copies)):
            socket = open_socket(self._context, zmq.PAIR)  # frames that a dead rank does not read block nothing
            sockets.append(socket)
            socket.rcvhwm = 0
            if host is None:
                addresses.append(f"ipc://{self._folder}/{kind}-{rank}")
                socket.bind(addresses[-1])
                continue
            # No client can send a message without the public key, which only this rank receives.
            socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public, secret
            socket.bind(f"tcp://{host}:*")
            addresses.append(socket.get_string(zmq.LAST_ENDPOINT))
        return messages.RankEndpoint(addresses[0], addresses[1], keys)

    def _watch(self, rank: int, process: LaunchedProcess) -> None:
        """Stop all waits for a rank that has ended."""
        while (code := process.wait(_WATCH_SECONDS)) is None:
            if self._closing:
                return
        self._ended.append((rank, code))
        self.group.abandon()
        self.wake()

    def _receive_while_loading(self, rank: int, kind: type[_Message]) -> _Message:
        """Return the next message of a rank that loads; there is no timeout while it is alive and makes progress."""
        silent, still = PolledTimeout(2 * self._seconds), PolledTimeout(_LOAD_SECONDS)
        sign = b""
        while not self._ready_to(zmq.POLLIN, rank):
            while self._copies[rank - 1].poll(0):
                last, sign = sign, self._copies[rank - 1].recv()
                silent.renew()
                if sign != last:
                    still.renew()
            self._require_heartbeats(rank, silent)
            if still.expired():
                raise _dead(f"rank {rank} made no progress for {_LOAD_SECONDS:g} s while it loaded")
        return self._expect(rank, self._receive(rank), kind)

    def _receive_within_timeout(self, rank: int, kind: type[_Message], seconds: float = 0.0) -> _Message:
        """Return the next message of a rank; `seconds` extends the timeout."""
        seconds = max(seconds, self._seconds)
        timeout = PolledTimeout(seconds)
        while not self._ready_to(zmq.POLLIN, rank):
            if timeout.expired():
                raise _dead(f"rank {rank} did not respond within {seconds:g} s")
        message = self._receive(rank)
        if rank in self._unchecked and isinstance(message, messages.RankReady):
            self._unchecked.remove(rank)
            return self._receive_within_timeout(rank, kind, seconds)
        return self._expect(rank, message, kind)

    def _require_heartbeats(self, rank: int, silent: PolledTimeout) -> None:
        if silent.expired():
            raise _dead(f"rank {rank} did not respond for {2 * self._seconds:g} s while it loaded")

    def _ready_to(self, what: int, rank: int) -> bool:
        """Poll briefly if a rank can be written to or read from. Raises `EngineDead` if it died."""
        if self._steps[rank - 1].poll(_POLL_MS, what):
            return True
        if self.group.abandoned:
            raise self._failure(f"rank {rank} died")
        return False

    def _expect(self, rank: int, message: messages.RankMessage, kind: type[_Message]) -> _Message:
        """Return a message of the expected kind. Raises the error of a fault."""
        if isinstance(message, kind):
            return message
        if isinstance(message, Fault):
            raise _error_of(rank, message)
        raise _dead(f"rank {rank}: expected {kind.__name__}, got {type(message).__name__}")

    def _receive(self, rank: int) -> messages.RankMessage:
        message: messages.RankMessage = msgspec.msgpack.decode(self._steps[rank - 1].recv(), type=messages.RankMessage)
        return message


class LeadingRunner(Runner):
    """The runner of rank 0: the other ranks execute the same as it."""

    def __init__(
        self,
        ranks: RankProcesses,
        shares: Sequence[tuple[int, int]],
        ops: Ops,
        model: Model,
        *parts: Any,
        axis: int = -2,
    ) -> None:
        """`shares` are those of KV, see `JoinedKVCache`; the rest are the arguments of a `Runner`."""
        self.ranks = ranks
        """The other ranks, for audits and benchmarks."""
        self._shares, self._axis = shares, axis
        super().__init__(ops, model, *parts)
        self._leads = False

    def _allocate(self, model: Model) -> None:
        super()._allocate(model)
        self.cache = JoinedKVCache(self.cache, self.ranks, self._shares, axis=self._axis)

    def _compile(self, model: Model) -> None:
        super()._compile(model)
        self.adapters = JoinedAdapters(self.ops, model, self.cache, ranks=self.ranks)

    def warm_up(self, progress: LoadProgress) -> float:
        """Warm up; each rank does so independently."""
        with self.ranks.fail_together():
            self.ranks.broadcast(messages.WARM_UP)
            seconds = super().warm_up(progress)
            self.ranks.await_ready()
        self._leads = True
        return seconds

    @property
    def launches_ahead(self) -> bool:
        """False: ranks compare their sampled tokens after each step."""
        return False

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute one step on all ranks. Raises `EngineDead` if they diverge."""
        if not self._leads:
            return super().execute(plan)
        with self.ranks.fail_together():
            frame = messages.encode_order(messages.RankStep(plan, *self.batch.guesses()))
            self.ranks.broadcast(frame)
            output = super().execute(plan)
            self.ranks.compare(plan.step, messages.step_digest(frame, output))
        return output

    def check(self) -> None:
        """Raise `EngineDead` if a rank died or stalled, so that an idle engine does not report that it is healthy."""
        with self.ranks.fail_together():
            self.ranks.check_liveness()

    def close(self) -> None:
        """End the other ranks."""
        self.ranks.close()


class JoinedAdapters(RunnerAdapters):
    """The adapters of all ranks: an adapter is loaded on all of them or on none."""

    def __init__(self, ops: Ops, model: Model, cache: KVCache, ranks: RankProcesses) -> None:
        super().__init__(ops, model, cache)
        self._ranks = ranks

    def replace(self, adapters: Iterable[Adapter]) -> None:
        """Hold these adapters and no others, on all ranks; otherwise as `RunnerAdapters.replace`."""
        wanted, before = list(adapters), self.held
        super().replace(wanted)
        if (refusal := self._ranks.hold(wanted, known=before)) is not None:
            super().replace(before)
            if (again := self._ranks.hold(before, known=before)) is not None:
                raise _dead(again)
            raise MemoryError(refusal)


class JoinedKVCache(KVCache):
    """The KV of all ranks as one cache, for copies: exports do not depend on ranks."""

    def __init__(self, own: KVCache, ranks: RankProcesses, shares: Sequence[tuple[int, int]], axis: int = -2) -> None:
        """`shares`: first and end of each rank's share, KV heads if `axis` of exports is -2, layers if 1."""
        self.shape = joined_shape(own.shape, shares, axis)
        self.num_blocks = own.num_blocks
        self.spare_block = own.spare_block
        self._own = own
        self._ranks = ranks
        self._shares = shares
        self._axis = axis

    def layer(self, index: int) -> Any:
        """Return rank 0's handle of a layer."""
        return self._own.layer(index)

    def export_blocks(self, blocks: IntArray) -> npt.NDArray[Any]:
        """Copy blocks from all ranks; of ranks with the same share, from the first."""
        first = [rank for rank, share in enumerate(self._shares) if share not in self._shares[:rank]]
        asked = messages.encode_blocks(blocks)
        parts = {self._shares[0]: self._own.export_blocks(blocks)}
        for rank, answer in zip(first[1:], self._copy([(rank, asked) for rank in first[1:]]), strict=True):
            if answer is None:
                raise RuntimeError("a rank responded without KV")
            parts[self._shares[rank]] = answer
        return np.concatenate([parts[share] for share in sorted(parts)], axis=self._axis)

    def import_blocks(self, blocks: IntArray, data: npt.NDArray[Any]) -> None:
        """Write blocks on all ranks, to each its share."""
        whole = np.moveaxis(data, self._axis, 0)
        own, *others = (np.moveaxis(whole[slice(*share)], 0, self._axis) for share in self._shares)
        self._copy([(rank, messages.encode_blocks(blocks, share)) for rank, share in enumerate(others, 1)])
        self._own.import_blocks(blocks, own)

    def _copy(self, requests: list[tuple[int, list[bytes]]]) -> list[npt.NDArray[Any] | None]:
        copied = []
        for (rank, _), parts in zip(requests, self._ranks.copy(requests), strict=True):
            head, _, data = messages.decode_blocks(parts)
            if head.error is not None:
                raise RuntimeError(f"rank {rank}: {head.error}")
            copied.append(data)
        return copied


def joined_shape(own: KVShape, shares: Sequence[tuple[int, int]], axis: int = -2) -> KVShape:
    """Return the shape of the KV of all ranks, given `own`, that of one rank; see `JoinedKVCache`."""
    end = max(end for _, end in shares)
    if axis == 1:
        return replace(own, num_layers=end, first_layer=0)
    return replace(own, num_kv_heads=end, first_kv_head=0)


def _error_of(rank: int, fault: Fault) -> FdError:
    """Return the error that a rank sent: that of its settings, model or plugin, else `EngineDead`."""
    error = fault.error(f"rank {rank}: ")
    return _dead(error.message) if isinstance(error, EngineDead) else error


def _dead(text: str) -> EngineDead:
    """Return an error whose `field` is the rank named at the beginning of the text."""
    found = _RANK.match(text)
    return EngineDead(text, field=None if found is None else found[0])
