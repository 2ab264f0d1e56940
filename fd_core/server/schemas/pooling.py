"""Requests and responses of the endpoints for embeddings and scores."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fd_core.server.schemas.requests import TokenId


class PooledRequest(msgspec.Struct, kw_only=True):
    """Fields that these endpoints share; null means the default."""

    model: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Lower runs first under the `priority` policy."""
    user: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Maximum number of tokens of a text, or of a pair, which loses its end; -1 for the model's maximum."""


class TextsRequest(PooledRequest, kw_only=True):
    """Texts, each with a result."""

    input: str | list[str | int | list[TokenId]]
    """A text, texts, ids, or lists of ids."""
    add_special_tokens: bool | None = None
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    """Name of one of the prompts that the checkpoint declares, which is put before each text."""


class EmbeddingRequest(TextsRequest, kw_only=True):
    """The body of /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """Number of leading elements to keep; the vector is normalized again."""


class ClassificationRequest(TextsRequest, kw_only=True):
    """The body of /v1/classify."""


class PoolingRequest(TextsRequest, kw_only=True):
    """The body of /pooling."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    """By default `classify` or `token_classify` for a model that classifies, else `embed`."""


class ScoreRequest(PooledRequest, kw_only=True):
    """The body of /v1/score: one text with several, or pairs."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    """Another name of `text_1`."""
    documents: str | list[str] | None = None
    """Another name of `text_2`."""
    instruction: Annotated[str, Meta(max_length=4096)] | None = None
    """Instruction for a model that scores pairs."""


class RerankDocument(msgspec.Struct):
    """A document as an object."""

    text: str


class RerankRequest(PooledRequest, kw_only=True):
    """The body of /v1/rerank."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=2048)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """Number of best documents to return; 0 and null return all."""
    return_documents: bool | None = None
    """True if the response repeats the documents, the default."""
    instruction: Annotated[str, Meta(max_length=4096)] | None = None


class PooledUsage(msgspec.Struct):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """One vector."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or float32 in little-endian order as base64."""


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/embeddings."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Unix time, seconds."""
    data: list[Embedding]
    model: str
    usage: PooledUsage


class Pooled(msgspec.Struct, kw_only=True):
    """Result of one text."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float | list[float]]
    """Of the text, or of each of its tokens: a vector, or the probabilities of the classes."""


class PoolingAnswer(msgspec.Struct, kw_only=True):
    """The answer of /pooling."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Unix time, seconds."""
    model: str
    data: list[Pooled]
    usage: PooledUsage


class Classification(msgspec.Struct, kw_only=True):
    """Classes of one text."""

    index: int
    label: str
    """The most probable class."""
    probs: list[float]
    num_classes: int


class ClassificationAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/classify."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Unix time, seconds."""
    model: str
    data: list[Classification]
    usage: PooledUsage


class Score(msgspec.Struct, kw_only=True):
    """Score of one pair of texts."""

    object: Literal["score"] = "score"
    index: int
    score: float


class ScoreAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    """Unix time, seconds."""
    data: list[Score]
    model: str
    usage: PooledUsage


class RankedDocument(msgspec.Struct):
    """A document of the request."""

    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    """One document and how well it answers the query."""

    index: int
    """Its index in the request."""
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class RerankAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/rerank, the best document first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PooledUsage
