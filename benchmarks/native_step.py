"""Time one step of the native kernels on SmolLM2-135M's shape, and its share of the machine's limit.

    python -m benchmarks.native_step [--dtype bfloat16] [--weights plain int8 Q4_1] [--threads 2] [--only decode32]
    python -m benchmarks.native_step --adapters 0 1 4 16 --weights plain Q4_1 --only decode1 decode32 prefill128
    python -m benchmarks.native_step --context 2000 8000 32000 --only decode1 --kv-dtype int8

Weights are random, since their values do not affect the time; `plain` ones have the dtype, others are formats of packed
weights. `--adapters` loads that many LoRA adapters of rank 16 on every linear, and requests use them in turn.
`--context` replaces the context lengths of each case. Cases run interleaved, round by round,
because the machine drifts; the table gives the fastest and the median round. The limit of a step is the larger of the
time to read its bytes (weights once, keys and values once) and the time for its products, at the rates measured just
before.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from fd_core.cli.bench.compare.machine import BandwidthProbe, describe, load_average
from fd_core.models.decoder import Attention, Decoder, DecoderModel, Layer, Mlp
from fd_core.models.loading.config import ModelConfig
from fd_core.models.registry import describe as describe_model
from fd_core.ops.contract import Heads, KVCache, Norm, Ops, Rope, StepInput
from fd_core.ops.native import load_native_ops
from fd_core.ops.native.pack import NativeOps, ProgramForward
from fd_core.ops.weights import Adapter, LowRank, PackedTensor, RawTensor, Weight
from fd_core.runner.inputs.inputs import adapter_rows
from fd_core.testing.models.arrays import packed_weight

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCABULARY = 576, 9, 3, 64, 1536, 30, 49152
BLOCK_SIZE = 32
MAX_POSITIONS = 65536
RANK = 16
PLAIN = "plain"
"""Weights in the pack's dtype."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step: `rows` requests that each compute `queries` tokens, the last of which attends to `context` tokens."""

    name: str
    rows: int
    queries: int
    context: int
    shared: int = 0
    """Tokens of prefix whose blocks all rows have in common."""


CASES = (
    Case("decode1", 1, 1, 256),
    Case("decode8", 8, 1, 256),
    Case("decode32", 32, 1, 256),
    Case("decode32 long", 32, 1, 512),
    Case("decode32 shared", 32, 1, 480, shared=400),
    Case("prefill128", 1, 128, 128),
    Case("prefill512", 1, 512, 512),
    Case("prefill 4 x 512", 4, 512, 512),
)


def random_weight(rng: np.random.Generator, form: str, out: int, inputs: int) -> Weight:
    if form != PLAIN:
        return packed_weight(form, out, inputs, scale=0.02)
    values = (rng.standard_normal((out, inputs), np.float32) * 0.02).view(np.uint32)
    return RawTensor("BF16", (values >> 16).astype(np.uint16))


def random_model(ops: Ops, form: str) -> DecoderModel:
    rng = np.random.default_rng(0)
    norm = Norm(ops.prepare_vector(np.ones(HIDDEN, np.float32)), 1e-5)
    angles = np.arange(MAX_POSITIONS)[:, None] / 10000.0 ** (np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    tables = [ops.prepare_vector(f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
    heads = Heads(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, Rope(*tables))

    def linear(*shapes: tuple[int, int], gated: bool = False) -> object:
        return ops.prepare_linear([random_weight(rng, form, *shape) for shape in shapes], gated=gated)

    kv_width = KV_HEADS * HEAD_DIM
    layers = tuple(
        Layer(
            Attention(
                norm,
                linear((HIDDEN, HIDDEN), (kv_width, HIDDEN), (kv_width, HIDDEN)),
                heads,
                linear((HIDDEN, HIDDEN)),
                None,
                None,
            ),
            Mlp(
                norm,
                linear((INNER, HIDDEN), (INNER, HIDDEN), gated=True),
                linear((HIDDEN, INNER)),
                None,
                None,
                gated=True,
            ),
        )
        for _ in range(LAYERS)
    )
    table = ops.prepare_embedding(random_weight(rng, PLAIN, VOCABULARY, HIDDEN).expanded())
    head = ops.tied_head(table, random_weight(rng, form, VOCABULARY, HIDDEN))
    decoder = Decoder(table, 1.0, layers, norm, head, "silu", None, parallel=False)
    config = ModelConfig(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": norm.eps,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
        }
    )
    return DecoderModel(
        ops,
        describe_model(config),
        decoder,
        architecture="random",
        vocab_size=VOCABULARY,
        max_positions=MAX_POSITIONS,
        eos_token_ids=(),
        num_parameters=0,
    )


def random_adapter(model: DecoderModel, index: int) -> Adapter:
    """Return an adapter of rank `RANK` on every linear that one may change; all share their values."""
    values = np.random.default_rng(index).standard_normal((RANK, INNER), np.float32) * 0.02
    deltas = {
        name: LowRank(values[:, :ins].copy(), np.ascontiguousarray(values[:, :out].T))
        for name, (out, ins) in model.spec.adaptable().items()
    }
    return Adapter(f"adapter {index}", RANK, deltas)


def with_adapters(step: StepInput, case: Case, count: int, ops: Ops) -> StepInput:
    """Return the step with the adapters 1 to `count` in turn, request by request."""
    if not count:
        return step
    slots = np.repeat(np.arange(case.rows) % count + 1, case.queries).astype(np.int32)
    return replace(step, **adapter_rows(slots, ops))


def step_of(case: Case) -> StepInput:
    rng = np.random.default_rng(1)
    width = -(-case.context // BLOCK_SIZE)
    common = case.shared // BLOCK_SIZE
    tables = 1 + common + rng.permutation(case.rows * width).reshape(case.rows, width)
    tables[:, :common] = np.arange(common)
    positions = np.tile(np.arange(case.context - case.queries, case.context), case.rows)
    row_of = np.repeat(np.arange(case.rows), case.queries)
    arrays = {
        "token_ids": rng.integers(0, VOCABULARY, len(positions)),
        "positions": positions,
        "kv_slots": tables[row_of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        "query_start": np.arange(case.rows + 1) * case.queries,
        "context_len": np.full(case.rows, case.context),
        "block_tables": tables,
        "logits_rows": np.arange(1, case.rows + 1) * case.queries - 1,
    }
    given = {name: np.ascontiguousarray(array, np.int32) for name, array in arrays.items()}
    return StepInput(**given, max_query=case.queries, max_context=case.context)


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of the machine."""

    bandwidth: float
    """Bytes read per second."""
    linear: float
    """Floating-point operations per second of linear layers; of integers where weights are packed."""
    attention: float
    """Floating-point operations per second of products of activations."""


def limits(case: Case, form: str, adapters: int, itemsize: int, kv_token: int, rates: Rates) -> tuple[float, float]:
    """Return the seconds that a step's bytes and its products take at least."""
    layer = HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    head = VOCABULARY * HIDDEN
    sample = random_weight(np.random.default_rng(0), form, HIDDEN, HIDDEN)
    item_bytes = sample.nbytes / HIDDEN**2 if isinstance(sample, PackedTensor) else itemsize
    seen = case.rows * (case.context - case.shared) + case.shared
    kv_bytes = seen * LAYERS * kv_token
    tokens = case.rows * case.queries
    pairs = case.rows * case.queries * (case.context - (case.queries - 1) / 2)
    linear = 2 * (tokens * LAYERS * layer + case.rows * head)
    attention = 2 * pairs * LAYERS * 2 * HEADS * HEAD_DIM
    # Of the parts' ins and outs: q, k and v, output, gate and up, down.
    widths = 3 * HIDDEN + (HEADS + 2 * KV_HEADS) * HEAD_DIM + HIDDEN + HEADS * HEAD_DIM + 3 * (HIDDEN + INNER)
    lora = LAYERS * RANK * widths * min(adapters, 1)
    read = (LAYERS * layer + head) * item_bytes + kv_bytes + min(adapters, case.rows) * lora * itemsize
    compute = linear / rates.linear + (attention + 2 * tokens * lora) / rates.attention
    return read / rates.bandwidth, compute


def measured_rate(ops: NativeOps, form: str, rows: int, width: int, repeats: int) -> float:
    """Return multiply-adds per second of a product with `rows` rows and `width` columns, the best of five."""
    linear = ops.prepare_linear([random_weight(np.random.default_rng(2), form, width, HIDDEN)])
    x = np.ones((rows, HIDDEN), np.float32)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            ops.linear(x, linear)
        best = max(best, repeats * rows * HIDDEN * width / (time.perf_counter() - start))
    return best


def shares(forward: ProgramForward, step: StepInput, cache: KVCache, repeats: int = 8) -> dict[str, float]:
    """Return seconds of one step by kind of operation; each operation at its fastest of `repeats` steps."""
    program = forward.program(cache)
    fastest: list[tuple[str, float]] = []
    for _ in range(repeats):
        program.set_timed(True)
        forward(step, cache)
        times = program.times()
        fastest = [(name, min(a, b)) for (name, a), (_, b) in zip(fastest or times, times, strict=True)]
    program.set_timed(False)
    total: dict[str, float] = {}
    for name, seconds in fastest:
        total[name] = total.get(name, 0.0) + seconds
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--weights", nargs="+", default=[PLAIN], metavar="FORM", help="plain, or formats such as Q4_1")
    parser.add_argument("--adapters", type=int, nargs="+", default=[0], metavar="N")
    parser.add_argument("--context", type=int, nargs="+", default=[], metavar="TOKENS")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "int8"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", default=[""], help="run cases whose name starts so")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/native_step.json"))
    arguments = parser.parse_args()
    ops = load_native_ops(arguments.dtype, arguments.threads)
    if ops is None:
        raise SystemExit("the native kernels cannot be built here")
    cases = [case for case in CASES if case.name.startswith(tuple(arguments.only))]
    if arguments.context:
        contexts = (replace(case, name=f"{case.name} {n}", context=n) for case in cases for n in arguments.context)
        cases = [case for case in contexts if max(case.queries, case.shared + 1) <= case.context <= MAX_POSITIONS]
    most = max(case.rows * -(-case.context // BLOCK_SIZE) + case.shared // BLOCK_SIZE + 1 for case in cases)
    itemsize = 4 if arguments.dtype == "float32" else 2
    # A scale of four bytes goes with the bytes of a key and of a value.
    kv_token = 2 * KV_HEADS * (HEAD_DIM + 4 if arguments.kv_dtype == "int8" else HEAD_DIM * itemsize)
    # Reading: a weight of 256 MiB or more for one row. Products: operands that stay in the caches.
    weight_rate = itemsize * measured_rate(ops, PLAIN, 1, 5 * VOCABULARY, 3)
    bandwidth = max(BandwidthProbe(arguments.threads).measure(), weight_rate)
    attention = 2 * measured_rate(ops, PLAIN, 240, 1024, 20)
    rates, forwards = {}, {}
    cache = None
    for form in arguments.weights:
        rates[form] = Rates(bandwidth, 2 * measured_rate(ops, form, 240, 1024, 20), attention)
        model = random_model(ops, form)
        cache = cache or ops.allocate_kv(replace(model.kv_shape(BLOCK_SIZE), dtype=arguments.kv_dtype), most)
        for count in arguments.adapters:
            held = model.with_adapters([random_adapter(model, index) for index in range(count)])
            forwards[form, count] = ops.compile(held.forward)
    assert cache is not None
    steps = {(case.name, n): with_adapters(step_of(case), case, n, ops) for case in cases for n in arguments.adapters}
    times: dict[tuple[str, tuple[str, int]], list[float]] = {(case.name, key): [] for case in cases for key in forwards}
    load = load_average()
    for measured in (False, *[True] * arguments.rounds):
        for case in cases:
            for key, forward in forwards.items():
                start = time.perf_counter()
                forward(steps[case.name, key[1]], cache)
                if measured:
                    times[case.name, key].append(time.perf_counter() - start)

    print(f"{ops.describe()}, {arguments.threads} threads, load {load:.1f}")
    for form, rate in rates.items():
        print(f"{form}: read {bandwidth / 1e9:.1f} GB/s, products {rate.linear / 1e9:.0f} G operations/s")
    columns = "".join(f"{name:>9}" for name in ("weights", "adapters", "fastest", "median"))
    print(f"{'case':18}{columns}{'bytes':>8}{'flops':>8}{'share':>7}   of which")
    results = []
    for case in cases:
        for (form, count), forward in forwards.items():
            assert isinstance(forward, ProgramForward)
            kept, step = times[case.name, (form, count)], steps[case.name, count]
            read, compute = limits(case, form, count, itemsize, kv_token, rates[form])
            share = max(read, compute) / min(kept)
            parts = shares(forward, step, cache)
            named = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in parts.items())
            figures = (
                f"{min(kept) * 1e3:9.2f}{median(kept) * 1e3:9.2f}{read * 1e3:8.2f}{compute * 1e3:8.2f}{share:7.0%}"
            )
            print(f"{case.name:18}{form:>9}{count:>9}{figures}   {named}")
            limit = {"limit_bytes_s": read, "limit_flops_s": compute, "share": share}
            results.append(
                asdict(case) | {"weights": form, "adapters": count, "seconds": kept, "operations_s": parts} | limit
            )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    summary = {"machine": describe(), "kernels": ops.describe()}
    summary |= {"rates": {form: asdict(rate) for form, rate in rates.items()}}
    summary |= {"threads": arguments.threads, "load_average": load, "cases": results}
    arguments.output.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
