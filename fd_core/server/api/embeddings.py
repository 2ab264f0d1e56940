"""POST /v1/embeddings, /v1/classify, /v1/score, /v1/rerank and /pooling: one engine request for each text."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.engine.vectors import (
    INSTRUCTION,
    ONE_TOKEN,
    check_dimensions,
    judged_prompt,
    judging_tokens,
    probabilities_of,
    probability_of_yes,
    prompt_of,
    require_classifier,
    similarity,
    vector_of,
)
from fd_core.errors import ModelError
from fd_core.http.access.keys import scoped
from fd_core.http.errors import ApiError, invalid, unavailable
from fd_core.http.spans import span_name
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.jobs import PromptState
from fd_core.server.schemas import pooling
from fd_core.server.schemas.pooling import PooledRequest, PooledUsage, RerankRequest, ScoreRequest, TextsRequest
from fd_core.server.schemas.unsupported import POOLED, POOLING
from fd_core.server.state import ServerState
from fd_core.server.stream.response_format import UntilDisconnect, cancel_on_disconnect
from fd_core.text.prompt_reader import PromptText, names_of
from fd_core.types import Delta, FinishReason, Pooling, RequestSpec

Floats = npt.NDArray[np.float32]

MAX_TEXTS: Final = 2048
_MAX_PAIR_CHARS: Final = 2**24
"""Limit for all rendered pairs together: each text of one side is rendered with each of the other."""
router = APIRouter(route_class=DirectRoute)
EMBEDDINGS: Final = BodyFormat(pooling.EmbeddingRequest, POOLED)
CLASSIFY: Final = BodyFormat(pooling.ClassificationRequest, POOLED)
SCORE: Final = BodyFormat(pooling.ScoreRequest, POOLED)
RERANK: Final = BodyFormat(pooling.RerankRequest, POOLED)
POOL: Final = BodyFormat(pooling.PoolingRequest, POOLING)
_UNKNOWN_CONTEXT: Final = 2**31
_AT_ONCE: Final = 16
"""Vectors that are encoded without yielding to the event loop."""


async def read_texts(
    state: PromptState, given: Any, field: str, add_special: bool = True, longest: int | None = None
) -> list[PromptText]:
    """Return texts, or lists of ids, as prompts; `ApiError` (400) for too many, `BadRequest` for unreadable ones."""
    texts = [given] if isinstance(given, str) else [each for each in given if not isinstance(each, int)]
    if len(texts) > MAX_TEXTS:
        raise invalid(f"{field} has {len(texts)} texts; at most {MAX_TEXTS} are allowed per request", field)
    reader = state.prompt_reader
    size = sum(len(each) for each in texts if isinstance(each, str))
    return await reader.run(size, lambda: reader.completion(given, add_special, field, longest=longest))


def longest_text(state: PromptState, body: PooledRequest) -> int | None:
    """Return the number of tokens to which texts are truncated; None to keep them whole. Raises `ApiError` (400)."""
    longest = body.truncate_prompt_tokens
    if longest is None:
        return None
    most = (state.context or _UNKNOWN_CONTEXT) - 1
    if longest != -1 and not 1 <= longest <= most:
        field = "truncate_prompt_tokens"
        raise invalid(f"{field} is {longest}; expected 1 to {most}, or -1, which stands for {most}", field)
    return most if longest == -1 else longest


def pairs_of(body: ScoreRequest | RerankRequest) -> tuple[list[tuple[str, str]], str]:
    """Return each text with its partner, the only one or the one of its index, and the field of the second side."""
    if isinstance(body, RerankRequest):
        return [(body.query, each if isinstance(each, str) else each.text) for each in body.documents], "documents"
    sides: list[list[str]] = []
    names: list[str] = []
    for name, other in (("text_1", "queries"), ("text_2", "documents")):
        first, second = getattr(body, name), getattr(body, other)
        given = second if first is None else first
        if given is None or (first is not None and second is not None):
            raise invalid(f"specify either {name} or {other}", name)
        sides.append([given] if isinstance(given, str) else given)
        names.append(other if first is None else name)
        if not 1 <= len(sides[-1]) <= MAX_TEXTS:
            raise invalid(f"{names[-1]} has {len(sides[-1])} texts; expected 1 to {MAX_TEXTS}", names[-1])
    ones, others = sides
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        message = f"{names[0]} has {len(ones)} texts and {names[1]} {len(others)}; expected 1 or equal numbers"
        raise invalid(message, names[1])
    return list(zip(ones, others, strict=True)), names[1]


def distinct(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the distinct texts of pairs: a model that compares vectors reads each once."""
    return [*dict.fromkeys(text for pair in pairs for text in pair)]


class PooledTexts:
    """Tokenization and pooling of the texts of one HTTP request; nothing keeps running once its methods return."""

    def __init__(self, state: ServerState, request: Request, body: PooledRequest) -> None:
        """Raises `ApiError`: 404 for a model that is not served, 503 without room for a text."""
        self._state = state
        self._request = request
        self._body = body
        self._served = state.served(body.model)
        self.model = self._served.name
        self.usage = PooledUsage(0, 0)
        state.admit(1)

    async def read(self, body: TextsRequest) -> list[PromptText]:
        """Return the prompts of a body, see `read_texts`."""
        given, prompt = body.input, prompt_of(self._state.client.info.vectors, body.prompt_name)
        if prompt:
            listed = [given] if isinstance(given, str) else given
            given = [prompt + each if isinstance(each, str) else each for each in listed]
        return await self._read(given, "input", body.add_special_tokens is not False)

    async def _read(self, given: Any, field: str, add_special: bool = True) -> list[PromptText]:
        longest = longest_text(self._state, self._body)
        reading = read_texts(self._state, given, field, add_special, longest)
        return await cancel_on_disconnect(self._request, reading)

    async def vectors(self, prompts: Sequence[PromptText], field: str, dimensions: int | None = None) -> list[Floats]:
        """Return a vector of each prompt, with the model's settings and the options of the request."""
        return await self._vectors([each.ids for each in prompts], names_of(field, len(prompts)), dimensions)

    async def _vectors(
        self, prompts: Sequence[tuple[int, ...]], names: Sequence[str], dimensions: int | None
    ) -> list[Floats]:
        info = self._state.client.info
        check_dimensions(dimensions, info.state_size)
        pooled = await self._pool(prompts, Pooling(info.vectors.pooling), names)
        return [vector_of(each, info.vectors, dimensions) for each in pooled]

    async def classes(self, prompts: Sequence[PromptText], field: str) -> list[pooling.Classification]:
        """Return the classes of each prompt. Raises `BadRequest` for a model without a classification layer."""
        settings = self._state.client.info.vectors
        classifier = require_classifier(settings, of_tokens=False)
        pooled = await self._pool(
            [each.ids for each in prompts], Pooling(classifier.pooling), names_of(field, len(prompts))
        )
        found = [probabilities_of(each, classifier)[0].tolist() for each in pooled]
        return [
            pooling.Classification(
                index=index, label=classifier.labels[probs.index(max(probs))], probs=probs, num_classes=len(probs)
            )
            for index, probs in enumerate(found)
        ]

    async def tokens(self, prompts: Sequence[PromptText], field: str, *, classes: bool) -> list[Floats]:
        """Return a vector, or the probabilities of `classes`, of each token of each prompt: float32[tokens, *]."""
        info = self._state.client.info
        classifier = require_classifier(info.vectors, of_tokens=True) if classes else None
        found = await self._pool([each.ids for each in prompts], Pooling("all"), names_of(field, len(prompts)))
        if classifier is not None:
            return [probabilities_of(each, classifier) for each in found]
        pairs = zip(found, prompts, strict=True)
        return [np.frombuffer(each, "<f4").reshape(len(prompt.ids), -1) for each, prompt in pairs]

    async def scores(self, pairs: Sequence[tuple[str, str]], field: str, instruction: str | None) -> list[float]:
        """Return a score for each pair: the probability of yes from a model that scores pairs, else a cosine."""
        settings = self._state.client.info.vectors
        judge = settings.judge
        if judge is not None:
            return await self._judged(pairs, judge, field, instruction=instruction or INSTRUCTION)
        if instruction is not None:
            raise invalid(
                "instruction is only supported by models that judge by it; this model compares texts", "instruction"
            )
        if settings.second_text is not None:
            return await self._classified(pairs, settings.second_text, field)
        order = {text: index for index, text in enumerate(distinct(pairs))}
        reader, longest = self._state.prompt_reader, longest_text(self._state, self._body)
        texts = [settings.prompt + text for text in order]
        read = reader.run(
            sum(map(len, texts)), lambda: [reader.text(each, True, field, longest=longest) for each in texts]
        )
        vectors = await self._vectors(await cancel_on_disconnect(self._request, read), [field] * len(texts), None)
        return [similarity(vectors[order[one]], vectors[order[other]]) for one, other in pairs]

    async def _classified(self, pairs: Sequence[tuple[str, str]], second_text: int, field: str) -> list[float]:
        """Return the output of a classifier with one class for each pair."""
        classifier = require_classifier(self._state.client.info.vectors, of_tokens=False)
        reader = self._state.prompt_reader
        size, longest = _require_size(pairs, "", field), longest_text(self._state, self._body)
        read = reader.run(size, lambda: [reader.pair(*pair, field, second_text, longest).ids for pair in pairs])
        prompts, names = await cancel_on_disconnect(self._request, read), names_of(field, len(pairs))
        pooled = await self._pool(prompts, Pooling(classifier.pooling), names)
        return [float(probabilities_of(each, classifier)[0, 0]) for each in pooled]

    async def _judged(
        self, pairs: Sequence[tuple[str, str]], judge: tuple[str, str], field: str, instruction: str
    ) -> list[float]:
        try:
            ids = judging_tokens(self._state.tokenizer, judge, self._state.client.info.vocab_size)
        except ModelError as error:
            raise ApiError(500, error.message, kind="server_error") from None
        _require_size(pairs, instruction, field)
        texts = [judged_prompt(*pair, instruction) for pair in pairs]
        prompts = await self._read(texts, field, add_special=False)
        pooled = await self._pool([each.ids for each in prompts], Pooling("tokens", ids), names_of(field, len(pairs)))
        return [probability_of_yes(each) for each in pooled]

    async def _pool(self, prompts: Sequence[tuple[int, ...]], pooling: Pooling, names: Sequence[str]) -> list[bytes]:
        spans = self._state.spans
        if spans is None:
            return await self._pooled(prompts, pooling, names)
        name, attributes = span_name("/v1/embeddings", self.model)
        used = {"gen_ai.usage.input_tokens": sum(map(len, prompts))}
        with spans.begin(name, "server", self._request.headers, attributes | used):
            return await self._pooled(prompts, pooling, names)

    async def _pooled(self, prompts: Sequence[tuple[int, ...]], pooling: Pooling, names: Sequence[str]) -> list[bytes]:
        """Run the requests, at most as many at a time as there are slots; all end with this call."""
        state = self._state
        most = state.client.info.max_model_len - 1
        for name, prompt in zip(names, prompts, strict=True):
            if len(prompt) > most:
                message = f"{name}: a text has {len(prompt)} tokens, but at most {most} are supported; shorten it"
                raise invalid(message, name, "context_length_exceeded")
        tokens = sum(map(len, prompts))
        self.usage = PooledUsage(tokens, tokens)
        at_once = min(len(prompts), state.client.info.max_num_seqs)
        state.admit(at_once)
        name = self._request.state.request_id
        record = self._request.state.record
        state.access.reserve(record, tokens)
        record.count(tokens, 0)
        ids = state.active.enter(name, len(prompts), self._request.state.owner)
        turn = asyncio.Semaphore(at_once)
        found: list[bytes] = [b""] * len(prompts)

        async def one(index: int) -> None:
            async with turn:
                found[index] = await self._vector(ids[index], prompts[index], pooling)

        try:
            async with UntilDisconnect(self._request.receive) as client:
                try:
                    async with asyncio.TaskGroup() as group:
                        for index in range(len(prompts)):
                            group.create_task(one(index))
                except ExceptionGroup as errors:
                    raise errors.exceptions[0] from None
        finally:
            state.active.leave(name, ids)
        if client.disconnected:
            raise ApiError(499, "the client disconnected", code="client_gone")
        return found

    async def _vector(self, engine_id: str, prompt: tuple[int, ...], pooling: Pooling) -> bytes:
        body = self._body
        spec = RequestSpec(
            request_id=engine_id,
            prompt=prompt,
            params=ONE_TOKEN,
            pooling=pooling,
            priority=body.priority or 0,
            tenant=scoped(self._request.state.owner, body.user),
            cache_salt=self._state.access.salt(self._request.state.owner, body.cache_salt),
            adapter=self._served.adapter,
        )
        vector: bytes | None = None
        async with aclosing(cast(AsyncGenerator[Delta, None], self._state.client.submit(spec))) as deltas:
            async for delta in deltas:
                if delta.finish_reason is FinishReason.ERROR:
                    raise ApiError(500, f"a text could not be read: {delta.error}", kind="server_error")
                vector = delta.pooled if delta.pooled is not None else vector
        if vector is None:
            raise unavailable("the request was aborted", "aborted", retry_after=1)
        return vector


def _require_size(pairs: Sequence[tuple[str, str]], instruction: str, field: str) -> int:
    """Return the characters of rendered pairs. Raises `ApiError` (400) for too many."""
    size = sum(len(query) + len(document) + len(instruction) for query, document in pairs)
    if size > _MAX_PAIR_CHARS:
        raise invalid(
            f"{field}: the pairs have {size:,} characters; at most {_MAX_PAIR_CHARS:,} are allowed per request",
            field,
        )
    return size


@router.post(
    "/v1/embeddings",
    **endpoint("Create embeddings", pooling.EmbeddingRequest, pooling.EmbeddingAnswer, example={"input": "a text"}),
)
async def create_embeddings(request: Request) -> Response:
    """Return a vector of each text, in the same order."""
    state, body, headers = await EMBEDDINGS.read(request)
    texts = PooledTexts(state, request, body)
    prompts = await texts.read(body)
    vectors = await texts.vectors(prompts, "input", body.dimensions)
    packed = body.encoding_format == "base64"
    data: list[Any] = []
    for index, vector in enumerate(vectors):
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector.tolist()
        data.append(msgspec.Raw(msgspec.json.encode(pooling.Embedding(index=index, embedding=shown))))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    answer = pooling.EmbeddingAnswer(
        id=f"embd-{request.state.request_id}",
        created=int(time.time()),
        data=data,
        model=texts.model,
        usage=texts.usage,
    )
    return json_response(answer, headers)


@router.post(
    "/v1/classify",
    **endpoint(
        "Classify texts", pooling.ClassificationRequest, pooling.ClassificationAnswer, example={"input": "a text"}
    ),
)
@router.post("/classify", include_in_schema=False)
async def create_classification(request: Request) -> Response:
    """Return the probabilities of the classes of each text, in the same order."""
    state, body, headers = await CLASSIFY.read(request)
    texts = PooledTexts(state, request, body)
    data = await texts.classes(await texts.read(body), "input")
    answer = pooling.ClassificationAnswer(
        id=f"classify-{request.state.request_id}",
        created=int(time.time()),
        model=texts.model,
        data=data,
        usage=texts.usage,
    )
    return json_response(answer, headers)


@router.post(
    "/pooling",
    **endpoint("Pool texts", pooling.PoolingRequest, pooling.PoolingAnswer, example={"input": "a text"}),
)
async def create_pooling(request: Request) -> Response:
    """Return a vector or the classes of each text, or of each of its tokens."""
    state, body, headers = await POOL.read(request)
    texts = PooledTexts(state, request, body)
    classifier = state.client.info.vectors.classifier
    task = body.task or (
        "embed" if classifier is None else "classify" if classifier.pooling != "all" else "token_classify"
    )
    prompts = await texts.read(body)
    found: list[Any]
    if task == "classify":
        found = [each.probs for each in await texts.classes(prompts, "input")]
    elif task == "embed":
        found = await texts.vectors(prompts, "input")
    else:
        found = await texts.tokens(prompts, "input", classes=task == "token_classify")
    answer = pooling.PoolingAnswer(
        id=f"pool-{request.state.request_id}",
        created=int(time.time()),
        model=texts.model,
        data=[await _pooled(index, values) for index, values in enumerate(found)],
        usage=texts.usage,
    )
    return json_response(answer, headers)


async def _pooled(index: int, values: Floats | list[float]) -> Any:
    """Encode the result of one text, a few rows at a time."""
    rows = []
    for begin in range(0, len(values), _AT_ONCE if np.ndim(values) > 1 else len(values)):
        some = values[begin : begin + _AT_ONCE] if np.ndim(values) > 1 else values
        rows.append(msgspec.json.encode(np.asarray(some).tolist())[1:-1])
        await asyncio.sleep(0)
    return pooling.Pooled(index=index, data=cast(Any, msgspec.Raw(b"[" + b",".join(rows) + b"]")))


@router.post(
    "/v1/score",
    **endpoint(
        "Score pairs of texts",
        pooling.ScoreRequest,
        pooling.ScoreAnswer,
        example={"text_1": "a question", "text_2": ["an answer"]},
    ),
)
@router.post("/score", include_in_schema=False)
async def create_score(request: Request) -> Response:
    """Return a score for each pair of texts."""
    state, body, headers = await SCORE.read(request)
    texts = PooledTexts(state, request, body)
    pairs, field = pairs_of(body)
    scores = await texts.scores(pairs, field, body.instruction)
    answer = pooling.ScoreAnswer(
        id=f"score-{request.state.request_id}",
        created=int(time.time()),
        data=[pooling.Score(index=index, score=score) for index, score in enumerate(scores)],
        model=texts.model,
        usage=texts.usage,
    )
    return json_response(answer, headers)


@router.post(
    "/v1/rerank",
    **endpoint(
        "Rank documents by a query",
        pooling.RerankRequest,
        pooling.RerankAnswer,
        example={"query": "a question", "documents": ["a text", "another"]},
    ),
)
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def create_rerank(request: Request) -> Response:
    """Return the documents that answer a query best, the best first."""
    state, body, headers = await RERANK.read(request)
    texts = PooledTexts(state, request, body)
    pairs, field = pairs_of(body)
    scores = await texts.scores(pairs, field, body.instruction)
    documents = [document for _, document in pairs]
    order = sorted(range(len(documents)), key=lambda index: (-scores[index], index))
    results = [
        pooling.RerankResult(
            index=index,
            relevance_score=scores[index],
            document=msgspec.UNSET if body.return_documents is False else pooling.RankedDocument(documents[index]),
        )
        for index in order[: body.top_n or None]
    ]
    answer_id = f"rerank-{request.state.request_id}"
    return json_response(
        pooling.RerankAnswer(id=answer_id, model=texts.model, results=results, usage=texts.usage), headers
    )
