"""`fdcore env`: machine, versions, backends and caches for a bug report."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from fd_core.cli.report import reports_errors

_LIBRARIES: Final = tuple(
    """
    fd-core numpy msgspec pyzmq fastapi uvicorn tokenizers safetensors gguf huggingface-hub torch paddlepaddle
    transformers
    """.split()
)
_GIBI: Final = 1 << 30


@reports_errors
def env() -> None:
    """Show machine, versions, backends and caches.

    Each backend is listed with the reason why it can or cannot run here.
    """
    from rich.console import Console
    from rich.table import Column, Table

    from fd_core.plugins import installed_plugins

    console = Console(markup=False)  # reasons contain brackets, such as those of an extra
    for title, rows in (("Machine", _machine()), ("Versions", _versions()), ("Caches", _caches())):
        columns = (Column(), Column(overflow="fold"))  # a truncated path is useless
        table = Table(*columns, title=title, title_justify="left", show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    backends = Table("Backend", "Runs here", "Reason", "Source", title="Backends", title_justify="left")
    for backend_row in _backends():
        backends.add_row(*backend_row)
    console.print(backends)
    sizes = Table("--max-num-seqs", "--max-num-batched-tokens", "Default of", title="Batches", title_justify="left")
    for sizes_row in _default_sizes():
        sizes.add_row(*sizes_row)
    console.print(sizes)
    for problem in installed_plugins().problems:
        console.print(f"not usable: {problem}", style="red", markup=False, highlight=False)


def _machine() -> Iterator[tuple[str, str]]:
    yield "System", f"{platform.system()} {platform.release()} {platform.machine()}"
    yield "Processor", processor()
    yield "Processors usable", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    yield "Memory", _memory()
    yield "Compiler", shutil.which("c++") or shutil.which("g++") or "none; the CPU backend runs without native kernels"


def _versions() -> Iterator[tuple[str, str]]:
    import importlib.metadata

    yield "Python", f"{platform.python_version()} ({sys.executable})"
    for name in _LIBRARIES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _caches() -> Iterator[tuple[str, str]]:
    from fd_core.config.paths import find_cache_dir
    from fd_core.models.catalog import list_models

    folder = find_cache_dir()
    try:
        free = shutil.disk_usage(folder).free if folder.is_dir() else None
    except OSError as error:
        yield "Folder", f"{folder}: {(error.strerror or str(error)).lower()}"
        return
    yield "Folder", str(folder)
    if free is not None:
        yield "Free disk", f"{free / _GIBI:,.1f} GiB"
    for model in list_models():
        if model.path is not None:
            yield model.name, f"{model.path} ({model.size / 1e6:,.0f} MB)"


def _backends() -> Iterator[tuple[str, str, str, str]]:
    from fd_core.errors import PluginError
    from fd_core.plugins import BACKEND, installed_plugins

    for name, offer in installed_plugins().offered(BACKEND).items():
        try:
            availability = offer.probe()
            runs, why = ("yes" if availability.available else "no"), availability.reason
            if availability.available and availability.emulated:
                runs = "emulated"
        except PluginError as error:
            runs, why = "broken", error.message
        yield name, runs, why, str(offer.origin)


def _default_sizes() -> Iterator[tuple[str, str, str]]:
    """Yield the default sizes of a step, and the backends that have them."""
    from fd_core.errors import PluginError
    from fd_core.plugins import BACKEND, installed_plugins

    names = defaultdict[tuple[int, int], list[str]](list)
    for name, offer in installed_plugins().offered(BACKEND).items():
        with contextlib.suppress(PluginError):  # the table of backends has the reason
            cls = offer.load()
            names[cls.default_num_seqs, cls.default_batched_tokens].append(name)
    for (num_seqs, tokens), backends in sorted(names.items()):
        yield f"{num_seqs:,}", f"{tokens:,}", ", ".join(backends)


def processor() -> str:
    """Return the processor's name and the vector extensions that kernels use."""
    from fd_core.cli.bench.compare.machine import cpu_model, instruction_sets

    return f"{cpu_model()} ({' '.join(instruction_sets()) or 'unknown vector extensions'})"


def _memory() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{total / _GIBI:,.1f} GiB, {free / _GIBI:,.1f} GiB free"
