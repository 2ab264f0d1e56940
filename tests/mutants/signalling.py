"""Faults against section 1 of the protocol: the release of slots, and the request that a token belongs to."""

from __future__ import annotations

from tests.mutants.mutant import mutant

SIGNALS = "signals.py"
POSTPROCESS = "runner/postprocess/numpy_matrix.py"
SCHEDULER = "scheduling/scheduler.py"
PLANNER = "scheduling/running/planner.py"
ADMISSIONS = "scheduling/waiting/admission_planner.py"
RESIDENCIES = "scheduling/running/running_batch.py"
OUTPUTS = "scheduling/running/output_processor.py"
RUNNER = "runner/runner.py"
ENGINE = "engine/core.py"
FRAMES = "engine/process/messages.py"

_STALE_RELEASE = "            if output.gens[slot] != gen or slots.gen[slot] != gen:\n"
_FRAME = "isinstance(read, _Failure) else read\n"
_REBUILT = (
    "isinstance(read, _Failure) else StepOutput(\n"
    "        read.epoch, read.step, read.tokens, {gens}, read.drafts_ready, read.logprobs, {errors}\n"
    "    )\n"
)

MUTANTS = (
    mutant(
        "minus-one-is-read-as-a-release",
        "1.2: -1 never means a release",
        (SIGNALS, "released = tokens[:, 0] == PREEMPTED_TOKEN_ID", "released = tokens[:, 0] == EMPTY_TOKEN_ID"),
    ),
    mutant(
        "minus-one-is-written-as-a-release",
        "1.2: -1 never means a release",
        (POSTPROCESS, "matrix[revoked, 0] = PREEMPTED_TOKEN_ID", "matrix[revoked, 0] = EMPTY_TOKEN_ID"),
    ),
    mutant(
        "minus-one-is-written-and-read-as-a-release",
        "1.2: -1 never means a release, absence never means it",
        (POSTPROCESS, "matrix[revoked, 0] = PREEMPTED_TOKEN_ID", "matrix[revoked, 0] = EMPTY_TOKEN_ID"),
        (
            OUTPUTS,
            "seen = set((outcomes.kinds == _RELEASED).nonzero()[0].tolist())",
            "seen = set((outcomes.kinds == Outcome.EMPTY).nonzero()[0].tolist()) & set(expected)",
        ),
    ),
    mutant(
        "matrix-is-overwritten-by-the-next-step",
        "1: no later step changes the matrix of a step",
        (
            POSTPROCESS,
            "        matrix[slots] = ",
            '        matrix = self.__dict__.setdefault("matrix", matrix)\n'
            "        matrix.fill(EMPTY_TOKEN_ID)\n"
            "        matrix[slots] = ",
        ),
    ),
    mutant(
        "token-zero-is-not-a-token",
        "1.9: token id 0 is a valid token",
        (SIGNALS, "is_token = tokens >= 0", "is_token = tokens > 0"),
    ),
    mutant(
        "release-is-read-from-the-last-column",
        "1.3: -9 is in column 0 for any number of drafts k",
        (SIGNALS, "released = tokens[:, 0]", "released = tokens[:, -1]"),
    ),
    mutant(
        "release-in-a-row-with-tokens",
        "1.3: a row that carries -9 carries nothing else",
        (
            SIGNALS,
            "        if not complete.all():",
            "        complete |= released\n        if not complete.all():",
        ),
    ),
    mutant(
        "requeue-without-waiting-for-the-release",
        "1.2: a request leaves DRAINING only on the -9 with its gen",
        (
            PLANNER,
            "                self._running_batch.preempt(self._choose_victim(), builder)\n",
            "                victim = self._choose_victim()\n"
            "                self._running_batch.preempt(victim, builder)\n"
            "                self._admit.__self__.wait(self._running_batch.release(victim))\n",
        ),
        (
            OUTPUTS,
            _STALE_RELEASE,
            "            if output.gens[slot] != gen or slots.gen[slot] != gen or not slots.draining[slot]:\n",
        ),
    ),
    mutant(
        "requeue-on-any-output",
        "1.2: a release answers the revocation of the same step",
        (
            OUTPUTS,
            "        self._pool.answered(plan.step)\n",
            "        self._pool.answered(plan.step)\n"
            "        for slot in np.flatnonzero(self._slots.draining).tolist():\n"
            "            request = self._slots.requests[slot]\n"
            "            if request is not None and not request.abort_requested and request.ended is None:\n"
            "                self._on_released(self._running_batch.release(slot))\n",
        ),
        (
            OUTPUTS,
            _STALE_RELEASE,
            "            if output.gens[slot] != gen or slots.gen[slot] != gen or not slots.draining[slot]:\n",
        ),
    ),
    mutant(
        "missing-release-is-ignored",
        "1.2: exactly one -9 answers a revocation",
        (OUTPUTS, "if seen != set(expected):", "if not seen <= set(expected):"),
    ),
    mutant(
        "unexpected-release-is-ignored",
        "1.2: no -9 without a revocation",
        (OUTPUTS, "if seen != set(expected):", "if not seen >= set(expected):"),
    ),
    mutant(
        "one-output-is-discarded",
        "1.1: no token is lost",
        (
            OUTPUTS,
            "        outcomes = signals.read(output.tokens, output.errors)\n",
            "        if plan.step == 7 and not plan.revocations:\n"
            "            return []\n"
            "        outcomes = signals.read(output.tokens, output.errors)\n",
        ),
    ),
    mutant(
        "tokens-of-a-draining-slot-are-discarded",
        "1.1: delivered tokens are all that were generated before the -9",
        (
            OUTPUTS,
            "current = same_runner & ",
            "current = same_runner & slots.running[indices] & ",
        ),
    ),
    mutant(
        "no-output-for-an-empty-batch",
        "1.3: a step whose whole batch was revoked still yields an output",
        (RUNNER, "for revocation in plan.revocations]", "for revocation in plan.revocations if len(rows.slots)]"),
    ),
    mutant(
        "no-step-for-an-empty-batch",
        "1.3: a step whose whole batch was revoked still yields an output",
        (
            "scheduling/running/plan.py",
            "if not (self._slots or self._revocations or self._admissions):",
            "if not (self._slots or self._admissions):",
        ),
    ),
    mutant(
        "error-drops-the-other-rows",
        "1.3: an error in one row never swallows another row",
        (
            OUTPUTS,
            "healthy = outcomes.kinds[indices] != Outcome.ERROR",
            "healthy = (outcomes.kinds[indices] != Outcome.ERROR) & (not output.errors)",
        ),
    ),
    mutant(
        "error-suppresses-its-release",
        "1.3: a revoked slot is released even if its row failed",
        (SIGNALS, "        if kinds[slot] != Outcome.RELEASED:\n            kinds[slot]", "        kinds[slot]"),
    ),
    mutant(
        "row-with-nan-logits-is-delivered",
        "1.3: a row that failed is an error",
        (RUNNER, "        if not np.isfinite(peaks).all():\n", "        if False:\n"),
    ),
    mutant(
        "rejected-draft-fails-its-request",
        "1.3: a row that failed is an error, and no other is",
        (RUNNER, "& (np.arange(width) <= accepted[:, None])).any", "& (np.arange(width) >= 0)).any"),
    ),
    mutant(
        "release-in-a-failed-row-is-ignored",
        "1.3: a slot is released on its -9 despite other errors",
        (SIGNALS, "        if kinds[slot] != Outcome.RELEASED:\n", "        if True:\n"),
    ),
    mutant(
        "draining-slot-counts-as-free",
        "1.4: while DRAINING a request keeps its slot",
        (
            "scheduling/running/slots.py",
            "free = ~(self.running | self.loading | self.draining)",
            "free = ~(self.running | self.loading)",
        ),
    ),
    mutant(
        "prefill-length-is-computed-before-the-release",
        "1.4: the prefill of a readmission is computed after the -9",
        (
            "scheduling/running/slots.py",
            "self._delivered.append(rows, tokens, counts)",
            "self._delivered.append(rows, tokens, np.where(self.running[rows], counts, 0))",
        ),
    ),
    mutant(
        "no-epoch-check",
        "1.5: outputs apply only if the epoch matches",
        (
            OUTPUTS,
            "(output.epoch, output.step) != (plan.epoch, plan.step) or plan.step != self._next_step",
            "output.step != plan.step or plan.step != self._next_step",
        ),
    ),
    mutant(
        "no-step-check",
        "1.5: outputs apply only if the step matches",
        (
            OUTPUTS,
            "(output.epoch, output.step) != (plan.epoch, plan.step) or plan.step != self._next_step",
            "output.epoch != plan.epoch",
        ),
    ),
    mutant(
        "frames-keyed-by-slot-only",
        "1.5: outputs apply only if the gen matches",
        (OUTPUTS, "same_runner = output.gens[indices] == plan.gens", "same_runner = np.full(len(plan.slots), True)"),
        (OUTPUTS, "(slots.delivering_gen[indices] == plan.gens)", "(slots.delivering_gen[indices] >= 0)"),
    ),
    mutant(
        "no-gen-check-of-rows-in-the-scheduler",
        "1.5: outputs apply only if the gen matches the slot's present occupant",
        (OUTPUTS, "(slots.delivering_gen[indices] == plan.gens)", "(slots.delivering_gen[indices] >= 0)"),
    ),
    mutant(
        "no-gen-check-of-rows-in-the-runner",
        "1.5: outputs apply only if the gen matches what the runner computed",
        (OUTPUTS, "same_runner = output.gens[indices] == plan.gens", "same_runner = np.full(len(plan.slots), True)"),
    ),
    mutant(
        "no-gen-check-of-releases",
        "1.2: a request leaves DRAINING only on the -9 with its gen",
        (OUTPUTS, _STALE_RELEASE, "            if slots.gen[slot] != gen:\n"),
    ),
    mutant(
        "readmission-keeps-the-gen",
        "1.5: the gen grows each time a request is admitted to a slot",
        ("scheduling/running/slots.py", "        self.gen[slot] += 1\n", "        self.gen[slot] = 1\n"),
    ),
    mutant(
        "eos-in-flight-while-draining-is-requeued",
        "1.6: a request whose last token was in flight while DRAINING is not requeued",
        (
            OUTPUTS,
            "            if ends[index]:\n",
            "            if ends[index] and slots.running[slot]:\n",
        ),
    ),
    mutant(
        "ended-while-draining-is-requeued-on-its-release",
        "1.6: a request whose last token was in flight while DRAINING is not requeued",
        (
            RESIDENCIES,
            "        if request.ended is not None:\n            request.advance(Event.RELEASED_ENDED)\n        elif",
            "        if",
        ),
        (OUTPUTS, "            if request.ended is None:\n", "            if not request.abort_requested:\n"),
    ),
    mutant(
        "abort-while-draining-frees-at-once",
        "1.7: abort frees everything exactly once, a draining slot on its -9",
        (
            SCHEDULER,
            "        else:\n            if request.state is State.RUNNING:\n",
            "        elif request.state is State.DRAINING and request.slot is not None:\n"
            "            self._running_batch.slots.vacate(request.slot)\n"
            "            self._ended(request, FinishReason.ABORT)\n"
            "        else:\n            if request.state is State.RUNNING:\n",
        ),
        (
            OUTPUTS,
            _STALE_RELEASE,
            "            if output.gens[slot] != gen or slots.gen[slot] != gen or not slots.draining[slot]:\n",
        ),
    ),
    mutant(
        "abort-while-draining-is-forgotten",
        "1.7: abort is prompt in every state",
        (
            RESIDENCIES,
            "        elif request.abort_requested:\n            request.advance(Event.RELEASED_ABORTED)\n",
            "        elif request.abort_requested and request.preemptions == 0:\n"
            "            request.advance(Event.RELEASED_ABORTED)\n",
        ),
    ),
    mutant(
        "aborted-waiting-request-is-prefilled",
        "1.7: a waiting request leaves at once, never prefilled",
        (ADMISSIONS, "        self._waiting.remove(request)\n        self._offloading", "        self._offloading"),
    ),
    mutant(
        "abort-of-a-running-request-waits-for-its-end",
        "1.7: abort is prompt in every state",
        (SCHEDULER, "                self._aborting.append(request)\n", "                pass\n"),
    ),
    mutant(
        "no-watchdog",
        "1.8: a handshake without an answer is an engine fault, never a silent hang",
        (ENGINE, "self._device.collect(self._watchdog_seconds)", "self._device.collect(1e6)"),
    ),
    mutant(
        "frame-drops-the-gens",
        "1.5: outputs apply only if the gen matches, over every transport",
        (FRAMES, _FRAME, _REBUILT.format(gens="np.zeros_like(read.gens)", errors="read.errors")),
    ),
    mutant(
        "frame-drops-the-errors",
        "1.3: an error in one row reaches its request, over every transport",
        (FRAMES, _FRAME, _REBUILT.format(gens="read.gens", errors="()")),
    ),
    mutant(
        "negative-id-reaches-the-client",
        "1.9: no negative id reaches a client",
        (
            OUTPUTS,
            "token_ids = delivered if count == width else delivered[:count]",
            "token_ids = delivered",
        ),
    ),
)
