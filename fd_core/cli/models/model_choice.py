"""Which model is meant where none was named: people at a terminal are asked, programs are told what there is."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fd_core.cli.report import plain
from fd_core.errors import ConfigError

if TYPE_CHECKING:
    from fd_core.models.catalog import ListedModel


def named_models() -> list[ListedModel]:
    """Return the models that can be named at once, those that lie on this machine first; no file of them is read."""
    from fd_core.models.catalog import list_models

    return sorted(list_models(checked=False), key=lambda model: model.path is None)


def size_of(model: ListedModel) -> str:
    """Return how large a model is and whether it has to be fetched first."""
    return f"{model.size / 1e6:,.0f} MB, " + ("here" if model.path is not None else "fetched at the first start")


def choose_model(command: str) -> str:
    """Return the model that somebody at the terminal chooses for `command`, such as `fdcore serve`.

    Raises `ConfigError` with the list where nobody sits at one, or nothing is chosen.
    """
    models = named_models()
    if not _at_a_terminal():
        raise _none_named(command, models)
    try:
        chosen = _asked(models)
    except EOFError:
        print(file=sys.stderr)
        raise _none_named(command, models) from None
    print(f"next time: {command} {plain(shlex.quote(chosen))}", file=sys.stderr)
    return chosen


def _at_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _asked(models: Sequence[ListedModel]) -> str:
    from rich.console import Console
    from rich.prompt import Prompt
    from rich.text import Text

    console = Console(stderr=True)
    console.print("No model was named. These can be served; so can a folder, a .gguf file or a Hugging Face name.")
    for number, model in enumerate(models, 1):
        console.print(Text(f"  {number}  {model.name}  ({size_of(model)})"))
    while True:
        answer = Prompt.ask("Number or name", console=console, default="1").strip() or "1"
        if not answer.isdecimal():
            return answer
        if 1 <= int(answer) <= len(models):
            return models[int(answer) - 1].name
        console.print(f"There is no number {int(answer)}.")


def _none_named(command: str, models: Sequence[ListedModel]) -> ConfigError:
    listed = "; ".join(f"{model.name} ({size_of(model)})" for model in models)
    hint = f"type `{command} {models[0].name}`, or name a folder, a .gguf file or a Hugging Face name"
    return ConfigError(f"no model was named; there is {listed}", field="MODEL", hint=hint)
