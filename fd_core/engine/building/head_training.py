"""Training of EAGLE-3 heads on texts, with the target's own predictions as labels (Li et al., 2025).

A head learns to continue from its own states: each text is computed several times, and every time after the first the
head reads its states of the pass before in place of the target's, as it does for the second and later drafts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, linear, rms_norm, silu

from fd_core.backends.contract import Backend, cache_shape
from fd_core.config import EngineConfig
from fd_core.errors import ConfigError
from fd_core.models.decoder import DecoderModel
from fd_core.models.families.spec import rope_tables
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import describe
from fd_core.ops.contract import Array
from fd_core.ops.weights import RawTensor
from fd_core.plugins import installed_plugins
from fd_core.runner.inputs.inputs import Spans, build_inputs
from fd_core.text.tokenizer import Tokenizer, load_tokenizer
from fd_core.types import IntArray

PASSES: Final = 3
_LENGTH: Final = 256
_BLOCK: Final = 16
_FEW: Final = 5
"""Layers up to which a target counts as small."""
_HELD_OUT: Final = 16
"""Every so many sequences, one is held out."""
_MEASURED: Final = 24
"""Held-out sequences that are measured, at most."""
_RATE: Final = 1e-3
_WARM_UP: Final = 0.05
Tensor = Any


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a training."""

    sequences: int
    """Sequences that were learned from, counted each time."""
    acceptance: tuple[float, ...]
    """Of held-out texts, the share of positions where all drafts up to the first, second, ... are the target's most
    likely tokens."""


class TappedTarget:
    """A model whose hidden states are read."""

    def __init__(self, model: DecoderModel, config: Mapping[str, Any]) -> None:
        count, hidden, ops = len(model.spec.layers), model.spec.embedding.shape[1], model.ops
        self.layers = (2, count // 2, count - 3) if count > _FEW else tuple(sorted({0, count // 2, count}))
        """Layers before which they are read."""
        same = ops.prepare_linear([RawTensor("F32", np.eye(hidden, dtype=np.float32))])
        reading: Any = _PlainTaps(dict.fromkeys(self.layers, same))
        self.model = replace(model, draft_head=reading)
        self.config = config
        self._forward = ops.compile_states(self.model.tapped)
        self._cache = ops.allocate_kv(cache_shape(self.model, _BLOCK, "auto"), -(-_LENGTH // _BLOCK))

    def read(self, tokens: IntArray) -> tuple[Tensor, Tensor]:
        """Return hidden states [T, 3 H] and logits [T, V] of a text of up to `_LENGTH` tokens."""
        ops, zero, count = self.model.ops, np.zeros(1, np.int32), len(tokens)
        spans = Spans(zero, zero, np.array([count], np.int32), logits_rows=np.arange(count, dtype=np.int32))
        table = np.arange(self._cache.num_blocks, dtype=np.int32)[None, None]
        states, *taps = self._forward(build_inputs(spans, tokens[None], table, _BLOCK, ops), self._cache)
        return torch.cat([self.tensor(each) for each in taps], 1), self.tensor(self.model.head(states))

    def tensor(self, array: Array) -> Tensor:
        """Return an array of the pack as a tensor."""
        return torch.from_numpy(self.model.ops.to_host(array))


def open_target(path: Path, threads: int | None = None) -> tuple[TappedTarget, Tokenizer]:
    """Load the model at `path` on the CPU; return it and its tokenizer. Raises `ConfigError` or `ModelError`."""
    config = EngineConfig(model=str(path), backend="cpu", dtype="float32", max_model_len=_LENGTH, num_threads=threads)
    backend: Backend = installed_plugins().choose_backend("cpu").cls(config)
    model = backend.load_model(path, backend.make_ops(), lambda *_: None)
    spec = model.spec if isinstance(model, DecoderModel) and model.causal else None
    if spec is None or not isinstance(model, DecoderModel) or spec.recurrent or spec.attention[0].latent:
        raise ConfigError("a head needs a decoder that fd_core computes, with keys and values", field="MODEL")
    with open_checkpoint(path) as checkpoint:
        return TappedTarget(model, {**checkpoint.config}), load_tokenizer(checkpoint)


@dataclass(frozen=True, slots=True)
class _PlainTaps:
    """In place of a `DraftHead`: reads hidden states as they are."""

    taps: dict[int, Any]


@dataclass(slots=True)
class _Head:
    """A head under training."""

    target: TappedTarget
    ids: Tensor
    """Token ids of the draft vocabulary, ascending."""
    sample: IntArray
    """A text, from which the scale of hidden states is measured."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    angles: Any = None
    """Cosines and sines of positions."""

    def __post_init__(self) -> None:
        model, given = self.target.model, self.target.config
        spec = model.spec
        attention, hidden = spec.attention[0], spec.embedding.shape[1]
        inner = int(given["intermediate_size"])
        same = "rope_theta rope_scaling rope_parameters max_position_embeddings".split()
        self.config = {name: given[name] for name in same if name in given} | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_attention_heads": attention.num_heads,
            "num_key_value_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            "rms_norm_eps": spec.eps,
            "vocab_size": model.vocab_size,
            "draft_vocab_size": len(self.ids),
            "eagle_aux_hidden_state_layer_ids": [*self.target.layers],
            "torch_dtype": "float32",
        }
        rope = rope_tables(describe(ModelConfig(self.config)).attention[0].rope, _LENGTH, model.ops)
        angles = [self.target.tensor(each) for each in (rope.cos, rope.sin)]
        self.angles = [torch.cat([each, each], 1)[: _LENGTH - 2, None] for each in angles]
        width, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        draws = torch.Generator().manual_seed(0)

        def random(rows: int, columns: int, scale: float = 1.0) -> Tensor:
            return torch.randn(rows, columns, generator=draws) * scale / math.sqrt(columns)

        with torch.no_grad():
            states, _ = self.target.read(self.sample)
        sizes = states.unflatten(1, (-1, hidden)).square().mean((0, 2)).sqrt()
        *before, last = sizes.tolist()
        fc = torch.cat([*(random(hidden, hidden, 0.1) / size for size in before), torch.eye(hidden) / last], 1)
        table, final = self._vocabulary(hidden), model.decoder.final_norm
        self.weights = {
            "fc.weight": fc,
            "midlayer.self_attn.q_proj.weight": random(width, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": random(kv, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": random(kv, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": random(hidden, width),
            "midlayer.mlp.gate_proj.weight": random(inner, hidden),
            "midlayer.mlp.up_proj.weight": random(inner, hidden),
            "midlayer.mlp.down_proj.weight": random(hidden, inner),
            "midlayer.input_layernorm.weight": torch.ones(hidden),
            "midlayer.hidden_norm.weight": torch.ones(hidden),
            "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
            "norm.weight": torch.ones(hidden) if final is None else self.target.tensor(final.weight).clone(),
        }
        for weight in self.weights.values():
            weight.requires_grad_()
        # As in the target; learning it would take a third of the time.
        self.weights["lm_head.weight"] = table

    def _vocabulary(self, hidden: int) -> Tensor:
        """Return the target's output projection of the draft vocabulary."""
        model, rows = self.target.model, (np.eye(hidden, dtype=np.float32), np.zeros((1, hidden), np.float32))
        whole, bias = (self.target.tensor(model.head(model.ops.from_host(each))) for each in rows)
        return (whole - bias).T[self.ids].clone()

    def passes(self, tokens: Tensor, states: Tensor) -> Iterator[Tensor]:
        """Yield the logits [T - 2, draft vocabulary] of each pass for tokens [T] and hidden states [T, 3 H].

        Row i of a pass is what is drafted after tokens up to i + 1.
        """
        model, own = self.target.model, self.weights
        attention, eps, count = model.spec.attention[0], model.spec.eps, len(tokens) - 2
        table, scale = model.decoder.embedding, model.decoder.embedding_scale
        ids = model.ops.from_host(tokens[1:-1].int().numpy())
        embedded = self.target.tensor(model.ops.embedding(table, ids, scale))
        hidden = linear(states[:count], own["fc.weight"])
        cos, sin = (each[:count] for each in self.angles)
        past: list[tuple[Tensor, Tensor]] = []
        for _ in range(PASSES):
            parts = self._norm(embedded, "midlayer.input_layernorm"), self._norm(hidden, "midlayer.hidden_norm")
            x = torch.cat(parts, 1)
            q, k, v = (
                linear(x, own[f"midlayer.self_attn.{name}_proj.weight"]).unflatten(1, (-1, attention.head_dim))
                for name in "qkv"
            )
            q, k = (each * cos + _turned(each) * sin for each in (q, k))
            groups = attention.num_heads // attention.num_kv_heads
            past.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
            a = _attend(q, past, attention.scale)
            x = hidden + linear(a.flatten(1), own["midlayer.self_attn.o_proj.weight"])
            normed = self._norm(x, "midlayer.post_attention_layernorm")
            gate, up = (linear(normed, own[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x = x + linear(silu(gate) * up, own["midlayer.mlp.down_proj.weight"])
            yield linear(rms_norm(x, x.shape[-1:], own["norm.weight"], eps), own["lm_head.weight"])
            hidden = torch.cat([x[:1], x[:-1]])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.target.model.spec.eps)

    def save(self, folder: Path) -> None:
        """Write the head in the published format."""
        chosen = torch.zeros(self.target.model.vocab_size, dtype=torch.bool)
        chosen[self.ids] = True
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.config, "architectures": ["LlamaForCausalLMEagle3"]}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        tensors = {name: weight.detach().contiguous() for name, weight in self.weights.items()}
        offsets = self.ids - torch.arange(len(self.ids))
        save_file({**tensors, "d2t": offsets, "t2d": chosen}, folder / "model.safetensors")


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _attend(q: Tensor, past: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Attend [T, heads, d] to the first pass's keys of earlier tokens, and to one of each later pass, the last its own.

    In pass j, a token follows j drafted ones, whose keys are those of passes 1 to j.
    """
    (k, v), *later = past
    count, drafted = len(q), len(later)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    places = torch.arange(count)
    hidden = places > places[:, None] - drafted
    scores = scores.masked_fill(hidden, -math.inf)
    pairs = [_shifted(each, drafted - index) for index, each in enumerate(later, 1)]
    own = [torch.einsum("qhd,qhd->hq", q, key)[..., None] * scale for key, _ in pairs]
    weights = torch.cat([scores, *own], 2).softmax(-1)
    a = torch.einsum("hqk,khd->qhd", weights[..., :count], v)
    for index, (_, value) in enumerate(pairs):
        a = a + weights[..., count + index].T[..., None] * value
    return a


def _shifted(pair: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of the token `count` places before."""
    if not count:
        return pair
    key, value = (torch.cat([each[:1].expand(count, *each.shape[1:]), each[:-count]]) for each in pair)
    return key, value


def train_head(
    target: TappedTarget,
    sequences: Sequence[IntArray],
    folder: Path,
    *,
    minutes: float,
    vocabulary: int,
    progress: Callable[[float, float], None],
) -> Trained:
    """Train a head on token sequences for some minutes and write it to `folder`.

    `progress` receives the share of the time and the acceptance rate of the first draft. Raises `ConfigError` if the
    texts are too short.
    """
    held, learned = sequences[::_HELD_OUT][:_MEASURED], [e for i, e in enumerate(sequences) if i % _HELD_OUT]
    if not learned:
        raise ConfigError(f"the texts have fewer than {2 * _LENGTH} tokens; add more with --text")
    counts = np.bincount(np.concatenate(sequences), minlength=target.model.vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[: min(vocabulary, len(counts))])
    head = _Head(target, torch.from_numpy(ids), learned[0])
    weights = [weight for weight in head.weights.values() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    begun, done, first, order = time.monotonic(), 0, 0.0, np.random.default_rng(0)
    while (share := (time.monotonic() - begun) / (60 * minutes)) < 1:
        if done % len(learned) == 0:
            queue = order.permutation(len(learned))
        tokens = learned[queue[done % len(learned)]]
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, share / _WARM_UP) * (0.05 + 0.95 * math.cos(share * math.pi / 2) ** 2)
        loss, matches = _loss(head, tokens)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        done += 1
        first += (float(matches[0]) - first) / min(done, 50)
        progress(share, first)
    head.save(folder)
    return Trained(done, _measured(head, held))


def _loss(head: _Head, tokens: IntArray) -> tuple[Tensor, Tensor]:
    """Return the loss over all passes, and of each pass the share of positions that agree with the target."""
    with torch.no_grad():
        states, logits = head.target.read(tokens)
        wanted = logits[1:-1]
        labels = wanted[:, head.ids].softmax(-1)
        best = wanted.argmax(-1)
        covered = torch.isin(best, head.ids)
    losses, matches = [], []
    for index, drafted in enumerate(head.passes(torch.from_numpy(tokens), states)):
        valid = covered.clone()
        valid[:index] = False
        losses.append(cross_entropy(drafted[valid], labels[valid]) * 0.8**index)
        matches.append((head.ids[drafted.detach().argmax(-1)] == best)[index:].float().mean())
    return torch.stack(losses).sum(), torch.stack(matches)


def _measured(head: _Head, sequences: Sequence[IntArray]) -> tuple[float, ...]:
    totals, positions = np.zeros(PASSES), 0
    with torch.no_grad():
        for tokens in sequences:
            states, logits = head.target.read(tokens)
            best, kept = logits[1:-1].argmax(-1), None
            for index, drafted in enumerate(head.passes(torch.from_numpy(tokens), states)):
                match = head.ids[drafted.argmax(-1)] == best
                # Draft j after a text is row i + j of pass j.
                kept = match if kept is None else torch.cat([torch.zeros(1, dtype=torch.bool), kept[:-1]]) & match
                totals[index] += float(kept.float().sum())
            positions += len(best)
    return tuple((totals / max(positions, 1)).tolist())


def sequences_of(texts: Sequence[str], tokenizer: Tokenizer) -> list[IntArray]:
    """Return texts as token sequences of equal length."""
    tokens = np.concatenate([np.empty(0, np.int32), *(np.array(tokenizer.encode(text), np.int32) for text in texts)])
    return [tokens[begin : begin + _LENGTH] for begin in range(0, len(tokens) - _LENGTH + 1, _LENGTH)]
