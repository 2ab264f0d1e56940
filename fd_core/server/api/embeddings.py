"""POST /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.api.pooled import PooledTexts, pairs_of, read_texts
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.schemas import pooling
from fd_core.server.schemas.unsupported import POOLED
from fd_core.server.stream.streaming import unless_gone

router = APIRouter(route_class=DirectRoute)
EMBEDDINGS: Final = BodyFormat(pooling.EmbeddingRequest, POOLED)
SCORE: Final = BodyFormat(pooling.ScoreRequest, POOLED)
RERANK: Final = BodyFormat(pooling.RerankRequest, POOLED)
_AT_ONCE: Final = 16
"""Vectors that are encoded while everybody else waits."""


@router.post("/v1/embeddings", **endpoint("Make vectors of texts", pooling.EmbeddingRequest, pooling.EmbeddingAnswer))
async def create_embeddings(request: Request) -> Response:
    """Return a vector of each text, in the order given."""
    state, body, headers = await EMBEDDINGS.read(request)
    texts = PooledTexts(state, request, body)
    reading = read_texts(state, body.input, "input", body.add_special_tokens is not False)
    prompts = await unless_gone(request, reading)
    vectors = await texts.vectors(prompts, "input", body.dimensions)
    packed = body.encoding_format == "base64"
    data: list[Any] = []
    for index, vector in enumerate(vectors):
        shown = base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector.tolist()
        data.append(msgspec.Raw(msgspec.json.encode(pooling.Embedding(index=index, embedding=shown))))
        if index % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    return json_response(pooling.EmbeddingAnswer(data=data, model=texts.model, usage=texts.usage), headers)


@router.post("/v1/score", **endpoint("Tell how well texts fit", pooling.ScoreRequest, pooling.ScoreAnswer))
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


@router.post("/v1/rerank", **endpoint("Order documents by a query", pooling.RerankRequest, pooling.RerankAnswer))
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
