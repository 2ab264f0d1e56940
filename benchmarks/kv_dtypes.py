"""Compare attention over 8-bit keys and values with those of the program's dtype, in speed and in accuracy.

    python -m benchmarks.kv_dtypes [--threads 2] [--rounds 20]          # seconds of a step, results/kv_dtypes.json
    python -m benchmarks.kv_dtypes --accuracy [--texts 16]              # greedy tokens of SmolLM2 against float32

Steps of both caches run in turn, because the machine drifts; seconds are the fastest of all rounds for each operation.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.native_step import BLOCK_SIZE, PLAIN, Case, random_model, shares, step_of
from fd_core.cli.bench.compare.machine import describe, load_average
from fd_core.engine.llm import LLM
from fd_core.ops.contract import KVCache, Ops
from fd_core.ops.native import load_native_ops
from fd_core.ops.native.pack import ProgramForward
from fd_core.ops.numpy.kv_8bit import quantize_kv
from fd_core.types import SamplingParams

CASES = (Case("context 256", 32, 1, 256), Case("context 2,048", 32, 1, 2048), Case("context 8,192", 8, 1, 8192))
KV = ("auto", "int8")
ACCURATE = (*KV, "fp8")
"""Types whose tokens are compared; the native kernels do not compute `fp8`."""
ROOT = Path(__file__).parents[1]
PROMPT, ANSWER = 192, 64
"""Tokens of a prompt, which begins a document, and of the answer whose tokens are compared."""


def filled_cache(ops: Ops, model: Any, blocks: int, kv: str) -> KVCache:
    """Return a cache without a page of zeros, which the system would read from its caches."""
    shape = replace(model.kv_shape(BLOCK_SIZE), dtype=kv)
    cache = ops.allocate_kv(shape, blocks)
    sizes = (1, shape.num_layers, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    data: Any = np.random.default_rng(3).standard_normal(sizes, np.float32)
    if shape.quantized:
        data = quantize_kv(data)
    elif ops.dtype == "bfloat16":
        data = (data.view(np.uint32) >> 16).astype(np.uint16)
    for block in range(blocks):
        cache.import_blocks(np.array([block], np.int32), data)
    return cache


def time_steps(threads: int, rounds: int) -> list[dict[str, Any]]:
    """Return seconds of the parts of a step, for each case and dtype of KV."""
    ops = load_native_ops("bfloat16", threads)
    if ops is None:
        raise SystemExit("the native kernels cannot be built here")
    model = random_model(ops, PLAIN)
    results = []
    for case in CASES:
        blocks = case.rows * -(-case.context // BLOCK_SIZE) + 1
        forward = ops.compile(model.forward)
        assert isinstance(forward, ProgramForward)
        caches = {kv: filled_cache(ops, model, blocks, kv) for kv in KV}
        step = step_of(case)
        parts: dict[str, dict[str, float]] = {}
        for kv, cache in caches.items():
            forward(step, cache)
            parts[kv] = shares(forward, step, cache, 1)
        for _ in range(rounds):
            for kv, cache in caches.items():
                for name, seconds in shares(forward, step, cache, 1).items():
                    parts[kv][name] = min(parts[kv][name], seconds)
        for kv, cache in caches.items():
            size = cache.shape.bytes_per_block(2) * blocks
            results.append({"case": case.name, "kv": kv, "bytes": size, "operations_s": parts[kv]})
            whole = sum(parts[kv].values())
            print(
                f"{case.name:14} {kv:5} attention {parts[kv]['attention'] * 1e3:7.2f} ms of {whole * 1e3:7.2f}, "
                f"{size / 1e6:,.0f} MB, {size / parts[kv]['attention'] / 1e9:.1f} GB/s"
            )
    return results


def compare_tokens(texts: int) -> list[dict[str, Any]]:
    """Return how the most likely tokens of each dtype agree with those of float32, after float32's own text."""
    documents = [file.read_text() for file in sorted((ROOT / "docs").rglob("*.md"))][:texts]
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": PROMPT + ANSWER + 1, "structured_output": False}
    llm = LLM("smollm2", dtype="float32", **settings)
    prompts = [llm.tokenizer.encode(document)[:PROMPT] for document in documents]
    asked = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    answers = [completion.token_ids for completion in llm.generate(prompts, asked)]
    llm.close()
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    results = []
    for dtype in ("float32", "bfloat16"):
        for kv in ACCURATE:
            llm = LLM("smollm2", dtype=dtype, kv_cache_dtype=kv, native_kernels=kv != "fp8", **settings)
            agree, logprobs = [], []
            for text, completion in zip(whole, llm.generate(whole, scored), strict=True):
                assert completion.prompt_logprobs is not None
                for position, score in enumerate(completion.prompt_logprobs):
                    if score is not None:
                        logprobs.append(score.logprob)
                        if position >= PROMPT:
                            agree.append(score.top_ids[0] == text[position])
            block_bytes = llm.info.kv_cache_bytes // llm.info.num_kv_blocks
            llm.close()
            results.append(
                {
                    "dtype": dtype,
                    "kv": kv,
                    "greedy_agreement": float(np.mean(agree)),
                    "tokens": len(agree),
                    "perplexity": float(np.exp(-np.mean(logprobs))),
                    "scored": len(logprobs),
                    "requests_of_512_tokens_in_256_MiB": 2**28 // block_bytes // (512 // BLOCK_SIZE),
                }
            )
            print(results[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--accuracy", action="store_true", help="compare tokens, not seconds")
    parser.add_argument("--texts", type=int, default=16)
    arguments = parser.parse_args()
    output = ROOT / "benchmarks" / "results" / "kv_dtypes.json"
    found = json.loads(output.read_text()) if output.exists() else {}
    if arguments.accuracy:
        found["accuracy"] = compare_tokens(arguments.texts)
    else:
        load = load_average()
        found["steps"] = time_steps(arguments.threads, arguments.rounds)
        found |= {"machine": describe(), "threads": arguments.threads, "load_average": load}
    output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
