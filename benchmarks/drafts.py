"""Compare drafters of SmolLM2 on three kinds of text, and write the texts from which its EAGLE-3 head learns.

    python benchmarks/drafts.py texts -o learn.txt
    fdcore train-drafter smollm2 HEAD --text learn.txt --minutes 20
    python benchmarks/drafts.py compare HEAD

`texts` lets the model answer about subjects of which `compare` leaves none. In each round every method answers the same
prompts, greedily, in turns; its tokens per second are compared with those without drafts in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fd_core import LLM, SamplingParams
from fd_core.cli.bench.compare.machine import describe
from fd_core.config import SpeculativeConfig

SUBJECTS = """
    volcanoes rivers bees bridges clocks bread coffee tea glass paper steel copper wool cotton silk ships trains
    bicycles airplanes rockets comets tides winds storms snow deserts forests islands caves lakes whales sharks
    wolves horses dogs cats owls eagles ants spiders frogs chess football tennis violins pianos drums opera
    painting poems printing maps compasses telescopes batteries magnets radios computers databases cameras
    lenses lasers vaccines vitamins sleep memory fractions geometry probability banks taxes harbours castles
    libraries museums gardens vineyards wells canals windmills
""".split()
TASKS = [
    task.strip()
    for task in """
    reverse a string, sum a list, count words, find the largest number, check for a palindrome, merge two dictionaries,
    compute a factorial, list prime numbers, read lines of a file, parse a date, flatten a nested list, rotate a list,
    remove duplicates, compute an average, generate a password, count vowels, find the median, transpose a matrix
    """.split(",")
]
REPORT = (
    "The report about {0} was finished on Monday. It says that {0} were more important than expected, and that the "
    "city should spend more on {0} next year. The mayor read the report about {0} and asked for a second opinion."
)
KINDS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "prose": (SUBJECTS, ("Explain how {0} work and why they matter.", "Write a short story about {0}.")),
    "code": (TASKS, ("Write a Python function to {0}, with comments.", "Show two ways to {0} in Python.")),
    "edits": (SUBJECTS, (f"Repeat this text, but replace Monday by Friday:\n\n{REPORT}",)),
}
"""For each kind of text, the subjects and the questions about them."""
HELD_OUT = 6
"""Every so many subjects, one is only compared."""
METHODS: Mapping[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "suffix": {"method": "suffix", "num_speculative_tokens": 5},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 2},
}


def prompts(kind: str, *, held_out: bool) -> list[str]:
    """Return the questions about subjects that are held out, or about the others."""
    subjects, questions = KINDS[kind]
    chosen = [each for index, each in enumerate(subjects) if (index % HELD_OUT == 0) == held_out]
    return [question.format(subject) for subject in chosen for question in questions]


def answers(llm: LLM, asked: Sequence[str], params: SamplingParams) -> list[Any]:
    return llm.chat([[{"role": "user", "content": question}] for question in asked], params)


def write_texts(out: Path, max_tokens: int) -> None:
    """Write questions and the model's answers."""
    llm = LLM("smollm2", max_num_seqs=32)
    with out.open("w", encoding="utf-8") as file:
        for kind in KINDS:
            for temperature in (0.0, 0.7):
                asked = prompts(kind, held_out=False)
                params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
                for question, answer in zip(asked, answers(llm, asked, params), strict=True):
                    file.write(f"{question}\n{answer.text}\n\n")


def compare(head: Path, rounds: int, max_tokens: int) -> None:
    """Print tokens per second, the ratio to none, and the share of drafts that were accepted."""
    engines = {}
    for name, given in METHODS.items():
        own: dict[str, Any] = {"model": str(head)} if name == "eagle3" else {}
        speculative = None if given is None else SpeculativeConfig(**given, **own)
        engines[name] = LLM(
            "smollm2", max_num_seqs=8, num_kv_blocks=400, speculative=speculative, enable_prefix_caching=False
        )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    print(f"{describe()}\n\n| text | streams | " + " | ".join(METHODS) + " |\n|" + "---|" * (2 + len(METHODS)))
    for kind in KINDS:
        for streams in (1, 8):
            rates: dict[str, list[float]] = {name: [] for name in METHODS}
            shares: dict[str, list[int]] = {}
            for index in range(rounds):
                asked = prompts(kind, held_out=True)
                asked = [asked[(index * streams + each) % len(asked)] for each in range(streams)]
                texts = set()
                for name, llm in engines.items():
                    before = llm.stats.scheduler.drafts
                    begun = time.perf_counter()
                    found = answers(llm, asked, params)
                    rates[name].append(sum(len(each.token_ids) for each in found) / (time.perf_counter() - begun))
                    after = llm.stats.scheduler.drafts
                    proposed, accepted = after.proposed - before.proposed, after.accepted - before.accepted
                    sums = shares.setdefault(name, [0, 0])
                    sums[0] += proposed
                    sums[1] += accepted
                    texts.add(tuple(tuple(each.token_ids) for each in found))
                if len(texts) > 1:
                    raise SystemExit(f"{kind}: drafts changed a text")
            cells = []
            for name in METHODS:
                ratio = statistics.median(own / plain for own, plain in zip(rates[name], rates["none"], strict=True))
                proposed, accepted = shares[name]
                cell = f"{statistics.median(rates[name]):.0f}"
                cells.append(cell if name == "none" else f"{cell} ({ratio:.2f}; {accepted / max(1, proposed):.0%})")
            print(f"| {kind} | {streams} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Write texts, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    texts = commands.add_parser("texts", help="write texts to learn from")
    texts.add_argument("-o", "--out", type=Path, required=True)
    texts.add_argument("--max-tokens", type=int, default=300)
    compared = commands.add_parser("compare", help="measure every method")
    compared.add_argument("head", type=Path, help="folder that train-drafter wrote")
    compared.add_argument("--rounds", type=int, default=5)
    compared.add_argument("--max-tokens", type=int, default=128)
    given = parser.parse_args()
    if given.command == "texts":
        write_texts(given.out, given.max_tokens)
    else:
        compare(given.head, given.rounds, given.max_tokens)


if __name__ == "__main__":
    main()
