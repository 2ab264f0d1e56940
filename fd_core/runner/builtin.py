"""Built-in drafters and postprocessors, registered through the same hooks as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

_HERE = "fd_core.runner.drafting"
_MATRIX = "fd_core.runner.postprocess"


@hookimpl
def fd_register_drafters() -> list[Entry]:
    """Register `ngram`, `suffix`, `draft_model`, `eagle3` and `mtp`."""
    return [
        Entry("ngram", f"{_HERE}.lookup:NgramDrafter", "the tokens after the latest occurrence of the same n tokens"),
        Entry("suffix", f"{_HERE}.lookup:SuffixDrafter", "the tokens after the longest suffix that occurred before"),
        Entry("draft_model", f"{_HERE}.draft_model:DraftModelDrafter", "the greedy continuation of a smaller model"),
        Entry(
            "eagle3", f"{_HERE}.eagle:EagleDrafter", "the continuation by a head that reads the model's hidden states"
        ),
        Entry("mtp", f"{_HERE}.eagle:MtpDrafter", "likewise by the checkpoint's layer for multi-token prediction"),
    ]


@hookimpl
def fd_register_postprocessors() -> list[Entry]:
    """Register one per framework, under its name."""
    return [
        Entry("numpy", f"{_MATRIX}.numpy_matrix:NumpyPostprocess", "for numpy arrays, those of onnxruntime among them"),
        Entry("torch", f"{_MATRIX}.torch_matrix:TorchPostprocess", "for torch on any device"),
        Entry("paddle", f"{_MATRIX}.paddle_matrix:PaddlePostprocess", "for Paddle on any device"),
    ]
