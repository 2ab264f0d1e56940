"""Prompt reading: converts texts, token id lists and conversations to token ids. Server and router share this code.

Restrictions of a server, such as unsupported roles, are checked in the server; conversations are converted
here, so that a router counts the same tokens as its workers.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from fd_core.errors import BadRequest, FdError, ModelError
from fd_core.models.catalog import resolve_model
from fd_core.models.families.image_processor import ImageProcessor, ProcessedImage
from fd_core.models.fetching.packaged import ProgressSink
from fd_core.models.opening import open_checkpoint
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.fair_thread import FairThread
from fd_core.text.template_budget import brief_renderings
from fd_core.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from fd_core.types import Image
from fd_core.types.checks import check_ids

_INLINE_CHARS: Final = 8192
"""Longer texts are read on a thread, so that streams on the event loop are not delayed."""
LONG_CHARS: Final = 131_072
"""Longer texts are read on a separate thread, so that shorter ones never wait for seconds."""
_COUNTED_CHARS: Final = 1_000_000
"""Limit of texts that are only counted: tools truncate long documents by the token counts of a server."""
_ROLE_ALIASES: Final = {"developer": "system"}
_TURN_FIELDS: Final = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Message fields that a template receives; clients send more."""
_MAX_TEMPLATES: Final = 16
_MAX_TOKEN_ID: Final = 2**31 - 1

_SAMPLE_TEXT: Final = "The 3 quick (brown) foxes\n\n\tcouldn't jump; naïve 東京 🙂 <|im_start|>  over 12,345.67 dogs?"
_SAMPLE_TURNS: Final = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": _SAMPLE_TEXT},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
)
_SAMPLE_DAY: Final = datetime(2001, 2, 3, 4, 5, 6)
"""Date for templates that use it."""

T = TypeVar("T")


class PromptText(NamedTuple):
    """A prompt as token ids, and as the text that the client gave, if it gave text."""

    ids: tuple[int, ...]
    text: str | None
    images: tuple[Image, ...] = ()


class PromptReader:
    """Reads prompts for one tokenizer and chat template. Every method but `run` blocks its thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        vocab_size: int = _MAX_TOKEN_ID + 1,
        max_chars: int | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        """Ids of prompts must be below `vocab_size`, and texts at most `max_chars` long."""
        self.images = images
        """Processor of images; None for a model that takes none."""
        self._tokenizer = tokenizer
        self._template = template
        self._vocab_size = vocab_size
        self._max_chars = max_chars
        self.thread = FairThread("fdcore-text")
        self.long_thread = FairThread("fdcore-long-text")
        """For texts of more than `LONG_CHARS`, so that reading them does not delay others."""
        self.image_thread = FairThread("fdcore-images")
        self._given_templates: dict[str, ChatTemplate] = {}
        """Templates of requests, the one used last at the end; only the thread of `run` reads them."""

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenization, from the tokens of sample texts: equal for tokenizers that agree on them."""
        ids = [self._tokenizer.encode(_SAMPLE_TEXT, add_special=special) for special in (True, False)]
        if self._template is not None:
            try:
                text = replace(self._template, now=lambda: _SAMPLE_DAY).render(_SAMPLE_TURNS)
            except FdError as error:  # such as a template without system messages; equal templates fail equally
                text = type(error).__name__
            ids.append(self._tokenizer.encode(text, add_special=False))
        return hashlib.blake2b(msgspec.json.encode(ids), digest_size=16).hexdigest()

    @property
    def template_source(self) -> str | None:
        """Jinja source of the chat template; None if there is none."""
        return None if self._template is None else self._template.source or None

    async def run(self, size: int, read: Callable[[], T], *, at_once: bool = True) -> T:
        """Return `read()` of a prompt of `size` characters: at once, or from a thread where it would block for long.

        Short texts that may take long, as templates may, are never read `at_once`. A read cancelled
        before its turn does not run.
        """
        if at_once and size <= _INLINE_CHARS:
            return read()
        return await (self.thread if size <= LONG_CHARS else self.long_thread).run(read)

    async def render(self, size: int, read: Callable[[], T], *, is_plain: bool) -> T:
        """Return `read()` of a conversation of `size` characters, from a thread: a template may take long over it.

        One that `is_plain`, short messages for the model's own template and nothing else, is tried at once first,
        within a budget of a millisecond: a turn on a thread takes as long as most renderings.
        """
        if is_plain and size <= _INLINE_CHARS:
            with contextlib.suppress(FdError), brief_renderings():
                return read()
        return await (self.thread if size <= LONG_CHARS else self.long_thread).run(read)

    def own_template(self, name: str) -> ChatTemplate | None:
        """Return one of the model's templates by its name; None if there is none of that name."""
        return None if self._template is None else self._template.of_name(name)

    @property
    def switches_reasoning(self) -> bool:
        """Return True if the chat template can switch reasoning on and off."""
        return self._template is not None and self._template.mentions("enable_thinking")

    @property
    def supports_effort(self) -> bool:
        """Return True if the chat template accepts a reasoning effort."""
        return self._template is not None and self._template.mentions("reasoning_effort")

    def close(self) -> None:
        """End the threads."""
        for thread in (self.thread, self.long_thread, self.image_thread):
            thread.close()

    def text(
        self,
        text: str,
        add_special: bool = True,
        field: str = "prompt",
        *,
        counted: bool = False,
        longest: int | None = None,
    ) -> tuple[int, ...]:
        """Return the ids of one text, given in `field`; `add_special` adds the model's special tokens, such as BOS.

        A text that is only `counted`, or truncated to the `longest` number of tokens, may be longer than the context,
        up to a million characters. Raises `BadRequest` for a text that is empty, too long for the context or not valid
        Unicode.
        """
        return _not_empty(field, self._encode(text, add_special, field, counted, longest) if text else ())

    def completion(
        self, prompt: object, add_special: bool = True, field: str = "prompt", *, longest: int | None = None
    ) -> list[PromptText]:
        """Return prompts given as a text, texts, ids or lists of ids, each truncated to the `longest` number of tokens.

        Raises `BadRequest` for mixed ones, and for one that is empty, too long or unknown, by its index.
        """
        given: Sequence[str | list[int]] = split_prompts(prompt, field)
        names = names_of(field, len(given))
        return [
            PromptText(self.text(each, add_special, names[index], longest=longest), each)
            if isinstance(each, str)
            else PromptText(self._checked_ids(each, names[index])[:longest], None)
            for index, each in enumerate(given)
        ]

    def pair(self, first: str, second: str, field: str, second_text: int, longest: int | None = None) -> PromptText:
        """Return two texts as one prompt, see `Tokenizer.encode`; raises `BadRequest` as `text` does."""
        ids = self._encode((first, second), True, field, longest=longest, second_text=second_text)
        return PromptText(self._checked_ids(_not_empty(field, ids), field), None)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_special: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[ProcessedImage] = (),
    ) -> PromptText:
        """Return the prompt of a conversation, rendered by the model's template, or by `template`, a source or the
        name of one of the model's templates. Parts of type `image` are the places of `images`.

        Control tokens come from the template; `add_special` adds the model's special tokens as well.
        `add_generation_prompt`, `continue_final_message`, `documents` and `tools` are those of `ChatTemplate.render`.
        Raises `BadRequest` if the template rejects or cannot render the conversation, if the caller's template is
        invalid, and if there is no template.
        """
        turns, size = [], 0
        for message in messages:
            if not isinstance(message, Mapping):
                raise BadRequest("expected a message as an object", field="messages")
            turn = {name: value for name in _TURN_FIELDS if (value := message.get(name)) is not None}
            if isinstance(role := turn.get("role"), str):
                turn["role"] = _ROLE_ALIASES.get(role, role)
            if isinstance(content := turn.get("content"), str):
                size += len(content)
            turns.append(turn)
        if self._max_chars is not None and size > self._max_chars:
            raise self._too_long(size, "messages")
        rendering = self._template if template is None else self._template_of(template)
        if rendering is None:
            raise BadRequest(
                "this model has no chat template; use /v1/completions, or start the server with --chat-template",
                field="messages",
            )
        try:
            text = rendering.render(
                turns,
                tools,
                add_generation_prompt,
                template_kwargs,
                continue_final_message=continue_final_message,
                documents=documents,
                image_text=self.images.placeholder if images and self.images is not None else "",
            )
        except ModelError as error:  # the model's template was compiled at startup: these messages exceed its limits
            raise BadRequest(str(error), field="messages" if template is None else "chat_template") from error
        processor = self.images if images else None
        ids = self._encode(text if processor is None else processor.expand(text, images), add_special, "messages")
        if not ids:
            raise _empty("messages")
        return PromptText(tuple(ids), None, () if processor is None else processor.place(ids, images))

    def given(self, ids: Sequence[int], field: str) -> tuple[int, ...]:
        """Return ids that a client sent in `field`; raises `BadRequest` if there are none or one is unknown."""
        return self._checked_ids(_not_empty(field, ids), field)

    def _encode(
        self,
        text: str | tuple[str, str],
        add_special: bool,
        field: str,
        counted: bool = False,
        longest: int | None = None,
        second_text: int = 0,
    ) -> list[int]:
        chars, most = len(text) if isinstance(text, str) else len(text[0]) + len(text[1]), self._max_chars
        if most is not None and chars > max(most, _COUNTED_CHARS if counted or longest is not None else 0):
            raise self._too_long(chars, field)
        ids = self._tokenizer.encode(text, add_special=add_special, second_text=second_text, longest=longest)
        if not counted and not self._fits:
            check_ids(ids, self._vocab_size, field, text_of=self._tokenizer.token_text)
        return ids

    @cached_property
    def _fits(self) -> bool:
        """Return True if every id of the tokenizer is in the model's vocabulary."""
        return self._tokenizer.vocab_size <= self._vocab_size

    def _too_long(self, chars: int, field: str) -> BadRequest:
        return BadRequest(
            f"{field} has {chars:,} characters, which exceeds the context; at most {self._max_chars:,} fit",
            field=field,
            code="context_length_exceeded",
        )

    def _template_of(self, source: str) -> ChatTemplate:
        """Return the template that a request names or contains, compiled once for repeated requests."""
        if (own := self.own_template(source)) is not None:
            return own
        found = self._given_templates.pop(source, None)
        if found is None:
            found = ChatTemplate(source, self._tokenizer.bos_token, self._tokenizer.eos_token)
        self._given_templates[source] = found
        while len(self._given_templates) > _MAX_TEMPLATES:
            del self._given_templates[next(iter(self._given_templates))]
        return found

    def _checked_ids(self, ids: Sequence[int], field: str) -> tuple[int, ...]:
        check_ids(ids, self._vocab_size, field, text_of=self._tokenizer.token_text)
        return tuple(ids)


def template_kwargs(
    kwargs: Mapping[str, Any] | None, enable_thinking: object, reasoning_effort: object
) -> Mapping[str, Any] | None:
    """Return the variables of a template that a request sets: in `chat_template_kwargs`, or in separate fields.

    An effort of `none` switches reasoning off, unless the request sets it otherwise.
    """
    named: dict[str, Any] = {}
    if isinstance(reasoning_effort, str):
        named["reasoning_effort"] = reasoning_effort
        if reasoning_effort == "none":
            named["enable_thinking"] = False
    if isinstance(enable_thinking, bool):
        named["enable_thinking"] = enable_thinking
    return {**named, **(kwargs or {})} if named else kwargs


def split_prompts(prompt: object, field: str = "prompt") -> list[str] | list[list[int]]:
    """Return the prompts of a completions request, all texts or all ids, none of them empty; raises `BadRequest`."""
    given: list[Any] = [prompt] if not isinstance(prompt, list) or (prompt and _is_ids(prompt)) else prompt
    if not given or any(each in ("", []) for each in given):
        empty = next((at for at, each in enumerate(given) if each in ("", [])), 0)
        raise _empty(names_of(field, len(given) or 1)[empty])
    if not all(isinstance(each, str) for each in given) and not all(map(_is_ids, given)):
        raise BadRequest(f"{field} mixes texts and ids; expected a text, texts, ids, or lists of ids", field=field)
    return given


def names_of(field: str, count: int) -> list[str]:
    """Return what so many prompts in a field are called in errors."""
    return [field] if count == 1 else [f"{field}[{index}]" for index in range(count)]


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _not_empty(field: str, ids: Sequence[int]) -> tuple[int, ...]:
    if not ids:
        raise _empty(field)
    return tuple(ids)


def _empty(field: str) -> BadRequest:
    return BadRequest(f"{field} is empty; at least one token is required", field=field, code="empty_prompt")


BYTES: Final = "bytes"
"""Name of the tokenizer of workers on the null backend."""


class ModelText(NamedTuple):
    """The tokenizer and the chat template of a model."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None


def find_text(name: str, *, offline: bool, progress: ProgressSink | None = None) -> ModelText:
    """Return the tokenizer and template of a model, if `offline` of one on this machine; raises `ModelError`."""
    if name == BYTES:
        tokenizer = byte_tokenizer()
    else:
        checkpoint = open_checkpoint(resolve_model(name, offline=offline, progress=progress).path)
        try:
            tokenizer = load_tokenizer(checkpoint)
        finally:
            checkpoint.close()
    return ModelText(name, tokenizer, ChatTemplate.of(tokenizer))
