"""Named features that a backend may lack. Signalling and budget are not among them: every backend must have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ABILITIES: Final[Mapping[str, str]] = {
    "bfloat16": "weights, activations and KV in bfloat16",
    "biases": "linears that add a bias",
    "checkpoints": "real models, read from checkpoints",
    "interleaved_rope": "rotary embedding of neighbouring elements",
    "kv_transfer": "KV blocks copied to the host and back",
    "moe": "layers of experts",
    "own_process": "an engine in a process of its own",
    "paged_kv": "attention over scattered blocks as an operation by itself",
    "primitives": "single operations on arrays, outside a whole forward pass",
    "softcap": "scores and logits capped by a tanh",
    "window": "layers that see a sliding window",
}
"""A key of `Backend.limits` to what tests that ask for it use."""
