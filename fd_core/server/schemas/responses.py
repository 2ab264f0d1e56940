"""Responses of the server, as values that encode to JSON and describe themselves in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fd_core.structured.workers.messages import Unenforced
from fd_core.types import PHASE_NAMES


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens served from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens read and written; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in the format of the completions API."""

    text_offset: list[int]
    """Offset of each token in the choice's text, in characters."""
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens and the chosen one, by text."""


class PromptLogprob(msgspec.Struct, gc=False):
    """One token of a prompt, or a likely alternative at its position."""

    logprob: float
    rank: int | None
    """Its rank among all tokens, 1 for the most likely."""
    decoded_token: str


class TopLogprob(msgspec.Struct, gc=False):
    """One likely token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, gc=False):
    """One chosen token and the most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities in the format of the chat API."""

    content: list[TokenLogprob]
    refusal: None = None


class _Ending(msgspec.Struct, kw_only=True):
    """End of a choice; token ids are included only if requested."""

    index: int
    finish_reason: str
    """One of OpenAI's values."""
    stop_reason: str | int | None = None
    """The stop string or the id from `stop_token_ids` that ended the text; `abort` for one that was aborted."""
    weight_version: str = ""
    """Name of the weights that computed the last token, see /v1/update_weights."""
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChoice(_Ending, kw_only=True):
    """One generated text."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    """For each token of the prompt by id, null for the first; present only if requested."""


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Unix time, seconds."""
    model: str
    system_fingerprint: str
    """Identifies model and engine: if equal, equal requests with a seed get equal texts."""
    choices: list[CompletionChoice]
    usage: Usage
    warnings: list[Unenforced] | msgspec.UnsetType = msgspec.UNSET
    """Parts of schemas without `strict` that could not be enforced; absent if there are none."""


class FunctionCall(msgspec.Struct):
    """A function and its arguments."""

    name: str
    arguments: str
    """JSON, as the model wrote it; incomplete if `max_tokens` truncated it."""


class ToolCall(msgspec.Struct, kw_only=True):
    """One call that the model requests."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """Message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    """The same as `reasoning_content`, under its newer name."""
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(_Ending, kw_only=True):
    """One generated message."""

    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Unix time, seconds."""
    model: str
    system_fingerprint: str
    """Identifies model and engine: if equal, equal requests with a seed get equal texts."""
    choices: list[ChatChoice]
    usage: Usage
    warnings: list[Unenforced] | msgspec.UnsetType = msgspec.UNSET
    """Parts of schemas without `strict` that could not be enforced; absent if there are none."""
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    """For each token of the rendered prompt by id, null for the first; present only if requested."""


class ModelCard(msgspec.Struct, kw_only=True):
    """One name under which the model answers, with the fields of OpenAI's and of Anthropic's clients."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "fd_core"
    root: str
    """The model as the engine knows it."""
    parent: str | None = None
    """Name of the model that an adapter belongs to; null for the model itself."""
    max_model_len: int
    """Longest prompt plus output, tokens."""
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    """`created` in the form of RFC 3339."""
    lifecycle: Literal["active"] = "active"


class ModelList(msgspec.Struct, kw_only=True):
    """Every name under which the model answers, all on one page."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The ids of a text."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class AddedTokenInfo(msgspec.Struct):
    """An added token of the vocabulary, with the fields of tokenizer_config.json."""

    content: str
    lstrip: bool
    normalized: bool
    rstrip: bool
    single_word: bool
    special: bool


class TokenizerInfoAnswer(msgspec.Struct, kw_only=True):
    """Properties of the tokenizer that clients need in addition to `/tokenize`."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    """The class of transformers that reads such a tokenizer."""
    bos_token: str | None
    eos_token: str | None
    vocab_size: int
    model_max_length: int
    """Longest prompt plus output, tokens."""
    added_tokens_decoder: dict[int, AddedTokenInfo]
    """By id."""
    chat_template: str | None


class DetokenizeAnswer(msgspec.Struct):
    """The text of ids."""

    prompt: str


class RequestCard(msgspec.Struct):
    """One generation that has not ended; a request with `n` texts has as many."""

    id: str
    """The request's X-Request-Id, which /v1/abort_requests accepts."""
    state: str | None
    """`waiting`, `loading`, `running` or `draining`; null if no engine has the request, or has reported it yet."""
    wait_reason: Annotated[str | None, msgspec.Meta(examples=[*PHASE_NAMES[1:], None])]
    """Why it is not computed; null while it is, or if the state is null."""
    prompt_tokens: int
    generated_tokens: int
    seconds: float
    """Time since it was submitted."""


class RequestListAnswer(msgspec.Struct):
    """Generations that have not ended, the oldest first."""

    data: list[RequestCard]
    object: str = "list"


class AbortAnswer(msgspec.Struct):
    """Ids of the aborted requests; ids that were neither running nor waiting are listed separately."""

    aborted: list[str]
    not_found: list[str]


class AdapterAnswer(msgspec.Struct):
    """Result of a request to load or unload an adapter."""

    message: str


class ControlAnswer(msgspec.Struct):
    """State of the engine that control endpoints change."""

    is_paused: bool
    """True if requests wait for /v1/resume."""
    is_sleeping: bool
    """True if requests wait for /v1/wake_up."""
    sleep_level: int
    weight_version: str
    """Name of the weights that compute."""
    success: bool = True
    """As SGLang answers."""


class LoadAnswer(msgspec.Struct):
    """Load of the server, in requests."""

    server_load: int
    """All that have not ended."""
    running: int
    waiting: int


class ModelInfoAnswer(msgspec.Struct):
    """The model, in SGLang's format."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    max_model_len: int
    architecture: str
