"""Faults of ranks: what keeps several processes one engine."""

from __future__ import annotations

from tests.mutants.mutant import mutant

LEADING = "engine/ranks/leading.py"
MESSAGES = "engine/ranks/messages.py"
GROUP = "ops/parallel.py"
STAGES = "engine/ranks/stages.py"

MUTANTS = (
    mutant(
        "a-rank-that-made-something-else-is-believed",
        "4: ranks change no text",
        (LEADING, "if (result.step, result.digest) != (step, digest):", "if False:"),
    ),
    mutant(
        "ranks-are-not-compared-by-what-they-sampled",
        "4: ranks change no text",
        (MESSAGES, "    digest.update(output.tokens.tobytes())\n", ""),
    ),
    mutant(
        "ranks-are-not-compared-by-what-they-execute",
        "4: ranks change no text",
        (MESSAGES, "digest = hashlib.blake2b(frame, digest_size=8)", "digest = hashlib.blake2b(digest_size=8)"),
    ),
    mutant(
        "a-late-rank-is-waited-for-without-end",
        "1.8: a rank that stands still is an engine fault, never a silent hang",
        (LEADING, "            if timeout.expired():\n", "            if False:\n"),
    ),
    mutant(
        "a-rank-that-copies-late-is-waited-for-without-end",
        "1.8: a rank that stands still is an engine fault, never a silent hang",
        (LEADING, "if not self.group.abandoned and timeout.expired():", "if False:"),
    ),
    mutant(
        "the-answer-of-a-late-copy-is-that-of-the-next",
        "3.2: a copy that is not answered in time is applied to no other blocks",
        (
            LEADING,
            '                        self._timeout_error = f"rank {rank} did not respond within {self._seconds:g} s"\n'
            "                        self.group.abandon()\n",
            '                        raise RuntimeError(f"rank {rank} did not respond within {self._seconds:g} s")\n',
        ),
    ),
    mutant(
        "the-end-of-a-rank-wakes-nobody",
        "1.8: a rank that ends is an engine fault, never a silent hang",
        (LEADING, "        self.group.abandon()\n        self.wake()\n", "        self.group.abandon()\n"),
    ),
    mutant(
        "the-end-of-a-rank-keeps-the-others-waiting",
        "1.8: a rank that ends is an engine fault, never a silent hang",
        (LEADING, "        self.group.abandon()\n        self.wake()\n", "        self.wake()\n"),
    ),
    mutant(
        "the-answer-to-a-look-is-taken-for-that-of-a-step",
        "1.5: an output applies only to its own step",
        (LEADING, "if rank in self._unchecked and isinstance(message, messages.RankReady):", "if False:"),
    ),
    mutant(
        "a-rank-drafts-by-itself",
        "4: all ranks verify the same drafts",
        (
            LEADING,
            "messages.encode_order(messages.RankStep(plan, *self.batch.guesses()))",
            "messages.encode_order(messages.RankStep(plan, *(part[:0] for part in self.batch.guesses())))",
        ),
    ),
    mutant(
        "an-adapter-that-one-rank-refuses-stays-on-the-others",
        "4: the text of a request depends on its own adapter",
        (LEADING, "            super().replace(before)\n            if (again", "            if (again"),
    ),
    mutant(
        "what-ranks-keep-is-joined-in-any-order",
        "4: the KV of a position is read where it was written",
        (LEADING, "for share in sorted(parts)]", "for share in sorted(parts, reverse=True)]"),
    ),
    mutant(
        "every-rank-is-given-the-first-share",
        "4: the KV of a position is read where it was written",
        (LEADING, "whole[slice(*share)]", "whole[slice(*self._shares[0])]"),
    ),
    mutant(
        "memory-is-what-rank-0-has",
        "2.5: a configuration that cannot keep the rule is refused at start",
        (
            "engine/building/builder.py",
            "min(self._loaded, key=lambda rank: rank.free_memory / rank.bytes_per_block)",
            "self._loaded[0]",
        ),
    ),
    mutant(
        "a-stage-does-not-wait-for-the-tokens-of-its-rows",
        "4: texts do not depend on what is planned when",
        (
            STAGES,
            "while self._plans and (self._sampled[self._plans[0].slots] <= self._known).all():",
            "while self._plans:",
        ),
    ),
    mutant(
        "a-stage-is-not-told-what-was-sampled",
        "4: texts do not depend on what is planned when",
        (STAGES, "                self.batch.correct(slots, gens, lengths, num_drafts, tokens)\n", ""),
    ),
    mutant(
        "a-stage-leaves-its-last-layer-out",
        "4: stages change no text",
        ("models/build.py", "for each in of_stage:", "for each in of_stage[: max(1, len(of_stage) - 1)]:"),
    ),
    mutant(
        "a-stage-hands-on-before-it-has-computed",
        "4: stages change no text",
        (
            STAGES,
            "self._group.pass_on(self.ops.to_host(self._forward(inputs, self.cache)))",
            "self._group.pass_on(np.zeros_like(self.ops.to_host(self._forward(inputs, self.cache))))",
        ),
    ),
    mutant(
        "a-stage-takes-the-states-of-the-step-before",
        "4: stages change no text",
        (GROUP, "self._slots[rank + 1, number % 2, : 4", "self._slots[rank + 1, 1 - number % 2, : 4"),
    ),
    mutant(
        "a-sum-is-what-the-last-rank-holds",
        "4: ranks change no text",
        (GROUP, "total[rows] += part", "total[rows] = part"),
    ),
)
