"""Shapes of models that are calculated with, as their published configurations state them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ARCHITECTURES", "ModelShape"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated feed-forward layers, dense or of experts."""

    title: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of a feed-forward layer, or of one expert."""
    vocab_size: int
    max_model_len: int
    tied: bool = False
    """Whether embedding and output projection are one weight."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0

    @property
    def attention_weights(self) -> int:
        """Parameters of the projections of one layer's attention."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Parameters of one feed-forward layer, or of one expert."""
        return 3 * self.hidden * self.inner

    @property
    def head_weights(self) -> int:
        """Parameters of the output projection."""
        return self.vocab_size * self.hidden

    def experts_hit(self, tokens: float) -> float:
        """Return how many experts of a layer are read for `tokens` tokens, 1 for a dense model.

        Expected, where every token goes to each expert with the same chance; real routers are less even.
        """
        if not self.experts:
            return 1.0
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        return self.experts * (1 - missed)

    @property
    def parameters(self) -> int:
        """Parameters in all, without norms and biases."""
        feed_forward = self.expert_weights * max(self.experts, 1) + self.hidden * self.experts
        return self.layers * (self.attention_weights + feed_forward) + self.head_weights * (1 if self.tied else 2)


ARCHITECTURES: Final = {
    "llama-8b": ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-70b": ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "llama-1b": ModelShape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
    "qwen2.5-7b": ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 131072),
    "qwen3-30b-a3b": ModelShape(
        "Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 768, 151936, 40960, experts=128, experts_per_token=8
    ),
    "smollm2": ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied=True),
}
