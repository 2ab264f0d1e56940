"""The built-in families of models, offered through the same hook as those of plugins."""

from __future__ import annotations

from fd_core.hookspecs import Entry, hookimpl

FD_CONTRACT = 1


@hookimpl
def fd_register_models() -> list[Entry]:
    """Offer the built-in families."""
    families = "fd_core.models.families"
    return [
        Entry("ernie4_5", f"{families}.ernie:Ernie", "ERNIE 4.5"),
        Entry("ernie4_5_moe", f"{families}.ernie:ErnieMoe", "ERNIE 4.5, mixtures of experts"),
        Entry("gemma3", f"{families}.gemma:Gemma3", "Gemma 3, text"),
        Entry("llama", f"{families}.llama:Llama", "Llama 2 and 3, and models with this architecture"),
        Entry("mistral", f"{families}.llama:Mistral", "Mistral"),
        Entry("qwen2", f"{families}.qwen:Qwen2", "Qwen2 and Qwen2.5"),
        Entry("qwen3", f"{families}.qwen:Qwen3", "Qwen3"),
        Entry("qwen3_moe", f"{families}.qwen:Qwen3Moe", "Qwen3, mixtures of experts"),
    ]
