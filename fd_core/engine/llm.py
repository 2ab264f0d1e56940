"""Offline use: a model as a Python object, without server or event loop."""

from __future__ import annotations

import abc
import operator
import os
import secrets
import signal
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, Self, TypedDict, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config import EngineConfig
from fd_core.config.constraints import make_settings
from fd_core.engine.building.assets import Assets, find_assets
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.engine.process.messages import (
    ControlOrder,
    EngineInfo,
    EngineStats,
    PauseGeneration,
    ResetPrefixCache,
    ResumeGeneration,
    Sleep,
    UpdateWeights,
    WakeUp,
)
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
from fd_core.errors import BadRequest, FdError, ModelError
from fd_core.models.families.image_processor import ImageProcessor, ProcessedImage
from fd_core.structured.grammar import json_schema
from fd_core.text.chat_template import ChatTemplate, Message
from fd_core.text.detokenizer import IncrementalDetokenizer
from fd_core.text.image_files import bytes_of_data_url, processed
from fd_core.text.prompt_reader import PromptText
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import Delta, FinishReason, Pooling, RequestSpec, SamplingParams, TokenLogprobs, choice_seed
from fd_core.types.checks import check_ids, check_sampling

Prompt = str | Sequence[int]
Conversation = Sequence[Message]
_Result = TypeVar("_Result")
_BUSY: Final = (
    "another text is being streamed; read it to its end, or close its iterator, first; for requests of several threads "
    "use AsyncLLM or a server"
)
_IMAGE_PARTS: Final = ("image_url", "image_pil")


class ImagePrompt(TypedDict):
    """A text with images for `generate`: the text contains the placeholder of the model once for each image."""

    prompt: str
    multi_modal_data: Mapping[str, Any]
    """`image` is an image of Pillow, or the bytes of its file, or a list of them."""


@dataclass(slots=True)
class Completion:
    """The result of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One for each prompt token if `SamplingParams.prompt_logprobs` requested them; None for the first."""
    cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    token_times: list[float] = field(default_factory=list)
    """Seconds from the start of `generate` to the step that delivered each token."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the text; None for another end."""
    alternatives: list[Completion] = field(default_factory=list)
    """Further texts for the same prompt if more than one was requested."""

    @property
    def outputs(self) -> list[Completion]:
        """All texts for the prompt."""
        return [self, *self.alternatives]

    @property
    def ttft(self) -> float:
        """Seconds to the first token; NaN if there was none."""
        return self.token_times[0] if self.token_times else float("nan")


class CompletionReader:
    """Reads the deltas of one request into its `Completion`."""

    def __init__(self, spec: RequestSpec, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.spec = spec
        self.completion = Completion()
        params = spec.params
        self._ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *spec.eos_token_ids)
        self._detokenizer = IncrementalDetokenizer(tokenizer, stop=stop, min_tokens=params.min_tokens)

    @property
    def ended(self) -> bool:
        """True once the text is complete; its request may still run."""
        return self.completion.finish_reason is not None

    def read(self, delta: Delta, now: float) -> str:
        """Add a delta that arrived at `now`; return the text that it adds."""
        result, ids = self.completion, delta.token_ids
        is_end = delta.finish_reason is FinishReason.STOP and ids[-1:] and ids[-1] in self._ends
        found = self._detokenizer.push(ids[:-1] if is_end else ids, last=delta.finish_reason is not None)
        result.text += found.text
        result.finish_reason = delta.finish_reason
        if found.stopped_by is not None:
            result.finish_reason, result.stop_reason = FinishReason.STOP, found.stopped_by
            ids = ids[: found.consumed]
        elif is_end and ids[-1] in self.spec.params.stop_token_ids:
            result.stop_reason = ids[-1]
        result.token_ids += ids
        result.token_times += [now] * len(ids)
        result.cached_tokens += delta.cached_tokens or 0
        if delta.logprobs is not None:
            result.logprobs = (result.logprobs or []) + list(delta.logprobs[: len(ids)])
        if delta.prompt_logprobs is not None:
            result.prompt_logprobs = [None, *delta.prompt_logprobs]
        return found.text


class RequestMaker(abc.ABC):
    """Conversion of prompts and conversations to requests, each with the reader of its text."""

    tokenizer: Tokenizer

    def __init__(self, images: ImageProcessor | None) -> None:
        """`images`: processor of the model's images; None if it takes none."""
        self._images = images
        self._name, self._requests = secrets.token_hex(4), 0

    @property
    @abc.abstractmethod
    def info(self) -> EngineInfo:
        """Properties of the engine."""

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's authors recommend."""
        defaults = self.info.generation
        return SamplingParams(max_tokens=defaults.max_new_tokens or SamplingParams().max_tokens, **defaults.sampling())

    def _readers(
        self,
        items: Sequence[Prompt | ImagePrompt | PromptText],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        n: int,
        stop: str | Sequence[str] | None,
        schema: Mapping[str, Any] | None,
        adapter: str | Sequence[str | None] | None,
    ) -> list[CompletionReader]:
        """Return the reader of each text, with its request. Raises `BadRequest`."""
        if not self.info.generates:
            raise BadRequest(
                f"{self.info.model} has no output projection and cannot generate text; use embed", field="model"
            )
        if n < 1:
            raise BadRequest(f"n is {n}; expected at least 1", field="n")
        given = [params or self.default_params()] * len(items) if not isinstance(params, Sequence) else list(params)
        if len(given) != len(items):
            raise BadRequest(f"got {len(items)} prompts but {len(given)} sampling parameters", field="params")
        grammar = None if schema is None else json_schema(schema, field="schema")
        for parameters in given:
            check_sampling(parameters, self.info.vocab_size)
        stops = _stop_strings(stop)
        readers = []
        for item, each, digest in zip(items, given, self._digests(adapter, len(items)), strict=True):
            prompt = self._read(item)
            for choice in range(n):
                spec = RequestSpec(
                    request_id=f"{self._name}-{self._requests}",
                    prompt=prompt.ids,
                    images=prompt.images,
                    params=msgspec.structs.replace(
                        each, seed=choice_seed(each.seed, choice), grammar=each.grammar if grammar is None else grammar
                    ),
                    eos_token_ids=self.info.eos_token_ids,
                    adapter=digest,
                )
                self._requests += 1
                readers.append(CompletionReader(spec, self.tokenizer, stops))
        return readers

    def _rendered(
        self,
        messages: Conversation,
        tools: Sequence[Mapping[str, Any]] | None,
        source: str | None,
        **rendering: Any,
    ) -> PromptText:
        """Return the prompt of a conversation; `rendering` are further arguments of `ChatTemplate.render`."""
        template = ChatTemplate.of(self.tokenizer, source)
        if template is None:
            raise ModelError(
                f"{self.info.model} has no chat template; pass chat_template, or use generate", field="model"
            )
        messages, images = self._images_of(messages)
        placeholder = self._images.placeholder if images and self._images is not None else ""
        text = template.render(messages, tools, image_text=placeholder, **rendering)
        return self._placed(text, images, add_special=False)

    def _images_of(self, messages: Conversation) -> tuple[Conversation, list[ProcessedImage]]:
        """Return the messages with a part of type `image` at the place of each image, and the images."""
        turns, images = [], list[tuple[Any, str]]()
        for index, message in enumerate(messages if isinstance(messages, Sequence) else ()):
            parts = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(parts, list | tuple):
                parts = list(parts)
                for number, part in enumerate(parts):
                    kind = part.get("type") if isinstance(part, Mapping) else None
                    if kind in _IMAGE_PARTS:
                        images.append((part.get(kind), f"messages[{index}].content[{number}].{kind}"))
                        parts[number] = {"type": "image"}
                message = {**message, "content": parts}
            turns.append(message)
        return (turns, self._processed(images)) if images else (messages, [])

    def _processed(self, images: Sequence[tuple[Any, str]]) -> list[ProcessedImage]:
        """Process images, each with its field: one of Pillow, the bytes of its file, a data URL, or an object with it.

        Raises `BadRequest`.
        """
        from PIL.Image import Image

        found = []
        for image, place in images:
            if self._images is None:
                raise BadRequest(f"{place}: {self.info.model} takes no images", field=place)
            given = image.get("url") if isinstance(image, Mapping) else image
            data = bytes_of_data_url(given, place) if isinstance(given, str) else given
            if not isinstance(data, bytes | Image):
                raise BadRequest(
                    f"{place}: expected an image of Pillow or data:image/...;base64,...; other URLs are not read "
                    "offline: open the file with PIL.Image.open",
                    field=place,
                )
            process = self._images.process if len(images) == 1 else self._images.process_among
            found.append(processed(process, data, place))
        return found

    def _placed(self, text: str, images: Sequence[ProcessedImage], add_special: bool) -> PromptText:
        """Return a text with images at its placeholders. Raises `BadRequest` for another number of them."""
        if not images or self._images is None:
            return PromptText(tuple(self.tokenizer.encode(text, add_special=add_special)), None)
        ids = self.tokenizer.encode(self._images.expand(text, images), add_special=add_special)
        return PromptText(tuple(ids), None, self._images.place(ids, images))

    def _read(self, prompt: Prompt | ImagePrompt | PromptText) -> PromptText:
        """Return the ids and images of a prompt. Raises `BadRequest`."""
        if isinstance(prompt, Mapping):
            text, data = prompt.get("prompt"), prompt.get("multi_modal_data")
            if not isinstance(text, str) or not isinstance(data, Mapping) or [*data] != ["image"]:
                raise BadRequest("a prompt with images needs text as prompt, and image alone in multi_modal_data")
            given = data["image"] if isinstance(data["image"], list | tuple) else [data["image"]]
            images = self._processed([(each, f"multi_modal_data.image[{at}]") for at, each in enumerate(given)])
            prompt = self._placed(text, images, add_special=True)
        if isinstance(prompt, PromptText):
            return prompt._replace(ids=self._tokens(prompt.ids))
        return PromptText(self._tokens(prompt), None)

    async def _embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        dimensions: int | None,
        adapter: str | Sequence[str | None] | None,
        prompt_name: str | None,
    ) -> npt.NDArray[np.float32]:
        check_dimensions(dimensions, self.info.state_size)
        settings = self.info.vectors
        prefix = prompt_of(settings, prompt_name)
        items = [prefix + each if isinstance(each, str) else each for each in _as_list(prompts)]
        vectors = [vector_of(pooled, settings, dimensions) for pooled in await self._pooled(items, adapter)]
        return np.array(vectors, np.float32).reshape(len(vectors), dimensions or self.info.state_size)

    async def _classify(
        self, prompts: Prompt | Iterable[Prompt], adapter: str | Sequence[str | None] | None
    ) -> npt.NDArray[np.float32]:
        classifier = require_classifier(self.info.vectors, of_tokens=False)
        pooling = Pooling(classifier.pooling)
        found = [probabilities_of(pooled, classifier) for pooled in await self._pooled(prompts, adapter, pooling)]
        return np.array(found, np.float32).reshape(len(found), len(classifier.labels))

    async def _classify_tokens(self, prompts: Prompt | Iterable[Prompt]) -> list[npt.NDArray[np.float32]]:
        classifier = require_classifier(self.info.vectors, of_tokens=True)
        return [probabilities_of(pooled, classifier) for pooled in await self._pooled(prompts, None, Pooling("all"))]

    async def _score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], instruction: str | None
    ) -> list[float]:
        ones, others = ([side] if isinstance(side, str) else [*side] for side in (text_1, text_2))
        ones = ones * len(others) if len(ones) == 1 else ones
        if len(ones) != len(others):
            raise BadRequest(f"got {len(ones)} and {len(others)} texts; expected 1 or equal numbers", field="text_2")
        settings = self.info.vectors
        if (judge := settings.judge) is None:
            if settings.second_text is not None and settings.classifier is not None and instruction is None:
                pairs = zip(ones, others, strict=True)
                prompts = [self.tokenizer.encode(pair, second_text=settings.second_text) for pair in pairs]
                found = await self._pooled(prompts, None)
                return [float(probabilities_of(each, settings.classifier)[0, 0]) for each in found]
            if instruction is not None:
                raise BadRequest("this model compares vectors; it takes no instruction", field="instruction")
            texts = [*dict.fromkeys((*ones, *others))]
            vector = dict(zip(texts, await self._embed(texts, None, None, None), strict=True))
            return [similarity(vector[one], vector[other]) for one, other in zip(ones, others, strict=True)]
        pooling = Pooling("tokens", judging_tokens(self.tokenizer, judge, self.info.vocab_size))
        texts = [judged_prompt(*pair, instruction or INSTRUCTION) for pair in zip(ones, others, strict=True)]
        ids = [self.tokenizer.encode(text, add_special=False) for text in texts]
        return [probability_of_yes(pooled) for pooled in await self._pooled(ids, None, pooling)]

    async def _pooled(
        self,
        prompts: Prompt | Iterable[Prompt],
        adapter: str | Sequence[str | None] | None,
        pooling: Pooling | None = None,
    ) -> list[bytes]:
        items = _as_list(prompts)
        digests = self._digests(adapter, len(items))
        pooling, prefix = pooling or Pooling(self.info.vectors.pooling), secrets.token_hex(4)
        found: dict[str, bytes] = {}
        requests = [
            RequestSpec(
                request_id=f"{prefix}-{index}",
                prompt=self._tokens(item),
                params=ONE_TOKEN,
                adapter=digest,
                pooling=pooling,
            )
            for index, (item, digest) in enumerate(zip(items, digests, strict=True))
        ]
        async with aclosing(self._compute(requests)) as deltas:
            async for delta in deltas:
                if delta.error is not None:
                    raise BadRequest(f"prompt {delta.request_id.rpartition('-')[2]}: {delta.error}", field="prompts")
                if delta.pooled is not None:
                    found[delta.request_id] = delta.pooled
        return [found[f"{prefix}-{index}"] for index in range(len(items))]

    @abc.abstractmethod
    def _compute(self, requests: Sequence[RequestSpec]) -> AsyncGenerator[Delta]:
        """Yield the deltas of requests. Closing it aborts what still runs."""

    def _digests(self, adapter: str | Sequence[str | None] | None, count: int) -> list[str]:
        """Return the digest of each prompt's adapter, empty for none."""
        names = [adapter] * count if adapter is None or isinstance(adapter, str) else [*adapter]
        if len(names) != count:
            raise BadRequest(f"got {count} prompts but {len(names)} adapters", field="adapter")
        known = {info.name: info.digest for info in self.info.adapters}
        for name in names:
            if name is not None and name not in known:
                there = ", ".join(known) or "none"
                raise BadRequest(f"unknown adapter {name!r}; loaded: {there}", field="adapter")
        return ["" if name is None else known[name] for name in names]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of a prompt. Raises `BadRequest` for ids that the model has no embedding row for."""
        if isinstance(prompt, str):
            ids = tuple(self.tokenizer.encode(prompt))
        else:
            try:
                ids = tuple(each if isinstance(each, bool) else operator.index(each) for each in prompt)
            except TypeError as error:
                raise BadRequest("prompts: expected text or a list of integers", field="prompts") from error
        check_ids(ids, self.info.vocab_size, "prompts", text_of=self.tokenizer.token_text)
        return ids


class LLM(RequestMaker):
    """A loaded model.

    Keyword arguments are the fields of `fd_core.config.EngineConfig`; `lora_modules` may be a mapping of names to
    folders as well. Not safe for several threads, and of use only in the process that loaded it.

    Examples:
        >>> llm = LLM("smollm2")
        >>> llm.generate("The capital of France is", SamplingParams(max_tokens=5, temperature=0))[0].text
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        assets = assets_of(model, settings)
        self.tokenizer = assets.tokenizer
        self._engine: Engine = load_engine(assets.config, assets.path, progress=lambda *_: None)
        super().__init__(assets.images)
        self._busy, self._closed = threading.Lock(), False
        self._process = os.getpid()
        self._close_engine = weakref.finalize(self, self._engine.close)
        self._close_engine.atexit = False

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be sent to another process; load the model there")

    @property
    def info(self) -> EngineInfo:
        """Properties of the engine."""
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        """Gauges and counters of the engine."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | ImagePrompt | Iterable[Prompt | ImagePrompt | PromptText],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        on_delta: Callable[[int, Delta], None] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Complete prompts, all at once, in the order given.

        A prompt is text, token ids, or an `ImagePrompt`: `{"prompt": text, "multi_modal_data": {"image": images}}`.
        `params` applies to every prompt or is one for each; None takes `default_params`. Each prompt gets `n` texts,
        with seeds derived from the one of its parameters. A text ends where the context does, whatever `max_tokens` is,
        and before the first of the strings `stop`, and matches the JSON schema `schema`. `on_delta(index, delta)` is
        called as tokens arrive, with the index of the text. `adapter` names one of `lora_modules` for every prompt, or
        one or None for each. Raises `BadRequest` for a prompt that can never run and for a parameter out of range. A
        step that fails raises: there is no second engine here to resume on.
        """
        items = _as_list(prompts)
        readers = self._readers(items, params, n=n, stop=stop, schema=schema, adapter=adapter)
        with closing(self._deltas(readers)) as deltas:
            for index, delta, _ in deltas:
                if on_delta is not None:
                    on_delta(index, delta)
        texts = [reader.completion for reader in readers]
        for first in range(0, len(texts), n):
            texts[first].alternatives = texts[first + 1 : first + n]
        return texts[::n]

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation or several; messages and tools are OpenAI's, `options` are those of `generate`.

        With `continue_final_message` the text continues the last message, and with `add_generation_prompt=False` the
        prompt does not begin an answer; `documents` are for templates that support them.

        A part of type `image_url` contains a data URL, one of type `image_pil` an image of Pillow or the bytes of its
        file. The text is what the model writes: tool calls and reasoning are not parsed. Raises `BadRequest` for
        messages that the template rejects, and `ModelError` for a model without a template.
        """
        conversations: list[Any] = [*messages]  # which may be an iterator
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        rendering = {
            "template_kwargs": chat_template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "documents": documents,
        }
        prompts = [self._rendered(each, tools, chat_template, **rendering) for each in conversations]
        return self.generate(prompts, params, **options)

    def stream(
        self,
        prompt: Prompt | ImagePrompt,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        schema: Mapping[str, Any] | None = None,
        adapter: str | None = None,
    ) -> Iterator[str]:
        """Yield the text for one prompt as it is generated; options are as in `generate`.

        Closing the iterator aborts the request. Raises `BadRequest` while another iterator is open.
        """
        readers = self._readers([prompt], params, n=1, stop=stop, schema=schema, adapter=adapter)
        with closing(self._deltas(readers)) as deltas:
            for _, _, text in deltas:
                if text:
                    yield text

    def _deltas(self, readers: Sequence[CompletionReader]) -> Generator[tuple[int, Delta, str]]:
        """Run the requests of readers; yield (index, delta, text that it adds). Closing it aborts what still runs."""
        index_of = {reader.spec.request_id: index for index, reader in enumerate(readers)}
        start = time.perf_counter()
        with closing(self._run([reader.spec for reader in readers])) as steps:
            for deltas in steps:
                now = time.perf_counter() - start
                for delta in deltas:
                    index = index_of.get(delta.request_id)
                    if index is None:
                        continue
                    if delta.error is not None:
                        raise BadRequest(f"prompt {index}: {delta.error}", field="prompts")
                    text = readers[index].read(delta, now)
                    if readers[index].ended:
                        del index_of[delta.request_id]
                        if delta.finish_reason is None:
                            self._engine.abort([delta.request_id])
                    yield index, delta, text

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        adapter: str | Sequence[str | None] | None = None,
        prompt_name: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return an embedding of each prompt, text or token ids: float32[n, H], or [n, dimensions] if cut.

        Pooling and length are those of the checkpoint, see `EngineInfo.vectors`, and of the setting `pooling`;
        `adapter` is as in `generate`. `prompt_name` selects the declared prompt that precedes texts. Raises
        `BadRequest` for a prompt that can never run, for an unknown adapter or name and for `dimensions` out of range.
        """
        return _finished(self._embed(prompts, dimensions, adapter, prompt_name))

    def classify(
        self, prompts: Prompt | Iterable[Prompt], *, adapter: str | Sequence[str | None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the probability of each class for each prompt, text or token ids: float32[n, classes].

        `EngineInfo.vectors.classifier` has their labels; `adapter` is as in `generate`. Raises `BadRequest` for a
        checkpoint without a classification layer and for a prompt that can never run.
        """
        return _finished(self._classify(prompts, adapter))

    def classify_tokens(self, prompts: Prompt | Iterable[Prompt]) -> list[npt.NDArray[np.float32]]:
        """Return the probability of each class for each token of each prompt, float32[tokens, classes].

        Raises `BadRequest` for a checkpoint that does not classify tokens.
        """
        return _finished(self._classify_tokens(prompts))

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """Return a score for each pair of texts: the probability of yes from a model that scores pairs, else a cosine.

        One text is paired with each of the other side. `instruction` replaces the question that is put to a model that
        scores pairs. Raises `BadRequest` for sides of different lengths.
        """
        return _finished(self._score(text_1, text_2, instruction))

    async def _compute(self, requests: Sequence[RequestSpec]) -> AsyncGenerator[Delta]:
        with closing(self._run(requests)) as steps:
            for deltas in steps:
                for delta in deltas:
                    yield delta

    def _run(self, requests: Sequence[RequestSpec]) -> Generator[list[Delta]]:
        """Compute requests until all have ended. An early exit, such as Ctrl-C, aborts them: none is left running."""
        self._require_open()
        if self.info.stopped:
            raise BadRequest("the model is paused or sleeps; call resume() or wake_up() first")
        if not self._busy.acquire(blocking=False):
            raise BadRequest(_BUSY)
        try:
            for request in requests:
                yield _uninterrupted(self._engine.submit, request)
            while self._engine.has_work:
                self._require_open()
                yield _uninterrupted(self._engine.step)
        finally:
            _uninterrupted(self._engine.abort_all)
            self._busy.release()

    def pause(self) -> None:
        """Reject requests until `resume`; an open stream has to end first."""
        self._control(PauseGeneration())

    def resume(self) -> None:
        """Accept requests again."""
        self._control(ResumeGeneration())

    def sleep(self, level: int = 1) -> None:
        """Release the memory of the KV cache, at level 2 also that of the weights, until `wake_up`."""
        self._control(Sleep(level))

    def wake_up(self) -> None:
        """Restore KV cache and weights."""
        self._control(WakeUp())

    def reset_prefix_cache(self) -> None:
        """Forget the prefixes in the device cache."""
        self._control(ResetPrefixCache())

    def update_weights(self, path: str | Path, version: str | None = None) -> None:
        """Replace the weights by those in a folder, of the same shapes; `version` names them in `info`."""
        self._control(UpdateWeights(str(path), version))

    def _control(self, order: ControlOrder) -> None:
        self._require_idle()
        results: list[FdError | None] = []
        self._engine.control(order, results.append)
        while not results:
            _uninterrupted(self._engine.step)
        if (error := results[0]) is not None:
            raise error

    def _require_open(self) -> None:
        if self._process != os.getpid():
            raise BadRequest(
                f"the model was loaded in process {self._process}, whose threads are not in a fork; load it there too",
                field="model",
            )
        if self._closed:
            raise BadRequest("the model was closed; load it again", field="model")

    def _require_idle(self) -> None:
        self._require_open()
        if self._busy.locked():
            raise BadRequest(_BUSY)

    def close(self) -> None:
        """Stop the engine's threads; further calls fail. The end of a `with` block and of the object do the same."""
        self._closed = True
        if self._process == os.getpid():
            self._close_engine()


def assets_of(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> Assets:
    """Return the files of a model; `settings` are fields of `EngineConfig`. Raises `ConfigError` or `ModelError`."""
    modules = settings.get("lora_modules")
    if isinstance(modules, Mapping):
        settings = {**settings, "lora_modules": tuple(f"{name}={folder}" for name, folder in modules.items())}
    return find_assets(make_settings(EngineConfig, {"model": os.fspath(model), **settings}))


def _stop_strings(stop: Any) -> list[str]:
    """Return the strings that end a text. Raises `BadRequest` for others than texts."""
    strings = () if stop is None else stop if isinstance(stop, list | tuple) else (stop,)
    if not all(isinstance(each, str) for each in strings):
        raise BadRequest(f"stop: expected a text or a list of texts, got {str(stop)[:40]}", field="stop")
    return [*strings]


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes):
        raise BadRequest("prompts: expected text or token ids, got bytes", field="prompts", hint="decode them first")
    items = [*prompts]  # which may be an iterator
    ids = [item for item in items if isinstance(item, int)]
    if 0 < len(ids) < len(items):
        raise BadRequest("prompts mixes token ids and prompts", field="prompts")
    return [ids] if ids else items


def _uninterrupted(call: Callable[..., _Result], *args: Any) -> _Result:
    """Return the result of a call of the engine; SIGINT, as of Ctrl-C, is handled after it, and a second one at once.

    The output of an interrupted step would stay unread, and the next step would wait until its timeout.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return call(*args)
    held = list[tuple[int, FrameType | None]]()

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        result = call(*args)
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])
    return result


def _finished(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(_Result, end.value)
    raise RuntimeError("the coroutine is suspended")
