"""Measure an NVIDIA GPU: its own rates, then steps of models with random weights, kernel by kernel.

    python benchmarks/gpu_first_hour.py [--models smollm2 llama-8b] [--formats bf16 int4] [--output FILE]

Needs a GPU. Weights are made here, so nothing is downloaded. Decodes of 1, 32 and 256 requests see 1,024 tokens each,
two steps in flight; a prefill is 2,048 tokens. The result is written after each model, so that what was measured is
kept when something fails; `gpu_roofline.py --measured FILE` compares it with the floors.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from harness.gpu_device import chip_of, device_facts, device_rates, kernel_times
from harness.random_model import RandomCheckpoint
from harness.roofline import FORMATS, held_bytes
from harness.stepping import StepTimes, limits_for, time_decodes, time_prefills

from fd_core.config import EngineConfig
from fd_core.models.decoder import DecoderModel
from fd_core.models.registry import load_model
from fd_core.ops.contract import KVCache, Ops
from fd_core.plugins import POSTPROCESS, installed_plugins
from fd_core.runner.postprocess.contract import Postprocess
from fd_core.runner.runner import Runner
from fd_core.simulation.costs.calculating import ARCHITECTURES, ModelShape

MODELS = ("smollm2", "llama-1b", "llama-8b", "qwen3-30b-a3b")
BATCHES = (1, 32, 256)
RESULT = Path(__file__).resolve().parent / "results" / "gpu_first_hour.json"
SHARE = 0.9
"""Of the device's free memory that weights and KV may take."""
PROFILED = 4
COPIED = 64
"""Blocks that are copied to the host and back."""


class Bench:
    """Measures models, one after another.

    `make_ops` returns a pack and a function that chooses its kernels for a model and returns the choice; `free` returns
    the free bytes of the device, `made` the number of kernels that Triton has made so far.
    """

    def __init__(
        self,
        make_ops: Callable[[str], tuple[Ops, Callable[[DecoderModel], str]]],
        free: Callable[[], int],
        made: Callable[[], int],
        postprocess: type[Postprocess],
        context: int,
        prefill: int,
        batches: Sequence[int],
    ) -> None:
        self._make_ops, self._free, self._made, self._postprocess = make_ops, free, made, postprocess
        self._context, self._prefill, self._batches = context, prefill, batches

    def model(self, name: str, shape: ModelShape, form: str, steps: int) -> dict[str, Any]:
        """Measure one model in one format of weights."""
        free = self._free()
        fitting = [
            rows
            for rows in self._batches
            if held_bytes(shape, FORMATS[form], rows * (self._context + steps + 32)) < SHARE * free
        ]
        facts: dict[str, Any] = {"model": name, "format": form, "batches": fitting, "free_bytes": free}
        if not fitting:
            return facts | {"skipped": f"its weights do not fit into {free / 1e9:.0f} GB"}
        begun = time.perf_counter()
        ops, choose = self._make_ops(form)
        limits = limits_for(fitting[-1], self._context, self._prefill, shape.vocab_size, steps)
        model = load_model(RandomCheckpoint(shape, form), ops, limits.max_model_len)
        facts["computed_by"] = choose(model)
        runner = Runner(ops, model, limits, self._postprocess)
        _fill(runner.cache, shape.layers)
        loaded, held = time.perf_counter(), self._free()
        runner.warm_up(lambda done, total: None)
        made = self._made()
        facts |= {"load_s": loaded - begun, "warm_up_s": time.perf_counter() - loaded}
        facts |= {"graphs_and_workspaces_bytes": held - self._free(), "kernels_made_at_start": made}
        lines = [
            self._line(
                name, form, rows, 1, self._context, time_decodes(runner, rows, self._context, steps, gen=10 + at)
            )
            for at, rows in enumerate(fitting)
        ]
        prefills = time_prefills(runner, self._prefill, repeats=5, gen=100)
        lines.append(self._line(name, form, 1, self._prefill, self._prefill, prefills))
        facts["kernels_made_later"] = self._made() - made
        facts["kernels"] = {
            str(rows): kernel_times(
                lambda rows=rows: time_decodes(runner, rows, self._context, PROFILED, 200), PROFILED
            )
            for rows in fitting
        }
        return facts | {"steps": lines, "kv_copies": _copies(runner)}

    def _line(self, name: str, form: str, rows: int, queries: int, context: int, times: StepTimes) -> dict[str, Any]:
        step = {"model": name, "format": form, "rows": rows, "queries": queries, "context": context}
        rate = rows * queries / times.seconds
        what = f"{name} {form}: {rows} x {queries} tokens at {context}"
        took = f"{times.seconds * 1e3:.3f} ms, {rate:,.0f} tokens/s, host {times.launch * 1e6:.0f} us"
        print(f"{what}: {took}", flush=True)
        return step | {"seconds": times.seconds, "launch_s": times.launch, "tokens_per_s": rate}


def _fill(cache: KVCache, layers: int) -> None:
    """Write random keys and values, because products of zeros take less power and so less time."""
    for index in range(layers):
        layer = cache.layer(index)
        for side in (layer.keys, layer.values):
            side.normal_() if side.is_floating_point() else side.random_(-127, 128)


def _copies(runner: Runner) -> dict[str, float]:
    """Return bytes per second of KV to the host and back."""
    blocks = np.arange(min(COPIED, runner.limits.num_kv_blocks), dtype=np.int32)
    held = runner.cache.export_blocks(blocks)  # allocates the buffers of copies
    begun = time.perf_counter()
    held = runner.cache.export_blocks(blocks)
    between = time.perf_counter()
    runner.cache.import_blocks(blocks, held)
    ended = time.perf_counter()
    return {"export": held.nbytes / (between - begun), "import": held.nbytes / (ended - between)}


def run(
    bench: Bench, models: list[str], forms: list[str], steps: int, found: dict[str, Any], output: Path
) -> list[str]:
    """Measure all models, write after each; return the failed ones, whose errors are in the result."""
    failed = []
    for name in models:
        for form in forms:
            try:
                facts = bench.model(name, ARCHITECTURES[name], form, steps)
            except Exception as error:  # noqa: BLE001 - one failed model must not stop the others
                traceback.print_exc()
                failed.append(f"{name} {form}")
                facts = {"model": name, "format": form, "failed": f"{type(error).__name__}: {error}"}
            found["steps"] += facts.pop("steps", [])
            found["models"].append(facts)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            gc.collect()
            with suppress(ImportError, RuntimeError):
                import torch

                torch.cuda.empty_cache()
    return failed


def on_cuda(context: int, prefill: int, batches: Sequence[int]) -> Bench:
    """Return the bench on the first CUDA device."""
    import torch
    from fd_gpu_cuda.backend import CudaBackend

    def make_ops(form: str) -> tuple[Ops, Callable[[DecoderModel], str]]:
        backend = CudaBackend(EngineConfig(model=form, dtype="bfloat16"))
        ops = backend.make_ops()

        def choose(model: DecoderModel) -> str:
            """Test the kernels on the model, as at start; a failing one is replaced by the next provider."""
            if backend._providers is not None:
                backend._try_providers(backend._providers, model, ops)
            print(f"on {backend.describe()}", flush=True)
            return backend.describe()

        return ops, choose

    def free() -> int:
        bytes_free, _ = torch.cuda.mem_get_info(0)
        return int(bytes_free) + torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0)

    plugins = installed_plugins()
    postprocess = plugins.load(POSTPROCESS, plugins.default_postprocessor("gpu_cuda", "torch"))
    return Bench(make_ops, free, _made_kernels(), postprocess, context, prefill, batches)


def _made_kernels() -> Callable[[], int]:
    """Return a counter of the kernels that Triton makes from now on, compiled or read from its cache."""
    import triton

    if not hasattr(triton, "knobs"):
        return lambda: 0  # releases before 3.4 have no such hook
    made: list[Any] = []
    before = triton.knobs.runtime.jit_post_compile_hook

    def hook(*arguments: Any, **facts: Any) -> Any:
        made.append(facts.get("key"))
        return None if before is None else before(*arguments, **facts)

    triton.knobs.runtime.jit_post_compile_hook = hook
    return lambda: len(made)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(ARCHITECTURES))
    parser.add_argument("--formats", nargs="+", default=["bf16", "int4"], choices=list(FORMATS))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="rows of decodes")
    parser.add_argument("--steps", type=int, default=64, help="decodes of each batch")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args(arguments)


def main() -> None:
    chosen = parse()
    bench = on_cuda(chosen.context, chosen.prefill, chosen.batches)
    facts = device_facts()
    found: dict[str, Any] = facts | {"chip": chip_of(facts["device"]), "steps": [], "models": []}
    try:
        found["rates"] = device_rates()
        print(json.dumps(found["rates"], indent=1))
        failed = []
    except RuntimeError as error:  # the models may run all the same
        traceback.print_exc()
        found["rates"], failed = {"failed": str(error)}, ["rates"]
    failed += run(bench, chosen.models, chosen.formats, chosen.steps, found, chosen.output)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
