"""Compare `--model-impl transformers` with `transformers` itself: same random model, same prompts, interleaved.

    python benchmarks/fallback.py --architecture Helium --streams 1 8

`transformers` generates with a static batch of prompts of equal length, its usual attention and its KV cache. Both
sides compute in float32 in this process, and a round measures one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.testing.models.texts import run
from fd_core.types import RequestSpec, SamplingParams

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""About 0.2 billion parameters."""


def generate(model: Any, prompts: torch.Tensor, tokens: int) -> None:
    """Generate greedily from prompts of equal length."""
    mask = torch.ones_like(prompts)
    model.generate(
        prompts, attention_mask=mask, pad_token_id=0, do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
    )


def main() -> None:
    """Print tokens per second of both, and the ratio of each round's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", default="Helium", help="prefix of the classes of transformers")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = getattr(transformers, f"{options.architecture}Config")(**SIZES)
        getattr(transformers, f"{options.architecture}ForCausalLM")(config).save_pretrained(folder)
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        engine = load_engine(
            EngineConfig(
                model=folder,
                model_impl="transformers",
                backend="cpu",
                dtype="float32",
                num_threads=options.threads,
                max_num_seqs=max(options.streams),
                max_model_len=options.prompt + options.tokens,
                enable_prefix_caching=False,
                structured_output=False,
            ),
            Path(folder),
            progress=lambda *_: None,
            wake=lambda: None,
        )
        for streams in options.streams:
            prompts = np.random.default_rng(streams).integers(3, 32_000, (streams, options.prompt))
            params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
            specs = [
                RequestSpec(request_id=f"r{row}", prompt=tuple(prompt.tolist()), params=params)
                for row, prompt in enumerate(prompts)
            ]
            sides = partial(run, engine, specs), partial(generate, peer, torch.from_numpy(prompts), options.tokens)
            rates: tuple[list[float], ...] = ([], [])
            for index in range(options.rounds + 1):
                for compute, found in zip(sides, rates, strict=True):
                    begun = time.perf_counter()
                    compute()
                    if index:  # the first one warms up
                        found.append(streams * options.tokens / (time.perf_counter() - begun))
            ours, theirs = map(statistics.median, rates)
            ratio = statistics.median(a / b for a, b in zip(*rates, strict=True))
            print(f"{streams} streams: fd_core {ours:.1f}, transformers {theirs:.1f} tokens/s, ratio {ratio:.2f}")
        engine.close()


if __name__ == "__main__":
    main()
