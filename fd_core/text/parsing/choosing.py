"""Which parsers fit a model, by what its chat template writes."""

from __future__ import annotations

from typing import Final, NamedTuple


class ParserNames(NamedTuple):
    """Names of parsers; None where nothing fits."""

    tools: str | None
    reasoning: str | None


_TOOLS: Final = (
    ("<|channel|>", "gpt_oss"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<|python_start|>", "pythonic"),
    ("Environment: ipython", "llama3_json"),
    ("<tool_call>", "hermes"),
)
"""What stands in a template, and the parser of the tool calls of such models; the first that stands there counts."""

_REASONING: Final = (
    ("<|channel|>", "gpt_oss"),
    ("<｜Assistant｜>", "deepseek_r1"),
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
)


def parsers_for(template: str | None, knows_tools: bool, architecture: str = "") -> ParserNames:
    """Return the parsers for a chat template's source; `knows_tools` says whether it writes tools itself.

    A template that does not is helped out in the hermes form, see `fd_core.text.tool_prompt`.
    """
    if template is None:
        return ParserNames(None, None)
    tools = next((name for mark, name in _TOOLS if mark in template), None)
    if tools == "deepseek" and "```json" not in template:
        tools = "deepseek_v31"
    reasoning = next((name for mark, name in _REASONING if mark in template), None)
    if reasoning == "deepseek_r1" and "</think>" not in template:
        reasoning = None
    if "ernie" in architecture.lower():
        tools, reasoning = "ernie45" if tools == "hermes" else tools, "ernie45" if reasoning else None
    return ParserNames(tools if knows_tools else "hermes", reasoning)
