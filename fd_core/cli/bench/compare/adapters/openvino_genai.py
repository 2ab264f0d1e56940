"""OpenVINO GenAI's continuous batching pipeline, on the model that its own GGUF loader builds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


class OpenVinoLibrary:
    """Paged attention, stepped in this process until all requests have finished.

    It computes in bf16 where the processor has the instructions, else in float32, with KV of as many bits in float16:
    there the pipeline ends at KV in bf16.
    """

    def __init__(self, model: str, threads: int, max_requests: int, max_length: int) -> None:
        self.version = genai.__version__
        has_bf16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        computed, kept = ("bf16", "bf16") if has_bf16 else ("f32", "f16")
        self.notes: dict[str, Any] = {"inference_precision": computed, "kv_cache_precision": kept}
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = max_requests
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = 1  # GiB
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        self._pipe = genai.ContinuousBatchingPipeline(
            Path(model),
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": computed,
                "KV_CACHE_PRECISION": kept,
                "INFERENCE_NUM_THREADS": threads,
            },
        )
        self._next_id = 0

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> list[tuple[list[int], float, float]]:
        """Send all prompts, step until the pipeline is idle."""
        handles = []
        for prompt, count in zip(prompts, max_tokens, strict=True):
            config = genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = count
            config.ignore_eos = True
            config.do_sample = False
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipe.add_request(self._next_id, ids, config))
            self._next_id += 1
        first = [0.0] * len(prompts)
        last = [0.0] * len(prompts)
        tokens: list[list[int]] = [[] for _ in prompts]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            at = time.perf_counter()
            for i, handle in enumerate(handles):
                if handle.can_read():
                    first[i] = first[i] or at
                    last[i] = at
                    for output in handle.read().values():
                        tokens[i].extend(output.generated_ids)
        return list(zip(tokens, first, last, strict=True))


library = OpenVinoLibrary
