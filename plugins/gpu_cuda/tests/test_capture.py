"""The captures of the tests reject work that a device would reject or compute wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from capture import CaptureRefused, record  # noqa: E402 - only where torch is installed
from processor import Processor  # noqa: E402

from fd_gpu_cuda.device import upload_packed  # noqa: E402

HOST = torch.device("cpu")


def test_replay_reads_the_current_content_of_its_memory() -> None:
    x, weight, y = torch.ones(3), torch.full((3,), 2.0), torch.zeros(3)

    def compute() -> None:
        middle = torch.empty_like(x).copy_(x).mul_(weight)
        y.copy_(torch.cat((middle[1:], middle[:1])) + 1)

    recorded = record(compute)
    assert y.tolist() == [3, 3, 3]
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    weight[0] = 10.0
    recorded.replay()
    assert y.tolist() == [5, 7, 11]


def test_replay_repeats_no_decision_of_python() -> None:
    x, y, signs = torch.ones(1), torch.zeros(1), iter([1.0, 1.0, -1.0])
    recorded = record(lambda: y.copy_(x * next(signs)))
    recorded.replay()
    assert y.item() == 1


def upload() -> None:
    upload_packed(Processor(), [np.zeros(3, np.int32)])


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "item": (lambda x: x[0].item(), "looks at values"),
    "list": (lambda x: x.tolist(), "looks at values"),
    "bool": (lambda x: bool(x[0]), "looks at values"),
    "int": (lambda x: int(x[0]), "looks at values"),
    "index": (lambda x: [1, 2, 3, 4][x.long()[0]], "looks at values"),
    "cpu": (lambda x: x.cpu(), "looks at values"),
    "to": (lambda x: x.to("cpu"), "looks at values"),
    "numpy": (lambda x: x.numpy(), "looks at values"),
    "equal": (lambda x: torch.equal(x, x), "looks at values"),
    "nonzero": (lambda x: x.nonzero(), "depends on values"),
    "mask": (lambda x: x[x > 0], "depends on values"),
    "select": (lambda x: torch.masked_select(x, x > 0), "depends on values"),
    "unique": (lambda x: x.unique(), "depends on values"),
    "counts": (lambda x: torch.bincount(x.long()), "depends on values"),
    "repeats": (lambda x: x.repeat_interleave(x.long()), "depends on values"),
    "tensor": (lambda x: x * torch.tensor(2.0), "on the host"),
    "as a tensor": (lambda x: x * torch.as_tensor([2.0]), "on the host"),
    "from numpy": (lambda x: x * torch.from_numpy(np.ones(1, np.float32)), "become a tensor"),
    "list as index": (lambda x: x[[0, 1]], "become a tensor"),
    "pinned": (lambda x: x.pin_memory(), "on the host"),
    "zeros": (lambda x: x + torch.zeros(4), "without a device"),
    "random": (lambda x: x + torch.rand(4, device=HOST), "random numbers"),
    "noise": (lambda x: x.uniform_(), "random numbers"),
    "upload": (lambda x: upload(), "pinned memory in a capture"),
    "download": (lambda x: Processor().download([x]), "a download in a capture"),
    "wait": (lambda x: Processor().wait(), "a wait in a capture"),
    "lane": (lambda x: Processor().copy_lane(), "another stream in a capture"),
    "nested": (lambda x: Processor().capture(lambda: None), "a capture in a capture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_cannot_be_captured_are_rejected(name: str) -> None:
    work, words = REFUSED[name]
    x, runs = torch.ones(4), iter([False, True])

    def compute() -> None:
        x.abs()
        if next(runs):  # the run before the capture may do anything
            work(x)

    with pytest.raises(CaptureRefused, match=words):
        record(compute)


def test_memory_made_for_one_call_is_rejected() -> None:
    """As an array that was uploaded for a step, and not copied to the memory of the graph."""
    y, inputs = torch.zeros(3), iter([torch.ones(3), torch.ones(3)])
    with pytest.raises(CaptureRefused, match="made for this call alone"):
        record(lambda: y.add_(next(inputs)))


def test_freed_memory_is_rejected_at_the_replay() -> None:
    """As a workspace that has grown since."""
    y, owned = torch.zeros(3), [torch.ones(3)]
    recorded = record(lambda: y.add_(owned[0]))
    recorded.replay()
    assert y.tolist() == [3, 3, 3]
    owned[0] = torch.ones(5)
    with pytest.raises(CaptureRefused, match="given back"):
        recorded.replay()


def test_workspace_made_before_the_capture_may_be_read() -> None:
    y, owned = torch.zeros(3), list[Any]()

    def compute() -> None:
        if not owned:
            owned.append(torch.ones(3))
        y.add_(owned[0])

    record(compute).replay()
    assert y.tolist() == [3, 3, 3]


def test_capture_works_after_a_rejected_one() -> None:
    x = torch.ones(2)
    with pytest.raises(CaptureRefused):
        record(lambda: x.fill_(x[0].item()))
    record(lambda: x.add_(1)).replay()
    assert Processor().pinned(1) is not None
