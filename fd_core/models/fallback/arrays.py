"""Arrays of a pack as tensors of torch, and back: a pack on numpy arrays of the host shares their memory."""

from __future__ import annotations

import numpy as np
import torch

from fd_core.ops.contract import Array, Ops


def as_tensor(array: Array, dtype: torch.dtype) -> Array:
    """Return an array of a pack as a tensor of a dtype."""
    if isinstance(array, np.ndarray):
        bits = array.dtype == np.uint16
        array = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if bits else torch.from_numpy(array)
    return array.to(dtype)


def as_array(tensor: Array, ops: Ops) -> Array:
    """Return a tensor as an array of the pack; numpy has the bits of bfloat16 as uint16."""
    if ops.framework == "torch":
        return tensor
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
