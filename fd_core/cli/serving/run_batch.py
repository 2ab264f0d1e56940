"""`fdcore run-batch`: complete the requests of a file with a model that is loaded for them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fd_core.cli.report import interrupts_end_it, reports_errors
from fd_core.cli.settings.flags import CONFIG_FILE, ENGINE_FLAGS, SERVER_FLAGS, Given, takes_flags
from fd_core.errors import ConfigError, EngineDead

if TYPE_CHECKING:
    from rich.console import Console

    from fd_core.cli.settings.settings import Settings
    from fd_core.server.batches.lines import AnswerFile, BatchLine
    from fd_core.server.batches.running import BatchProgress


_SERVER: Final = tuple(
    """
    served_model_names chat_template trust_request_chat_template tool_call_parser reasoning_parser engine log_level
    """.split()
)
"""Settings of the server that apply without connections."""


@reports_errors
@takes_flags(ENGINE_FLAGS, [flag for flag in SERVER_FLAGS if flag.field in _SERVER], (CONFIG_FILE,))
def run_batch(
    given: Given,
    source: Annotated[
        Path, typer.Option("--input", "-i", metavar="FILE", help="Requests in OpenAI's batch format, one per line.")
    ],
    target: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File for the answers, one per line.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", show_default="smollm2", help="smollm2, a folder, a .gguf file or a Hugging Face name."
        ),
    ] = None,
) -> None:
    """Answer every request of a file in OpenAI's batch format, and write one line for each.

    Answers are in the order of completion; custom_id identifies their requests. They are in FILE.partial until
    all are complete, and a run that was interrupted resumes from it. An invalid line gets a line with the error. The
    exit code is 1 if a request failed.
    """
    from fd_core.cli.settings.settings import merge

    settings = merge(model, given, os.environ, default_model="smollm2")
    os.environ["FD_LOG_LEVEL"] = settings.server.log_level
    if source.resolve() == target.resolve():
        raise ConfigError("the output would replace the input", field="--output", hint="choose another file")
    with interrupts_end_it():
        import asyncio

        from rich.console import Console

        from fd_core.cli.serving.serve import loop_factory
        from fd_core.server.batches.lines import AnswerFile

    console = Console(stderr=True)
    with AnswerFile(target) as answers, asyncio.Runner(loop_factory=loop_factory()) as runner:
        progress = runner.run(_run(settings, source, answers, console=console))
    print(f"{target}: {progress.completed} answered, {progress.failed} failed")
    if progress.failed:
        raise typer.Exit(1)


async def _run(settings: Settings, source: Path, answers: AnswerFile, console: Console) -> BatchProgress:
    import asyncio

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    from fd_core.cli.serving.startup import check_folders, choose_parsers, find_model, running_engine, startup_bars
    from fd_core.server.app import create_app
    from fd_core.server.batches.lines import BatchAnswer, BatchLine, read_requests
    from fd_core.server.batches.running import AsgiAnswer, BatchProgress, ask, run_requests

    server, longest = settings.server, settings.server.max_body_bytes
    async with contextlib.AsyncExitStack() as stack:
        try:
            file = stack.enter_context(source.open("rb"))
            if not file.seekable():
                hint = "write the requests to a file first"
                raise ConfigError(f"{source} is a pipe, but the input is read twice", field="--input", hint=hint)
            requests = [
                BatchLine(each.number, each.custom_id, digest=each.digest) for each in read_requests(file, longest)
            ]
            file.seek(0)
        except OSError as error:
            raise ConfigError(f"cannot read {source}: {error.strerror}", field="--input") from error
        _check_resumable(requests, answers)
        names = (server.tool_call_parser, server.reasoning_parser)
        choose_parsers(*names, template=None, architecture="")
        check_folders(settings)
        done = list(answers.known.values())
        progress = BatchProgress(len(requests), sum(each.ok for each in done), sum(not each.ok for each in done))
        with startup_bars(console) as bars:
            model = await asyncio.to_thread(find_model, settings.engine, server.chat_template, bars)
            engine = running_engine(model, server.engine, bars, engines=server.data_parallel_size)
            client = await stack.enter_async_context(engine)
        chosen = choose_parsers(*names, model.template, client.info.architecture)
        app = create_app(
            server, client, model.tokenizer, template=model.template, parsers=chosen.parsers, images=model.images
        )
        stack.callback(app.state.fd.prompt_reader.close)
        stack.callback(app.state.fd.grammars.close)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        shown = Bars(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        stack.enter_context(shown)
        bar = shown.add_task("Requests", total=progress.total, completed=progress.done)

        async def sent(path: str, body: bytes, request_id: str) -> AsgiAnswer:
            answer = await ask(app, path, body, request_id, owner="")
            if answer.status == 503 and not client.alive and not client.restarts:
                raise EngineDead("the engine failed; run the command again to resume")
            return answer

        def take(answer: BatchAnswer) -> None:
            answers.write(answer)
            progress.completed += answer.ok
            progress.failed += not answer.ok
            shown.update(bar, completed=progress.done)

        most = client.info.max_num_seqs
        slots = asyncio.Semaphore(most + most // 2 + 1)
        try:
            await run_requests(read_requests(file, longest), sent, take, slots=slots, known=answers.known)
        except ExceptionGroup as group:
            first = group.exceptions[0]
            if isinstance(first, OSError):
                raise ConfigError(f"cannot write the answers: {first}", field="--output") from None
            raise first from None
    answers.finish()
    return progress


def _check_resumable(requests: list[BatchLine], answers: AnswerFile) -> None:
    """Raise `ConfigError` if the existing answers belong to other requests."""
    lines = {request.number: request for request in requests}
    for number, known in answers.known.items():
        line = lines.get(number)
        # Files of earlier versions have ids without a digest, which begin like those with one.
        if line is None or line.custom_id != known.custom_id or not line.id.startswith(known.id):
            message = f"{answers.path}.partial has an answer to {known.custom_id!r}, which does not match the input"
            raise ConfigError(message, field="--output", hint="delete it, or choose another file")
