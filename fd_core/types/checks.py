"""Checks of requests: the ranges of sampling parameters, and token ids against the model's embedding rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np

from fd_core.errors import BadRequest
from fd_core.types import RequestSpec, SamplingParams

_HIGHEST_ID: Final = 2**31 - 1
_PATH: Final = re.compile(r" - at `\$\.(?P<path>[^`]*)`")


def check_ids(ids: Collection[Any], rows: int, field: str, text_of: Callable[[int], str] = lambda token_id: "") -> None:
    """Raise `BadRequest` for the first of `ids` that is not an integer from 0 to `rows` - 1.

    Kernels index the model's embedding, which has `rows` rows, by these ids. A tokenizer may have more tokens than
    that; `text_of` returns the text of a token for the error.
    """
    if not ids or ({*map(type, ids)} == {int} and min(ids) >= 0 and max(ids) < rows):
        return
    found = [each for each in ids if not _is_integer(each) or not 0 <= each < rows]
    if not found:  # integers of NumPy
        return
    wrong = found[0]
    text = text_of(wrong) if _is_integer(wrong) and rows <= wrong <= _HIGHEST_ID else ""
    shown = f"{str(wrong)[:40]} ({text[:80]!r})" if text else str(wrong)[:40]
    raise BadRequest(
        f"{field}: token id {shown} is out of range; the vocabulary has {rows} ids, 0 to {rows - 1} (embedding rows)",
        field=field,
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_request_ids(spec: RequestSpec, rows: int) -> None:
    """Raise `BadRequest` for a request with any token id that the model has no row for."""
    check_ids(spec.prompt, rows, "prompt")
    check_ids(spec.delivered, rows, "delivered")
    if spec.pooling is not None:
        check_ids(spec.pooling.token_ids, rows, "pooling")
    check_tokens(spec.params, rows)


def check_sampling(params: SamplingParams, vocab_size: int | None = None) -> None:
    """Raise `BadRequest` that names a field that is out of its range, or an id beyond the vocabulary."""
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"{name}: expected a finite number, got {value}", field=name)
    try:
        msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PATH.search(text)
        field = "params" if place is None else place["path"]
        words = text if place is None else text[: place.start()]
        raise BadRequest(f"{field}: {words[:1].lower()}{words[1:]}", field=field) from None
    if not 0 <= params.seed < 2**64:
        raise BadRequest("seed: must be an unsigned 64-bit integer", field="seed")
    if params.min_tokens > params.max_tokens:
        text = f"min_tokens={params.min_tokens} exceeds the {params.max_tokens} tokens that may be generated"
        raise BadRequest(f"{text}; raise max_tokens", field="min_tokens")
    check_structure(params)
    check_tokens(params, vocab_size)


def check_tokens(params: SamplingParams, vocab_size: int | None = None) -> None:
    """Raise `BadRequest` for ids beyond the vocabulary, and for limits that leave no token to be generated."""
    bans = params.bad_words_token_ids
    if not all(bans):
        raise BadRequest("bad_words_token_ids: a sequence is empty", field="bad_words_token_ids")
    for field, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("reasoning.end", () if params.reasoning is None else params.reasoning.end),
        ("bad_words_token_ids", tuple(chain.from_iterable(bans))),
    ):
        if vocab_size is not None:
            check_ids(ids, vocab_size, field)
    allowed = params.allowed_token_ids
    if allowed is not None and not {*allowed} - {ban[0] for ban in bans if len(ban) == 1}:
        raise BadRequest("allowed_token_ids: it is empty, or all of its tokens are banned", field="allowed_token_ids")


def check_structure(params: SamplingParams) -> None:
    """Raise `BadRequest` for parameters that contradict a grammar, which alone decides where the text may end."""
    if params.reasoning is not None and not params.reasoning.end:
        raise BadRequest("reasoning.end: must have at least one token id", field="reasoning.end")
    if params.grammar is None:
        return
    if not params.grammar:
        raise BadRequest("grammar: it is empty; omit it for unconstrained text", field="grammar")
    for field, given in (("ignore_eos", params.ignore_eos), ("min_tokens", params.min_tokens)):
        if given:
            raise BadRequest(
                f"{field} cannot be combined with a grammar, which decides where the text may end", field=field
            )
