"""Request fields to `SamplingParams`, with every check that needs the model's limits."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

from fd_core.engine.process.messages import EngineInfo
from fd_core.http.errors import invalid, unsupported
from fd_core.server.schemas.requests import (
    MAX_LOGIT_BIAS,
    MAX_STOP,
    MAX_STOP_CHARS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import SamplingParams
from fd_core.types.checks import check_ids, check_tokens

_MASK: Final = 2**64 - 1
_GREEDY_BELOW: Final = 1e-5
"""Smaller temperatures would overflow float32 where logits are divided; they are treated as 0."""
_MAX_BAD_CHARS: Final = 8192
"""Limit for all banned words together: they are tokenized while other requests wait."""
_READ: Final = frozenset(
    """
    max_tokens min_tokens temperature top_k seed logit_bias logprobs stop_token_ids allowed_token_ids
    bad_words_token_ids grammar prompt_logprobs reasoning
    """.split()
)
"""Sampling parameters that are not simply copied from the request's field of the same name."""
_COPIED: Final = tuple(name for name in SamplingParams.__struct_fields__ if name not in _READ)


class TextCost(NamedTuple):
    """Most tokens that a request for texts reads and writes."""

    outputs: Sequence[int]
    n: int
    """Texts of each prompt."""
    tokens: int
    """The most tokens read and written."""


def text_cost(
    request: GenerationRequest,
    prompts: Sequence[int],
    *,
    most_texts: int,
    context: int | None,
    limit: int | None,
    default_tokens: int | None = None,
) -> TextCost:
    """Return the cost of texts at most as long as `limit`, at servers and routers. Raises `ApiError` (400).

    `default_tokens` is the length of answers of a conversation that does not set one; None for what the context holds.
    """
    n = request.n or 1
    if isinstance(request, CompletionRequest) and request.best_of is not None and request.best_of != n:
        raise unsupported(f"best_of is {request.best_of} and n is {n}; only equal values are supported", "best_of")
    if isinstance(request, CompletionRequest) and request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens=0 requires echo=true, because the answer would be empty", "max_tokens")
    texts = n * len(prompts)
    if texts > most_texts:
        raise invalid(
            f"{len(prompts)} prompts times n={n} are {texts} texts; at most {most_texts} are allowed per request", "n"
        )
    asked, field = asked_tokens(request, default_tokens)
    outputs = [asked] * len(prompts)
    for index, prompt in enumerate(prompts):
        if context is None:
            break
        room = context - prompt
        if room < 1:
            raise invalid(
                f"the prompt has {prompt} tokens, but the context length is {context}, including at least one output "
                "token; shorten the prompt",
                "messages" if isinstance(request, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
        # A default is lowered instead of rejected.
        if asked is None or (asked > room and request.max_tokens is None and field == "max_tokens"):
            outputs[index] = room
        elif asked > room:
            message = (
                f"{prompt} prompt tokens plus {field}={asked} exceed the context length {context}; lower {field} to "
                f"at most {room}"
            )
            raise invalid(message, field, "context_length_exceeded")
    min_tokens = _min_tokens(request)
    if (allowed := min((each for each in outputs if each is not None), default=min_tokens)) < min_tokens:
        raise invalid(f"min_tokens={min_tokens} exceeds the {allowed} tokens that may be generated", "min_tokens")
    if asked is None and limit is not None:
        share = max(1, min_tokens, (limit - sum(prompts)) // texts)
        outputs = [share if each is None else max(1, min_tokens, min(each, share)) for each in outputs]
    longest = [1 if each is None else each for each in outputs]
    return TextCost(longest, n, sum(prompts) + n * sum(longest))


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """Return the stop strings, checked in number and length."""
    if not request.stop:
        return ()
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    if len(stop) > MAX_STOP:
        raise invalid(f"stop has {len(stop)} strings; at most {MAX_STOP} are allowed", "stop")
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise invalid(f"a stop string has {len(text)} characters; expected 1 to {MAX_STOP_CHARS}", "stop")
    return tuple(stop)


def sampling_params(
    request: GenerationRequest,
    info: EngineInfo,
    outputs: Sequence[int],
    logprobs: int | None,
    tokenizer: Tokenizer | None = None,
) -> list[SamplingParams]:
    """Return the sampling parameters of each prompt's first choice. Raises `ApiError` (400) for invalid ones."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    if tokenizer is not None and (request.bad_words or request.bad_words_token_ids):
        bad_words = _bad_word_ids(request, info, tokenizer)
    stop_ids = tuple(request.stop_token_ids or ())
    for name, ids in (
        ("stop_token_ids", stop_ids),
        ("logit_bias", request.logit_bias),
        ("allowed_token_ids", request.allowed_token_ids),
    ):
        if ids:
            check_ids(ids, info.vocab_size, name, text_of=(lambda _: "") if tokenizer is None else tokenizer.token_text)
    bias: dict[int, float] | None = None
    if request.logit_bias:
        if len(request.logit_bias) > MAX_LOGIT_BIAS:
            entries = len(request.logit_bias)
            raise invalid(f"logit_bias has {entries} entries; at most {MAX_LOGIT_BIAS} are allowed", "logit_bias")
        bias = {token_id: value for token_id, value in request.logit_bias.items() if value} or None
    allowed_ids = tuple(sorted({*request.allowed_token_ids})) if request.allowed_token_ids else None
    ending = {*stop_ids, *info.eos_token_ids}
    if allowed_ids is not None and _min_tokens(request) and ending.issuperset(allowed_ids):
        message = "allowed_token_ids has only stop tokens, but other tokens are required before the end"
        raise invalid(message, "allowed_token_ids")
    named = (*_COPIED, "temperature", "top_k")
    given = info.generation.sampling() | {
        name: value for name in named if (value := getattr(request, name)) is not None
    }
    temperature, top_k = given.pop("temperature", 1.0), given.pop("top_k")
    seed = secrets.randbits(63) if request.seed is None else request.seed
    if not -(2**63) <= seed <= _MASK:
        raise invalid("seed must fit in 64 bits: -2^63 to 2^64-1", "seed")
    min_tokens = _min_tokens(request)
    scored = request.prompt_logprobs
    if isinstance(request, CompletionRequest) and request.echo:  # the echo includes them as well
        scored = max((each for each in (scored, logprobs) if each is not None), default=None)
    params = []
    for allowed in outputs:
        params.append(
            SamplingParams(
                max_tokens=allowed,
                min_tokens=min_tokens,
                temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
                top_k=min(max(top_k, 0), info.vocab_size),
                seed=seed & _MASK,
                logit_bias=bias,
                allowed_token_ids=allowed_ids,
                bad_words_token_ids=bad_words,
                logprobs=logprobs,
                prompt_logprobs=scored,
                stop_token_ids=stop_ids,
                **given,
            )
        )
    if bad_words or allowed_ids is not None:
        check_tokens(params[0])
    return params


def asked_tokens(request: GenerationRequest, default: int | None = None) -> tuple[int | None, str]:
    """Return the requested number of tokens, or the default of a conversation, and the field that sets it."""
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise invalid(
            f"max_completion_tokens={newer} and max_tokens={older} differ; specify only one", "max_completion_tokens"
        )
    if newer is not None:
        return newer, "max_completion_tokens"
    if older is None:
        older = default if isinstance(request, ChatRequest) else 16
    # A prompt alone still needs one output token, which is computed and not shown.
    return older if older is None else max(older, 1), "max_tokens"


def _min_tokens(request: GenerationRequest) -> int:
    """Return the number of tokens before one may end the text."""
    one, other = request.min_tokens, request.min_new_tokens
    if one is not None and other is not None and one != other:
        raise invalid(f"min_tokens={one} and min_new_tokens={other} differ; specify only one", "min_new_tokens")
    return one or other or 0


def _bad_word_ids(request: GenerationRequest, info: EngineInfo, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that the request bans, its words spelled with and without a space before them."""
    size = sum(map(len, request.bad_words or ()))
    if size > _MAX_BAD_CHARS:
        raise invalid(f"bad_words has {size:,} characters; at most {_MAX_BAD_CHARS:,} are allowed", "bad_words")
    spelled = [
        tuple(tokenizer.encode(space + word.lstrip(), add_special=False) or tokenizer.encode(word, add_special=False))
        for word in request.bad_words or ()
        for space in ("", " ")
    ]
    check_ids({*chain.from_iterable(spelled)}, info.vocab_size, "bad_words", text_of=tokenizer.token_text)
    given = [(each,) if isinstance(each, int) else tuple(each) for each in request.bad_words_token_ids or ()]
    check_ids({*chain.from_iterable(given)}, info.vocab_size, "bad_words_token_ids", text_of=tokenizer.token_text)
    return tuple(dict.fromkeys(ids for ids in (*spelled, *given) if ids))
