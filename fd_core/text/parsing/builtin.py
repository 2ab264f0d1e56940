"""The parsers that come with the core, offered through the same hooks as a stranger's."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

_HERE = "fd_core.text.parsing"


@hookimpl
def fd_register_tool_parsers() -> list[Entry]:
    """Offer one for each format of calls."""
    return [
        Entry("hermes", f"{_HERE}.hermes:HermesTools", "JSON between <tool_call> markers: Qwen, SmolLM, Hermes"),
        Entry("ernie45", f"{_HERE}.hermes:ErnieTools", "ERNIE-4.5: as hermes, with <response> around content"),
        Entry("llama3_json", f"{_HERE}.llama:LlamaJsonTools", "Llama 3: a bare JSON object"),
        Entry("pythonic", f"{_HERE}.pythonic:PythonicTools", "Llama 4: a Python list of calls"),
        Entry("mistral", f"{_HERE}.mistral:MistralTools", "Mistral: behind [TOOL_CALLS]"),
        Entry("deepseek", f"{_HERE}.deepseek:DeepSeekTools", "DeepSeek V3, R1 and V3.1"),
        Entry("glm45", f"{_HERE}.glm:GlmTools", "GLM-4.5: keys and values between markers"),
        Entry("gpt_oss", f"{_HERE}.harmony:HarmonyTools", "gpt-oss: harmony messages to functions"),
    ]


@hookimpl
def fd_register_reasoning_parsers() -> list[Entry]:
    """Offer one for each way to write reasoning."""
    return [
        Entry("qwen3", f"{_HERE}.thinking:QwenReasoning", "between <think> and </think>: Qwen3, GLM-4.5"),
        Entry("deepseek_r1", f"{_HERE}.thinking:DeepSeekR1Reasoning", "up to </think>, with or without <think>"),
        Entry("ernie45", f"{_HERE}.thinking:ErnieReasoning", "ERNIE-4.5: up to </think>, then <response>"),
        Entry("mistral", f"{_HERE}.thinking:MistralReasoning", "between [THINK] and [/THINK]"),
        Entry("gpt_oss", f"{_HERE}.harmony:HarmonyReasoning", "the analysis channel of harmony"),
    ]
