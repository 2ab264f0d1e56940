"""Screen of `fdcore` without a command: suggestions, and the models and backends of this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import fd_core
from fd_core.cli.report import reports_errors
from fd_core.errors import PluginError

_NEXT = (
    ("fdcore serve {model}", "a server with OpenAI's API at http://127.0.0.1:8000/v1"),
    ("fdcore chat {model}", "chat with a model in this terminal"),
    ("fdcore models list", "known and local models; `fdcore models pull MODEL` fetches one"),
    ("fdcore env", "this machine, and which backends can run and why"),
    ("fdcore --help", "all commands; each has --help"),
)


@reports_errors
def show_welcome() -> None:
    """Print the screen. Only names and sizes are read; nothing is loaded or fetched."""
    print(*_lines(), sep="\n")


def _lines() -> Iterator[str]:
    from fd_core.cli.models.models import named_models, size_of

    models = named_models()
    yield f"fdcore {fd_core.__version__} serves language models. Next steps:"
    yield ""
    commands = [(command.format(model=models[0].name), about) for command, about in _NEXT]
    width = max(len(command) for command, _ in commands)
    yield from (f"  {command:<{width}}  {about}" for command, about in commands)
    yield ""
    more = f" and {len(models) - 1} more" if len(models) > 1 else ""
    yield f"Model    {models[0].name} ({size_of(models[0])}){more}"
    yield f"Backend  {_backend()}"
    yield "Docs     docs/quick-start.md of the sources: thirty minutes from here to a plugin of your own"


def _backend() -> str:
    from fd_core.plugins import installed_plugins

    try:
        chosen = installed_plugins().choose_backend()
    except PluginError as error:
        return str(error)
    if chosen.name == "cpu" and shutil.which("c++") is None:
        return "cpu, slow: native kernels require a C++ compiler (apt-get install g++)"
    return chosen.name
