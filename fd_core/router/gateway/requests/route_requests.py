"""Fields of a client's request that the router needs to choose a worker. The worker validates everything else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from fd_core.errors import FdError
from fd_core.http.errors import OLLAMA_PATH
from fd_core.router.selection import RouteRequest
from fd_core.server.api import completions, embeddings
from fd_core.server.api.embeddings import distinct, longest_text, pairs_of, read_texts
from fd_core.server.messages import routes as messages
from fd_core.server.messages.schemas import CountRequest
from fd_core.server.ollama import routes as ollama
from fd_core.server.ollama.schemas import LATEST, EmbedRequest, OllamaTextRequest
from fd_core.server.preprocess.body import BodyFormat, decodable, require_json
from fd_core.server.preprocess.jobs import chat_prompt, completion_prompts
from fd_core.server.preprocess.sampling import text_cost
from fd_core.server.responses import routes as responses
from fd_core.server.responses.schemas import ResponsesRequest
from fd_core.server.schemas.pooling import RerankRequest, ScoreRequest, TextsRequest
from fd_core.server.schemas.requests import MAX_CHOICES, ChatRequest, CompletionRequest, ContentPart, Message
from fd_core.text.chat_template import shown_tool
from fd_core.text.parsing.answer import Parsers
from fd_core.text.prompt_reader import BYTES, ModelText, PromptReader, find_text, split_prompts, template_kwargs
from fd_core.types import IntArray

_MAX_CHARS: Final = 1_000_000
"""Longer texts are compared by their bytes."""
_MAX_TOKENS: Final = 131_072
"""Length of the prefix of a prompt that is compared."""
_MAX_IDS: Final = 2_000_000
BYTES_PER_TOKEN: Final = 4
"""Assumed length of a token without a tokenizer."""


class _Body(msgspec.Struct):
    prompt: Any = None
    messages: Any = None
    system: Any = None
    input: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    documents: Any = None
    tools: Any = None
    tool_choice: Any = None
    enable_thinking: Any = None
    reasoning_effort: Any = None
    prompt_token_ids: Any = None
    session_id: Any = None
    user: Any = None
    cache_salt: Any = None
    model: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    raw: Any = None
    """Of Ollama's API, as are `images` and `options`."""
    images: Any = None
    options: Any = None

    @property
    def output_tokens(self) -> int:
        """Most tokens that the request allows for its answers; 0 if it sets no limit."""
        option = self.options.get("num_predict") if isinstance(self.options, dict) else None
        asked = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens, option)
        for most in asked:
            if type(most) is int and most > 0:
                return most * (self.n if type(self.n) is int and self.n > 0 else 1)
        return 0

    @property
    def text(self) -> Any:
        """The prompt of a completion, or the input of an embedding."""
        prompt = self.prompt if self.prompt_token_ids is None else self.prompt_token_ids
        return self.input if prompt is None else prompt

    @property
    def conversation(self) -> list[Any]:
        """The messages, after the system prompt, which the Messages API sends in a separate field."""
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else self.messages

    @property
    def offered(self) -> list[Any] | None:
        if not isinstance(self.tools, list) or self.tool_choice == "none":
            return None
        return [shown_tool(tool) for tool in self.tools]


def _described(message: Any) -> Any:
    """Return a message with a digest in the place of each image: routers compare images, and never load them."""
    if not isinstance(message, dict):
        return message
    content, images = message.get("content"), message.get("images")
    if not images and not isinstance(content, list):
        return message
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    if isinstance(images, list):
        parts = [*({"type": "image", "source": {"data": data}} for data in images), *parts]
    if not any(map(_is_image, parts)):
        return message
    return {**message, "content": [_described_part(part) for part in parts], "images": None}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind in _IMAGES


def _described_part(part: Any) -> Any:
    if not _is_image(part):
        return part
    given = part.get("image_url") or part.get("source")
    if isinstance(given, dict):
        given = given.get("url") or given.get("data")
    return {"type": "text", "text": _image_text(given)}


def _image_text(given: object) -> str:
    """Return a digest of the URL or data of an image, which has about as many tokens as a small image."""
    return hashlib.blake2b(msgspec.json.encode(given)).hexdigest()


_IMAGES: Final = frozenset({"image_url", "input_image", "image"})
_decoder: Final = msgspec.json.Decoder(_Body)
_encoder: Final = msgspec.json.Encoder(order="sorted")
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class RouteRequestReader:
    """Converts bodies to routing requests. It never yields an empty prompt, and it never rejects a body."""

    def __init__(self, text: ModelText | None) -> None:
        """Without `text`, prompts are compared by the bytes of their text."""
        self._prompts = None if text is None else PromptReader(text.tokenizer, text.template, max_chars=_MAX_CHARS)
        self.description = f"Prompts are compared by the {f'tokens of {text.name}' if text else 'bytes of their text'}."
        """Line of the live page that states how prompts are compared."""

    @property
    def fingerprint(self) -> str | None:
        """Digest of the tokenization, see `PromptReader.fingerprint`; None if prompts are compared by their bytes."""
        return None if self._prompts is None else self._prompts.fingerprint

    def close(self) -> None:
        """End the thread that reads long prompts."""
        if self._prompts is not None:
            self._prompts.close()

    async def read(self, body: bytes, session: str | None = None, path: str = "") -> RouteRequest:
        """Return the routing request for a body; `session` is from a header and takes precedence over the body's."""
        if not await decodable(body, _MAX_IDS):  # the worker rejects it
            return _by_bytes(body, session, "")
        if self._prompts is None:
            return self._read(body, session, path)
        return await self._prompts.run(
            len(body), lambda: self._read(body, session, path), at_once=b'"messages"' not in body
        )

    @staticmethod
    async def model(body: bytes) -> str | None:
        """Return the name of the model that a body requests, if the body can be read."""
        try:
            return _name(_decoder.decode(body).model) if await decodable(body, _MAX_IDS) else None
        except _UNREADABLE:
            return None

    def _read(self, body: bytes, session: str | None, path: str) -> RouteRequest:
        try:
            asked = _decoder.decode(body)
        except _UNREADABLE:
            return _by_bytes(body, session, "")
        if path.startswith(OLLAMA_PATH):
            self._read_ollama(asked)
        exact = True
        if isinstance(asked.messages, list):
            given, asked.messages = asked.messages, [_described(message) for message in asked.messages]
            # Workers report blocks with tokens of images, which the router does not know.
            exact = asked.messages == given
        session = session or _name(asked.session_id, asked.user)
        salt = _name(asked.cache_salt) or ""
        model, output = _name(asked.model), asked.output_tokens
        if self._prompts is not None or isinstance(asked.text, list):
            try:
                ids, length = self._ids(asked)
                tokens = np.fromiter(ids[:_MAX_TOKENS], np.int32)
            except (FdError, OverflowError, TypeError):  # the worker rejects it with the proper error
                pass
            else:
                return RouteRequest(tokens, session, salt, length, model, tokenized=exact, output_tokens=output)
        return _by_bytes(_bytes_of(asked) or body, session, salt, model, output_tokens=output)

    def _read_ollama(self, asked: _Body) -> None:
        """Change a body to what OpenAI's API has for it: the name of the model, and a chat for a prompt."""
        if isinstance(asked.model, str):
            asked.model = asked.model.removesuffix(LATEST)
        has_template = self._prompts is not None and self._prompts.template_source is not None
        if (has_template or asked.images) and asked.raw is not True and isinstance(asked.prompt, str):
            asked.messages = [{"role": "user", "content": asked.prompt, "images": asked.images}]

    def _ids(self, asked: _Body) -> tuple[Sequence[int], int]:
        """Return the first prompt's ids and the tokens of all; `FdError`, or `TypeError` without tokenizer."""
        if self._prompts is None:
            given = split_prompts(asked.text)
            if isinstance(given[0], str):
                raise TypeError("texts cannot be tokenized without a tokenizer")
            return given[0], sum(map(len, given))
        if isinstance(asked.messages, list) and asked.prompt_token_ids is None:
            kwargs = asked.chat_template_kwargs if isinstance(asked.chat_template_kwargs, dict) else None
            ids, *_ = self._prompts.chat(
                asked.conversation,
                asked.add_generation_prompt if isinstance(asked.add_generation_prompt, bool) else None,
                template_kwargs(kwargs, asked.enable_thinking, asked.reasoning_effort),
                continue_final_message=asked.continue_final_message is True,
                documents=asked.documents if isinstance(asked.documents, list) else None,
                add_special=asked.add_special_tokens is True,
                tools=asked.offered,
            )
            return ids, len(ids)
        prompts = self._prompts.completion(asked.text, asked.add_special_tokens is not False)
        return prompts[0].ids, sum(len(each.ids) for each in prompts)


def _bytes_of(asked: _Body) -> bytes:
    """Return bytes with equal prefixes for prompts with equal prefixes, independent of all other fields."""
    if isinstance(asked.messages, list):
        return _encoder.encode_lines(asked.conversation)
    prompt = asked.text
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt.encode("utf-8", "replace")
    return msgspec.json.encode(prompt) if prompt is not None else b""


def _by_bytes(
    data: bytes, session: str | None, salt: str, model: str | None = None, output_tokens: int = 0
) -> RouteRequest:
    length = max(1, len(data) // BYTES_PER_TOKEN)
    # A number takes the bytes of a token, so that blocks cover as much text as they do with a tokenizer.
    tokens: IntArray = np.frombuffer(data.ljust(BYTES_PER_TOKEN, b"\0"), np.int32, min(length, _MAX_TOKENS))
    return RouteRequest(tokens, session, salt, length, model, tokenized=False, output_tokens=output_tokens)


def _name(*values: Any) -> str | None:
    """Return the first of these values that is a name."""
    for value in values:
        if isinstance(value, str) and value:
            return value[:256]
    return None


_UNKNOWN_CONTEXT: Final = 1 << 19
COMPUTES_NOTHING: Final = frozenset(
    {"/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize", "/api/show"}
)
"""Paths whose text is not cached by a worker, and so is not routed as a prompt."""
FORMATS: Final[Mapping[str, BodyFormat[Any]]] = {
    "/v1/chat/completions": completions.CHAT_BODY,
    "/v1/completions": completions.COMPLETION_BODY,
    "/v1/messages": messages.BODY,
    "/v1/responses": responses.BODY,
    "/v1/embeddings": embeddings.EMBEDDINGS,
    **dict.fromkeys(("/v1/classify", "/classify"), embeddings.CLASSIFY),
    "/pooling": embeddings.POOL,
    **dict.fromkeys(("/v1/score", "/score"), embeddings.SCORE),
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), embeddings.RERANK),
    "/api/chat": ollama.CHAT_BODY,
    "/api/generate": ollama.GENERATE_BODY,
    "/api/embed": ollama.EMBED_BODY,
}


def _without_images(message: Message) -> Message:
    """Return a message with texts in the place of its images: routers estimate their tokens."""
    if not isinstance(message.content, list) or not any(part.type == "image_url" for part in message.content):
        return message
    parts = [
        ContentPart(type="text", text=_image_text(part.image_url)) if part.type == "image_url" else part
        for part in message.content
    ]
    return msgspec.structs.replace(message, content=parts)


class Cost(NamedTuple):
    """Tokens of one request."""

    prompt: int
    most: int
    """Of prompts and texts together."""


@dataclass
class CostReader:
    """Counts the tokens that requests may use. Without `text`, a token is assumed to have `BYTES_PER_TOKEN` bytes."""

    text: ModelText | None
    context: int | None = None
    """Most tokens of prompt and text together, once a worker has reported it."""
    max_n: int = MAX_CHOICES
    trusts_templates: bool = False
    parsers: Parsers = field(default_factory=Parsers)
    images: None = None
    prompt_reader: PromptReader = field(init=False)

    def __post_init__(self) -> None:
        text = find_text(BYTES, offline=True) if self.text is None else self.text
        # Workers validate token ids: their models may have more ids than the tokenizer.
        self.prompt_reader = PromptReader(text.tokenizer, text.template, vocab_size=1 << 31)

    def close(self) -> None:
        """End the threads."""
        self.prompt_reader.close()

    async def cost(self, path: str, content_type: str, body: bytes, limit: int | None) -> Cost:
        """Return the tokens that a request charges to its key's `limit`; `ApiError`, `BadRequest` if it is invalid."""
        body_format = FORMATS.get(path)
        if body_format is None:
            return Cost(0, 0)
        if body_format.needs_type:
            require_json(content_type)
        decoded, _ = await body_format.decode_bounded(body, self.context or _UNKNOWN_CONTEXT)
        if isinstance(decoded, EmbedRequest):
            decoded = ollama.as_embedding(decoded)
        if isinstance(decoded, TextsRequest | ScoreRequest | RerankRequest):
            read = await self._pooled(decoded)
            return Cost(read, read)
        if isinstance(decoded, CompletionRequest):
            found = await completion_prompts(self, self._countable(decoded))
            lengths = [len(each.ids) if each.text is None else self._tokens(len(each.ids)) for each in found]
            asked: ChatRequest | CompletionRequest = decoded
        else:
            asked = asking = self._countable(self._as_chat(decoded))
            if isinstance(decoded, OllamaTextRequest) and not asking.messages:
                return Cost(0, 0)
            ids = (await chat_prompt(self, asking)).ids
            lengths = [len(ids) if asking.prompt_token_ids else self._tokens(len(ids))]
        context = None if self.text is None else self.context
        counted = text_cost(asked, lengths, most_texts=self.max_n, context=context, limit=limit)
        return Cost(sum(lengths), counted.tokens)

    def _as_chat(self, decoded: ChatRequest | CountRequest | ResponsesRequest | OllamaTextRequest) -> ChatRequest:
        """Return the chat that a worker makes of a request, without the stored conversation that it continues."""
        if isinstance(decoded, ChatRequest):
            return decoded
        if isinstance(decoded, ResponsesRequest):
            return responses.as_chat(decoded, ())
        if isinstance(decoded, OllamaTextRequest):
            return ollama.as_chat(self, decoded)
        if self.text is None:  # without a tokenizer there is no template to apply an effort
            decoded = msgspec.structs.replace(decoded, output_config=None)
        return messages.as_chat(self, decoded)

    def _countable(self, request: Any) -> Any:
        """Return a request without fields that only a worker can validate: templates of the client and the model."""
        if isinstance(request, CompletionRequest):
            return request if self.text is not None else msgspec.structs.replace(request, truncate_prompt_tokens=None)
        if request.messages:
            request = msgspec.structs.replace(request, messages=[_without_images(each) for each in request.messages])
        if request.chat_template:
            request = msgspec.structs.replace(request, chat_template=None)
        if self.text is None:
            request = msgspec.structs.replace(
                request, truncate_prompt_tokens=None, reasoning_effort=None, chat_template_kwargs=None, documents=None
            )
        return request

    async def _pooled(self, decoded: TextsRequest | ScoreRequest | RerankRequest) -> int:
        longest = None if self.text is None else longest_text(self, decoded)
        if isinstance(decoded, TextsRequest):
            special = decoded.add_special_tokens is not False
            found = await read_texts(self, decoded.input, "input", special, longest)
        else:
            pairs, name = pairs_of(decoded)
            found = await read_texts(self, distinct(pairs), name, longest=longest)
        return sum(len(each.ids) if each.text is None else self._tokens(len(each.ids)) for each in found)

    def _tokens(self, read: int) -> int:
        return read if self.text is not None else max(1, read // BYTES_PER_TOKEN)
