"""transformers' `generate`: one padded batch, each prompt as long as the longest."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class _StepClock(StoppingCriteria):
    """Notes when each token of the batch was ready; never stops a sequence itself."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Engine:
    """A causal LM in bf16 with torch's scaled dot product attention."""

    def __init__(self, model: str, threads: int, max_requests: int, max_length: int) -> None:
        torch.set_num_threads(threads)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.notes: dict[str, Any] = {"dtype": "bfloat16", "attention": "sdpa", "batch": "left-padded"}
        self._model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        ).eval()

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> list[tuple[list[int], float, float]]:
        """Generate for the left-padded batch; every sequence ends with the last step."""
        [count] = set(max_tokens)  # the library takes one number for the whole batch
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        clock = _StepClock()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return [(row.tolist(), clock.at[0], clock.at[-1]) for row in output[:, longest:]]
