"""`fdcore calibrate`: measure the cost of steps here, for `fdcore simulate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fd_core.cli.report import reports_errors
from fd_core.cli.settings.flags import CONFIG_FILE, ENGINE_FLAGS, Given, takes_flags
from fd_core.errors import FdError

if TYPE_CHECKING:
    from rich.console import Console

    from fd_core.simulation.costs.calibrating import Progress
    from fd_core.simulation.costs.profile import CostProfile


_IMAGE_SIZE: Final = (448, 448)


@reports_errors
@takes_flags(ENGINE_FLAGS, (CONFIG_FILE,))
def calibrate(
    given: Given,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Model to measure. [default: smollm2]")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the profile; by default one in the cache folder, where it is found by name.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the profile; by default MODEL-BACKEND.", metavar="NAME")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Time for measuring steps.", metavar="SECONDS")
    ] = 25.0,
    max_spread: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=10,
            metavar="SHARE",
            help="Largest deviation of half of the repetitions of a step from their median; above it, nothing is "
            "written.",
        ),
    ] = 0.2,
) -> None:
    """Run steps of MODEL here, fit their cost, and write it as a profile for `fdcore simulate`.

    The machine should be otherwise idle.
    """
    import datetime

    import numpy as np
    from rich.console import Console

    from fd_core.cli.env import processor
    from fd_core.cli.serving.startup import find_model, startup_bars
    from fd_core.cli.settings.settings import merge
    from fd_core.config.outputs import require_writable
    from fd_core.engine.building.builder import load_engine
    from fd_core.simulation.costs.calibrating import Calibration, require_alone
    from fd_core.simulation.costs.calibrating import calibrate as measure
    from fd_core.simulation.costs.naming import calibrated_path
    from fd_core.simulation.costs.profile import write_profile

    config = require_alone(merge(model, given, os.environ, default_model="smollm2").engine)
    require_writable(output, "-o")
    with startup_bars() as bars:
        found = find_model(config, None, bars)
        engine = load_engine(found.config, found.path, progress=bars)
        try:
            named = name or f"{Path(engine.info.model).stem.lower()}-{engine.info.backend}"
            path = output or calibrated_path(named)
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            how = Calibration(named, processor(), seconds, max_spread, today, config.tensor_parallel_size)
            image = None
            if found.images is not None and config.tensor_parallel_size == 1:  # the ranks would wait for each other
                image = found.images.process(np.full((*_IMAGE_SIZE, 3), 128, np.uint8)).parts[0]
            profile = measure(engine, found.tokenizer.encode, how, bars, image)
        finally:
            engine.close()
        profile = _with_surroundings(profile, config.model, given, bars)
    write_profile(profile, path)
    console = Console()
    _show(console, profile)
    console.print(f"Written to {path}", soft_wrap=True, markup=False, highlight=False)


def _with_surroundings(profile: CostProfile, model: str, given: Given, bars: Progress) -> CostProfile:
    """Return the profile with further measurements of this machine: a server, transfers, a store on the disk."""
    import msgspec

    from fd_core.cli.planning.measured_server import serving_times
    from fd_core.simulation.costs.calibrating import ASSUMED_LINKS, ASSUMED_SERVING, disk_links, transfer_link

    notes = [note for note in profile.notes if note not in (ASSUMED_LINKS, ASSUMED_SERVING)]
    bars("server and links", 0, 2)
    try:
        request = serving_times([model, *_typed(given)], profile.request, profile.limits.max_model_len)
        notes.append("The costs of receiving a request and of delivery are CPU times of a server process, over HTTP.")
    except FdError as error:
        request = profile.request
        notes += [ASSUMED_SERVING, f"Measuring them failed: {error.message}."[:500].replace("\n", " ")]
    bars("server and links", 1, 2)
    transfer = transfer_link(profile.bytes_per_block)
    reads, writes = disk_links(profile.bytes_per_block)
    bars("server and links", 2, 2)
    return msgspec.structs.replace(
        profile, notes=tuple(notes), request=request, transfer=transfer, store_read=reads, store_write=writes
    )


def _typed(given: Given) -> list[str]:
    """Return the engine's settings as arguments of `fdcore serve`."""
    words = []
    for flag in (*ENGINE_FLAGS, CONFIG_FILE):
        value = given.get(flag.field)
        if isinstance(value, bool):
            words.append(flag.flag if value else f"--no-{flag.key}")
        elif value is not None:
            for one in value if flag.repeated else [value]:
                words += [flag.flag, str(one)]
    return words


def _show(console: Console, profile: CostProfile) -> None:
    from rich.table import Table

    errors = Table(
        "Held-out steps", "Number", "Mean error", "99th percentile", title=f"{profile.name}: {profile.device}"
    )
    for error in profile.error:
        errors.add_row(error.kind, str(error.steps), f"{error.mean:.1%}", f"{error.p99:.1%}")
    console.print(errors)
    terms = Table("Operation", "Time")
    for what, taken in _terms(profile):
        terms.add_row(what, f"{taken * 1e3:.2f} ms" if taken >= 1e-3 else f"{taken * 1e6:.1f} us")
    console.print(terms)
    console.print(f"Half of the repetitions were within {profile.spread:.1%} of their median.", highlight=False)


def _terms(profile: CostProfile) -> list[tuple[str, float]]:
    step, request = profile.step, profile.request
    curve = step.by_tokens
    costs = zip(curve.counts, curve.seconds, strict=True)
    return [
        ("fixed cost of a step", step.constant + curve.seconds[0]),
        *((f"{count:g} tokens", seconds) for count, seconds in costs if count in (8, 64, 512, 2048)),
        ("first sampled row", step.by_sampled_rows.seconds[1]),
        ("a row", step.per_row),
        ("reading 1,000 positions", 1000 * step.per_context_token),
        ("1,000 query-key pairs", 1000 * step.per_query_key),
        *([("a draft", step.per_draft)] if profile.limits.max_drafts else []),
        ("one iteration of the loop", request.turn),
        ("per row of an iteration", request.turn_per_row),
        ("receiving a request", request.receive),
        ("1,000 tokens of a prompt", 1000 * request.receive_per_token),
        ("delivering a token", request.delivery),
        ("a KV block to the host", profile.host_copy.seconds(profile.bytes_per_block)),
        ("a KV block to another worker", profile.transfer.seconds(profile.bytes_per_block)),
        ("a KV block from the disk", profile.store_read.seconds(profile.bytes_per_block)),
    ]
