"""Fields that other servers know and this one does not serve: refused by name, never ignored.

Each is refused unless its value asks for nothing (null, or what is listed with it). Fields that cannot change the
text are accepted and do nothing. Any other unknown field is ignored and named in the answer's header
`X-Ignored-Fields`, so that a misspelt field is found. A path such as `messages[].audio` names a field within an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = ["CHAT", "COMPLETIONS", "HARMLESS", "POOLED", "Refusal"]


class Refusal(NamedTuple):
    """Why a field is refused, and the values that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


HARMLESS: Final = frozenset(
    (
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "stream_options.include_obfuscation", "messages[].refusal", "messages[].annotations"),
        *("collect_metrics", "trace_context", "max_streaming_response_tokens", "return_cached_tokens_details"),
    )
)

_REASONING: Final = Refusal("use max_completion_tokens for the whole answer and reasoning_max_tokens for its reasoning")
_PLACEMENT: Final = Refusal("a router and its workers decide who computes what; see --role")
_PROCESSORS: Final = Refusal("code from requests is never run", ([], {}, ""))
_NOT_SHOWN: Final = Refusal("the answer cannot show it", (False, 0))

_OTHER_SAMPLERS: Mapping[str, Refusal] = {
    **dict.fromkeys(("typical_p", "top_a", "tfs_z"), Refusal("it is not served; use top_p or min_p", (0, 1))),
    "mirostat": Refusal("it is not served; use temperature, top_p or min_p", (0,)),
    "xtc_probability": Refusal("it is not served; use temperature, top_p or min_p", (0,)),
    "dry_multiplier": Refusal("it is not served; use repetition_penalty", (0,)),
    "repeat_penalty": Refusal("use repetition_penalty", (1,)),
    "no_repeat_ngram_size": Refusal("it is not served; use repetition_penalty", (0,)),
    "repetition_detection": Refusal("repetition does not end a text; use repetition_penalty or stop"),
    "do_sample": Refusal("use temperature 0 for the most likely token", (True,)),
    "use_beam_search": Refusal("beam search is not served", (False,)),
    "num_beams": Refusal("beam search is not served", (1,)),
    "length_penalty": Refusal("it belongs to beam search, which is not served", (1,)),
    "early_stopping": Refusal("it belongs to beam search, which is not served", (False,)),
    "temp_scaled_logprobs": Refusal("log-probabilities are those of the model, before any parameter", (False,)),
    "top_p_normalized_logprobs": Refusal("log-probabilities are those of the model, before any parameter", (False,)),
}

_BOTH: Mapping[str, Refusal] = {
    **_OTHER_SAMPLERS,
    "guided_decoding_backend": Refusal("there is one backend, llguidance", ("", "auto", "guidance")),
    "structured_outputs.disable_additional_properties": Refusal("say it in the schema", (False,)),
    "functions": Refusal("use tools", ([],)),
    "function_call": Refusal("use tool_choice", ("none", "auto")),
    "response_max_tokens": _REASONING,
    "max_new_tokens": Refusal("use max_completion_tokens"),
    "n_predict": Refusal("use max_completion_tokens"),
    "stop_regex": Refusal("texts stop at strings, given as stop, and at tokens", ("", [])),
    "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
    "logprob_token_ids": Refusal("log-probabilities are those of the most likely tokens; use top_logprobs", ([],)),
    "include_draft_logprobs": _NOT_SHOWN,
    "include_logprobs_decode_token": Refusal("only the default true is served", (True,)),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "completion_token_ids": Refusal("put them behind the prompt, in prompt_token_ids", ([],)),
    "lora_path": Refusal("the model is served without adapters", ("", [])),
    "logits_processors": _PROCESSORS,
    "logits_processors_args": _PROCESSORS,
    "custom_logit_processor": _PROCESSORS,
    "custom_params": _PROCESSORS,
    "vllm_xargs": _PROCESSORS,
    "session_params": Refusal("each request brings its whole prompt; a known prefix costs nothing", ({},)),
    "extra_key": Refusal("use cache_salt", ("",)),
    "kv_transfer_params": Refusal(
        "KV moves between the workers of a pair, which the router brings together; see --role", ({},)
    ),
    "ec_transfer_params": _PLACEMENT,
    "disaggregate_info": _PLACEMENT,
    **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room"), _PLACEMENT),
    **dict.fromkeys(("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"), _PLACEMENT),
    **dict.fromkeys(("return_hidden_states", "return_routed_experts", "return_prompt_text"), _NOT_SHOWN),
    **dict.fromkeys(("return_token_offsets", "return_assistant_tokens_mask"), _NOT_SHOWN),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs"), Refusal("only text is served", ({},))),
    "mm_hashes": Refusal("only text is served", ([],)),
    "spaces_between_special_tokens": Refusal("only the default true is served", (True,)),
}

_CONVERSATION: Final = Refusal(
    "conversations are served at /v1/chat/completions", ([], {}, "", True, False, "none", "auto")
)

COMPLETIONS: Mapping[str, Refusal] = {
    **_BOTH,
    "suffix": Refusal("text before a suffix is not served", ("", {})),
    "top_logprobs": Refusal("logprobs is the number of likely tokens here", (0,)),
    **dict.fromkeys(("messages", "documents", "continue_final_message", "chat_template_kwargs"), _CONVERSATION),
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), _CONVERSATION),
    "enable_thinking": Refusal(_CONVERSATION.reason, (False,)),
    **dict.fromkeys(("reasoning_max_tokens", "thinking_token_budget"), _CONVERSATION),
    **dict.fromkeys(("chat_template", "disable_chat_template", "add_generation_prompt"), _CONVERSATION),
}

_NEXT_MESSAGE: Final = Refusal("use continue_final_message to go on with the last message", (False,))

CHAT: Mapping[str, Refusal] = {
    **_BOTH,
    "audio": Refusal("only text is served"),
    "modalities": Refusal("only text is served", (["text"],)),
    "prediction": Refusal("predicted output is not served"),
    "web_search_options": Refusal("web search is not served"),
    "verbosity": Refusal("verbosity cannot be chosen", ("medium",)),
    "store": Refusal("answers are not stored", (False,)),
    "echo": Refusal("the prompt can be echoed at /v1/completions only", (False,)),
    "best_of": Refusal("it is not served; ask for n choices", (1,)),
    "task": Refusal("tasks are not served; say in a message what is to be done"),
    "prompt": Refusal("plain prompts are served at /v1/completions", ("", [])),
    "messages[].audio": Refusal("only text is served"),
    "messages[].prefix": _NEXT_MESSAGE,
    "messages[].partial": _NEXT_MESSAGE,
    "messages[].tools": Refusal("give tools beside the messages", ([],)),
}

POOLED: Mapping[str, Refusal] = {
    "stream": Refusal("vectors and scores come whole", (False,)),
    "messages": Refusal("conversations are served at /v1/chat/completions", ([],)),
    "truncate_prompt_tokens": Refusal("texts are read whole; shorten them", ()),
    "truncate": Refusal("texts are read whole; shorten them", (False, "none", "NONE")),
    "max_tokens_per_doc": Refusal("texts are read whole; shorten them"),
    "rank_fields": Refusal("documents are texts; give those"),
    "input_type": Refusal("write the instruction before the text, as the model wants it"),
    "task": Refusal("write the instruction before the text, as the model wants it"),
    "prompt_name": Refusal("write the instruction before the text, as the model wants it"),
    "pooling_type": Refusal("the server was started with --pooling"),
    "embed_dtype": Refusal("vectors are float32", ("float32",)),
    "embedding_types": Refusal("use encoding_format", (["float"],)),
    "output_dtype": Refusal("vectors are float32", ("float",)),
    "normalize": Refusal("the checkpoint says whether vectors have length 1"),
    "activation": Refusal("scores are what the model says"),
    "use_activation": Refusal("scores are what the model says", (True,)),
}
