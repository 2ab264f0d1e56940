"""Groups of ranks over every transport: order of sums, and ranks that end, are missing or stall."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from fd_core.engine.ranks.groups import opened_group
from fd_core.errors import ConfigError
from fd_core.ops import parallel, polled_timeout
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.parallel import Parallel, RankExchangeError, RankGroup
from fd_core.testing.kit.ranks import gloo_ranks, on_ranks, shared_memory_ranks

pytest.importorskip("torch")

from fd_core.ops.torch.group import TorchCollectives, TorchGroup, gloo_group, shared_store

Make = Callable[[int, float], Sequence[RankGroup]]
each_transport = pytest.mark.parametrize("make", [shared_memory_ranks, gloo_ranks])


def of_rank(rank: int, rows: int, width: int = 96) -> Any:
    """Return numbers of very different magnitudes, whose sum depends on the order."""
    values = np.random.default_rng(rank).standard_normal((rows, width), np.float32)
    return (values * 10.0 ** np.random.default_rng(7 + rank).integers(-3, 4, values.shape)).astype(np.float32)


def in_order(size: int, rows: int) -> Any:
    total = of_rank(0, rows)
    for rank in range(1, size):
        total = total + of_rank(rank, rows)
    return total


@each_transport
def test_sum_of_a_row_does_not_depend_on_other_rows(make: Make) -> None:
    def work(group: RankGroup) -> list[Any]:
        mine = of_rank(group.parallel.rank, 40)
        return [group.all_reduce(mine), *(group.all_reduce(mine[i : i + 1]) for i in range(3))]

    for whole, *single in on_ranks(3, work, make=make):
        np.testing.assert_array_equal(whole, in_order(3, 40))
        np.testing.assert_array_equal(np.concatenate(single), whole[:3])


@pytest.mark.parametrize("make", [shared_memory_ranks, gloo_ranks])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("most", [0, 1 << 18])
def test_tensors_are_summed_in_rank_order(size: int, most: int, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent whole to all ranks, or reduced in parts: bitwise equal, rounded once."""
    import torch

    monkeypatch.setattr("fd_core.ops.torch.group._WHOLE_BYTES", most)

    def work(group: RankGroup) -> list[Any]:
        gloo = gloo_group(shared_store(group), group.parallel, group.host, 20.0)
        collectives = TorchCollectives(gloo, group.parallel)
        mine = torch.from_numpy(of_rank(group.parallel.rank, 5))
        rounded = collectives.all_reduce(mine.bfloat16())
        assert rounded.dtype == torch.bfloat16
        empty = collectives.all_reduce(mine[:0]), collectives.all_gather(mine[:0])
        assert [each.shape for each in empty] == [(0, 96), (0, size * 96)]
        return [collectives.all_reduce(mine).numpy(), collectives.all_gather(mine).numpy(), rounded.float().numpy()]

    parts = [torch.from_numpy(of_rank(rank, 5)) for rank in range(size)]
    narrow = [part.bfloat16().float() for part in parts]
    total = narrow[0]
    for part in narrow[1:]:
        total = total + part
    for reduced, gathered, rounded in on_ranks(size, work, make=make):
        np.testing.assert_array_equal(reduced, in_order(size, 5))
        np.testing.assert_array_equal(gathered, torch.cat(parts, dim=1).numpy())
        np.testing.assert_array_equal(rounded, total.bfloat16().float().numpy())


@each_transport
def test_missing_rank_is_named(make: Make) -> None:
    def work(group: RankGroup) -> None:
        if group.parallel.rank != 1:
            with pytest.raises(RankExchangeError, match=r"rank 1 did not respond within 1 s"):
                group.all_reduce(of_rank(0, 1))

    on_ranks(3, work, 1.0, make)


def test_suspended_machine_does_not_time_out_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs on while the machine or all of its processes are suspended."""
    calls = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * (next(calls) > 3))
    monkeypatch.setattr(polled_timeout, "time", clock)
    monkeypatch.setattr(parallel, "_SPINS", 0)

    def work(group: RankGroup) -> Any:
        if group.parallel.rank == 1:
            time.sleep(0.3)
        return group.all_reduce(of_rank(group.parallel.rank, 1))

    for total in on_ranks(2, work, 20.0):
        np.testing.assert_array_equal(total, in_order(2, 1))
    assert next(calls) > 5


@each_transport
def test_stalled_rank_is_named_by_all_others(make: Make) -> None:
    named = threading.Barrier(3, timeout=60)

    def work(group: RankGroup) -> str:
        group.all_reduce(of_rank(0, 1))
        if group.parallel.rank == 1:
            named.wait()
            return ""
        with pytest.raises(RankExchangeError) as caught:
            group.all_reduce(of_rank(0, 1))
        named.wait()
        return str(caught.value)

    first, _, last = on_ranks(3, work, 1.0, make)
    assert "rank 1 did not respond" in first and "rank 1 did not respond" in last


@each_transport
def test_failing_rank_releases_waiting_ranks(make: Make) -> None:
    def work(group: RankGroup) -> float:
        group.all_reduce(of_rank(0, 1))
        if group.parallel.rank == 1:
            group.abandon()
            return 0.0
        begun = time.monotonic()
        with pytest.raises(RankExchangeError, match="the other ranks are lost"):
            group.all_reduce(of_rank(0, 1))
        assert group.abandoned
        return time.monotonic() - begun

    assert max(on_ranks(2, work, 60.0, make)) < 20


@each_transport
def test_abandoned_group_does_not_wait_for_devices(make: Make) -> None:
    group = make(2, 60.0)[0]
    threading.Timer(0.2, group.abandon).start()
    with pytest.raises(RankExchangeError, match="the other ranks are lost"):
        group.wait_until(lambda: False)


@each_transport
def test_rank_with_hung_device_is_named(make: Make) -> None:
    named = threading.Barrier(3, timeout=60)

    def work(group: RankGroup) -> str:
        group.all_reduce(of_rank(0, 1))
        if group.parallel.rank == 2:
            named.wait()
            return ""
        with pytest.raises(RankExchangeError) as caught:
            group.wait_until(lambda: False)
        named.wait()
        return str(caught.value)

    first, second, _ = on_ranks(3, work, 1.0, make)
    assert "rank 2 did not respond" in first and "rank 2 did not respond" in second


@each_transport
def test_hung_devices_are_reported_if_all_ranks_respond(make: Make) -> None:
    def work(group: RankGroup) -> None:
        group.all_reduce(of_rank(0, 1))
        group.wait_until(lambda: True)
        with pytest.raises(RankExchangeError, match=r"the ranks' devices did not complete a step within 1.5 s"):
            group.wait_until(lambda: False)

    on_ranks(2, work, 2.0, make)


KILLED = """
import sys
import msgspec, numpy as np
from fd_core.ops.parallel import Parallel, RankRendezvous
from fd_core.ops.torch.group import TorchGroup
group = TorchGroup.join(Parallel(1, 2), msgspec.json.decode(sys.argv[1], type=RankRendezvous), 60.0)
group.all_reduce(np.ones((1, 8), np.float32))
print("met", flush=True)
sys.stdin.read()
"""


@pytest.mark.timing
def test_process_exit_is_detected_immediately_over_gloo() -> None:
    group, rendezvous = opened_group(2, 60.0, "gloo")
    command = [sys.executable, "-c", KILLED, msgspec.json.encode(rendezvous).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        np.testing.assert_array_equal(group.all_reduce(np.ones((1, 8), np.float32)), np.full((1, 8), 2, np.float32))
        assert process.stdout is not None and process.stdout.readline() == b"met\n"
        threading.Timer(0.3, process.send_signal, [signal.SIGKILL]).start()
        begun = time.monotonic()
        with pytest.raises(RankExchangeError, match="the other ranks are lost"):
            group.all_reduce(np.ones((1, 8), np.float32))
        assert group.abandoned and time.monotonic() - begun < 20


def test_rendezvous_listens_on_loopback_only() -> None:
    """A socket open beyond this machine would serve any client."""
    groups = gloo_ranks(2, 20.0)
    on_ranks(2, lambda group: group.all_reduce(of_rank(0, 1)), make=lambda *_: groups)
    owned = {str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    mine = [words[1] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in owned]
    assert mine and all(address.startswith("0100007F:") for address in mine)


def test_groups_at_one_address_are_not_mixed() -> None:
    first = TorchGroup.open(2, 0.5)
    stranger = TorchGroup.join(Parallel(1, 2), msgspec.structs.replace(first.rendezvous, token="another"), 0.5)
    for group, other in ((first, 1), (stranger, 0)):
        with pytest.raises(RankExchangeError, match=f"rank {other} did not respond"):
            group.all_reduce(of_rank(0, 1))


def test_fences_are_required_for_weak_memory_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_STORES_IN_ORDER", False)
    fences: list[int] = []

    def work(group: RankGroup) -> Any:
        with pytest.raises(ConfigError, match="requires native kernels"):
            NumpyOps().join(group)
        assert isinstance(group, parallel.SharedMemoryGroup)
        group.fence = lambda: fences.append(1)
        NumpyOps().join(group)
        return group.all_reduce(of_rank(group.parallel.rank, 1))

    for total in on_ranks(2, work):
        np.testing.assert_array_equal(total, in_order(2, 1))
    assert len(fences) == 6  # on each rank before it publishes its slot, and after each wait
    on_ranks(2, lambda group: NumpyOps().join(group), make=gloo_ranks)
