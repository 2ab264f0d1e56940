"""Calculate the least time of a step on an H100 and an H200, as the expectation before anything is measured.

    python benchmarks/gpu_roofline.py [--context 1024] [--prefill 2048] [--kv-cache-dtype fp8]
    python benchmarks/gpu_roofline.py --measured benchmarks/results/gpu_{llama*,kernels}.json

The first writes benchmarks/results/gpu_roofline.md and .json. The second compares measurements by `gpu_first_hour.py`
with the floors of their own steps, shows those by `gpu_kernels.py`, and writes gpu_measured.md to the same folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.roofline import (
    CHIPS,
    FORMATS,
    LAUNCHES_DENSE,
    LAUNCHES_EXPERTS,
    LAUNCHES_OUTSIDE_LAYERS,
    Chip,
    Format,
    Step,
    floor_of,
    held_bytes,
    work_of,
)

from fd_core.ops.contract import KV_TYPES
from fd_core.simulation.costs.calculating import ARCHITECTURES, ModelShape

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = ("smollm2", "llama-1b", "llama-8b", "qwen3-30b-a3b")
SHOWN_FORMATS = ("bf16", "fp8", "int4")
BATCHES = (1, 32, 256)
SHOWN_KERNELS = 12
PREAMBLE = """\
# What a GPU takes at least for a step

Calculated by `python benchmarks/gpu_roofline.py`, **not measured** but for the launches. The floor of a step is the
longer of moving its bytes and multiplying, at the maker's rates, and what launches add. No engine reaches it: 70 to
85 % of the bandwidth and 50 to 70 % of the operations are good.

- Decodes see {context:,} tokens. Weights are read once, keys and values once, logits written and read once.
- Of experts, those that are hit are read, expected where routing is uniform: of 128, 8 for one token, 112 for 32.
- `fp8` and `int4` are the weights of layers; embedding, output projection and attention stay in bfloat16. KV is
  stored as {kv}.
- Launches: {dense} a dense layer, {experts} one with experts, {outside} outside. A decode is one graph: {graph:g} us,
  and {node:g} us a kernel. A prefill is launched by the host, {eager:g} us a kernel, ahead of the device. These three
  were measured on an H100."""
HEADINGS = ("step", "weights", "moved", "operations", "launches", "floor", "tokens/s", "binds")


def calculated(name: str, how: str, step: Step, chip: Chip, kv: str = "auto") -> dict[str, Any]:
    """Return one line as plain values: the work, the floor, and whether model and KV fit into the memory."""
    model, weights = shape(name), form(how)
    work = work_of(model, weights, step, kv)
    floor = floor_of(work, step, weights, chip)
    numbers = asdict(work) | {"bytes": work.bytes, "operations": work.operations}
    times = {"memory_s": floor.memory, "compute_s": floor.compute, "gaps_s": floor.gaps, "host_s": floor.host}
    held = held_bytes(model, weights, step.rows * step.context, kv)
    answers = {"floor_s": floor.seconds, "tokens_per_s": floor.rate, "binds": floor.binds}
    room = {"held_bytes": held, "fits": held < chip.base.memory}
    return {"model": name, "format": how, "decode": step.decode} | asdict(step) | numbers | times | answers | room


def shape(name: str) -> ModelShape:
    """Return a model's sizes. Raises `SystemExit` with the known models."""
    if name not in ARCHITECTURES:
        raise SystemExit(f"{name!r} is no model of this roofline; there are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def form(name: str) -> Format:
    """Return a format of weights. Raises `SystemExit` with the known formats."""
    if name not in FORMATS:
        raise SystemExit(f"{name!r} is no format of this roofline; there are {', '.join(FORMATS)}")
    return FORMATS[name]


def every_line(chip: Chip, context: int, prefill: int, kv: str = "auto") -> Iterator[dict[str, Any]]:
    """Yield the lines of one chip, model by model."""
    steps = [*(Step(rows, 1, context) for rows in BATCHES), Step(1, prefill, prefill)]
    for name in MODELS:
        for how in SHOWN_FORMATS:
            for step in steps:
                yield calculated(name, how, step, chip, kv)


def cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line's cells, as HEADINGS names them."""
    step = f"decode of {line['rows']}" if line["decode"] else f"prefill of {line['queries']:,}"
    return (
        step,
        line["format"],
        f"{line['bytes'] / 1e9:,.2f} GB",
        f"{line['operations'] / 1e12:,.3f} T",
        f"{line['launches']}",
        f"{line['floor_s'] * 1e3:,.3f} ms",
        f"{line['tokens_per_s']:,.0f}",
        line["binds"] if line["fits"] else f"does not fit: {line['held_bytes'] / 1e9:,.0f} GB",
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table, line by line."""
    lines = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def page(lines: Mapping[str, Sequence[Mapping[str, Any]]], context: int, kv: str = "auto") -> str:
    """Return the roofline as Markdown."""
    launching = next(iter(CHIPS.values())).launching
    text = [
        PREAMBLE.format(
            context=context,
            kv="bfloat16" if kv == "auto" else kv,
            dense=LAUNCHES_DENSE,
            experts=LAUNCHES_EXPERTS,
            outside=LAUNCHES_OUTSIDE_LAYERS,
            **{name: seconds * 1e6 for name, seconds in asdict(launching).items()},
        )
    ]
    for name, found in lines.items():
        chip = CHIPS[name]
        peaks = ", ".join(f"{how} {rate / 1e12:,.0f}" for how, rate in chip.peaks.items())
        text += ["", f"## {chip.base.title}", ""]
        text += [
            f"{chip.base.bandwidth / 1e12:g} TB/s; {peaks} T operations/s; {chip.multiprocessors} multiprocessors."
        ]
        for model in MODELS:
            mine = [cells(line) for line in found if line["model"] == model]
            text += ["", f"### {ARCHITECTURES[model].title}", "", *table(HEADINGS, mine)]
    sources = {chip.source: None for chip in CHIPS.values()}
    return "\n".join([*text, "", f"Sources: {'; '.join(sources)}.", ""])


def compared(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each measured step with its floor, and how many times the floor it took.

    `measured` is what `gpu_first_hour.py` writes: `chip`, and `steps` with model, format, rows, queries, context and
    seconds.
    """
    if measured.get("chip") not in CHIPS:
        raise SystemExit(f"chip {measured.get('chip')!r} is none of this roofline; there are {', '.join(CHIPS)}")
    lines = []
    for each in measured["steps"]:
        step = Step(each["rows"], each["queries"], each["context"])
        line = calculated(each["model"], each["format"], step, CHIPS[measured["chip"]])
        lines.append(line | {"seconds": each["seconds"], "ratio": each["seconds"] / line["floor_s"]})
    return lines


def comparison(measured: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a measurement and its floors as Markdown."""
    headings = ("model", "step", "weights", "floor", "measured", "ratio", "tokens/s", "binds")
    rows = []
    for line in lines:
        step, how, *_, floor, _, binds = cells(line)
        rate = line["rows"] * line["queries"] / line["seconds"]
        found = (f"{line['seconds'] * 1e3:,.3f} ms", f"{line['ratio']:.2f}", f"{rate:,.0f}")
        at = f" at {line['context']:,}" if line["decode"] else ""
        rows.append((line["model"], step + at, how, floor, *found, binds))
    parts = []
    for facts in measured.get("models", ()):
        for batch, kernels in facts.get("kernels", {}).items():
            parts += ["", f"## {facts['model']} {facts['format']}, decode of {batch}", "", *kernel_table(kernels)]
    title = f"# Measured compared with the floor: {measured.get('device', CHIPS[measured['chip']].base.title)}"
    facts = [f"torch {measured['torch']}, CUDA {measured['cuda']}", ""] if "torch" in measured else []
    kernels = kernels_page(measured.get("results", ()))
    return "\n".join([title, "", *facts, *table(headings, rows), *parts, *kernels, ""])


def kernel_table(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the time of a step on the device by kernel, the longest first."""
    total = sum(each["seconds"] for each in kernels)
    rows = [
        (
            each["kernel"][:60],
            f"{each['launches']:.0f}",
            f"{each['seconds'] * 1e6:,.0f}",
            f"{each['seconds'] / total:.0%}",
        )
        for each in kernels[:SHOWN_KERNELS]
    ]
    launches = sum(each["launches"] for each in kernels)
    everything = ("all", f"{launches:.0f}", f"{total * 1e6:,.0f}", "100%")
    return table(("kernel", "launches a step", "us a step", "share"), [*rows, everything] if kernels else rows)


def merged(measurements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several measurements of one device as one. Raises `SystemExit` if there are several devices."""
    devices = sorted({each["device"] for each in measurements})
    if len(devices) > 1:
        raise SystemExit(f"measured on different devices: {', '.join(devices)}")
    lists = {
        name: [line for each in measurements for line in each.get(name, ())] for name in ("steps", "models", "results")
    }
    return {name: value for each in measurements for name, value in each.items()} | lists


def kernels_page(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the results of `gpu_kernels.py` as Markdown: attention, then products in all formats side by side."""
    attention, products = [], dict[tuple[str, int], dict[str, Mapping[str, Any]]]()
    for each in results:
        if each["part"] == "products":
            form, _, size = each["name"].partition(" ")
            products.setdefault((size, each["tokens"]), {})[form] = each
        else:
            library = each.get("library_s", float("nan"))
            attention.append(
                (
                    f"{each['part']}: {each['name']}",
                    *(f"{each[name] * 1e6:,.0f}" for name in ("floor_s", "seconds")),
                    f"{each['ratio']:.2f}",
                    "" if library != library else f"{library * 1e6:,.0f}",
                    f"{each['error']:.1e}",
                )
            )
    forms = list(dict.fromkeys(form for found in products.values() for form in found))
    rows = [
        (f"{size}, {tokens:,}", *(f"{found[form]['seconds'] * 1e6:,.0f}" if form in found else "" for form in forms))
        for (size, tokens), found in products.items()
    ]
    headings = ("attention", "floor us", "measured us", "ratio", "library us", "error")
    text = ["", "## Attention of one layer", "", *table(headings, attention)] if attention else []
    return [*text, "", "## Products, us", "", *table(("weight, tokens", *forms), rows)] if rows else text


def write(stem: Path, values: Any, text: str) -> None:
    """Write JSON and Markdown, and print the latter."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_name(f"{stem.name}.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    stem.with_name(f"{stem.name}.md").write_text(text, encoding="utf-8")
    print(text)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=1024, help="tokens that a decode sees")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of a prefill")
    parser.add_argument("--kv-cache-dtype", choices=("auto", *KV_TYPES), default="auto")
    parser.add_argument("--measured", type=Path, nargs="+", metavar="FILE", help="show these measurements instead")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    if min(chosen.context, chosen.prefill) < 1:
        parser.error("--context and --prefill must be at least 1")
    if chosen.measured is not None:
        measured = merged([json.loads(file.read_text(encoding="utf-8")) for file in chosen.measured])
        if measured.get("chip") == "":
            print(f"no floor is known for {measured.get('device')}, only for {', '.join(CHIPS)}: nothing is compared")
            return
        text = comparison(measured, compared(measured))
        chosen.results.mkdir(parents=True, exist_ok=True)
        (chosen.results / "gpu_measured.md").write_text(text, encoding="utf-8")
        print(text)
        return
    found = {
        name: list(every_line(chip, chosen.context, chosen.prefill, chosen.kv_cache_dtype))
        for name, chip in CHIPS.items()
    }
    data = {"chips": {name: asdict(chip) for name, chip in CHIPS.items()}, "steps": found}
    write(chosen.results / "gpu_roofline", data, page(found, chosen.context, chosen.kv_cache_dtype))


if __name__ == "__main__":
    main()
