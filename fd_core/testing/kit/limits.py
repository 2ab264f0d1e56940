"""Optional features of a backend. Signalling and budget are mandatory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

ABILITIES: Final[Mapping[str, str]] = {
    "bfloat16": "weights, activations and KV in bfloat16",
    "any_experts": "experts with sigmoid scores, groups or factors, or whose inputs are weighed",
    "biased_experts": "biases of routers and experts, and the activation of gpt-oss",
    "biases": "linears that add a bias",
    "checkpoints": "real models, read from checkpoints",
    "chunks": "attention within chunks",
    "expert_parallel": "experts that ranks divide among them",
    "encoders": "attention in both directions, and layer norms",
    "float32": "weights, activations and KV in float32",
    "interleaved_rope": "rotary embedding of adjacent elements",
    "joint_norms": "one norm of all query heads and one of all key heads",
    "latents": "attention over latent vectors that all heads share",
    "kv_transfer": "KV blocks copied to the host and back",
    "moe": "layers of experts",
    "own_process": "an engine in a separate process",
    "paged_kv": "attention over scattered blocks as a separate operation",
    "primitives": "single operations on arrays, outside a whole forward pass",
    "recurs": "recurrent layers, and gates of attention",
    "shared_gate": "shared experts with a gate",
    "sinks": "attention sinks",
    "softcap": "scores and logits capped by a tanh",
    "ungated": "feed-forward blocks without a gate",
    "ungated_experts": "experts without a gate",
    "window": "layers with a sliding window",
}
"""Keys of `Backend.limits`, with the feature that tests require."""

OPTIONAL: Final[Mapping[str, str]] = {
    "ungated": "activate",
    "ungated_experts": "ungated_experts",
    "shared_gate": "weigh",
    "joint_norms": "joint_norm",
    "encoders": "encodes",
    "chunks": "chunks",
    "any_experts": "any_experts",
    "latents": "latents",
    "biased_experts": "biased_experts",
    "expert_parallel": "expert_parallel",
    "recurs": "recurs",
    "sinks": "sinks",
}
"""Abilities that a pack has if it redefines this operation or attribute of `Ops`."""
