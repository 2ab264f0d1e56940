"""`fdcore chat` and `fdcore complete`: use a model in the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fd_core.cli.chats.conversation import ChatHistory, input_history, typed_messages
from fd_core.cli.report import harmless, plain, print_error, reports_errors
from fd_core.cli.settings.flags import CHAT_FLAGS, CLIENT_KEY_FILE, CONFIG_FILE, ENGINE_FLAGS, Given, takes_flags
from fd_core.config.paths import find_cache_dir
from fd_core.errors import BadRequest, ConfigError, FdError

if TYPE_CHECKING:
    from fd_core.cli.chats.chat_backend import ChatBackend, SamplingOptions
    from fd_core.cli.chats.loop_thread import LoopThread


Url = Annotated[
    str | None, typer.Option(help="URL of a running server to use instead of loading a model.", metavar="URL")
]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer in tokens.", metavar="N")]
Temperature = Annotated[
    float | None,
    typer.Option(help="Sampling temperature, 0 to 2; 0 always selects the most likely token.", metavar="T"),
]
TopP = Annotated[
    float | None, typer.Option(help="Probability mass to sample from, above 0 and at most 1.", metavar="P")
]
Seed = Annotated[int | None, typer.Option(help="Sampling seed; the same seed reproduces an answer.", metavar="N")]


@reports_errors
@takes_flags(ENGINE_FLAGS, CHAT_FLAGS, (CONFIG_FILE,))
def chat(
    given: Given,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]")] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]", help="A single message, `-` for the standard input; without it, you type messages."
        ),
    ] = None,
    url: Url = None,
    system: Annotated[
        str | None, typer.Option(help="System message at the beginning of the conversation.", metavar="TEXT")
    ] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
) -> None:
    """Chat with a model in the terminal.

    MODEL defaults to smollm2; --url uses a running server instead. A new line sends the message, unless it ends in a
    backslash; three quotes begin and end a message of several lines. /help shows the commands: /reset, /system, /save,
    /load and /quit; Ctrl-C stops an answer. Typed lines are saved in the cache folder for the arrow keys, except those
    sent to a server that requires a key.
    """
    from fd_core.cli.settings.settings import client_key

    options = _sampling(max_tokens, temperature, top_p, seed=seed)
    with _chat_backend(model, url, given, chats=True) as (loop, backend, name):
        if prompt is None and sys.stdin.isatty():
            print(
                f"{plain(name)}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D quits",
                file=sys.stderr,
            )
        # Messages to a server that requires a key are not saved here.
        secret = url is not None and client_key(given, os.environ)
        with input_history(None if secret else find_cache_dir() / "chat_history"):
            messages = typed_messages() if prompt is None else [sys.stdin.read() if prompt == "-" else prompt]
            _converse(loop, backend, ChatHistory(system), messages, options=options)


@reports_errors
@takes_flags(ENGINE_FLAGS, CHAT_FLAGS, (CONFIG_FILE,))
def complete(
    given: Given,
    prompt: Annotated[str, typer.Argument(help="Text to continue; `-` reads it from the standard input.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="smollm2, a folder, a .gguf file or a Hugging Face name.", metavar="MODEL"),
    ] = None,
    url: Url = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
) -> None:
    """Continue a text."""
    options = _sampling(128 if max_tokens is None else max_tokens, temperature, top_p, seed=seed)
    text = sys.stdin.read() if prompt == "-" else prompt
    with _chat_backend(model, url, given) as (loop, backend, _):
        for piece in loop.iterate(backend.complete(text, options)):
            _put(piece)
        _put("\n")


def _sampling(
    max_tokens: int | None, temperature: float | None, top_p: float | None, seed: int | None
) -> SamplingOptions:
    """Return the sampling options of the flags. Raises `ConfigError` that names the flag out of its range."""
    from fd_core.cli.chats.chat_backend import SamplingOptions
    from fd_core.types.checks import check_sampling

    options = SamplingOptions(max_tokens, temperature, top_p, seed=seed)
    try:
        check_sampling(options.params(2**31 - 1))
    except BadRequest as error:
        field = error.field or ""
        flag = "--" + field.replace("_", "-")
        raise ConfigError(flag + error.message.removeprefix(field), field=flag) from None
    return options


@contextlib.contextmanager
def _chat_backend(
    model: str | None, url: str | None, given: Given, *, chats: bool = False
) -> Iterator[tuple[LoopThread, ChatBackend, str]]:
    """Yield loop, chat backend and its name; `ModelError` before loading for a model without a chat template."""
    from fd_core.cli.chats.loop_thread import LoopThread

    with LoopThread() as loop, contextlib.ExitStack() as stack:
        parts = _local(loop, stack, model, given, chats) if url is None else _remote(loop, stack, url, model, given)
        yield loop, *parts


def _remote(
    loop: LoopThread, stack: contextlib.ExitStack, url: str, model: str | None, given: Given
) -> tuple[ChatBackend, str]:
    from fd_core.cli.chats.api_client import ApiClient
    from fd_core.cli.chats.chat_backend import ServerChatBackend
    from fd_core.cli.settings.settings import client_key

    keys = ("api_keys", CLIENT_KEY_FILE.field)
    for flag in (*ENGINE_FLAGS, *CHAT_FLAGS):
        if flag.field in given and flag.field not in keys:
            why = "only applies to a model loaded by this command"
            raise ConfigError(f"--url cannot be combined with {flag.flag}, which {why}")
    api = stack.enter_context(loop.entered(ApiClient(url, client_key(given, os.environ))))
    name = model or loop.run(api.first_model())
    return ServerChatBackend(api, name), f"{name} at {api.url}"


def _local(
    loop: LoopThread, stack: contextlib.ExitStack, model: str | None, given: Given, chats: bool
) -> tuple[ChatBackend, str]:
    from fd_core.cli.settings.settings import merge
    from fd_core.engine.process.engine_process import prestarted_process

    settings = merge(model, given, os.environ, default_model="smollm2")
    where = settings.server.engine
    begun = stack.enter_context(loop.entered(prestarted_process(settings.engine.backend, wanted=where == "process")))

    from fd_core.cli.chats.chat_backend import EngineChatBackend, no_template
    from fd_core.cli.serving.startup import find_model, running_engine, startup_bars

    with startup_bars() as bars:
        found = find_model(settings.engine, settings.server.chat_template, bars)
        if chats and found.template is None:
            raise no_template(found.config.model)
        client = stack.enter_context(loop.entered(running_engine(found, where, bars, prestarted=begun)))
    return EngineChatBackend(client, found.tokenizer, found.template), found.config.model


def _converse(
    loop: LoopThread,
    backend: ChatBackend,
    conversation: ChatHistory,
    messages: Iterable[str],
    options: SamplingOptions,
) -> None:
    for text in messages:
        line = text.strip()
        if line in ("/quit", "/exit"):
            return
        try:
            notice = conversation.command(line) if text.startswith("/") else None
        except FdError as error:
            print_error(error)
            continue
        if notice is not None:
            print(harmless(notice), file=sys.stderr)
        elif line:
            answer, whole = _answer(loop, backend, conversation.asked(text), options=options)
            if answer or whole:
                conversation.answered(text, answer)


def _answer(
    loop: LoopThread, backend: ChatBackend, messages: list[dict[str, Any]], options: SamplingOptions
) -> tuple[str, bool]:
    """Print one answer and return its text and True if it is complete; Ctrl-C stops it."""
    pieces: list[str] = []
    whole = False
    speed = AnswerSpeed()
    try:
        for piece in loop.iterate(backend.chat(messages, options, speed.count)):
            pieces.append(piece)
            _put(piece)
        whole = True
    except KeyboardInterrupt:
        print(" [stopped]", file=sys.stderr, end="")
    except FdError as error:
        if not sys.stdin.isatty():
            raise
        print_error(error)
    _put("\n")
    if sys.stdin.isatty() and (notice := speed.summary()):
        print(notice, file=sys.stderr)
    return "".join(pieces), whole


def _put(text: str) -> None:
    sys.stdout.write(harmless(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class AnswerSpeed:
    """Counts and times the tokens of one answer from construction on, one by one or all at the end."""

    def __init__(self, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._asked = seconds()
        self._first = self._last = 0.0
        self._tokens = 0

    def count(self, tokens: int) -> None:
        """Count tokens that just arrived; 0 if their number is not known yet."""
        self._last = self._seconds()
        self._first = self._first or self._last
        self._tokens += tokens

    def summary(self) -> str | None:
        """Return a line with tokens, tokens per second and time to first token; None without tokens."""
        if not self._tokens:
            return None
        between = self._last - self._first
        rate = f", {(self._tokens - 1) / between:,.1f} tokens/s" if between > 0 and self._tokens > 1 else ""
        return f"[{self._tokens:,} tokens{rate}, first after {self._first - self._asked:.2f} s]"
