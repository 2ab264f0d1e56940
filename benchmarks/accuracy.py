"""Measure what quantized weights cost in accuracy, and write the table of docs/quantization.md.

    python -m benchmarks.accuracy [--model smollm2] [--tokens 4096] [--types Q8_0,Q4_0]

For each form of the weights: the perplexity of the licence and some documents of this repository, and how often the
most likely token is that of the reference. The reference computes the checkpoint as it is stored, expanded to float32,
with torch in float32. Each form is computed twice: expanded in the same way, which shows the loss of the weights alone,
and by the cpu backend as it serves, whose kernels may round activations, too.

The types of GGUF that the `gguf` package can write are made from the checkpoint's layers; its embedding and output
projection stay.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from benchmarks.harness.machine import describe
from fd_core import LLM, SamplingParams
from fd_core.cli.quantize import files_beside
from fd_core.models.catalog import resolve_model
from fd_core.models.loading.checkpoint import open_checkpoint
from fd_core.models.quantized_folder import write_quantized

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "quantization.md"
RESULT: Final = ROOT / "benchmarks" / "results" / "accuracy.json"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
TEXTS: Final = ("LICENSE", "docs/operations.md", "docs/security.md", "docs/reliability.md", "docs/tour.md")
WINDOW: Final = 512
GGML_TYPES: Final = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
EXPANDED: Final[Mapping[str, Any]] = {"native_kernels": False, "dtype": "float32"}


@dataclass(frozen=True)
class Row:
    """One form of the weights, computed in one way."""

    form: str
    computed: str
    perplexity: float
    same: float
    """Share of the positions at which the most likely token is the reference's."""


@dataclass(frozen=True)
class Reading:
    """What a model says of the text."""

    perplexity: float
    best: tuple[int, ...]


def read(model: Path, prompts: list[list[int]], **settings: Any) -> Reading:
    """Run the text through an engine, in windows that know nothing of each other."""
    llm = LLM(str(model), backend="cpu", max_model_len=WINDOW + 8, max_num_seqs=4, num_kv_blocks=80, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    found = [each for done in llm.generate(prompts, params) for each in (done.prompt_logprobs or ()) if each]
    llm.close()
    return Reading(math.exp(-np.mean([each.logprob for each in found])), tuple(each.top_ids[0] for each in found))


def windows(model: Path, tokens: int) -> list[list[int]]:
    """Return the beginning of each text, as many tokens of each."""
    from fd_core.text.tokenizer import load_tokenizer

    with open_checkpoint(model) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    share = tokens // len(TEXTS)
    texts = [tokenizer.encode((ROOT / name).read_text())[:share] for name in TEXTS]
    return [text[begin : begin + WINDOW] for text in texts for begin in range(0, len(text), WINDOW)]


def requantized(source: Path, kind: str, target: Path) -> Path:
    """Write a GGUF file whose layers are of another type."""
    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    architecture = str(bytes(reader.fields["general.architecture"].parts[-1]), "utf-8")
    writer = gguf.GGUFWriter(target, architecture)
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = entry.types[1] if len(entry.types) > 1 else None
            writer.add_key_value(name, entry.contents(), entry.types[0], inner)
    for tensor in reader.tensors:
        data, stored = np.array(tensor.data), tensor.tensor_type
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            data, stored = gguf.quants.quantize(gguf.quants.dequantize(data, stored), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def forms(source: Path, folder: Path, types: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the forms with a model in each, which may be gone when the next one is asked for."""
    yield "as stored", source
    for form in ("int8", "int4"):
        target = folder / form
        with open_checkpoint(source) as checkpoint:
            write_quantized(checkpoint, form, target, files_beside(checkpoint), lambda *_: None)
        yield form, target
    if source.suffix == ".gguf":
        for kind in types:
            target = requantized(source, kind, folder / f"{kind}.gguf")
            yield kind, target
            target.unlink()


def measure(source: Path, tokens: int, types: Sequence[str]) -> tuple[list[Row], int]:
    prompts = windows(source, tokens)
    reference = read(source, prompts, **EXPANDED)
    rows = [Row("as stored", "expanded to float32", reference.perplexity, 1.0)]
    with tempfile.TemporaryDirectory() as folder:
        for form, model in forms(source, Path(folder), types):
            for computed, settings in (("expanded to float32", EXPANDED), ("cpu backend", {})):
                if (form, computed) != (rows[0].form, rows[0].computed):
                    found = read(model, prompts, **settings)
                    same = np.mean(np.equal(found.best, reference.best))
                    rows.append(Row(form, computed, found.perplexity, float(same)))
                    print(rows[-1], flush=True)
    return rows, len(reference.best)


def table(rows: list[Row], positions: int, about: Mapping[str, Any]) -> str:
    """Return the table in Markdown, a row for each form."""
    base = rows[0].perplexity
    lines = [
        f"{positions:,} positions, reference perplexity {base:.3f}. {about['machine']}, `{about['command']}`:",
        "",
        "| weights of the layers | perplexity, weights alone | as the cpu backend computes | same most likely token, "
        "weights alone | as the cpu backend computes |",
        "|---|---|---|---|---|",
    ]
    for form in dict.fromkeys(row.form for row in rows):
        alone, served = (
            next(row for row in rows if (row.form, row.computed) == (form, computed))
            for computed in ("expanded to float32", "cpu backend")
        )
        moved = [f"{row.perplexity:.3f} ({row.perplexity / base - 1:+.2%})" for row in (alone, served)]
        lines.append(f"| {form} | {moved[0]} | {moved[1]} | {alone.same:.1%} | {served.same:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--types", default=",".join(GGML_TYPES), help="types of GGUF to make from it")
    arguments = parser.parse_args()
    rows, positions = measure(resolve_model(arguments.model).path, arguments.tokens, arguments.types.split(","))
    command = shlex.join(["python", "-m", "benchmarks.accuracy", *sys.argv[1:]])
    about = {"command": command, "machine": describe()["cpu"], "positions": positions}
    RESULT.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    text = table(rows, positions, about)
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.DOTALL))
    print(text)


if __name__ == "__main__":
    main()
