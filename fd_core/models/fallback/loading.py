"""Models of `transformers`, made from a config and from tensors that fd_core has read.

Nothing of a checkpoint is executed or fetched: classes are those of the installed package, fields of the config that
name code are dropped, and no weights are read by `transformers`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from fd_core.errors import ModelError
from fd_core.models.fallback.arrays import as_array, as_tensor
from fd_core.models.fallback.attention import Unsupported
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.safetensors_files import DTYPE_BYTES
from fd_core.models.registry import config_of, most_tensors
from fd_core.ops.contract import Array, Ops
from fd_core.ops.torch.ops import as_torch
from fd_core.ops.weights import RAW_TYPES, RawTensor

logger = logging.getLogger(__name__)

_DROPPED: Final = {
    *("auto_map", "attn_implementation", "experts_implementation", "dtype", "torch_dtype", "quantization_config"),
    *("fusion_config", "kernel_config", "distributed_config", "transformers_weights", "output_router_logits"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache"),
}
"""Fields that select code or outputs instead of describing the model; also those that begin with `_`."""
_BUFFER_BYTES: Final = 1 << 30
"""Limit of tables that are not stored, at least the size of the weights."""


def make_config(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return the class and the config of a checkpoint's model. Raises `ModelError`."""
    config = config_of(checkpoint)
    most_tensors(config, len(checkpoint.names()))
    name, kind = config.strings("architectures")[0], config.text("model_type", "")
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) != name:
        raise Unsupported(f"model_type {kind[:80]!r} has no {name}")
    cls = getattr(transformers, name)
    if cls._is_stateful:
        raise Unsupported("its layers keep recurrent states, which are not in the KV cache")
    if not cls._supports_attention_backend:
        raise Unsupported("its code does not use the attention interface")
    made = CONFIG_MAPPING[kind].from_dict(_cleaned(config.values))
    if getattr(made, "is_encoder_decoder", False):
        raise Unsupported("it has an encoder")
    return cls, made


def make_model(cls: Any, config: Any, checkpoint: Checkpoint, dtype: Any) -> Any:
    """Return a model with the weights of a checkpoint, on the host. Raises `ModelError`."""
    with torch.device("meta"):
        shell = cls(config)
    elements = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    # A checkpoint that lacks only a few tensors gets an error with their names instead.
    if (needed := sum(each.numel() for each in shell.parameters())) > 2 * elements:
        raise ModelError(f"{checkpoint.path} holds {elements} parameters, but its config describes {needed}")
    tables = sum(each.nbytes for each in shell.buffers())
    if tables > max(_BUFFER_BYTES, checkpoint.total_bytes):
        raise ModelError(f"{checkpoint.path}: tables of its config need {tables} bytes")
    del shell
    # Files may also store masks, in types that are no weights.
    kinds = {name: checkpoint.stored_format(name) for name in checkpoint.names()}
    stored = [name for name, kind in kinds.items() if kind in RAW_TYPES or kind not in DTYPE_BYTES]
    with _quiet():
        model, found = cls.from_pretrained(
            None,
            config=config,
            state_dict={name: as_torch(checkpoint.read(name)) for name in stored},
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{checkpoint.path} is not a complete {cls.__name__}: tensor {missing[0]!r} is missing{more}")
    if unused := sorted(found["unexpected_keys"]):
        logger.warning("%s: %d tensors are not used: %s", checkpoint.path, len(unused), ", ".join(unused[:5]))
    return model.requires_grad_(False).eval()


class PackedLinear(torch.nn.Module):
    """A linear of the pack in the place of one of torch."""

    def __init__(self, linear: Any, ops: Ops) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight.detach().to("meta")  # some code asks for its dtype
        self._ops = ops
        bias = None if linear.bias is None else [_raw(linear.bias)]
        self._weight = ops.prepare_linear([_raw(linear.weight)], bias)

    def forward(self, x: Array) -> Array:
        """Multiply x [..., in]."""
        y = as_tensor(self._ops.linear(as_array(x.flatten(0, -2), self._ops), self._weight), x.dtype)
        return y.unflatten(0, x.shape[:-1]).contiguous()


def pack_linears(model: Any, ops: Ops, dtype: Any) -> None:
    """Replace the linears of a model in a pack's dtype by its own: they are faster, and a row has the same bits in any
    batch if the pack's have."""
    for module in [*model.modules()]:
        for name, child in module.named_children():
            # Subclasses compute something else, and some models keep routers in float32.
            if type(child) is torch.nn.Linear and child.weight.dtype == dtype:
                setattr(module, name, PackedLinear(child, ops))


def _raw(tensor: Array) -> RawTensor:
    if tensor.dtype == torch.bfloat16:
        return RawTensor("BF16", tensor.view(torch.int16).numpy().view(np.uint16))
    return RawTensor("F16" if tensor.dtype == torch.float16 else "F32", tensor.numpy())


def _cleaned(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _cleaned(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if name not in _DROPPED and not name.startswith("_")
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """Show neither progress bars nor reports of `transformers`; its errors are raised."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
