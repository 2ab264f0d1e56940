"""Writes what the pages of docs/reference/ take from the code: settings, commands, metrics and the HTTP API.

python -m tests.reference
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client import Metric
from typer.main import get_command

from fd_core.cli.app import app
from fd_core.cli.settings.flags import (
    API_KEY_FILE,
    CONFIG_FILE,
    ENGINE_FLAGS,
    GATEWAY_FLAGS,
    ROUTER_FLAGS,
    SERVER_FLAGS,
    Flag,
)
from fd_core.config import ServerConfig
from fd_core.disagg.stats import ReceiverStats, SenderStats
from fd_core.engine.process.messages import LeaseStats
from fd_core.router.gateway.requests.state import GatewayMetrics
from fd_core.server.app import create_app
from tests.router.gateway.test_metrics import router_of
from tests.server.fakes import FakeClient, byte_tokenizer, chat_template
from tests.server.test_metric_names import families, labels

__all__ = ["FOLDER", "PAGES"]

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by `python -m tests.reference`; tests hold that it says what the code says. -->"


def settings() -> Iterator[str]:
    """Yield the lines of the page of settings: every flag of a server and of a router, with what its help says."""
    yield "# Settings"
    yield from (
        "",
        "Every setting is a flag, an environment variable (`FD_MAX_NUM_SEQS` for `--max-num-seqs`) and a key of the",
        "TOML file that `--config` names (`max-num-seqs = 8`). Flags win over the environment, the environment over",
        "the file. Settings that contradict each other are refused. Flags are named as in vLLM and FastDeploy; of",
        "those that vLLM alone has, an error says what there is in their place.",
        "",
        "## `fdcore serve`: the engine",
        "",
    )
    yield from _flags("setting of the engine", ENGINE_FLAGS)
    yield from ("", "## `fdcore serve`: the server", "")
    yield from _flags("setting of the server", (*SERVER_FLAGS, API_KEY_FILE, CONFIG_FILE))
    yield from (
        "",
        "## `fdcore route`",
        "",
        "Of the server's settings a router has those that `fdcore route --help` shows.",
        "",
    )
    mine = [flag for flag in (*GATEWAY_FLAGS, *ROUTER_FLAGS) if flag not in (*ENGINE_FLAGS, *SERVER_FLAGS)]
    yield from _flags("setting of the router", dict.fromkeys(mine))


def _flags(title: str, flags: Iterable[Flag]) -> Iterator[str]:
    yield f"| {title} | meaning |"
    yield "|---|---|"
    for flag in flags:
        name = f"`{flag.flag} {flag.metavar}`" if flag.metavar else f"`{flag.flag}`, `--no-{flag.key}`"
        yield f"| {name} | {flag.described} |"


def commands() -> Iterator[str]:
    """Yield the lines of the page of commands."""
    yield "# Commands"
    yield from (
        "",
        "`fdcore COMMAND --help` says the same in a terminal. [Settings](settings.md) have a page.",
    )
    for path, command in _leaves(get_command(app), ()):
        usage = " ".join(_argument(each) for each in command.params if each.param_type_name == "argument")
        yield from ("", f"## fdcore {' '.join(path)}", "", *_paragraphs(command.help), "")
        yield from ("```text", f"fdcore {' '.join(path)} [OPTIONS] {usage}".strip(), "```")
        if path in (("serve",), ("route",)):
            continue
        rows = [_option(each) for each in command.params if not getattr(each, "hidden", False)]
        if rows:
            yield from ("", "| argument | meaning |", "|---|---|", *rows)


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    children = getattr(command, "commands", {})
    if not children:
        yield path, command
    for name, child in sorted(children.items()):
        yield from _leaves(child, (*path, name))


def _paragraphs(text: str | None) -> Iterator[str]:
    for paragraph in (text or "").replace("\b", "").split("\n\n"):
        yield " ".join(paragraph.split())


def _argument(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _option(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [_argument(parameter)]
    value = f" {parameter.metavar}" if getattr(parameter, "metavar", None) and names[0].startswith("-") else ""
    meaning = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {', '.join(f'`{name}{value}`' for name in names)} | {meaning} |"


def metrics() -> Iterator[str]:
    """Yield the lines of the page of metrics."""
    yield "# Metrics"
    yield from (
        "",
        "What `/metrics` of a server and of a router says, in Prometheus' text format. Counters end in `_total`,",
        "histograms in `_bucket`, `_sum` and `_count`. [What to watch](../operate/metrics.md), and vLLM's names, have",
        "a page.",
    )
    ended = SenderStats(ended={"confirmed": 1}, refused={"busy": 1})
    of_servers = [
        each for leases in (LeaseStats(receiver=ReceiverStats()), LeaseStats(sender=ended)) for each in families(leases)
    ]
    yield from ("", "## `fdcore serve`", "", *_metrics(of_servers))
    yield from ("", "## `fdcore route`", "", *_metrics(GatewayMetrics(router_of(mixed=1)).collect()))


def _metrics(found: Iterable[Metric]) -> Iterator[str]:
    yield "| metric | kind | labels | meaning |"
    yield "|---|---|---|---|"
    for name, family in sorted({each.name: each for each in found}.items()):
        named = ", ".join(f"`{label}`" for label in labels(family))
        yield f"| `{name}` | {family.type} | {named} | {family.documentation} |"


def http() -> Iterator[str]:
    """Yield the lines of the page of the HTTP API, from the document at `/openapi.json`."""
    with TemporaryDirectory() as folder:
        made = create_app(
            ServerConfig(batch_api=True, batch_store=folder), FakeClient(), byte_tokenizer(), chat_template()
        ).openapi()
    yield "# HTTP API"
    yield from (
        "",
        "From the OpenAPI document of every server, `/openapi.json`. [Request fields](../serve/request-fields.md)",
        "beyond OpenAI's, and what is refused, have a page of their own.",
        "",
        "| method | path | what it does |",
        "|---|---|---|",
    )
    operations = [(path, method, each) for path, ways in made["paths"].items() for method, each in ways.items()]
    for path, method, each in operations:
        yield f"| {method.upper()} | `{path}` | {each['summary']} |"
    bodies = {}
    for path, _, each in operations:
        schema = each.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        if "$ref" in schema:
            bodies.setdefault(schema["$ref"].rpartition("/")[2], []).append(path)
    for name, paths in bodies.items():
        schema = made["components"]["schemas"][name]
        yield from (
            "",
            f"## {', '.join(f'`{path}`' for path in paths)}",
            "",
            *_paragraphs(schema.get("description")),
            "",
        )
        yield from ("| field | type | |", "|---|---|---|")
        required = schema.get("required", [])
        for field, kind in schema.get("properties", {}).items():
            note = (
                "required" if field in required else f"default `{_json(kind['default'])}`" if "default" in kind else ""
            )
            yield f"| `{field}` | {_type(kind)} | {note} |"


def _json(value: Any) -> str:
    return json.dumps(value).replace("|", "\\|")


def _type(schema: Mapping[str, Any]) -> str:
    """Return a schema in a few words."""
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{_json(each)}`" for each in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = {"minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "minLength": "length at least"}
    limits = [f"{word} {schema[key]}" for key, word in bounds.items() if key in schema]
    return f"{kind} ({', '.join(limits)})" if limits else kind


PAGES = {"settings.md": settings, "commands.md": commands, "metrics.md": metrics, "http.md": http}


def page(name: str) -> str:
    """Return the page called `name`."""
    title, *rest = PAGES[name]()
    return "\n".join((title, "", NOTE, *rest)) + "\n"


if __name__ == "__main__":
    for name in PAGES:
        (FOLDER / name).write_text(page(name), encoding="utf-8")
