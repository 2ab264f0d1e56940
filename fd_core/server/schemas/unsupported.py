"""Fields of other servers that are not supported here: rejected by name, never ignored. Each is rejected unless its
value has no effect (null, or the values listed with it). Fields that cannot change the text are accepted and do
nothing. Any other unknown field is ignored and named in the answer's header `X-Ignored-Fields`, so that a misspelt
field is found. A path such as `messages[].audio` names a field within an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fd_core.server.schemas.requests import ChatRequest


class Refusal(NamedTuple):
    """Reason why a field is rejected, and the values without effect."""

    reason: str
    neutral: tuple[Any, ...] = ()


HARMLESS: Final = frozenset(
    """
    metadata prompt_cache_key prompt_cache_retention safety_identifier service_tier
    stream_options.include_obfuscation messages[].refusal messages[].annotations collect_metrics trace_context
    max_streaming_response_tokens return_cached_tokens_details stream_interval session_id routed_experts_start_len
    routed_experts_prompt_start cache_prompt
    """.split()
)

_REASONING: Final = Refusal("use max_completion_tokens for the whole answer and reasoning_max_tokens for its reasoning")
_PLACEMENT: Final = Refusal("the router assigns workers; see --role")
_PROCESSORS: Final = Refusal("the server runs no code from requests", ([], {}, ""))
_ALWAYS: Final = Refusal("only the default true is supported", (True,))
_NOT_SHOWN: Final = Refusal("responses cannot include it", (False, 0))

_SAMPLER: Final = Refusal("use temperature, top_p or min_p", (0, -1, []))

OTHER_SAMPLERS: Mapping[str, Refusal] = {
    **dict.fromkeys(("typical_p", "top_a", "tfs_z"), Refusal("use top_p or min_p", (0, 1))),
    **dict.fromkeys(("mirostat", "xtc_probability"), _SAMPLER),
    "dry_multiplier": Refusal("use repetition_penalty", (0,)),
    "repeat_penalty": Refusal("use repetition_penalty", (1,)),
    "no_repeat_ngram_size": Refusal("use repetition_penalty", (0,)),
    "repetition_detection": Refusal("repetition does not end a text; use repetition_penalty or stop", ({},)),
    **dict.fromkeys(("dynatemp_range", "top_n_sigma", "samplers", "penalty_alpha"), _SAMPLER),
    **dict.fromkeys(("watermarking", "watermark"), Refusal("watermarks are not supported", (False,))),
    "do_sample": Refusal("use temperature 0 for the most likely token", (True,)),
    "use_beam_search": Refusal("beam search is not supported", (False,)),
    "num_beams": Refusal("beam search is not supported", (1,)),
    "length_penalty": Refusal("it belongs to beam search, which is not supported", (1,)),
    "early_stopping": Refusal("it belongs to beam search, which is not supported", (False,)),
    "temp_scaled_logprobs": Refusal("log-probabilities are those of the model, before any parameter", (False,)),
    "top_p_normalized_logprobs": Refusal("log-probabilities are those of the model, before any parameter", (False,)),
}

_INSTEAD: Final = {
    **dict.fromkeys(("max_new_tokens", "n_predict", "max_length", "max_output_tokens"), "max_completion_tokens"),
    **dict.fromkeys(("random_seed", "sampling_seed"), "seed"),
    **dict.fromkeys(("stop_sequences", "stop_words", "stop_strings"), "stop"),
    **dict.fromkeys(("banned_strings", "banned_tokens"), "bad_words"),
    **dict.fromkeys(("reasoning_budget", "thinking_budget", "thinking_budget_tokens"), "reasoning_max_tokens"),
    "min_length": "min_tokens",
    "num_return_sequences": "n",
    "n_probs": "logprobs",
    "input_ids": "prompt_token_ids",
    "json_mode": "response_format",
    "return_prompt_token_ids": "return_token_ids",
    "reasoning": "reasoning_effort",
    "thinking": "enable_thinking",
}
"""Names of other servers for supported fields."""
_BESIDE: Final = Refusal("send its fields at the top level of the request", ({},))

_BOTH: Mapping[str, Refusal] = {
    **OTHER_SAMPLERS,
    **{name: Refusal(f"use {ours}", ([], {}, "", False)) for name, ours in _INSTEAD.items()},
    **dict.fromkeys(("extra_body", "sampling_params", "parameters", "options"), _BESIDE),
    **dict.fromkeys(("separate_reasoning", "stream_reasoning", "detokenize"), _ALWAYS),
    "guided_decoding_backend": Refusal("there is one backend, llguidance", ("", "auto", "guidance")),
    "structured_outputs.disable_additional_properties": Refusal("set additionalProperties in the schema", (False,)),
    "functions": Refusal("use tools", ([],)),
    "function_call": Refusal("use tool_choice", ("none", "auto")),
    "response_max_tokens": _REASONING,
    "stop_regex": Refusal("use stop for strings, or stop_token_ids", ("", [])),
    "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
    "logprob_token_ids": Refusal("log-probabilities are those of the most likely tokens; use top_logprobs", ([],)),
    "include_draft_logprobs": _NOT_SHOWN,
    "include_logprobs_decode_token": _ALWAYS,
    "moderation": Refusal("no text is moderated"),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "completion_token_ids": Refusal("append them to the prompt, in prompt_token_ids", ([],)),
    **dict.fromkeys(
        ("lora_path", "lora", "lora_request", "adapter_id"),
        Refusal("send the name of the adapter as model", ("", [])),
    ),
    **dict.fromkeys(("web_search_options", "enable_search"), Refusal("web search is not supported", (False,))),
    **dict.fromkeys(("logits_processors", "logits_processors_args", "custom_logit_processor"), _PROCESSORS),
    **dict.fromkeys(("custom_params", "vllm_xargs"), _PROCESSORS),
    "session_params": Refusal("send the whole prompt with each request; cached prefixes are reused", ({},)),
    "extra_key": Refusal("use cache_salt", ("",)),
    "kv_transfer_params": Refusal(
        "the router pairs prefill and decode workers, which transfer KV directly; see --role", ({},)
    ),
    **dict.fromkeys(("ec_transfer_params", "disaggregate_info", "bootstrap_host", "bootstrap_port"), _PLACEMENT),
    "bootstrap_room": _PLACEMENT,
    **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"), _PLACEMENT),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_prompt_text"), _NOT_SHOWN),
    **dict.fromkeys(("return_token_offsets", "return_assistant_tokens_mask", "return_meta_info"), _NOT_SHOWN),
    **dict.fromkeys(("return_mm_kwargs", "return_spec_tokens_details"), _NOT_SHOWN),
    **dict.fromkeys(
        ("media_io_kwargs", "mm_processor_kwargs", "mm_payload"),
        Refusal("images are parts of messages, processed as the model's settings have it", ({},)),
    ),
    "mm_hashes": Refusal("images are named by their content", ([],)),
    "spaces_between_special_tokens": _ALWAYS,
}

_CONVERSATION: Final = Refusal("use /v1/chat/completions for conversations", ([], {}, "", True, False, "none", "auto"))

COMPLETIONS: Mapping[str, Refusal] = {
    **_BOTH,
    "suffix": Refusal("insertion before a suffix is not supported", ("", {})),
    "top_logprobs": Refusal("logprobs is the number of likely tokens here", (0,)),
    **dict.fromkeys(("messages", "documents", "continue_final_message", "chat_template_kwargs"), _CONVERSATION),
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), _CONVERSATION),
    "enable_thinking": Refusal(_CONVERSATION.reason, (False,)),
    **dict.fromkeys(("reasoning_max_tokens", "thinking_token_budget"), _CONVERSATION),
    **dict.fromkeys(("chat_template", "disable_chat_template", "add_generation_prompt"), _CONVERSATION),
}

_NEXT_MESSAGE: Final = Refusal("use continue_final_message to continue the last message", (False,))

CHAT: Mapping[str, Refusal] = {
    **_BOTH,
    "audio": Refusal("only text and images are supported"),
    "modalities": Refusal("answers are text", (["text"],)),
    "prediction": Refusal("predicted output is not supported"),
    "verbosity": Refusal("verbosity is not configurable", ("medium",)),
    "store": Refusal("chat completions are not stored", (False,)),
    "echo": Refusal("echo is only supported at /v1/completions", (False,)),
    "best_of": Refusal("use n", (1,)),
    "task": Refusal("tasks are not supported; put the instruction into a message"),
    "prompt": Refusal("use /v1/completions for plain prompts", ("", [])),
    "messages[].audio": Refusal("only text and images are supported"),
    "messages[].prefix": _NEXT_MESSAGE,
    "messages[].partial": _NEXT_MESSAGE,
    "messages[].tools": Refusal("use the top-level field tools", ([],)),
}

_ELSEWHERE: Final = "it is supported at /v1/chat/completions"
_FROM_CHATS: Mapping[str, Refusal] = {
    **dict.fromkeys(ChatRequest.__struct_fields__, Refusal(_ELSEWHERE, (False, "", [], {}))),
    **dict.fromkeys(("n", "repetition_penalty"), Refusal(_ELSEWHERE, (1,))),
    **dict.fromkeys(
        ("skip_special_tokens", "include_reasoning", "add_generation_prompt"), Refusal(_ELSEWHERE, (True,))
    ),
    **dict.fromkeys(("seed", "reasoning_max_tokens", "thinking_token_budget", "max_tokens"), Refusal(_ELSEWHERE)),
    "max_completion_tokens": Refusal("use max_tokens"),
    **CHAT,
}


def beside_chats(own: Mapping[str, Refusal]) -> Mapping[str, Refusal]:
    """Return the unsupported fields of another API over chats: `own`, and all chat fields that it does not read."""
    return {**_FROM_CHATS, **own}


_POOLED: Mapping[str, Refusal] = {
    "stream": Refusal("embeddings and scores cannot be streamed", (False,)),
    "messages": Refusal("use /v1/chat/completions for conversations", ([],)),
    "truncate": Refusal("use truncate_prompt_tokens", (False, "none", "NONE")),
    "max_tokens_per_doc": Refusal("use truncate_prompt_tokens"),
    "rank_fields": Refusal("documents must be texts"),
    "input_type": Refusal("prepend the instruction to the text, in the format of the model"),
    "prompt_name": Refusal("prepend the instruction to the text, in the format of the model"),
    "pooling_type": Refusal("pooling is set when the server starts, with --pooling"),
    "embed_dtype": Refusal("vectors are float32", ("float32",)),
    "embedding_types": Refusal("use encoding_format", (["float"],)),
    "output_dtype": Refusal("vectors are float32", ("float",)),
    "normalize": Refusal("the checkpoint decides if vectors are normalized"),
    "activation": Refusal("the model decides the activation of scores"),
    "use_activation": Refusal("the model decides the activation of scores", (True,)),
}
POOLING: Mapping[str, Refusal] = {
    **_POOLED,
    **dict.fromkeys(("encoding_format", "dimensions"), Refusal("use /v1/embeddings", ("float",))),
}
POOLED: Mapping[str, Refusal] = {
    **_POOLED,
    "task": Refusal("prepend the instruction to the text, in the format of the model"),
}
