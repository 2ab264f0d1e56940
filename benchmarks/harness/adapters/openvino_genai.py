"""OpenVINO GenAI's continuous batching pipeline, on the model that its own GGUF loader builds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


class Engine:
    """Paged attention in bf16, stepped in this process until all requests have finished."""

    def __init__(self, model: dict[str, str], threads: int, max_requests: int, max_length: int) -> None:
        self.version = genai.__version__
        self.notes: dict[str, Any] = {"inference_precision": "bf16", "kv_cache_precision": "bf16"}
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs = max_requests
        scheduler.max_num_batched_tokens = 2048
        scheduler.cache_size = 1  # GiB
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        self._pipe = genai.ContinuousBatchingPipeline(
            Path(model["gguf_f16"]),  # its GGUF loader reads no BF16
            scheduler,
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": "bf16",
                "KV_CACHE_PRECISION": "bf16",
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
