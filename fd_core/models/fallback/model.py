"""A model whose layers `transformers` computes, and whose attention and KV cache are the pack's.

It is checked when it is loaded: a forward in chunks, beside another request, must yield the logits of `transformers`
alone. So a model that keeps states elsewhere, or mixes tokens of a batch, is refused.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from transformers import PreTrainedModel

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups
from fd_core.errors import ConfigError, FdError, ModelError
from fd_core.models.build import ProgressSink
from fd_core.models.fallback.arrays import as_array, as_tensor
from fd_core.models.fallback.attention import NAME, PROBE, AttentionCalls, Unsupported
from fd_core.models.fallback.choice import FLAG, require_one_rank
from fd_core.models.fallback.loading import make_config, make_model, pack_linears
from fd_core.models.layer_groups import divide_layers, places_of
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.registry import require_positions
from fd_core.ops.contract import Array, KVCache, KVShape, Ops, StepInput
from fd_core.ops.weights import WeightUse, summed_uses

_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest mean difference of logits, relative to their norm, by dtype: 16 bits are rounded at other places."""
_CHECKED: Final = ((7, 10), (6, 1), (1, 0))
"""Tokens of each of two requests that the steps of the check compute."""
_BLOCK: Final = 4


@dataclass(eq=False)
class TransformersModel:
    """A model of `transformers` on one pack; satisfies `fd_core.backends.contract.Model`."""

    ops: Ops
    body: Any
    """The module that yields states."""
    projection: Any
    """The whole model, whose body returns its input."""
    calls: AttentionCalls
    architecture: str
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weights: tuple[WeightUse, ...]
    state_size: int
    generates: bool = True
    compiles: bool = False

    def kv_shape(self, block_size: int, groups: LayerGroups = ONE_GROUP) -> KVShape:
        """Return the size of the KV cache that `forward` needs, for blocks of `block_size` tokens."""
        heads, count = self.calls.heads, 1 + max(index for _, index in places_of(self.calls.windows, groups))
        return KVShape(count, heads.num_kv_heads, heads.head_dim, block_size, groups=groups)

    def layer_groups(self, longest: int) -> LayerGroups:
        """Return the groups into which contexts of up to `longest` tokens divide the layers."""
        return divide_layers(self.calls.windows, longest)

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        """Compute float32 logits [R, V] of the requested rows and write the step's keys and values."""
        return self.head(self.ops.gather_rows(self.states(step, cache), step.logits_rows))

    def states(self, step: StepInput, cache: KVCache) -> Array:
        """Compute the normalized hidden states [T, H] of all tokens and write the step's keys and values."""
        self.calls.begin(step, cache)
        ids, positions = (torch.as_tensor(each)[None].long() for each in (step.token_ids, step.positions))
        states = self.body(input_ids=ids, position_ids=positions, use_cache=False)
        self.calls.end()
        found = states[0][0]
        return found if self.ops.framework == "torch" else found.float().numpy()

    def head(self, states: Array) -> Array:
        """Project states [R, H] to float32 logits [R, V]."""
        embedded = as_tensor(states, getattr(torch, self.ops.dtype))
        return as_array(self.projection(inputs_embeds=embedded[None], use_cache=False).logits[0].float(), self.ops)


class _KnownStates(torch.nn.Module):
    """Stands for the body of a model whose states are known."""

    def __init__(self, output: type) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_: Any, inputs_embeds: Array, **__: Any) -> Any:
        return self._output(last_hidden_state=inputs_embeds)


def load_transformers(
    checkpoint: Checkpoint,
    ops: Ops,
    max_positions: int | None = None,
    progress: ProgressSink | None = None,
    quantization: str = "auto",
) -> TransformersModel:
    """Load a checkpoint as `registry.load_model` does, and check the model.

    Raises `ConfigError` for settings that such models do not have, `ModelError` if the model cannot be served.
    """
    require_one_rank(ops.parallel.size * ops.stage.count)
    if quantization != "auto":
        message = f"a model that transformers computes keeps its weights, got --quantization {quantization}"
        raise ConfigError(message, field=FLAG, hint="leave out --quantization")
    try:
        return _load(checkpoint, ops, max_positions, progress)
    except Unsupported as error:
        why = error.message
    except (FdError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - foreign code on a config and weights of any kind
        why = f"{type(error).__name__}: {error}"
    name = checkpoint.config["architectures"][0]
    raise ModelError(f"{checkpoint.path}: {FLAG} transformers cannot serve {name}: {why}", field=FLAG)


def _load(checkpoint: Checkpoint, ops: Any, max_positions: int | None, progress: ProgressSink | None) -> Any:
    cls, config = make_config(checkpoint)
    most = getattr(config, "max_position_embeddings", None)
    if type(most) is not int or most < 1:
        raise Unsupported("its config does not limit positions: max_position_embeddings is missing")
    most = min([most, *_switches(config.to_dict())])
    require_positions(max_positions or most, most)
    dtype, device = getattr(torch, ops.dtype), getattr(ops, "device", "cpu")
    whole = make_model(cls, config, checkpoint, dtype)
    num_parameters = sum(each.numel() for each in whole.parameters())
    weights = summed_uses([_uses(checkpoint, whole, ops.dtype)])
    body, path = _body_of(whole)
    calls = AttentionCalls(whole, ops)
    whole.set_attn_implementation(PROBE)
    place = torch.zeros(1, 1, dtype=torch.long)
    found = body(input_ids=place, position_ids=place, use_cache=False)
    layers = getattr(config, "num_hidden_layers", 0)
    if len(calls.recorded) < layers:
        raise Unsupported(
            f"only {len(calls.recorded)} of its {layers} layers use the attention interface; the state of others is "
            "not in the KV cache"
        )
    positions = min(max_positions or most, max(map(sum, zip(*_CHECKED, strict=True))))
    tokens = np.random.default_rng(0).integers(len(whole.get_input_embeddings().weight), size=(2, positions))
    whole.set_attn_implementation("eager")
    ids = torch.from_numpy(tokens)
    expected = whole(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.float()
    whole.set_attn_implementation(NAME)
    pack_linears(whole, ops, dtype)
    model = TransformersModel(
        ops,
        body,
        _replaced(whole.to(device), path.split("."), _KnownStates(type(found))),
        calls,
        architecture=cls.__name__,
        vocab_size=expected.shape[-1],
        max_positions=max_positions or most,
        eos_token_ids=checkpoint.eos_token_ids,
        num_parameters=num_parameters,
        weights=weights,
        state_size=found[0].shape[-1],
    )
    _check(model, ops, tokens, expected.to(device))
    if progress is not None:
        progress(checkpoint.total_bytes, checkpoint.total_bytes)
    return model


def _body_of(whole: Any) -> tuple[Any, str]:
    """Return the module of all layers, and its name."""
    inner = {module: name for name, module in whole.named_modules() if name and isinstance(module, PreTrainedModel)}
    named = whole.get_decoder()
    for module in (named, *inner):
        if module in inner:
            return module, inner[module]
    raise Unsupported("its code does not separate the output projection from the layers")


def _replaced(module: Any, path: list[str], other: Any) -> Any:
    """Return a module with another one at a path below it; all others are shared."""
    if not path:
        return other
    found = copy.copy(module)
    found._modules = {**module._modules, path[0]: _replaced(module._modules[path[0]], path[1:], other)}
    return found


def _switches(values: Any) -> Iterator[int]:
    """Yield the contexts beyond which a step's longest request changes the rotation of all its requests."""
    for each in values.values():
        if isinstance(each, dict):
            yield from _switches(each)
    if values.get("rope_type") == "longrope" and isinstance(
        short := values.get("original_max_position_embeddings"), int
    ):
        yield short


def _uses(checkpoint: Checkpoint, whole: Any, dtype: str) -> Iterator[WeightUse]:
    stored = Counter(map(checkpoint.stored_format, checkpoint.names())).most_common(1)[0][0]
    for each in whole.parameters():
        yield WeightUse(stored, dtype, False, each.numel(), each.nbytes)


def _check(model: TransformersModel, ops: Any, tokens: Any, expected: Array) -> None:
    """Compare the logits of two requests [2, n, V], which common steps compute in chunks. Raises `Unsupported`."""
    planned = np.cumsum(_CHECKED, axis=0).clip(max=tokens.shape[1])
    blocks = -(-tokens.shape[1] // _BLOCK)
    tables = np.random.default_rng(1).permutation(len(tokens) * blocks).reshape(len(tokens), -1).astype(np.int32)
    cache = ops.allocate_kv(model.kv_shape(_BLOCK), tables.size)
    for starts, ends in pairwise(np.vstack([np.zeros_like(planned[:1]), planned])):
        rows = (ends > starts).nonzero()[0]
        places = [np.arange(starts[row], ends[row], dtype=np.int32) for row in rows]
        if not places:
            continue
        counts, positions = [*map(len, places)], np.concatenate(places)
        row_of = np.repeat(rows, counts)
        host = {
            "token_ids": tokens[row_of, positions].astype(np.int32),
            "positions": positions,
            "kv_slots": tables[row_of, positions // _BLOCK] * _BLOCK + positions % _BLOCK,
            "query_start": np.cumsum([0, *counts], dtype=np.int32),
            "context_len": ends[rows].astype(np.int32),
            "block_tables": tables[rows],
            "logits_rows": np.arange(len(positions), dtype=np.int32),
        }
        arrays = {name: ops.from_host(each) for name, each in host.items()}
        step = StepInput(**arrays, max_query=max(counts), max_context=int(ends[rows].max()))
        found = as_tensor(model.forward(step, cache), expected.dtype)
        wanted = expected[row_of, positions]
        known = wanted.isfinite().all(dim=-1)  # weights may be damaged
        off = float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1))[known].sum() / max(int(known.sum()), 1))
        if not off <= _TOLERANCE[ops.dtype]:
            raise Unsupported(
                f"logits differ from those of transformers by {off:.2g} of their norm; its layers keep a state outside "
                "the KV cache, or mix tokens of a batch"
            )
