"""Tokens that a request may take of its key's minute: its body is decoded and counted as the workers do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from fd_core.router.gateway.requests.model_text import BYTES, ModelText, find_text
from fd_core.router.gateway.requests.route_requests import BYTES_PER_TOKEN
from fd_core.server.api import chat, completions, embeddings
from fd_core.server.api.pooled import distinct, pairs_of, read_texts
from fd_core.server.messages import asking as messages_asking
from fd_core.server.messages import routes as messages
from fd_core.server.messages.schemas import CountRequest
from fd_core.server.preprocess.body import BodyFormat, require_json
from fd_core.server.preprocess.prompts import chat_prompt, completion_prompts
from fd_core.server.preprocess.sampling import text_cost
from fd_core.server.responses import asking as responses_asking
from fd_core.server.responses import routes as responses
from fd_core.server.responses.schemas import ResponsesRequest
from fd_core.server.schemas.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from fd_core.server.schemas.requests import MAX_CHOICES, ChatRequest, CompletionRequest
from fd_core.text.parsing.answer import Parsers
from fd_core.text.prompt_reader import PromptReader

_UNKNOWN_CONTEXT: Final = 1 << 19
_FORMATS: Final[Mapping[str, BodyFormat[Any]]] = {
    "/v1/chat/completions": chat.BODY,
    "/v1/completions": completions.BODY,
    "/v1/messages": messages.BODY,
    "/v1/responses": responses.BODY,
    "/v1/embeddings": embeddings.EMBEDDINGS,
    **dict.fromkeys(("/v1/score", "/score"), embeddings.SCORE),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), embeddings.RERANK),
}
"""Formats of the paths that take tokens."""


class Cost(NamedTuple):
    """Tokens of one request."""

    prompt: int
    most: int
    """Of prompts and texts together."""


@dataclass
class CostReader:
    """Counts what requests may take. Without `text` a token of a text is taken as `BYTES_PER_TOKEN` bytes."""

    text: ModelText | None
    context: int | None = None
    """Most tokens of prompt and text together, once a worker has told it."""
    max_n: int = MAX_CHOICES
    trusts_templates: bool = False
    parsers: Parsers = field(default_factory=Parsers)
    prompt_reader: PromptReader = field(init=False)

    def __post_init__(self) -> None:
        text = find_text(BYTES, offline=True) if self.text is None else self.text
        # Which ids there are is the workers' to judge: their models may have more than the tokenizer names.
        self.prompt_reader = PromptReader(text.tokenizer, text.template, vocab_size=1 << 31)

    def close(self) -> None:
        """End the threads."""
        self.prompt_reader.close()

    async def cost(self, path: str, content_type: str, body: bytes, limit: int | None) -> Cost:
        """Return what a request to `path` takes; `limit` is that of its key.

        Raises `ApiError` or `BadRequest` for what no worker serves: it must not take anything.
        """
        body_format = _FORMATS.get(path)
        if body_format is None:
            return Cost(0, 0)
        require_json(content_type)
        decoded, _ = await body_format.decode_bounded(body, self.context or _UNKNOWN_CONTEXT)
        if isinstance(decoded, EmbeddingRequest | ScoreRequest | RerankRequest):
            read = await self._pooled(decoded)
            return Cost(read, read)
        if isinstance(decoded, CompletionRequest):
            found = await completion_prompts(self, self._countable(decoded))
            lengths = [len(each.ids) if each.text is None else self._tokens(len(each.ids)) for each in found]
            asked: ChatRequest | CompletionRequest = decoded
        else:
            asked = asking = self._countable(self._as_chat(decoded))
            ids = await chat_prompt(self, asking)
            lengths = [len(ids) if asking.prompt_token_ids else self._tokens(len(ids))]
        context = None if self.text is None else self.context
        counted = text_cost(asked, lengths, most_texts=self.max_n, context=context, limit=limit)
        return Cost(sum(lengths), counted.tokens)

    def _as_chat(self, decoded: ChatRequest | CountRequest | ResponsesRequest) -> ChatRequest:
        """Return a request as the chat that a worker makes of it; what it goes on from is known to its worker only."""
        if isinstance(decoded, ChatRequest):
            return decoded
        if isinstance(decoded, ResponsesRequest):
            return responses_asking.as_chat(decoded, ())
        if self.text is None:  # bytes have no template that could tell an effort
            decoded = msgspec.structs.replace(decoded, output_config=None)
        return messages_asking.as_chat(self, decoded)

    def _countable(self, request: Any) -> Any:
        """Return a request without what only a worker may judge: templates of clients, and those of its model."""
        if isinstance(request, CompletionRequest):
            return request if self.text is not None else msgspec.structs.replace(request, truncate_prompt_tokens=None)
        if request.chat_template:
            request = msgspec.structs.replace(request, chat_template=None)
        if self.text is None:
            request = msgspec.structs.replace(
                request, truncate_prompt_tokens=None, reasoning_effort=None, chat_template_kwargs=None, documents=None
            )
        return request

    async def _pooled(self, decoded: EmbeddingRequest | ScoreRequest | RerankRequest) -> int:
        if isinstance(decoded, EmbeddingRequest):
            found = await read_texts(self, decoded.input, "input", decoded.add_special_tokens is not False)
        else:
            pairs, name = pairs_of(decoded)
            found = await read_texts(self, distinct(pairs), name)
        return sum(len(each.ids) if each.text is None else self._tokens(len(each.ids)) for each in found)

    def _tokens(self, read: int) -> int:
        return read if self.text is not None else max(1, read // BYTES_PER_TOKEN)
