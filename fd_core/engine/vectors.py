"""Embeddings of texts: the request that computes one, and its conversion to the requested length and size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fd_core.errors import BadRequest
from fd_core.models.loading.config import VectorSettings
from fd_core.types import Pooling, RequestSpec, SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""For a request that needs only the pooled states of its prompt: it ends with one token, which is dropped."""


def pooling_request(
    request_id: str,
    prompt: tuple[int, ...],
    pooling: Pooling,
    *,
    priority: int = 0,
    tenant: str = "",
    salt: str = "",
    adapter: str = "",
) -> RequestSpec:
    """Return the request for an embedding of a prompt."""
    return RequestSpec(
        request_id=request_id,
        prompt=prompt,
        params=ONE_TOKEN,
        pooling=pooling,
        priority=priority,
        tenant=tenant,
        cache_salt=salt,
        adapter=adapter,
    )


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise `BadRequest` unless vectors of `size` elements can be truncated to `dimensions`; None keeps all."""
    if dimensions is not None and not 1 <= dimensions <= size:
        raise BadRequest(
            f"dimensions is {dimensions}, but the model's vectors have {size} elements", field="dimensions"
        )


def vector_of(pooled: bytes, settings: VectorSettings, dimensions: int | None = None) -> npt.NDArray[np.float32]:
    """Return a pooled vector as float32[dimensions], of length 1 if it was cut or the settings require it."""
    whole = np.frombuffer(pooled, "<f4").astype(np.float64)
    vector = whole[:dimensions]
    if settings.normalize or len(vector) < len(whole):
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype(np.float32)
