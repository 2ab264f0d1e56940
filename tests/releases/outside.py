"""Project outside of the repository, for type checkers: a model in use, a backend, policies, a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

import fd_core
from fd_core import LLM, Completion, FdError, SamplingParams
from fd_core.backends.contract import Availability, Backend
from fd_core.config import EngineConfig
from fd_core.hookspecs import CONTRACT_VERSION, Entry, hookimpl
from fd_core.kv.stores.contract import Bytes, KVStore, StoreStats
from fd_core.ops.contract import Ops
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.router.policies import Candidate, RouterPolicy, RoutingContext
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.types import RequestSpec

FD_CONTRACT = CONTRACT_VERSION


@hookimpl
def fd_register_stores() -> list[Entry]:
    """Offer a store."""
    return [Entry("forgetful", f"{__name__}:Forgetful", "keeps nothing")]


class Chip(Backend):
    """A custom device."""

    name = "chip"

    @classmethod
    def probe(cls) -> Availability:
        """It is always there."""
        return Availability(True, "always")

    def make_ops(self) -> Ops:
        """Compute with numpy."""
        return NumpyOps()

    def free_memory(self) -> int:
        """One GiB."""
        return 1 << 30


class ShortestFirst(SchedulingPolicy):
    """Short prompts first."""

    name = "shortest"

    def rank(self, request: QueuedRequest) -> tuple[int, ...]:
        """Order by the length of the prompt."""
        return (request.num_tokens, request.arrival)


class Patient(ContinuousBatchingScheduler):
    """The scheduler of the core, with access to requests."""

    def add_all(self, specs: Sequence[RequestSpec]) -> int:
        """Queue requests; return how many effects that has."""
        return sum(len(self.add(spec).operations) for spec in specs)


class Forgetful(KVStore):
    """A store that keeps nothing."""

    def open(self, timeout: float) -> str:
        """Describe the device."""
        return "forgetful"

    def get(self, keys: Sequence[bytes], limit: int, timeout: float) -> list[Bytes | None]:
        """Find nothing."""
        return [None for _ in keys]

    def put(self, values: Sequence[tuple[bytes, Sequence[Bytes]]], timeout: float) -> int:
        """Keep nothing."""
        return 0

    def longest_prefix(self, keys: Sequence[bytes], limit: int, timeout: float) -> int:
        """Know nothing."""
        return 0

    def delete(self, keys: Sequence[bytes], timeout: float) -> int:
        """Forget nothing."""
        return 0

    def stats(self, timeout: float) -> StoreStats:
        """Hold nothing."""
        return StoreStats(values=0)

    def close(self) -> None:
        """Free nothing."""


class First(RouterPolicy):
    """The first worker."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Ignore the requests."""
        return context.candidates[0]


def answer(prompt: str) -> str:
    """Return the answer of the model, or the reason that there is none."""
    try:
        llm = LLM("smollm2", backend="chip")
        results = llm.generate(prompt, SamplingParams(max_tokens=5, temperature=0))
    except FdError as error:
        return error.hint or error.message
    assert_type(results, list[Completion])
    assert_type(results[0].text, str)
    assert_type(fd_core.__version__, str)
    assert_type(EngineConfig(model="smollm2").max_num_seqs, int | None)
    return results[0].text
