"""Write a GGUF file with random weights in the shape of a larger model, to measure speed and memory without a download.

    python benchmarks/random_gguf.py 7b q4_k_m -o /tmp/7b-q4_k_m.gguf
    python benchmarks/random_gguf.py 270m q8_0 -o /tmp/270m-q8_0.gguf
    python benchmarks/peers.py --model /tmp/1b-q4_1.gguf

The tokenizer is SmolLM2's. Random weights compute at the speed of trained ones; their texts mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from harness.checkpoint import fetch_default
from rich.progress import track

SPREAD = 0.02
"""Standard deviation of the weights, as models are initialised."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a llama."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int | None = None
    """Tokens of the table, which is the output projection as well; None for the tokenizer's, and two tables."""


SHAPES = {
    "1b": Shape(2048, 5632, 22, 32, 4),
    "7b": Shape(4096, 14336, 32, 32, 8),
    "270m": Shape(768, 2048, 12, 4, 1, vocabulary=262_144),
}
"""Those of TinyLlama 1.1B and of Mistral 7B, whose layers are those of Llama 3.1 8B, but for the vocabulary, and about
that of Gemma 3 270M, most of which is its table."""


def q4_1(blocks: int, random: np.random.Generator) -> np.ndarray:
    """Return blocks of 32: scale and minimum as float16, 16 bytes of nibbles."""
    scale = SPREAD / 4.6  # the deviation of a nibble
    head = np.array([scale, -7.5 * scale], "<f2").view(np.uint8)
    return np.hstack([np.tile(head, (blocks, 1)), random.integers(0, 256, (blocks, 16), np.uint8)])


def q4_0(blocks: int, random: np.random.Generator) -> np.ndarray:
    """Return blocks of 32: scale as float16, 16 bytes of nibbles."""
    head = np.array([SPREAD / 4.6], "<f2").view(np.uint8)
    return np.hstack([np.tile(head, (blocks, 1)), random.integers(0, 256, (blocks, 16), np.uint8)])


def q8_0(blocks: int, random: np.random.Generator) -> np.ndarray:
    """Return blocks of 32: scale as float16, 32 bytes."""
    head = np.array([SPREAD / 74], "<f2").view(np.uint8)
    return np.hstack([np.tile(head, (blocks, 1)), random.integers(0, 256, (blocks, 32), np.uint8)])


def q4_k(blocks: int, random: np.random.Generator) -> np.ndarray:
    """Return blocks of 256: two float16, 12 bytes of scales and minima of 6 bits, 128 bytes of nibbles."""
    scale = SPREAD / (36 * 4.6)
    head = np.array([scale, 7.5 * scale], "<f2").view(np.uint8)
    return np.hstack([np.tile(head, (blocks, 1)), random.integers(0, 256, (blocks, 140), np.uint8)])


def q6_k(blocks: int, random: np.random.Generator) -> np.ndarray:
    """Return blocks of 256: 192 bytes of values of 6 bits, 16 scales of 8 bits, a float16."""
    tail = np.array([SPREAD / (74 * 18.5)], "<f2").view(np.uint8)
    return np.hstack([random.integers(0, 256, (blocks, 208), np.uint8), np.tile(tail, (blocks, 1))])


def bf16(blocks: int, random: np.random.Generator) -> np.ndarray:
    """Return blocks of one value; a million values repeat, because drawing all would take minutes."""
    values = SPREAD * random.standard_normal(1 << 20, np.float32)
    return np.resize((values.view("<u4") >> 16).astype("<u2"), blocks).view(np.uint8).reshape(blocks, 2)


BLOCKS = {
    Kind.BF16: bf16,
    Kind.Q4_0: q4_0,
    Kind.Q4_1: q4_1,
    Kind.Q8_0: q8_0,
    Kind.Q4_K: q4_k,
    Kind.Q6_K: q6_k,
}
MIXES = {kind.name.lower(): (kind, kind) for kind in BLOCKS} | {"q4_k_m": (Kind.Q4_K, Kind.Q6_K)}
"""Type of most weights, and of the output projection and every second `attn_v` and `ffn_down`."""


def write(shape: Shape, mix: tuple[Kind, Kind], target: Path, random: np.random.Generator) -> None:
    """Write the file; tensors are generated layer by layer while writing."""
    reader = gguf.GGUFReader(fetch_default())
    writer = gguf.GGUFWriter(target, "llama", use_temp_file=True)
    own = {
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.feed_forward,
        "llama.block_count": shape.layers,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.rope.dimension_count": shape.hidden // shape.heads,
    }
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "general.architecture", "general.file_type")):
            continue
        value_type, *item_type = field.types
        value = own.get(name, field.contents())
        if shape.vocabulary and name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
            more = range(len(value), shape.vocabulary)
            value = [*value, *(f"<filler {index}>" if name.endswith("tokens") else 1 for index in more)]
        writer.add_key_value(name, value, value_type, item_type[0] if item_type else None)
    vocabulary = shape.vocabulary or len(reader.fields["tokenizer.ggml.tokens"].data)
    most, some = mix

    def matrix(name: str, rows: int, columns: int, kind: Kind) -> None:
        size, nbytes = gguf.GGML_QUANT_SIZES[kind]
        made = BLOCKS[kind](rows * columns // size, random)
        writer.add_tensor(name, made.reshape(rows, columns // size * nbytes), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(shape.hidden, np.float32))

    head = shape.hidden // shape.heads
    matrix("token_embd.weight", vocabulary, shape.hidden, most)
    for layer in track(range(shape.layers), "making layers"):
        part, finer = f"blk.{layer}", some if layer % 2 else most
        norm(f"{part}.attn_norm.weight")
        matrix(f"{part}.attn_q.weight", shape.hidden, shape.hidden, most)
        matrix(f"{part}.attn_k.weight", shape.kv_heads * head, shape.hidden, most)
        matrix(f"{part}.attn_v.weight", shape.kv_heads * head, shape.hidden, finer)
        matrix(f"{part}.attn_output.weight", shape.hidden, shape.hidden, most)
        norm(f"{part}.ffn_norm.weight")
        matrix(f"{part}.ffn_gate.weight", shape.feed_forward, shape.hidden, most)
        matrix(f"{part}.ffn_up.weight", shape.feed_forward, shape.hidden, most)
        matrix(f"{part}.ffn_down.weight", shape.hidden, shape.feed_forward, finer)
    norm("output_norm.weight")
    if not shape.vocabulary:
        matrix("output.weight", vocabulary, shape.hidden, some)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("weights", choices=MIXES)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(SHAPES[given.size], MIXES[given.weights], given.out, np.random.default_rng(given.seed))
    print(f"{given.out}: {given.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
