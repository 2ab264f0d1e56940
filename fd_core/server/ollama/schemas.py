"""Requests and responses of Ollama's API."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from fd_core.server.schemas.requests import CHAT, MAX_IMAGES, Effort, Prompt, Seed, Stop, Tools
from fd_core.server.schemas.unsupported import OTHER_SAMPLERS, Refusal
from fd_core.types import MinP, Penalty, RepetitionPenalty, Temperature, TopP

LATEST: Final = ":latest"
"""Tag that may follow the name of a model."""
REFUSED: Final = {
    "suffix": Refusal("text is only generated at the end", ("",)),
    "template": Refusal("the template of the model is used; see --chat-template", ("",)),
    "context": Refusal("it is a token list of Ollama's models; use /api/chat", ([],)),
    "logprobs": Refusal("log-probabilities are available at /v1/chat/completions", (False,)),
    "top_logprobs": Refusal("log-probabilities are available at /v1/chat/completions", (0,)),
    **{f"options.{name}": OTHER_SAMPLERS[name] for name in ("typical_p", "tfs_z", "mirostat")},
    "options.repeat_last_n": Refusal("repeat_penalty applies to the whole text", (-1, 64)),
    "options.penalize_newline": Refusal("penalties apply to every token", (True,)),
}


Images = Annotated[list[str], Meta(max_length=MAX_IMAGES)]
"""Image files in base64."""


class Options(msgspec.Struct, kw_only=True):
    """Sampling options; those that are left out have the model's defaults."""

    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    """Most tokens of the answer; values below 1 allow as many as the context has room for."""
    temperature: Temperature | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: int | None = None
    """Without effect, as the next two: the server's settings hold."""
    num_gpu: int | None = None
    num_thread: int | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """Name and arguments of a call."""

    name: str
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)


class TurnCall(msgspec.Struct, kw_only=True):
    """A tool call."""

    function: CalledFunction


class ChatTurn(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Images | None = None
    thinking: str | None = None
    tool_calls: list[TurnCall] | None = None
    tool_name: str | None = None
    """Of a tool's message: the tool that was called."""


class OllamaRequest(msgspec.Struct, kw_only=True):
    """Fields that chats and completions share."""

    model: str
    stream: bool | None = None
    """True if left out."""
    format: Literal["", "json"] | dict[str, Any] | None = None
    """`json` for any JSON object, or the JSON schema of the answer."""
    options: Options | None = None
    think: bool | Effort | None = None
    keep_alive: Any = None
    """Without effect: the model stays loaded."""


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """The body of /api/chat."""

    messages: Annotated[list[ChatTurn], Meta(max_length=CHAT.messages)] = msgspec.field(default_factory=list)
    """Without any, the answer is that the model is loaded."""
    tools: Tools | None = None


class GenerateRequest(OllamaRequest, kw_only=True):
    """The body of /api/generate."""

    prompt: str = ""
    """Without text, the answer is that the model is loaded."""
    images: Images | None = None
    system: str | None = None
    raw: bool | None = None
    """True continues the prompt as it is, without the chat template."""


OllamaTextRequest = OllamaChatRequest | GenerateRequest


class EmbedRequest(msgspec.Struct, kw_only=True):
    """The body of /api/embed."""

    model: str
    input: Prompt
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    truncate: bool | None = None
    """False rejects a text that is too long; otherwise it loses its end."""
    options: Options | None = None
    keep_alive: Any = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """The body of /api/show."""

    model: str
    verbose: bool | None = None


class AnswerLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of a stream, or the whole answer; durations are in nanoseconds."""

    model: str
    created_at: str
    message: ChatTurn | None = None
    """Of a chat."""
    response: str | None = None
    """Of a completion."""
    thinking: str | None = None
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class ErrorText(msgspec.Struct):
    """Body of every error response."""

    error: str


class EmbedAnswer(msgspec.Struct, kw_only=True):
    """A vector of length 1 for each text."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class ModelDetails(msgspec.Struct, kw_only=True):
    """Architecture, size and format of a model."""

    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    format: str = ""
    parent_model: str = ""


class ListedName(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str = ""
    size_vram: int = 0


class TagsAnswer(msgspec.Struct):
    """The served models."""

    models: list[ListedName]


class ShowAnswer(msgspec.Struct, kw_only=True):
    """Description of a model."""

    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    template: str
    modified_at: str
    parameters: str
