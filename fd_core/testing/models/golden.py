"""The right text of a request: what the oracle says alone, with room for everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.models.loading.checkpoint import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.kit.target import Target
from fd_core.testing.models.checkpoints import ENGINE_CASE
from fd_core.testing.models.paged import PagedDriver
from fd_core.testing.stepping.texts import run
from fd_core.types import RequestSpec

MARGIN: Final[Mapping[str, float]] = {"float32": 0.0, "float16": 0.1, "bfloat16": 0.5, "packed": 1.5}
"""A text may part from the oracle's only where its best logit leads by at most this much, by `Target.precision`.

The logits of the kit's models have a standard deviation of about 4; bfloat16 moves them by about a hundredth of that,
float16 by an eighth of what bfloat16 does, activations of 8 bits by a fortieth, and a token that goes to another expert
by more.
"""

_INT8_MARGIN: Final = 0.1
"""What a key or value on the verge between two of its 255 steps may do to a logit, where both packs have int8 KV."""

_ALONE: Final[Mapping[str, Any]] = {
    "max_num_seqs": 1,
    "num_kv_blocks": 200,
    "max_num_batched_tokens": 1024,
    "max_model_len": 400,
    "structured_output": True,
}
_KNOWN: dict[tuple[tuple[str, ...], bytes], list[int]] = {}


def margin_of(target: Target) -> float:
    """Return by how much the oracle's best logit may lead a greedy token of the target."""
    return MARGIN[target.precision] if target.kv_dtype == "auto" else max(MARGIN[target.precision], _INT8_MARGIN)


class Golden:
    """Texts of one target's oracle, computed once in a process."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def texts(self, specs: Iterable[RequestSpec]) -> dict[str, list[int]]:
        """Return the right text of each request."""
        found: dict[str, list[int]] = {}
        for spec in specs:
            key = self.target.right, msgspec.json.encode(spec)
            if key not in _KNOWN:
                with self.target.oracle.engine(**_ALONE) as engine:
                    _KNOWN[key] = run(engine, [spec]).tokens[spec.request_id]
            found[spec.request_id] = _KNOWN[key]
        return found

    def whole(self, specs: Iterable[RequestSpec]) -> list[list[int]]:
        """Return prompts with their right texts, for a drafter that knows them."""
        specs = list(specs)
        texts = self.texts(specs)
        return [[*spec.prompt, *texts[spec.request_id]] for spec in specs]

    def check(self, specs: Iterable[RequestSpec], delivered: Mapping[str, Sequence[int]]) -> None:
        """Compare whole texts with the right ones."""
        for spec in specs:
            text = list(delivered[spec.request_id])
            self.check_prefix(spec, text)
            assert len(text) == len(self.texts([spec])[spec.request_id]), f"{spec.request_id} lost tokens or has more"

    def check_prefix(self, spec: RequestSpec, text: Sequence[int]) -> None:
        """Compare what was delivered so far; in lower precision each greedy token has to be within the margin."""
        right = self.texts([spec])[spec.request_id]
        margin = margin_of(self.target)
        if list(text) == right[: len(text)]:
            return
        parted = next(at for at, token in enumerate(text) if at >= len(right) or token != right[at])
        where = f"{spec.request_id} parts from the right text at token {parted}"
        assert margin and spec.params.temperature == 0.0, f"{where}: {list(text)} instead of {right}"
        lead = self._leads(spec, list(text))
        assert lead.max(initial=0.0) <= margin, f"{where}, where the best token leads by {lead.max():.3g}"

    def _leads(self, spec: RequestSpec, text: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Return by how much the oracle's best logit leads the delivered token's, after the delivered ones before."""
        tokens = [*spec.prompt, *text]
        path, ops = self.target.oracle.checkpoint(ENGINE_CASE), NumpyOps()
        assert path is not None
        with open_checkpoint(path) as checkpoint:
            model = load_model(checkpoint, ops, len(tokens), quantization=self.target.quantization)
        driver = PagedDriver(model, ops, [tokens], len(tokens), kv_dtype=self.target.kv_dtype)
        driver.step([(0, len(tokens) - 1)])
        logits = np.stack(driver.rows[0].logits)[len(spec.prompt) - 1 :].astype(np.float64)
        return logits.max(axis=1) - logits[np.arange(len(text)), text]
