"""From settings to a running engine: find the model, read its tokenizer, load, and show the progress."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from fd_core.cli.settings.flags import ENGINE_FLAGS, SERVER_FLAGS
from fd_core.config import EngineConfig
from fd_core.engine.building.assets import find_assets
from fd_core.errors import ConfigError
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.models.fetching.packaged import ProgressSink
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.parsing.answer import Parsers, parsers_for
from fd_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fd_core.cli.settings.settings import Settings
    from fd_core.engine.clients.client import EngineClient
    from fd_core.engine.process.engine_process import EngineProcess


_PHASES: Final = {
    "prepare": "Preparing kernels",
    "load": "Loading weights",
    "warmup": "Warming up",
    "quantize": "Quantizing",
}
_SECONDS_BETWEEN_LINES: Final = 10.0
"""Interval of progress lines where there is no terminal."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine, ready to be loaded by an engine."""

    config: EngineConfig
    """Settings with the model's display name instead of the given one."""
    path: Path | None
    """None for a backend that needs no checkpoint."""
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None if the model has no chat template."""
    images: ImageProcessor | None = None
    """None if the model takes no images."""


class StartupBars(ProgressSink):
    """Progress bars of downloads, weights and warm-up; called, it is the `StartProgress` of engines."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._download: TaskID | None = None
        self._phases: dict[str, TaskID] = {}

    def start(self, description: str, total_bytes: int | None) -> None:
        """Begin a download."""
        self._download = self._begin(description, total_bytes)

    def advance(self, count: int) -> None:
        """Count downloaded bytes."""
        if self._download is not None:
            self._bars.advance(self._download, count)
            task = next(task for task in self._bars.tasks if task.id == self._download)
            self._bars.update(self._download, amount=_megabytes(int(task.completed), task.total))

    def finish(self) -> None:
        """End the download's bar."""
        if self._download is not None:
            self._bars.stop_task(self._download)
            self._download = None

    def warn(self, text: str) -> None:
        """Print a line that stays."""
        self._bars.console.print(text, style="bold yellow", markup=False, highlight=False)

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show the progress of a phase of the engine's start."""
        if phase not in self._phases:
            self._phases[phase] = self._begin(_PHASES.get(phase, phase), total)
        amount = _megabytes(done, total) if phase in ("load", "quantize") else f"{done}/{total}"
        self._bars.update(self._phases[phase], completed=done, total=total, amount=amount)

    def _begin(self, description: str, total: int | None) -> TaskID:
        if self._bars.disable:
            self._bars.console.print(description, markup=False, highlight=False)
        return self._bars.add_task(description, total=total, amount="")


@contextlib.contextmanager
def startup_bars(console: Console | None = None) -> Iterator[StartupBars]:
    """Show bars on stderr or `console` while the block runs.

    Anything but a terminal gets a line for each phase instead, and one every ten seconds while it lasts.
    """
    console = console or Console(stderr=True)
    bars = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[amount]}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LINES):
            for task in (task for task in bars.tasks if not task.finished):
                line = f"{task.description}: {task.fields['amount']} after {task.elapsed or 0:.0f} s"
                console.print(line, markup=False, highlight=False)

    if bars.disable:
        threading.Thread(target=report, name="startup-lines", daemon=True).start()
    try:
        with bars:
            yield StartupBars(bars)
    finally:
        ended.set()


@dataclass(frozen=True, slots=True)
class ChosenParsers:
    """The parsers of a model's answers, and a line about each for the summary."""

    parsers: Parsers
    tools: str
    reasoning: str


def check_folders(settings: Settings) -> None:
    """Raise `ConfigError` for a folder that does not exist, before a model is loaded."""
    for flag in (*ENGINE_FLAGS, *SERVER_FLAGS):
        place = getattr(settings.engine, flag.field, None) or getattr(settings.server, flag.field, None)
        if flag.value != "FOLDER" or place is None or Path(place).is_dir():
            continue
        if Path(place).exists():
            raise ConfigError(f"{place} is not a folder", field=flag.flag)
        if flag.field != "batch_store":  # which the server creates
            raise ConfigError(f"there is no folder {place}", field=flag.flag, hint="create it, or omit the flag")


def choose_parsers(tools: str, reasoning: str, template: ChatTemplate | None, architecture: str) -> ChosenParsers:
    """Return the parsers of those names; `auto` selects those for the template. `PluginError` for unknown names."""
    from fd_core.plugins import REASONING_PARSER, TOOL_PARSER, installed_plugins

    fits = parsers_for(None, supports_tools=False)
    if template is not None:
        with_tools = template.for_tools
        calls = parsers_for(with_tools.source, with_tools.supports_tools, architecture)
        fits = calls._replace(reasoning=parsers_for(template.source or with_tools.source, True, architecture).reasoning)
    loaded: list[Any] = []
    descriptions = []
    for kind, asked, fitting in ((TOOL_PARSER, tools, fits.tools), (REASONING_PARSER, reasoning, fits.reasoning)):
        name = {"auto": fitting, "none": None}.get(asked, asked)
        loaded.append(None if name is None else installed_plugins().load(kind, name))
        descriptions.append((name or "none") + (" (fits the chat template)" if asked == "auto" and name else ""))
        if asked == "auto" and name is None and template is not None:
            descriptions[-1] = f"none: no {kind.word} is known for this chat template; set one with {kind.flag}"
    return ChosenParsers(Parsers(*loaded), *descriptions)


def find_model(config: EngineConfig, chat_template: str | None, bars: StartupBars) -> LocalModel:
    """Fetch the model if needed, read tokenizer and template. Raises `ConfigError`, `ModelError` or `PluginError`."""
    found = find_assets(config, bars)
    template = ChatTemplate.of(found.tokenizer, chat_template)
    config = msgspec.structs.replace(found.config, model=found.name)
    return LocalModel(config, found.path, found.tokenizer, template, found.images)


@contextlib.asynccontextmanager
async def running_engine(
    model: LocalModel,
    where: str,
    bars: StartupBars | None = None,
    *,
    engines: int = 1,
    prestarted: EngineProcess | None = None,
) -> AsyncIterator[EngineClient]:
    """Start engines for the block and stop them afterwards; `where` and `prestarted` are those of `open_client`."""
    from fd_core.engine.clients.launch import open_client

    client = await open_client(
        model.config, model.path, where=where, engines=engines, progress=bars, prestarted=prestarted
    )
    if bars is not None and client.info.emulated:
        bars.warn(f"Backend {client.info.backend} is emulated: slow, and not representative of the hardware.")
    try:
        yield client
    finally:
        await client.close()


def _megabytes(done: int, total: float | None) -> str:
    return f"{done / 1e6:,.0f} MB" if total is None else f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
