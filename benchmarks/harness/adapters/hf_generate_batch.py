"""transformers' continuous batching (`generate_batch`) on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig


class Engine:
    """A causal LM in bf16 with transformers' paged attention over torch's scaled dot product attention."""

    def __init__(self, model: str, threads: int, max_requests: int, max_length: int) -> None:
        torch.set_num_threads(threads)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.notes: dict[str, Any] = {"dtype": "bfloat16", "attention": "paged sdpa"}
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).eval()
        # Its default allocates most of the free memory, which takes time to clear.
        blocks = max_requests * -(-max_length // 32)
        self._batching = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=2048)

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> list[tuple[list[int], float, float]]:
        """Generate for all prompts; the library notes when each token was ready."""
        [count] = set(max_tokens)  # the library takes one number for the whole batch
        results = self._model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=self._batching,
            record_timestamps=True,
            warmup=False,
        )
        in_order = sorted(results.values(), key=lambda r: int(str(r.request_id).rsplit("_", 1)[-1]))
        return [(list(r.generated_tokens), r.timestamps[0], r.timestamps[-1]) for r in in_order]
