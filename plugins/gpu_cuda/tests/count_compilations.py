"""Serve many different requests on the fake driver, and print the compilations at start and those after it, as JSON.

`python count_compilations.py FOLDER '{"max_num_seqs": 8}' SEED`: a checkpoint, settings of the engine, and what the
requests are drawn from. Adapters in the engine's `lora_folder` change from round to round. With a fourth word, all
that is counted is compiled too, and what fails is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from fake_driver import H100, FakeDriver, zeros_for_empty
from fd_core.backends.contract import Availability
from fd_core.engine.llm import LLM
from fd_core.runner.postprocess.torch_matrix import TorchPostprocess
from fd_core.types import SamplingParams
from tokenizers import Tokenizer, decoders, models

import fd_gpu_cuda.backend
from fd_gpu_cuda.backend import CudaBackend, CudaPostprocess
from fd_gpu_cuda.compilations import Compilations
from fd_gpu_cuda.kernel_table import AdapterCapacity
from fd_gpu_cuda.ops import CudaOps
from fd_gpu_cuda.providers import Providers, operations_on, wanted_providers

ROUNDS = 12


def make_ops(backend: CudaBackend) -> CudaOps:
    device = H100()
    device.free = 2**30
    backend._cuda = device
    dtype = backend.requested_dtype("float32", "bfloat16") or backend._fastest_dtype(device)
    # Nothing is computed here, so providers cannot be tested.
    config = backend.config
    operations = operations_on(device, dtype, config.kv_cache_dtype)
    ops = CudaOps(dtype, device, Providers(operations, wanted_providers(config.attention_backend)).kernels)
    ops.compilations, ops.adapter_capacity = Compilations(), AdapterCapacity.of(config)
    return ops


class Matrix(CudaPostprocess):
    """Queues the kernel, and writes the matrix with torch: outputs must be valid for steps to continue."""

    def token_matrix(self, *arrays: Any) -> Any:
        super().token_matrix(*arrays)
        return TorchPostprocess(self.ops, self.limits).token_matrix(*arrays)


def with_tokenizer(folder: Path) -> str:
    """Add a tokenizer, which is not used, to a checkpoint."""
    if not (folder / "tokenizer.json").exists():
        words = Tokenizer(models.WordLevel({"0": 0}, "0"))
        words.decoder = decoders.ByteLevel()
        words.save(str(folder / "tokenizer.json"))
    return str(folder)


def params(random: Random, vocabulary: int, drafts: bool) -> SamplingParams:
    """Draw the options of a request; most have one or two."""
    wants: dict[str, Any] = {"max_tokens": random.randint(1, 9), "ignore_eos": True, "seed": random.getrandbits(64)}
    wants["temperature"] = random.choice((0.0, 0.0, 0.7, 1.0, 1.3))
    token = random.randrange(vocabulary)
    for more in (
        {"top_k": random.randint(1, 2 * vocabulary)},
        {"top_p": random.random() * 0.99 + 0.01},
        {"min_p": random.random()},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"logit_bias": {token: 1.0, (token + 1) % vocabulary: -2.0}},
        {"allowed_token_ids": tuple(range(random.randint(2, 40)))},
        {"min_tokens": 1},
        {"logprobs": random.randint(0, 20)},
        {"prompt_logprobs": random.randint(0, 5)},
        {"bad_words_token_ids": ((token,),)},
    ):
        if random.random() < 0.12:
            wants |= more
    return SamplingParams(**wants)


def requests(random: Random, model: LLM, drafts: bool) -> Iterator[tuple[list[int], SamplingParams]]:
    longest = model.info.max_model_len - 12
    vocabulary = model.info.vocab_size
    for _ in range(random.choice((1, 1, 2, 3, random.randint(1, 2 * model.info.max_num_seqs)))):
        length = random.choice((1, 2, 15, 16, 17, random.randint(1, 64), random.randint(1, longest)))
        prompt = [random.choice((0, 0, 0, random.randrange(vocabulary))) for _ in range(min(length, longest))]
        yield prompt, params(random, vocabulary, drafts)


def change_adapters(random: Random, model: LLM, folders: list[Path]) -> None:
    """Load one that is not there, or unload one that is."""
    if folders:
        chosen = random.choice(folders)
        if chosen.name in {info.name for info in model.info.adapters}:
            model._engine.unload_adapter(chosen.name)
        else:
            model._engine.load_adapter(chosen.name, chosen)


def main(folder: str, settings: str, seed: str, compiles: str = "") -> None:
    torch.set_num_threads(1)
    CudaBackend.probe = staticmethod(lambda: Availability(True, "a test", emulated=True))  # type: ignore[assignment, method-assign]
    CudaBackend.make_ops = make_ops  # type: ignore[method-assign]
    chosen: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "block_size": 4, **json.loads(settings)}
    fd_gpu_cuda.backend.CudaPostprocess = Matrix  # type: ignore[misc]
    fake, random = FakeDriver(compiles=bool(compiles)).install(), Random(int(seed))
    zeros_for_empty()
    model = LLM(with_tokenizer(Path(folder)), backend="gpu_cuda", **chosen)
    at_start, launches = fake.compiled, fake.launches
    to_load = sorted(Path(chosen["lora_folder"]).iterdir()) if "lora_folder" in chosen else []
    for _ in range(ROUNDS):
        change_adapters(random, model, to_load)
        prompts, wanted = zip(*requests(random, model, "speculative" in chosen), strict=True)
        names = [None, *(info.name for info in model.info.adapters)]
        adapters = [random.choice(names) for _ in prompts]
        model.generate(list(prompts), list(wanted), adapter=adapters)
        model.embed(list(prompts), adapter=adapters)
    later = fake.compiled[len(at_start) :]
    counted = {"at_start": at_start, "later": later, "launches": fake.launches - launches}
    print(json.dumps(counted | {"failures": fake.failures, "fusing": fake.fusing}))


if __name__ == "__main__":
    main(*sys.argv[1:])
