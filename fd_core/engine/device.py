"""Devices, which execute plans: inline, launched in sequence, in a thread, or over a ZeroMQ socket.

All return the same outputs.

The engine submits plans and collects outputs in the same order; the transport changes nothing else.
"""

from __future__ import annotations

import abc
import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import zmq

from fd_core.engine.process.messages import decode_output, encode_output
from fd_core.errors import ConfigError, EngineDead
from fd_core.ops.compilations import CompilationStats
from fd_core.ops.polled_timeout import PolledTimeout
from fd_core.runner.runner import LaunchedStep, Runner
from fd_core.runner.sampling.grammars import MaskStats
from fd_core.types import StepOutput, StepPlan

_POLLS_PER_TIMEOUT: Final = 4
"""Polls per timeout, in succession: a pause of the whole process expires one of them only."""


_CLOSE_SECONDS: Final = 30.0
"""Timeout for launched steps to finish when an engine closes, in seconds."""
_PAUSE_SECONDS: Final = 5e-5
"""Pause between two polls of a launched step, in seconds. The next step is on the device already."""


class DeviceStalled(EngineDead):
    """A step timed out; the thread that computes it may be stuck for ever."""


class Device(abc.ABC):
    """Executes plans in order; owned by one engine."""

    @abc.abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Submit a plan without waiting for those in flight."""

    @abc.abstractmethod
    def collect(self, timeout: float) -> StepOutput:
        """Return the output of the oldest plan that was not collected.

        Raises `DeviceStalled` if it does not arrive within `timeout` seconds, `EngineDead` if the runner failed.
        """

    @abc.abstractmethod
    def perform(self, change: Callable[[Runner], None]) -> None:
        """Change the runner after the plans that were submitted, and wait; raises what `change` does."""

    def check(self) -> None:  # noqa: B027 - most devices have no other processes
        """Raise `EngineDead` if another process of the model has died; called while the device is idle."""

    def mask_stats(self) -> MaskStats:
        """Return the cost of grammar masks and the work that grammars saved so far."""
        return MaskStats()

    def compilation_stats(self) -> CompilationStats | None:
        """Return the result of `Ops.compilation_stats`."""
        return None

    @abc.abstractmethod
    def close(self) -> None:
        """Stop; plans in flight are computed and dropped."""

    def close_runner(self) -> None:  # noqa: B027 - not every device has a runner
        """Close the runner once nothing is in flight."""


class RunnerDevice(Device):
    """A device on which a runner executes the plans."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def check(self) -> None:
        """Check the runner."""
        self.runner.check()

    def mask_stats(self) -> MaskStats:
        """Return the statistics of the runner."""
        return self.runner.mask_stats()

    def compilation_stats(self) -> CompilationStats | None:
        """Return the statistics of the pack."""
        return self.runner.ops.compilation_stats()

    def close_runner(self) -> None:
        """Close the runner."""
        self.runner.close()


class InlineDevice(RunnerDevice):
    """Computes when the output is collected; nothing overlaps."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Keep the plan for `collect`."""
        self.runner.announce(plan)
        self._plans.append(plan)

    def collect(self, timeout: float) -> StepOutput:
        """Compute the oldest plan; it cannot be interrupted, so the engine's client is the watchdog."""
        return self.runner.execute(self._plans.popleft())

    def perform(self, change: Callable[[Runner], None]) -> None:
        """Apply the change at once: a queued plan computes the same with additions, or without what is unused."""
        change(self.runner)

    def close(self) -> None:
        """Drop the plans that were not computed."""
        self._plans.clear()


class LaunchingDevice(RunnerDevice):
    """Launches plans after those in flight, on the caller's thread: for packs whose calls return before the device.

    A plan that depends on the steps before it is kept until the last of them is collected, and so is the sampling of a
    step that depends on tokens of the steps before it. Both are launched before their output is returned, so that the
    device computes while the host plans.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._kept: deque[StepPlan] = deque()
        self._launched: deque[LaunchedStep] = deque()
        self._end: EngineDead | None = None
        """Error after which nothing is launched, raised once the launched steps are collected."""
        self._pause = threading.Event()
        """Never set: for short waits that release the interpreter's lock."""

    def submit(self, plan: StepPlan) -> None:
        """Launch the plan, or keep it."""
        self.runner.announce(plan)
        self._kept.append(plan)
        self._launch()

    def collect(self, timeout: float) -> StepOutput:
        """Wait for the oldest step, and launch the plan that depended on it. A failed launch is raised in its turn."""
        if not self._launched:
            raise self._end or IndexError("no plan was submitted")
        launched = self._launched.popleft()
        try:
            self._await(launched, timeout)
            output = self.runner.finish(launched)
        except Exception as error:
            self._launched.clear()
            self._end = _failure(launched.plan, error)
            raise self._end from error
        self._launch()
        return output

    def perform(self, change: Callable[[Runner], None]) -> None:
        """Apply the change once the device has computed all launched steps; a kept plan computes the same after."""
        for launched in self._launched:
            launched.copies.wait()
        change(self.runner)

    def close(self) -> None:
        """Wait for the launched steps, unless the device has stalled."""
        self._kept.clear()
        with contextlib.suppress(DeviceStalled):
            for launched in self._launched:
                self._await(launched, _CLOSE_SECONDS)

    def _launch(self) -> None:
        """Sample the last step once those before it are finished, and launch plans after it."""
        launched = self._launched
        try:
            if len(launched) == 1 and launched[0].sampled is None:
                plan = launched[0].plan
                self.runner.sample(launched[0])
            while self._kept and self._end is None:
                plan = self._kept[0]
                if launched and (launched[-1].sampled is None or self.runner.must_wait(plan) is not None):
                    return
                launched.append(self.runner.launch(self._kept.popleft()))
        except Exception as error:  # noqa: BLE001 - raised by `collect`, after the steps before
            self._end = _failure(plan, error)
            if launched and launched[-1].plan is plan:
                launched.pop()

    def _await(self, launched: LaunchedStep, timeout: float) -> None:
        polled = PolledTimeout(timeout)
        while not launched.copies.ready():
            if polled.expired():
                raise _stalled(timeout)
            self._pause.wait(_PAUSE_SECONDS)


class _Threaded(RunnerDevice):
    """A thread that executes plans and passes their outputs to `_answer`."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self._plans: queue.SimpleQueue[StepPlan | Future[None] | None] = queue.SimpleQueue()
        self._changes: deque[Callable[[Runner], None]] = deque()
        """Changes that the futures in the queue stand for, in order."""
        self._thread = threading.Thread(target=self._run, name="fdcore-device", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        self.runner.announce(plan)
        self._plans.put(plan)

    def perform(self, change: Callable[[Runner], None]) -> None:
        done: Future[None] = Future()
        self._changes.append(change)
        self._plans.put(done)
        done.result()

    def close(self) -> None:
        self._plans.put(None)
        self._thread.join()

    @abc.abstractmethod
    def _answer(self, output: StepOutput | EngineDead) -> None:
        """Deliver an output, or the reason why there is none, to `collect`."""

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            if isinstance(plan, Future):
                try:
                    plan.set_result(self._changes.popleft()(self.runner))
                except Exception as error:  # noqa: BLE001 - raised in the thread that waits
                    plan.set_exception(error)
                continue
            try:
                output = self.runner.execute(plan)
            except Exception as error:  # noqa: BLE001 - the thread's last frame: raised by `collect`
                self._answer(_failure(plan, error))
                return
            self._answer(output)


class ThreadDevice(_Threaded):
    """Passes outputs in memory."""

    def __init__(self, runner: Runner) -> None:
        self._outputs: queue.SimpleQueue[StepOutput | EngineDead] = queue.SimpleQueue()
        super().__init__(runner)

    def collect(self, timeout: float) -> StepOutput:
        """Wait for the next output."""
        for _ in range(_POLLS_PER_TIMEOUT):
            with contextlib.suppress(queue.Empty):
                return _healthy(self._outputs.get(timeout=timeout / _POLLS_PER_TIMEOUT))
        raise _stalled(timeout)

    def _answer(self, output: StepOutput | EngineDead) -> None:
        self._outputs.put(output)


class SocketDevice(_Threaded):
    """Sends outputs as frames over ZeroMQ, within the process."""

    def __init__(self, runner: Runner) -> None:
        self._context = zmq.Context(1)
        self._receiver: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._receiver.bind("inproc://outputs")
        self._sender: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        self._sender.connect("inproc://outputs")
        super().__init__(runner)

    def collect(self, timeout: float) -> StepOutput:
        """Wait for the next frame."""
        for _ in range(_POLLS_PER_TIMEOUT):
            if self._receiver.poll(int(timeout * 1000 / _POLLS_PER_TIMEOUT)):
                return _healthy(decode_output(self._receiver.recv()))
        raise _stalled(timeout)

    def close(self) -> None:
        """End the thread and the sockets."""
        super().close()
        self._sender.close(linger=0)
        self._receiver.close(linger=0)
        self._context.term()

    def _answer(self, output: StepOutput | EngineDead) -> None:
        self._sender.send(encode_output(output))


def make_device(runner: Runner, pipeline_depth: int, transport: str) -> RunnerDevice:
    """Return the device for a transport, `memory` or `zmq`. Raises `ConfigError` for another."""
    if transport == "zmq":
        return SocketDevice(runner)
    if transport != "memory":
        raise ConfigError(
            f"unknown output transport {transport!r}; expected `memory` or `zmq`", field="--output-transport"
        )
    if pipeline_depth == 1:
        return InlineDevice(runner)
    return LaunchingDevice(runner) if runner.launches_ahead else ThreadDevice(runner)


def _healthy(output: StepOutput | EngineDead) -> StepOutput:
    if isinstance(output, EngineDead):
        raise output
    return output


def _failure(plan: StepPlan, error: Exception) -> EngineDead:
    if isinstance(error, EngineDead):
        return error
    return EngineDead(f"step {plan.step} failed: {type(error).__name__}: {error}")


def _stalled(timeout: float) -> DeviceStalled:
    return DeviceStalled(f"a step did not complete within {timeout:g} s")
