"""Faults of ranks: the agreement of the processes of one engine."""

from __future__ import annotations

from tests.mutants.mutant import mutant

LEADING = "engine/ranks/leading.py"
MESSAGES = "engine/ranks/messages.py"
GROUP = "ops/parallel.py"
STAGES = "engine/ranks/stages.py"

MUTANTS = (
    mutant(
        "deviating-rank-is-accepted",
        "4: ranks change no text",
        (LEADING, "if (result.step, result.digest) != (step, digest):", "if False:"),
    ),
    mutant(
        "rank-digests-ignore-sampled-tokens",
        "4: ranks change no text",
        (MESSAGES, "    digest.update(output.tokens.tobytes())\n", ""),
    ),
    mutant(
        "rank-digests-ignore-the-plan",
        "4: ranks change no text",
        (MESSAGES, "digest = hashlib.blake2b(frame, digest_size=8)", "digest = hashlib.blake2b(digest_size=8)"),
    ),
    mutant(
        "rank-timeout-is-disabled",
        "1.8: a hung rank is an engine fault, never a silent hang",
        (LEADING, "            if timeout.expired():\n", "            if False:\n"),
    ),
    mutant(
        "rank-copy-timeout-is-disabled",
        "1.8: a hung rank is an engine fault, never a silent hang",
        (LEADING, "if not self.group.abandoned and timeout.expired():", "if False:"),
    ),
    mutant(
        "late-copy-completes-the-next-one",
        "3.2: a copy without a timely answer is applied to no other blocks",
        (
            LEADING,
            '                        self._timeout_error = f"rank {rank} did not respond within {self._seconds:g} s"\n'
            "                        self.group.abandon()\n",
            '                        raise RuntimeError(f"rank {rank} did not respond within {self._seconds:g} s")\n',
        ),
    ),
    mutant(
        "rank-exit-wakes-no-waiter",
        "1.8: a rank that exits is an engine fault, never a silent hang",
        (LEADING, "        self.group.abandon()\n        self.wake()\n", "        self.group.abandon()\n"),
    ),
    mutant(
        "rank-exit-does-not-abort-the-group",
        "1.8: a rank that exits is an engine fault, never a silent hang",
        (LEADING, "        self.group.abandon()\n        self.wake()\n", "        self.wake()\n"),
    ),
    mutant(
        "reply-to-a-poll-counts-as-the-reply-to-a-step",
        "1.5: an output applies only to its own step",
        (LEADING, "if rank in self._unchecked and isinstance(message, messages.RankReady):", "if False:"),
    ),
    mutant(
        "rank-computes-separate-drafts",
        "4: all ranks verify the same drafts",
        (
            LEADING,
            "messages.encode_order(messages.RankStep(plan, *self.batch.guesses()))",
            "messages.encode_order(messages.RankStep(plan, *(part[:0] for part in self.batch.guesses())))",
        ),
    ),
    mutant(
        "adapter-rejected-by-one-rank-stays-on-the-others",
        "4: the text of a request depends on its own adapter",
        (LEADING, "            super().replace(before)\n            if (again", "            if (again"),
    ),
    mutant(
        "rank-shares-are-joined-in-reverse",
        "4: the KV of a position is read where it was written",
        (LEADING, "for share in sorted(parts)]", "for share in sorted(parts, reverse=True)]"),
    ),
    mutant(
        "every-rank-gets-the-first-share",
        "4: the KV of a position is read where it was written",
        (LEADING, "whole[slice(*share)]", "whole[slice(*self._shares[0])]"),
    ),
    mutant(
        "free-memory-is-that-of-rank-0",
        "2.5: a configuration that violates the rule is rejected at startup",
        (
            "engine/building/builder.py",
            "min(self._loaded, key=lambda rank: rank.free_memory / rank.bytes_per_block)",
            "self._loaded[0]",
        ),
    ),
    mutant(
        "stage-does-not-wait-for-its-input-tokens",
        "4: texts do not depend on the timing of plans",
        (
            STAGES,
            "while self._plans and (self._sampled[self._plans[0].slots] <= self._known).all():",
            "while self._plans:",
        ),
    ),
    mutant(
        "stage-does-not-receive-sampled-tokens",
        "4: texts do not depend on the timing of plans",
        (
            STAGES,
            "                self.batch.correct(slots, gens, lengths, num_drafts=num_drafts, tokens=tokens)\n",
            "",
        ),
    ),
    mutant(
        "stage-skips-its-last-layer",
        "4: stages change no text",
        ("models/build.py", "(each) for each in of_stage]", "(each) for each in of_stage[: len(of_stage) - 1 or 1]]"),
    ),
    mutant(
        "stage-sends-before-computing",
        "4: stages change no text",
        (
            STAGES,
            "self._group.pass_on(self.ops.to_host(self._forward(inputs, self.cache)))",
            "self._group.pass_on(np.zeros_like(self.ops.to_host(self._forward(inputs, self.cache))))",
        ),
    ),
    mutant(
        "stage-uses-the-states-of-the-previous-step",
        "4: stages change no text",
        (GROUP, "self._slots[rank + 1, number % 2, : 4", "self._slots[rank + 1, 1 - number % 2, : 4"),
    ),
    mutant(
        "all-reduce-returns-the-last-shard",
        "4: ranks change no text",
        (GROUP, "total[rows] += part", "total[rows] = part"),
    ),
    mutant(
        "ranks-adopt-different-weights",
        "4: ranks change no text",
        (LEADING, "        if any(answer.digest != digest for answer in answers):", "        if False:"),
    ),
    mutant(
        "error-of-a-rank-that-loads-is-ignored",
        "4: ranks change no text",
        (LEADING, "        if (reason := self._first_error(answers)) is not None:", "        if False:"),
    ),
)
