"""Texts per second of an embedding model in fd_core and in sentence-transformers, in turns on the same threads.

`python benchmarks/encoders.py FOLDER` needs sentence-transformers. Prints the median of the ratios of neighbouring runs
and the largest difference of a vector's element.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from fd_core import LLM

_TURNS = 7
_SETS = {"4 to 20 words": (256, 4, 20), "5 to 180 words": (96, 5, 180)}
"""Number of texts, and words of the shortest and of the longest."""


def _texts(count: int, least: int, most: int, words: list[str]) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choice(words) for _ in range(rng.randint(least, most))) for _ in range(count)]


def main(folder: str, threads: int = 2) -> None:
    """Measure the model in a folder with `vocab.txt`."""
    torch.set_num_threads(threads)
    words = [word for word in (Path(folder) / "vocab.txt").read_text().split() if word.isalpha()]
    other = SentenceTransformer(folder, device="cpu")
    other.max_seq_length = 512
    with closing(LLM(folder, backend="cpu", dtype="float32", num_threads=threads)) as llm:
        for name, sizes in _SETS.items():
            texts, ratios, rates = _texts(*sizes, words), [], []
            for _ in range(_TURNS):
                begun = time.perf_counter()
                right = other.encode(texts, batch_size=32)
                between = time.perf_counter()
                found = llm.embed(texts)
                ours = time.perf_counter() - between
                ratios.append((between - begun) / ours)
                rates.append(len(texts) / ours)
            off = float(np.abs(found - right).max())
            print(
                f"{name}: {statistics.median(rates):.0f} texts/s, {statistics.median(ratios):.2f} times, off {off:.1e}"
            )


if __name__ == "__main__":
    main(*sys.argv[1:2])
