"""Backends of a chat in the terminal: an engine started for the command, or a running server."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fd_core.cli.chats.api_client import ApiClient
from fd_core.config.generation import NO_DEFAULTS, GenerationDefaults
from fd_core.errors import BadRequest, FdError, ModelError
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.detokenizer import IncrementalDetokenizer
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import Delta, RequestSpec, SamplingParams

if TYPE_CHECKING:
    from fd_core.engine.clients.client import EngineClient


Message = Mapping[str, Any]
TokenCount = Callable[[int], None]
"""Receives the number of tokens that arrived, 0 if only their text is known."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters of an answer and its largest number of tokens."""

    max_tokens: int | None = None
    """None: up to the model's limit."""
    temperature: float | None = 0.0
    """None for the model's default, or 0.7."""
    top_p: float | None = 1.0
    """None for the model's default, or 0.95."""
    seed: int | None = None
    """None: a different answer each time."""

    def params(self, room: int, defaults: GenerationDefaults = NO_DEFAULTS) -> SamplingParams:
        """Return the parameters of an answer of at most `room` tokens."""
        asked = {"temperature": self.temperature, "top_p": self.top_p}
        values = {"temperature": 0.7, "top_p": 0.95} | defaults.sampling()
        longest = (defaults.max_new_tokens or room) if self.max_tokens is None else self.max_tokens
        return SamplingParams(
            max_tokens=min(room, longest),
            **values | {name: value for name, value in asked.items() if value is not None},
            seed=secrets.randbits(64) if self.seed is None else self.seed,
        )


def no_template(model: str) -> ModelError:
    """Return the error for a chat with a model without a chat template."""
    message = f"{model} has no chat template, so it only supports completions"
    hint = "use `fdcore complete`, an instruction-tuned model, or --chat-template FILE"
    return ModelError(message, field="model", hint=hint)


@dataclass(frozen=True, slots=True)
class EngineChatBackend:
    """Generates with an engine of this process."""

    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None

    def chat(
        self, messages: Sequence[Message], options: SamplingOptions, count: TokenCount | None = None
    ) -> AsyncGenerator[str, None]:
        """Answer a conversation."""
        if self.template is None:
            raise no_template(self.client.info.model)
        return self._generate(self.tokenizer.encode(self.template.render(messages), add_special=False), options, count)

    def complete(self, prompt: str, options: SamplingOptions) -> AsyncGenerator[str, None]:
        """Continue a text."""
        return self._generate(self.tokenizer.encode(prompt), options)

    async def _generate(
        self, prompt: list[int], options: SamplingOptions, count: TokenCount | None = None
    ) -> AsyncGenerator[str, None]:
        info = self.client.info
        room = info.max_model_len - len(prompt)
        if not prompt:
            raise BadRequest("the prompt is empty")
        if room < 1:
            message = (
                f"the prompt has {len(prompt):,} tokens, but the context length including the answer is "
                f"{info.max_model_len:,}"
            )
            raise BadRequest(message, hint="shorten it, or /reset the chat")
        params, ends = options.params(room, info.generation), info.eos_token_ids
        spec = RequestSpec(request_id=secrets.token_hex(8), prompt=tuple(prompt), params=params, eos_token_ids=ends)
        text = IncrementalDetokenizer(self.tokenizer)
        async with contextlib.aclosing(cast(AsyncGenerator[Delta, None], self.client.submit(spec))) as deltas:
            async for delta in deltas:
                if count is not None:
                    count(len(delta.token_ids))
                yield text.push(delta.token_ids).text
                if delta.error is not None:
                    raise FdError(delta.error)
        yield text.flush().text


@dataclass(frozen=True, slots=True)
class ServerChatBackend:
    """Generates with an OpenAI-compatible server."""

    api: ApiClient
    model: str

    def chat(
        self, messages: Sequence[Message], options: SamplingOptions, count: TokenCount | None = None
    ) -> AsyncGenerator[str, None]:
        """Answer a conversation."""
        return self._generate("/v1/chat/completions", {"messages": list(messages)}, options, count=count)

    def complete(self, prompt: str, options: SamplingOptions) -> AsyncGenerator[str, None]:
        """Continue a text."""
        # Unlike chats, completions have a short default length in this API.
        longest = {"max_tokens": 256} if options.max_tokens is None else {}
        return self._generate("/v1/completions", {"prompt": prompt, **longest}, options)

    async def _generate(
        self, path: str, asked: dict[str, Any], options: SamplingOptions, count: TokenCount | None = None
    ) -> AsyncGenerator[str, None]:
        request = {**asked, "model": self.model}
        for name, value in (("temperature", options.temperature), ("top_p", options.top_p)):
            if value is not None:
                request[name] = value
        if options.max_tokens is not None:
            request["max_tokens"] = options.max_tokens
        if options.seed is not None:
            request["seed"] = options.seed
        async with contextlib.aclosing(self.api.stream(path, request)) as chunks:
            async for chunk in chunks:
                if count is not None and (chunk.text or chunk.completion_tokens):
                    count(chunk.completion_tokens or 0)
                yield chunk.text


ChatBackend = EngineChatBackend | ServerChatBackend
"""Generates text chunk by chunk; closing the iterator early stops the generation."""
