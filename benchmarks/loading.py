"""Measure the memory of a model while it is loaded and afterwards, compared with the bytes of its files.

    python benchmarks/random_gguf.py 270m q8_0 -o /tmp/270m-q8_0.gguf
    python benchmarks/loading.py /tmp/270m-q8_0.gguf
    python benchmarks/loading.py FOLDER --pack torch --quantization int8

Each model is loaded in a separate process. `peak` is the growth of its resident set, with pages of files; `private`
and `file` are what is left of it; `reported` is what a server prints when it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

PACKS = ("native", "torch", "numpy")


def status() -> dict[str, int]:
    """Return the bytes of this process's memory by kind."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {name.rstrip(":"): int(words[0]) * 1024 for name, *words in lines if words[1:] == ["kB"]}


def measure(path: Path, pack: str, quantization: str) -> dict[str, float]:
    """Load a model in this process; return megabytes, and seconds."""
    from fd_core.models.opening import open_checkpoint
    from fd_core.models.registry import load_model
    from fd_core.ops.numpy.ops import NumpyOps

    if pack == "numpy":
        ops = NumpyOps()
    else:
        from fd_core.ops.native import load_native_ops
        from fd_core.ops.torch.ops import TorchOps

        threads = len(os.sched_getaffinity(0))
        ops = TorchOps("bfloat16") if pack == "torch" else load_native_ops("bfloat16", threads)
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before, begun = status(), time.perf_counter()
    with open_checkpoint(path) as checkpoint:
        _ = checkpoint.digest
        model = load_model(checkpoint, ops, 512, quantization=quantization)
    seconds = time.perf_counter() - begun
    after = status()
    del checkpoint
    gc.collect()
    left = status()
    reported = sum(use.nbytes for use in model.weights)
    whole = sum(file.stat().st_size for file in ([path] if path.is_file() else path.glob("*.safetensors")))
    grown = {"peak": after["VmHWM"] - before["VmRSS"]}
    grown |= {"private": left["RssAnon"] - before["RssAnon"], "file": left["RssFile"] - before["RssFile"]}
    return {name: size / 1e6 for name, size in {"files": whole, **grown, "reported": reported}.items()} | {
        "peak ratio": grown["peak"] / whole,
        "private ratio": grown["private"] / whole,
        "seconds": seconds,
    }


def main() -> None:
    """Print one row for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files and folders of safetensors")
    parser.add_argument("--pack", choices=PACKS, default="native")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(given.models[0], given.pack, given.quantization)))
        return
    for path in given.models:
        options = ["--pack", given.pack, "--quantization", given.quantization, "--here"]
        made = subprocess.run([sys.executable, __file__, path, *options], check=True, stdout=subprocess.PIPE, text=True)
        row = json.loads(made.stdout.splitlines()[-1])
        print(f"{path.name:24}", *(f"{name} {value:.2f}" for name, value in row.items()), sep="  ", flush=True)


if __name__ == "__main__":
    main()
