"""The workloads: which prompts are sent together and how many tokens each must return.

Pure: a workload is a function of its name, a corpus of token ids and a seed, so every engine of a round gets the
same prompts, and no round repeats the prompts of another (a prefix cache helps inside a round, never across rounds).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SALT_TOKENS = 4
"""Random tokens that open each prompt, so that no two prompts share a prefix by accident."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts that arrive at once; each must return exactly as many tokens as its entry of `max_tokens`."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]

    @property
    def output_tokens(self) -> int:
        """Tokens that the whole workload must return."""
        return sum(self.max_tokens)

    def peak_blocks(self, block_size: int) -> int:
        """Return the KV blocks in use in the fullest step if all requests start together and none ever waits."""
        pairs = [(len(prompt), tokens) for prompt, tokens in zip(self.prompts, self.max_tokens, strict=True)]
        return max(
            sum(-(-(length + step) // block_size) for length, tokens in pairs if step < tokens)
            for step in range(max(self.max_tokens))
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of a workload, in tokens. `shared` tokens of prefix are the same for all its requests.

    Each request returns `max_tokens`, or a number from `min_tokens` to it. With `steady_lengths` all seeds give the
    same lengths, so that the KV demand is known before anything runs.
    """

    requests: int
    min_input: int
    max_input: int
    max_tokens: int
    shared: int = 0
    min_tokens: int | None = None
    steady_lengths: bool = False

    @property
    def title(self) -> str:
        """Requests and lengths in words."""
        kinds = [_span(self.min_input, self.max_input), _span(self.min_tokens or self.max_tokens, self.max_tokens)]
        shared = f"shared prefix of {self.shared} and " if self.shared else ""
        requests = "one stream" if self.requests == 1 else f"{self.requests} concurrent"
        return f"{requests}, {shared}{kinds[0]} in, {kinds[1]} out"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output together."""
        return self.shared + self.max_input + self.max_tokens


def _span(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


SHAPES = {
    "w1": Shape(1, 128, 128, 128),
    "w2": Shape(32, 64, 512, 128),
    "w3": Shape(32, 50, 50, 64, shared=400),
    "pressure": Shape(32, 64, 512, 384, min_tokens=128, steady_lengths=True),
    "smoke": Shape(2, 8, 16, 4),
    # A quarter of the requests and of their output.
    "w1-quick": Shape(1, 128, 128, 32),
    "w2-quick": Shape(8, 64, 512, 32),
    "w3-quick": Shape(8, 50, 50, 16, shared=400),
}


def build(name: str, corpus: Sequence[int], seed: int) -> PromptSet:
    """Return the workload `name` cut from `corpus` (ids of running text, read as a ring) under `seed`."""
    if name not in SHAPES:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(SHAPES)}")
    if not corpus:
        raise ValueError("the corpus holds no tokens")
    shape = SHAPES[name]
    rng = random.Random(f"{name}/{seed}")  # noqa: S311
    lengths = random.Random(name) if shape.steady_lengths else rng  # noqa: S311
    shared = _passage(rng, corpus, shape.shared)
    prompts, max_tokens = [], []
    for _ in range(shape.requests):
        length = lengths.randint(shape.min_input, shape.max_input)
        prompts.append(shared + _passage(rng, corpus, length))
        least = shape.max_tokens if shape.min_tokens is None else shape.min_tokens
        max_tokens.append(shape.max_tokens if least == shape.max_tokens else lengths.randint(least, shape.max_tokens))
    return PromptSet(name, tuple(prompts), tuple(max_tokens))


def _passage(rng: random.Random, corpus: Sequence[int], length: int) -> tuple[int, ...]:
    """Return `length` tokens: a random salt, then running text from a random place."""
    salt = min(SALT_TOKENS, length)
    start = rng.randrange(len(corpus))
    running = (corpus[(start + i) % len(corpus)] for i in range(length - salt))
    return (*(rng.choice(corpus) for _ in range(salt)), *running)
