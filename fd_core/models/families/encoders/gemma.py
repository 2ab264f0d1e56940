"""EmbeddingGemma."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Final

from fd_core.models.families.builtin.gemma import Gemma3, gemma3_traits
from fd_core.models.families.contract import Family, Traits
from fd_core.models.loading.config import ModelConfig

_BOTH: Final = "use_bidirectional_attention"


class EmbeddingGemma(Family):
    """`Gemma3TextModel`: Gemma 3 without an output projection, whose tokens may attend in both directions."""

    architectures = ("Gemma3TextModel",)
    model_type = Gemma3.model_type
    defaults: ClassVar = Gemma3.defaults
    cases: ClassVar = {name: {**case, _BOTH: name == "mixed"} for name, case in Gemma3.cases.items()}

    def traits(self, config: ModelConfig) -> Traits:
        """Describe a model; a window in both directions is divided between them."""
        both = config.flag(_BOTH)
        traits = gemma3_traits(config)
        if not both:
            return traits
        window = config.count("sliding_window") // 2 + 1
        return replace(traits, causal=False, window=lambda layer: None if traits.window(layer) is None else window)
