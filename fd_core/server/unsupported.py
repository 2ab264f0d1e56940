"""Fields that other servers know and this one does not serve: refused by name, never ignored.

Each is refused unless its value asks for nothing (null, or what is listed with it). Fields that cannot change the
text are accepted and do nothing. Any other unknown field is ignored and named in the answer's header
`X-Ignored-Fields`, so that a misspelt field is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

__all__ = ["CHAT", "COMPLETIONS", "HARMLESS", "Refusal"]


class Refusal(NamedTuple):
    """Why a field is refused, and the values that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


HARMLESS: Final = frozenset(
    (
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
        "service_tier",
    )
)

_CONSTRAINED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
_TOOLS = Refusal("tools are not served", ([],))

_BOTH: Mapping[str, Refusal] = {
    "response_format": Refusal("only the format 'text' is served", ({"type": "text"},)),
    **dict.fromkeys(_CONSTRAINED, Refusal("constrained output is not served; leave the field out and check the text")),
    "use_beam_search": Refusal("beam search is not served", (False,)),
    "length_penalty": Refusal("it belongs to beam search, which is not served", (1.0,)),
    "allowed_token_ids": Refusal("it is not served; logit_bias can favour or ban tokens", ([],)),
    "bad_words": Refusal("it is not served; logit_bias can ban tokens", ([],)),
    "truncate_prompt_tokens": Refusal("prompts are never cut; shorten the prompt"),
    "prompt_logprobs": Refusal("log-probabilities of the prompt are not served"),
    "prompt_embeds": Refusal("prompts are text or token ids"),
    "logits_processors": Refusal("code from requests is never run", ([],)),
    "kv_transfer_params": Refusal("transfer of KV between servers is not served here"),
    "spaces_between_special_tokens": Refusal("only the default true is served", (True,)),
}

COMPLETIONS: Mapping[str, Refusal] = {
    **_BOTH,
    "suffix": Refusal("text before a suffix is not served", ("",)),
    "messages": Refusal("conversations are served at /v1/chat/completions"),
}

CHAT: Mapping[str, Refusal] = {
    **_BOTH,
    "tools": _TOOLS,
    "tool_choice": Refusal("tools are not served", ("none", "auto")),
    "functions": _TOOLS,
    "function_call": Refusal("functions are not served", ("none", "auto")),
    "audio": Refusal("only text is served"),
    "modalities": Refusal("only text is served", (["text"],)),
    "prediction": Refusal("predicted output is not served"),
    "web_search_options": Refusal("web search is not served"),
    "reasoning_effort": Refusal("the effort of reasoning cannot be chosen", ("none",)),
    "verbosity": Refusal("verbosity cannot be chosen", ("medium",)),
    "store": Refusal("answers are not stored", (False,)),
    "echo": Refusal("the prompt can be echoed at /v1/completions only", (False,)),
    "best_of": Refusal("it is not served; ask for n choices", (1,)),
    "continue_final_message": Refusal("the last message cannot be continued", (False,)),
    "chat_template": Refusal("templates from requests are never run; the operator sets one with --chat-template"),
    "documents": Refusal("documents are not served", ([],)),
    "prompt": Refusal("plain prompts are served at /v1/completions"),
}
