"""The documents agree with the code."""

import re
import subprocess
from pathlib import Path

from typer.main import get_command

from benchmarks import documented_speed
from fd_core.cli.app import app
from fd_core.cli.settings.flags import (
    API_KEY_FILE,
    CONFIG_FILE,
    ENGINE_FLAGS,
    GATEWAY_FLAGS,
    ROUTER_FLAGS,
    SERVER_FLAGS,
)
from fd_core.config import EngineConfig, ServerConfig
from fd_core.http.access.control import ROUTES
from fd_core.plugins import MODEL, Plugins
from tests.reference import GENERATED

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "understand" / "tour.md").read_text()
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
SERVING = (*ENGINE_FLAGS, *SERVER_FLAGS, API_KEY_FILE, CONFIG_FILE)
FLAGS = tuple(dict.fromkeys((*SERVING, *GATEWAY_FLAGS, *ROUTER_FLAGS)))
ELSEWHERE = {
    *("--from-file", "--from-literal", "--index-url", "--llama", "--model", "--rounds", "--scale", "--set", "--tasks"),
    *("--fd-coverage", "--fd-require-coverage"),
    *("--index", "--shrink", "--tokens", "--trace", "--types", "--worlds", "--write"),
}
"""Flags of other programs and of scripts of this repository that the documents name."""


def commands(command, path=("fdcore",)):
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(get_command(app)))


def folders():
    """Folders with files of their own that git does not ignore, below the visible top level and `.ci`."""
    tops = (".ci", "benchmarks", "deploy", "docs", "examples", "fd_core", "plugins")
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *tops)
    named = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for folder in sorted({Path(name).parent for name in named if (ROOT / name).is_file()}):
        if not any(part.startswith(".") for part in folder.parts[1:]):
            yield f"{folder.as_posix()}/"
    yield "tests/"


def test_every_command_and_option_has_help():
    for path, command in COMMANDS.items():
        assert command.help, path
        for parameter in command.params:
            assert getattr(parameter, "help", None) or parameter.name in ("prompt", "model"), (path, parameter.name)


def test_commands_named_in_documents_exist():
    named = set()
    for document in DOCUMENTS:
        named |= set(re.findall(r"`?fdcore((?: [a-z]+(?:-[a-z]+)*)+)", document.read_text()))
    assert named
    for words in named:
        parts = ("fdcore", *words.split())
        known = max((path for path in COMMANDS if parts[: len(path)] == path), key=len)
        takes_more = not getattr(COMMANDS[known], "commands", {})
        assert known == parts or (takes_more and len(known) > 1), f"fdcore{words}"


def test_flags_named_in_documents_exist():
    known = {"--help", *ELSEWHERE}
    for command in COMMANDS.values():
        for parameter in command.params:
            known |= {*parameter.opts, *parameter.secondary_opts}
    for document in DOCUMENTS:
        if document.is_relative_to(ROOT / "benchmarks"):
            continue
        written = re.sub(f"{documented_speed.BEGIN}.*{documented_speed.END}", "", document.read_text(), flags=re.DOTALL)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", written):
            assert flag in known, f"{document.name}: {flag}"


def test_speed_in_the_documents_is_the_measured_one():
    for document, wanted in documented_speed.documents(documented_speed.recorded()).items():
        assert document.read_text() == wanted, "python benchmarks/documented_speed.py writes it"


def test_readme_counts_the_architectures():
    served = {name for offer in Plugins.discover([]).offered(MODEL).values() for name in offer.load().architectures}
    assert f"| model architectures | [{len(served)}](docs/serve/models.md)" in README


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_every_setting_has_a_flag_or_a_reason():
    without = {"model"}
    fields = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}
    assert fields - {flag.field for flag in FLAGS} == without


def test_every_folder_has_its_line_in_the_tour():
    lines = set(re.findall(r"^- `([^`]+/)`: ", TOUR, re.MULTILINE))
    assert lines - {"benchmarks/results/"} == set(folders()) - {"benchmarks/results/"}


def numbered(title: str) -> list[str]:
    """Return the lines of the tour's numbered list under a title; check that its numbers ascend."""
    section = TOUR.partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^(\d+)\. (.*(?:\n   .*)*)", section, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [line for _, line in found]


def test_tour_has_eight_steps():
    assert len(numbered("The life of a request, in eight steps")) == 8


def test_links_have_targets():
    generated = {ROOT / "docs" / page for page in GENERATED}
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in target and (document.parent / target).resolve() not in generated:
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_paths_that_need_no_key_are_listed():
    text = (ROOT / "docs" / "operate" / "keys.md").read_text()
    paragraph = next(each for each in text.split("\n\n") if each.startswith("`/health`"))
    opened = {path for path, route in ROUTES.items() if route.right in ("probe", "page")}
    assert set(re.findall(r"`(/[^`]*)`", paragraph)) == opened


def test_documents_name_no_path_of_one_machine():
    for document in DOCUMENTS:
        assert not re.search(r"(?<![\w.])/(?:home|opt|root|tmp|work|Users)/", document.read_text()), document
