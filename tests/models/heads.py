"""Drafts of heads by `transformers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm, silu


def reference_drafts(reference: Any, folder: Path, text: Sequence[int], count: int) -> list[int]:
    """Return the drafts after a text by a head for a model of `transformers`, computed anew from the whole text."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    final: list[torch.Tensor] = []
    hook = reference.model.norm.register_forward_pre_hook(lambda _, given: final.append(given[0]))
    with torch.no_grad():
        states = reference(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        hook.remove()
        streams = [*(each[0] for each in states[:-1]), final[0][0]]
        read = [streams[layer] for layer in config["eagle_aux_hidden_state_layer_ids"]]
        hidden = linear(torch.cat(read, 1), weights["fc.weight"])
        known, drafts = [*text], []
        for _ in range(count):
            x = _layer(reference, config, weights, torch.tensor(known[1:]), hidden)
            logits = linear(_norm(x[-1:], weights["norm.weight"], config), weights["lm_head.weight"])
            chosen = int(logits[0].argmax())
            drafts.append(chosen + int(weights["d2t"][chosen]) if "d2t" in weights else chosen)
            known, hidden = [*known, drafts[-1]], torch.cat([hidden, x[-1:]])
    return drafts


def _norm(x: torch.Tensor, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:], weight, config["rms_norm_eps"])


def _layer(reference: Any, config: dict[str, Any], weights: dict[str, Any], ids: Any, hidden: Any) -> Any:
    own = {name.removeprefix("midlayer.").removesuffix(".weight"): each for name, each in weights.items()}
    size, embedded = config["head_dim"], reference.model.embed_tokens(ids)
    parts = _norm(embedded, own["input_layernorm"], config), _norm(hidden, own["hidden_norm"], config)
    q, k, v = (linear(torch.cat(parts, 1), own[f"self_attn.{name}_proj"]).unflatten(1, (-1, size)) for name in "qkv")
    angles = torch.arange(len(ids))[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    cos, sin = (torch.cat([each, each], 1)[:, None] for each in (angles.cos(), angles.sin()))
    q, k = (each * cos + torch.cat([-each[..., size // 2 :], each[..., : size // 2]], -1) * sin for each in (q, k))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    a = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
    x = hidden + linear(a, own["self_attn.o_proj"])
    normed = _norm(x, own["post_attention_layernorm"], config)
    gated = silu(linear(normed, own["mlp.gate_proj"])) * linear(normed, own["mlp.up_proj"])
    return x + linear(gated, own["mlp.down_proj"])
