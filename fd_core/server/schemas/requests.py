"""Request bodies of the server. Ranges stated here are checked while decoding and appear in the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from fd_core.server.preprocess.structured_fields import StructuredFields
from fd_core.types import Count, LogitBias, MinP, NumLogprobs, Penalty, RepetitionPenalty, Temperature, TokenCount, TopP

MAX_STOP: Final = 16
"""Stop strings of every API. OpenAI states 4 for chats and completions; Anthropic and vLLM state no limit."""
MAX_TOOLS: Final = 1024
MAX_CHOICES: Final = 128
"""Most texts of one HTTP request: prompts times n."""
MAX_STOP_CHARS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_LISTED: Final = 1024
"""Most words, or sequences of tokens, that one request may ban."""
MAX_IMAGES: Final = 1024
_MAX_IDS: Final = 256
_MAX_WORD: Final = 64
_MAX_ALLOWED: Final = 2**20


class ApiLimits(NamedTuple):
    """Limits on the requests of one API, each with its reference; `docs/serve/apis.md` has the same table."""

    tool_name: int
    messages: int


CHAT: Final = ApiLimits(tool_name=64, messages=4096)
"""OpenAI, "Create chat completion": `function.name` has at most 64 characters. No limit of messages is stated."""
RESPONSES: Final = ApiLimits(tool_name=128, messages=4096)
"""OpenAI, "Create a model response": `FunctionToolParam.name` has 1 to 128 characters. No limit of items is stated."""
MESSAGES: Final = ApiLimits(tool_name=128, messages=100_000)
"""Anthropic, "Create a Message": `Tool.name` has 1 to 128 characters, `messages` at most 100,000 entries."""

MAX_TOOL_NAME: Final = max(CHAT.tool_name, RESPONSES.tool_name, MESSAGES.tool_name)


class ToolFunction(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; any object if left out."""
    strict: bool | None = None
    """True if a call must always match the schema."""


class Tool(msgspec.Struct, kw_only=True):
    """A tool; functions are the only kind."""

    type: str = "function"
    function: ToolFunction


class ChosenFunction(msgspec.Struct, kw_only=True):
    """The name of a tool."""

    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    """The tool that must be called."""

    type: str = "function"
    function: ChosenFunction


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> Tool:
    """Return the tool that a function is."""
    return Tool(function=ToolFunction(name=name, description=description, parameters=parameters, strict=strict))


def named_choice(name: str) -> NamedChoice:
    """Return the choice of the tool of this name."""
    return NamedChoice(function=ChosenFunction(name=name))


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = str | NamedChoice
"""`none`, `auto`, `required`, or a tool."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
BadIds = Annotated[list[TokenId], Meta(min_length=1, max_length=_MAX_WORD)]
_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stop = Annotated[
    str | list[StopString],
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string", "maxLength": MAX_STOP_CHARS},
                {"type": "array", "maxItems": MAX_STOP, "items": _STOP_SCHEMA},
            ]
        }
    ),
]
_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompt = Annotated[
    str | list[str | int | list[TokenId]],
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": {"type": "string", "minLength": 1}},
                _IDS_SCHEMA,
                {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": _IDS_SCHEMA},
            ]
        }
    ),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Optional contents of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Every event includes the usage so far."""


class GenerationRequest(StructuredFields, kw_only=True):
    """Fields that completions and chat share; null means the default."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    min_tokens: Count | None = None
    min_new_tokens: Count | None = None
    """Another name of `min_tokens`."""
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """0 and -1 keep every token."""
    min_p: MinP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[int, LogitBias] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=_MAX_ALLOWED)] | None = None
    """Only these may be generated; an empty list allows all."""
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_LISTED)] | None = None
    """Never generated, at the beginning of a word or within one, as the tokenizer spells them."""
    bad_words_token_ids: Annotated[list[TokenId | BadIds], Meta(max_length=MAX_LISTED)] | None = None
    """Never generated: single tokens, and sequences of them."""
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=_MAX_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens as `token_id:ID`."""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """Most tokens of a prompt that are read; -1 reads as many as the context holds in addition to the output."""
    truncation_side: Literal["left", "right"] | None = None
    """Side on which a longer prompt is truncated: `left`, the default, keeps its end."""
    add_special_tokens: bool | None = None
    """Add the model's special tokens to a text, such as BOS; true for texts if left out, false for conversations, whose
    template does it."""
    priority: Priority | None = None
    """Lower runs first under the `priority` policy."""
    user: Annotated[str, Meta(max_length=256)] | None = None
    cache_salt: CacheSalt | None = None
    """Requests share cached prefixes only with requests of the same salt."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of /v1/completions."""

    prompt: Prompt | None = None
    prompt_token_ids: list[TokenId | list[TokenId]] | None = None
    """Read instead of `prompt`."""
    max_tokens: Count | None = None
    """0 only together with `echo`: the prompt alone is answered."""
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: NumLogprobs | None = None


class ImageUrl(msgspec.Struct, kw_only=True):
    """An image."""

    url: str
    """A data URL, or an http, https or file URL if the server allows it."""
    detail: str | None = None
    """Without effect: the model decides the size of an image."""


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message: text, an image, or an earlier refusal of the assistant."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None


class ImagePart(ContentPart, kw_only=True):
    """An image of another API."""

    field: str
    """Field of that API's request which contains it."""


def image_part(url: str, field: str) -> ImagePart:
    """Return the part of an image that another API has in `field`."""
    return ImagePart(type="image_url", image_url=url, field=field)


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user", "assistant", "tool"]})]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """Calls of an earlier answer, with arguments as the model wrote them."""
    tool_call_id: str | None = None
    """Of a tool's message: the call that it answers."""
    reasoning_content: str | None = None
    """Reasoning of the assistant before its `content`, for templates that show it."""
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    function_call: dict[str, Any] | None = None


Messages = Annotated[list[Message], Meta(max_length=CHAT.messages)]
Documents = Annotated[list[dict[str, Any]], Meta(max_length=_MAX_IDS)]
ChatTemplateSource = Annotated[str, Meta(max_length=65_536)]


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: Messages | None = None
    prompt_token_ids: list[TokenId] | None = None
    """Read instead of `messages`."""
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The text continues the last message instead of beginning another."""
    disable_chat_template: bool | None = None
    """The prompt is the plain text of the only message."""
    chat_template: ChatTemplateSource | None = None
    """One of the model's templates by name; a source to use instead only where the server was started with
    --trust-request-chat-template."""
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    """Documents that the answer may draw on, for templates that support them."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False keeps an answer to one call."""
    enable_thinking: bool | None = None
    """Another way to set `enable_thinking` of `chat_template_kwargs`."""
    reasoning_effort: Effort | None = None
    """Reasoning effort, for templates that support it; without such a template only `none` and `medium`."""
    reasoning_max_tokens: Count | None = None
    """Tokens of reasoning after which it is ended."""
    thinking_token_budget: Count | None = None
    """Another name of `reasoning_max_tokens`."""
    include_reasoning: bool | None = None
    """False leaves reasoning out of the answer."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /tokenize: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """As in `ChatRequest`, and likewise the fields below."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: ChatTemplateSource | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Documents | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """The body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None
    """False if left out: the text of every id, control tokens included."""


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/load_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=255)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Folder below --lora-folder."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=255)]
    lora_int_id: int | None = None
    """vLLM's number of the adapter; not needed, because the name identifies it."""


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/update_weights."""

    model_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Folder below --weights-folder with `config.json` and safetensors of the served model's shapes."""
    weight_version: Annotated[str, Meta(min_length=1, max_length=255, pattern="^[!-~]+$")] | None = None
    """Name of these weights in answers; by default the number of updates."""


class AbortRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/abort_requests: one of the two."""

    req_ids: Annotated[list[str], Meta(max_length=10_000)] | None = None
    abort_all: bool | None = None
