"""Cost of output constraints: schemas against free text, first token of a new schema, steps during compilation.

    python benchmarks/structured.py
    python benchmarks/structured.py --streams 1,8 --rounds 3 --out structured

One process, interleaved: in a round every stream count is measured with free text, with a schema whose forced tokens
are computed one by one, and with a schema whose forced tokens are drafts. Seconds per output token are those of whole
requests, after their first token. The last part fills every slot with free text and lets requests with large grammars
arrive that are never admitted meanwhile: what changes in a step is what their compilation does to others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fd_core import LLM, SamplingParams
from fd_core.structured import grammar
from fd_core.types import RequestSpec

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.forms import FREE_TOKENS, SCHEMA

RESULTS = Path(__file__).parent / "results"
SETTINGS: dict[str, Any] = {"max_num_seqs": 32, "max_model_len": 320, "num_kv_blocks": 400}
_serial = count()


def large_grammar() -> str:
    """A new schema of about 100 KB; it compiles in about 150 ms."""
    unseen = next(_serial)
    return grammar.json_schema(
        {
            "type": "object",
            "properties": {
                f"p{unseen}_{outer}": {
                    "type": "object",
                    "properties": {f"q{j}": {"type": "string", "pattern": f"^[a-z]{{{j},40}}$"} for j in range(20)},
                }
                for outer in range(80)
            },
        }
    )


def per_token(llm: LLM, streams: int, form: str | None) -> float:
    """Seconds per output token after the first, median over the requests of a batch."""
    prompts = [f"Record {next(_serial)} of the register:\n" for _ in range(streams)]
    params = [
        SamplingParams(max_tokens=200, temperature=1.0, seed=seed, grammar=form)
        if form
        else SamplingParams(max_tokens=FREE_TOKENS, temperature=1.0, seed=seed, ignore_eos=True)
        for seed in range(streams)
    ]
    done = llm.generate(prompts, params)
    return median((each.token_times[-1] - each.token_times[0]) / (len(each.token_times) - 1) for each in done)


def first_token(llm: LLM, form: str | None) -> float:
    """Seconds to the first token of one request alone."""
    params = SamplingParams(max_tokens=1, temperature=1.0, grammar=form)
    return llm.generate(f"Record {next(_serial)} of the register:\n", params)[0].ttft


def unseen_schema() -> str:
    """The schema with one new name, so that it is not in the cache."""
    return grammar.json_schema({**SCHEMA, "title": f"record {next(_serial)}"})


def steps(llm: LLM, grammars: int) -> list[float]:
    """Seconds of each step while every slot decodes free text and `grammars` large ones arrive and compile."""
    engine = llm._engine
    ignoring = SamplingParams(max_tokens=220, temperature=1.0, ignore_eos=True)
    for slot in range(llm.info.max_num_seqs):
        engine.submit(RequestSpec(request_id=f"free-{next(_serial)}", prompt=(slot + 3, 5, 7), params=ignoring))
    for _ in range(20):
        engine.step()
    forms = [large_grammar() for _ in range(grammars)]
    for form in forms:
        name = f"bound-{next(_serial)}"
        params = SamplingParams(max_tokens=8, grammar=form)
        spec = RequestSpec(request_id=name, prompt=(3, 5), params=params, eos_token_ids=llm.info.eos_token_ids)
        engine.submit(spec)
    taken = []
    for _ in range(150):
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    engine.abort_all()
    while engine.has_work:
        engine.step()
    return taken


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grammars", type=int, default=50)
    parser.add_argument("--out", default="structured")
    given = parser.parse_args()
    form = grammar.json_schema(SCHEMA)
    plain = LLM("smollm2", backend="cpu", max_forced_tokens=0, **SETTINGS)
    forced = LLM("smollm2", backend="cpu", **SETTINGS)
    results: dict[str, Any] = {"command": sys.argv, "device": plain.info.device, "rows": []}
    for streams in map(int, given.streams.split(",")):
        for llm in (plain, forced):
            per_token(llm, streams, form)
        rounds = []
        for _ in range(given.rounds):
            free = per_token(plain, streams, None)
            free_wide = per_token(forced, streams, None)
            rounds.append((free, free_wide, per_token(plain, streams, form), per_token(forced, streams, form)))
        free, free_wide, alone, drafted = (median(column) for column in zip(*rounds, strict=True))
        ratios = [median(each[index] / each[0] for each in rounds) for index in (1, 2, 3)]
        results["rows"].append({"streams": streams, "seconds": [free, free_wide, alone, drafted], "ratios": ratios})
        print(
            f"{streams:3d} streams: free {free * 1e3:.2f} ms a token; with room for drafts {ratios[0]:.3f}x; schema "
            f"{ratios[1]:.3f}x; schema with forced tokens {ratios[2]:.3f}x"
        )
    pairs = [(first_token(forced, None), first_token(forced, unseen_schema())) for _ in range(4 * given.rounds)]
    free_first, bound_first = (median(column) for column in zip(*pairs, strict=True))
    results["first_token"] = [free_first, bound_first]
    print(f"first token: free {free_first * 1e3:.1f} ms, unseen schema {bound_first * 1e3:.1f} ms")
    quiet, busy = [], []
    for _ in range(max(given.rounds // 2, 1)):
        quiet += steps(forced, 0)
        busy += steps(forced, given.grammars)
    for name, taken in (("quiet", quiet), ("busy", busy)):
        found = np.quantile(taken, [0.5, 0.9, 0.99]) * 1e3
        results[name] = found.tolist()
        print(f"{name}: step p50 {found[0]:.1f}, p90 {found[1]:.1f}, p99 {found[2]:.1f} ms over {len(taken)} steps")
    print("masks:", forced.stats.masks)
    results["masks"] = str(forced.stats.masks)
    (RESULTS / f"{given.out}.json").write_text(json.dumps(results, indent=1) + "\n")
    plain.close()
    forced.close()


if __name__ == "__main__":
    main()
