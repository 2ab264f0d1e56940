"""transformers' continuous batching (`generate_batch`) on the CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig


class Engine:
    """A causal LM in bf16 with transformers' paged attention over torch's scaled dot product attention."""

    def __init__(self, model: dict[str, str], threads: int, max_requests: int, max_length: int) -> None:
        torch.set_num_threads(threads)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.notes: dict[str, Any] = {"dtype": "bfloat16", "ttft": "end of the request: results arrive whole"}
        self._model = AutoModelForCausalLM.from_pretrained(
            model["folder"], dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).eval()

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], float, float]]:
        """Generate for all prompts; only the end of the whole call is known."""
        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        results = self._model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        at = time.perf_counter()
        finished = sorted(results.values(), key=lambda r: int(str(r.request_id).rsplit("_", 1)[-1]))
        return [(list(r.generated_tokens), at, at) for r in finished]
