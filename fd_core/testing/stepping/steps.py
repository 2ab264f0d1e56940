"""Steps by hand: a runner driven plan by plan, without a scheduler, so that a test says what each step is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fd_core.engine.core import Engine
from fd_core.engine.device import Device, make_device
from fd_core.signals import Outcomes, read
from fd_core.testing.stepping.stepper import Stepper
from fd_core.types import Admission, BlockGrant, Revocation, SamplingParams, StepOutput, StepPlan


def device_of(engine: Engine, transport: str) -> Device:
    """Return a device that computes the engine's steps; `transport`, `memory` or `zmq`, carries the outputs."""
    return make_device(engine.probe().runner, 2, transport)


class SentStepper(Stepper):
    """A stepper whose plans and outputs travel; a step that is not answered in time fails the test."""

    def __init__(self, engine: Engine, device: Device) -> None:
        super().__init__(engine, eager=True)
        self._device = device
        self._watchdog = engine.probe().watchdog_seconds

    def execute(self, plan: StepPlan) -> StepOutput:
        self._device.submit(plan)
        return self._device.collect(self._watchdog)


class ByHand:
    """Builds plans over an engine's runner; slot i owns the blocks [i * n, (i + 1) * n)."""

    def __init__(self, engine: Engine) -> None:
        self.runner = engine.probe().runner
        self.limits = self.runner.limits
        self._device = make_device(self.runner, 2, "memory")
        self._watchdog = engine.probe().watchdog_seconds
        self._step = 0
        self._gen = 0
        self._gens: dict[int, int] = {}
        self._length: dict[int, int] = {}
        self._pending: list[Admission] = []
        self._per_slot = self.limits.num_kv_blocks // self.limits.max_num_seqs

    def admit(self, slot: int, prompt: Sequence[int], **params: object) -> None:
        """Let a request enter a slot with the next step."""
        self._gen += 1
        self._gens[slot] = self._gen
        self._length[slot] = 0
        chosen = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params))  # type: ignore[arg-type]
        tokens = np.array(prompt, np.int32)
        self._pending.append(Admission(slot, self._gen, tokens, len(prompt), chosen, (), 0))

    def step(
        self, *rows: tuple[int, int] | tuple[int, int, bool] | tuple[int, int, bool, int], back: Sequence[int] = ()
    ) -> tuple[StepOutput, Outcomes]:
        """Compute rows of (slot, tokens[, samples[, drafts]]) and revoke the slots `back`; return its outcomes too."""
        full = [(slot, count, *rest, *(True, 0)[len(rest) :]) for slot, count, *rest in rows]
        slots = np.array([row[0] for row in full], np.int32)
        counts = np.array([row[1] for row in full], np.int32)
        drafts = np.array([row[3] for row in full], np.int32)
        admissions, self._pending = tuple(self._pending), []
        width = min(self._per_slot, self.limits.blocks_per_seq)
        grants = tuple(
            BlockGrant(each.slot, 0, np.arange(width, dtype=np.int32) + each.slot * self._per_slot)
            for each in admissions
        )
        plan = StepPlan(
            epoch=1,
            step=self._step,
            slots=slots,
            gens=np.array([self._gens[slot] for slot in slots.tolist()], np.int32),
            starts=np.array([self._length[slot] for slot in slots.tolist()], np.int32),
            num_tokens=counts + drafts,
            num_drafts=drafts,
            samples=np.array([row[2] for row in full], np.bool_),
            admissions=admissions,
            grants=grants,
            revocations=tuple(Revocation(slot, self._gens[slot]) for slot in back),
        )
        self._step += 1
        self._device.submit(plan)
        output = self._device.collect(self._watchdog)
        outcomes = read(output.tokens, output.errors)
        for slot, count, samples, _ in full:
            # A row that samples leaves its last token to be computed by the next one.
            self._length[slot] += count + (int(outcomes.counts[slot]) - 1 if samples else 0)
        return output, outcomes

    def close(self) -> None:
        self._device.close()
