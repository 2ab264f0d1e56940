"""Built-in parsers, registered through the same hooks as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1

_HERE = "fd_core.text.parsing.formats"
_THINK = "fd_core.text.parsing.thinking"


@hookimpl
def fd_register_tool_parsers() -> list[Entry]:
    """Offer a parser for each format of calls."""
    return [
        Entry("hermes", f"{_HERE}.json_calls:HermesTools", "JSON between <tool_call> markers: Qwen, SmolLM, Hermes"),
        Entry("ernie45", f"{_HERE}.json_calls:ErnieTools", "ERNIE-4.5: as hermes, with <response> around content"),
        Entry("qwen3_coder", f"{_HERE}.tagged:QwenCoderTools", "Qwen3-Coder: parameters between tags with names"),
        Entry("llama3_json", f"{_HERE}.json_calls:LlamaJsonTools", "Llama 3: a bare JSON object"),
        Entry("pythonic", f"{_HERE}.pythonic:PythonicTools", "Llama 4: a Python list of calls"),
        Entry("mistral", f"{_HERE}.json_calls:MistralTools", "Mistral: after [TOOL_CALLS]"),
        Entry("deepseek", f"{_HERE}.json_calls:DeepSeekTools", "DeepSeek V3 and R1: JSON in a code block"),
        Entry("deepseek_v31", f"{_HERE}.json_calls:DeepSeekV31Tools", "DeepSeek V3.1: JSON between control tokens"),
        Entry("glm45", f"{_HERE}.tagged:GlmTools", "GLM-4.5: keys and values between markers"),
        Entry("minimax_m2", f"{_HERE}.tagged:MiniMaxTools", "MiniMax-M2: as qwen3_coder, with names in quotes"),
        Entry("kimi_k2", f"{_HERE}.json_calls:KimiTools", "Kimi K2: JSON after ids with names"),
        Entry("lfm2", f"{_HERE}.pythonic:LfmTools", "LFM2: as pythonic, between markers"),
        Entry("nemotron", f"{_HERE}.json_calls:NemotronTools", "Nemotron Nano 2: a list between <TOOLCALL> markers"),
        Entry("gpt_oss", f"{_HERE}.harmony:HarmonyTools", "gpt-oss: harmony messages to functions"),
        *(
            Entry(alias, target, f"alias of {name}")
            for alias, name, target in (
                ("deepseek_v3", "deepseek", f"{_HERE}.json_calls:DeepSeekTools"),
                ("granite4", "hermes", f"{_HERE}.json_calls:HermesTools"),
                ("glm47", "glm45", f"{_HERE}.tagged:GlmTools"),
                ("llama4_pythonic", "pythonic", f"{_HERE}.pythonic:PythonicTools"),
                ("openai", "gpt_oss", f"{_HERE}.harmony:HarmonyTools"),
                ("qwen3_xml", "qwen3_coder", f"{_HERE}.tagged:QwenCoderTools"),
            )
        ),
    ]


@hookimpl
def fd_register_reasoning_parsers() -> list[Entry]:
    """Offer a parser for each format of reasoning."""
    return [
        Entry("qwen3", f"{_THINK}:QwenReasoning", "between <think> and </think>: Qwen3, GLM-4.5"),
        Entry("deepseek_r1", f"{_THINK}:DeepSeekR1Reasoning", "up to </think>, with or without <think>"),
        Entry("ernie45", f"{_THINK}:ErnieReasoning", "ERNIE-4.5: up to </think>, then <response>"),
        Entry("mistral", f"{_THINK}:MistralReasoning", "between [THINK] and [/THINK]"),
        Entry("gpt_oss", f"{_HERE}.harmony:HarmonyReasoning", "the analysis channel of harmony"),
        *(Entry(name, f"{_THINK}:QwenReasoning", "alias of qwen3") for name in ("glm45", "kimi_k2", "minimax_m2")),
        Entry("openai_gptoss", f"{_HERE}.harmony:HarmonyReasoning", "alias of gpt_oss"),
    ]
