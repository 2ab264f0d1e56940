"""Offline use in asyncio programs: many texts at a time from one engine, without a server."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, cast

from fd_core.engine.clients.client import EngineControls
from fd_core.engine.clients.launch import open_client
from fd_core.engine.llm import Completion, Conversation, ImagePrompt, Prompt, RequestMaker, assets_of
from fd_core.errors import BadRequest
from fd_core.text.prompt_reader import PromptText
from fd_core.types import Delta, RequestSpec, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fd_core.engine.clients.client import EngineClient
    from fd_core.engine.process.messages import ControlOrder, EngineInfo


class AsyncLLM(RequestMaker, EngineControls):
    """A loaded model whose requests are awaited; its engine runs in another process.

    Keyword arguments are the fields of `fd_core.config.EngineConfig`.

    Examples:
        >>> async with AsyncLLM("smollm2") as llm:
        ...     async for answer in llm.chat([{"role": "user", "content": "Hello"}]):
        ...         print(answer.text)
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        self._assets = assets_of(model, settings)
        super().__init__(self._assets.images)
        self.tokenizer = self._assets.tokenizer
        self._client: EngineClient | None = None

    async def __aenter__(self) -> Self:
        self._client = await open_client(self._assets.config, self._assets.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running().close()

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine."""
        return self._running().info

    async def generate(
        self,
        prompt: Prompt | ImagePrompt | PromptText,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Completion]:
        """Yield the growing text for a prompt, the same object each time; options are those of `LLM.generate`.

        Closing the generator aborts the request. Raises `BadRequest` for a prompt that can never run.
        """
        [reader] = self._readers([prompt], params, n=1, stop=stop, schema=schema, adapter=adapter)
        start = time.perf_counter()
        async with aclosing(cast(AsyncGenerator[Delta], self._running().submit(reader.spec))) as deltas:
            async for delta in deltas:
                if delta.error is not None:
                    raise BadRequest(delta.error, field="prompt")
                reader.read(delta, time.perf_counter() - start)
                yield reader.completion
                if reader.ended:
                    break

    def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> AsyncGenerator[Completion]:
        """Answer a conversation, as `LLM.chat` does; `options` are those of `generate`."""
        prompt = self._rendered(
            messages,
            tools,
            chat_template,
            template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=documents,
        )
        return self.generate(prompt, params, **options)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        prompt_name: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return an embedding of each prompt, as `LLM.embed` does."""
        return await self._embed(prompts, dimensions, adapter, prompt_name)

    async def classify(
        self, prompts: Prompt | Sequence[Prompt], *, adapter: str | Sequence[str | None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the probability of each class for each prompt, as `LLM.classify` does."""
        return await self._classify(prompts, adapter)

    async def classify_tokens(self, prompts: Prompt | Sequence[Prompt]) -> list[npt.NDArray[np.float32]]:
        """Return the probability of each class for each token, as `LLM.classify_tokens` does."""
        return await self._classify_tokens(prompts)

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """Return a score for each pair of texts, as `LLM.score` does."""
        return await self._score(text_1, text_2, instruction)

    async def _compute(self, requests: Sequence[RequestSpec]) -> AsyncGenerator[Delta]:
        client, streams = self._running(), []
        try:
            for request in requests:
                streams.append(client.submit(request))
            for stream in streams:
                async for delta in stream:
                    yield delta
        finally:
            for stream in streams:
                stream.abort()

    async def control(self, order: ControlOrder) -> None:
        """Give the engine an order; requests that run are not lost."""
        await self._running().control(order)

    def _running(self) -> EngineClient:
        if self._client is None:
            raise BadRequest("the model is not loaded yet: use `async with AsyncLLM(...) as llm`", field="model")
        return self._client
