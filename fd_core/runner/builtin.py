"""The drafters and postprocessors that come with the core, offered through the same hooks as a stranger's."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

_HERE = "fd_core.runner.drafting"
_MATRIX = "fd_core.runner.postprocess"


@hookimpl
def fd_register_drafters() -> list[Entry]:
    """Offer `ngram`, `suffix` and `draft_model`."""
    return [
        Entry("ngram", f"{_HERE}.lookup:NgramDrafter", "what followed the same n tokens last time"),
        Entry("suffix", f"{_HERE}.lookup:SuffixDrafter", "what followed the longest suffix seen before"),
        Entry("draft_model", f"{_HERE}.draft_model:DraftModelDrafter", "what a smaller model would say"),
    ]


@hookimpl
def fd_register_postprocessors() -> list[Entry]:
    """Offer one for each framework, under its name."""
    return [
        Entry("numpy", f"{_MATRIX}.numpy_matrix:NumpyPostprocess", "for numpy arrays, those of onnxruntime among them"),
        Entry("torch", f"{_MATRIX}.torch_matrix:TorchPostprocess", "for torch on any device"),
        Entry("paddle", f"{_MATRIX}.paddle_matrix:PaddlePostprocess", "for Paddle on any device"),
    ]
