"""The kit's tiny checkpoints, and their reference outputs from transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from fd_core.testing.models.checkpoints import CASES, write_checkpoint

__all__ = ["CASES", "Tiny", "write_tiny"]


@dataclass
class Tiny:
    """Checkpoint folder with its transformers model."""

    folder: Path
    reference: Any

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return transformers' logits of every position, float32[len(tokens), V]."""
        with torch.no_grad():
            return self.reference(torch.tensor([tokens])).logits[0].numpy()


def write_tiny(case: str, folder: Path) -> Tiny:
    write_checkpoint(case, folder)
    reference, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), f"transformers does not read the checkpoint as intended: {info}"
    return Tiny(folder, reference.eval())
