"""`fdcore plugins check` explains every broken plugin in one paragraph, and a broken plugin harms no other."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.cli.plugins.plugin_check import Inspection
from fd_core.hookspecs import ENTRY_POINT_GROUP
from tests.plugin_sites import GOOD, PARTS, Site

pytestmark = pytest.mark.slow

HOOK = "from fd_core.hookspecs import Entry, hookimpl\nFD_CONTRACT = 1\n@hookimpl\ndef "
MATRIX = """
from fd_core.runner.postprocess.contract import Postprocess

class Chip(Postprocess):
    serves = "torch"

    def token_matrix(self, sampled, accepted, slots, revoked): ...
"""
CHIP = PARTS.format(rank=0, answer="Availability(True, 'it is here')")

BROKEN = {
    "oldcontract": (
        {"source": "FD_CONTRACT = 99"},
        "built for contract 99; this fd_core implements 1",
        "install matching versions",
    ),
    "nocontract": ({"source": "x = 1"}, "fd_nocontract declares no FD_CONTRACT", "set FD_CONTRACT = 1 there"),
    "unknownhook": (
        {"source": HOOK + "fd_register_toasters(): ..."},
        "fd_register_toasters is not a hook; the hooks are fd_register_backends",
        "correct the spelling",
    ),
    "importerror": (
        {"source": "import no_driver"},
        "No module named 'no_driver'",
        "package that provides no_driver",
    ),
    "missingname": ({"source": "from os import no_such"}, "cannot import name 'no_such'", "a version that has it"),
    "notamodule": ({"source": "FD_CONTRACT = 1", "value": ":Plugin"}, "has no attribute 'Plugin'", "correct the name"),
    "raises": ({"source": "raise OSError('no licence')"}, "OSError: no licence", "ask its author"),
    "exits": ({"source": "import os; os._exit(7)"}, "it ended the process with exit code 7", "ask its author"),
    "offersnothing": ({"source": "FD_CONTRACT = 1"}, "it registers nothing", "implement one of the hooks"),
    "manyhooks": (
        {"source": HOOK + "fd_register_backends(app): ..."},
        "fd_register_backends",
        "use the hook arguments of",
    ),
    "framework": ({"source": "import torch\n" + GOOD, "parts": CHIP}, "discovering it imports torch", "fd_framework"),
    "threads": (
        {
            "source": "import threading, time\nthreading.Thread(target=time.sleep, args=(1,), name='spy').start()\n"
            + GOOD,
            "parts": CHIP,
        },
        "discovering it starts a thread (spy)",
        "every fdcore command discovers plugins",
    ),
    "notarget": (
        {"source": GOOD, "parts": CHIP.replace("Chip(", "Chap(")},
        "backend notarget: AttributeError: module 'fd_notarget_parts' has no attribute 'Chip'",
        "correct the name",
    ),
    "nomodule": (
        {"source": GOOD},
        "backend nomodule: ModuleNotFoundError: No module named 'fd_nomodule_parts'",
        "install the package that provides fd_nomodule_parts",
    ),
    "wrongbase": (
        {"source": GOOD, "parts": "class Chip: ..."},
        "backend wrongbase: fd_wrongbase_parts:Chip is not a subclass of fd_core.backends.contract:Backend",
        "derive it from that class",
    ),
    "abstract": (
        {"source": GOOD, "parts": CHIP.replace("    def free_memory(self): ...\n", "")},
        "fd_abstract_parts:Chip does not implement free_memory",
        "implement free_memory",
    ),
    "proberaises": (
        {"source": GOOD, "parts": PARTS.format(rank=0, answer="1 / 0")},
        "backend proberaises: ZeroDivisionError: division by zero",
        "ask its author",
    ),
    "probelies": (
        {"source": GOOD, "parts": PARTS.format(rank=0, answer="True")},
        "probe: expected an Availability, got bool True",
        "return Availability(",
    ),
    "probesilent": (
        {"source": GOOD, "parts": PARTS.format(rank=0, answer="Availability(False, '')")},
        "its probe gives no reason",
        "one line",
    ),
    "probeimports": (
        {"source": GOOD, "parts": PARTS.format(rank=0, answer="__import__('torch') and Availability(True, 'torch')")},
        "backend probeimports: fd_probeimports_parts:Chip.probe imports torch",
        "importlib.util.find_spec",
    ),
    "heavymodule": (
        {"source": GOOD, "parts": "import torch\n" + CHIP},
        "backend heavymodule: importing fd_heavymodule_parts:Chip imports torch",
        "import it in make_ops",
    ),
    "nosummary": (
        {"source": GOOD.replace('"a chip"', '""'), "parts": CHIP},
        "backend nosummary: its summary",
        "describe nosummary in the Entry",
    ),
    "serveless": (
        {"source": GOOD.replace("backends", "postprocessors"), "parts": MATRIX},
        "postprocessor serveless: fd_serveless_parts:Chip does not set `serves`",
        "set serves = (",
    ),
    "othername": (
        {"source": GOOD, "parts": CHIP, "name": "chip"},
        "fd_othername_parts:Chip has the name 'chip'",
        "set name = 'othername' in the class",
    ),
    "impostor": (
        {"source": GOOD.replace("{name!r}", "'cpu'"), "parts": CHIP, "name": "cpu"},
        "backend cpu: the name is offered by fd-core and fd-impostor",
        "rename your own",
    ),
}
"""Entry point to installed files, cause and fix."""


def install(site, point, source, parts=None, name=None, value=""):
    """Install `fd-POINT`; the class is called `name`."""
    module = f"fd_{point}"
    source = source.replace("{name!r}", repr(point)).replace("{module}", module)
    more = {} if parts is None else {"parts": parts.replace('name = "chip"', f"name = {name or point!r}")}
    site.install(f"fd-{point}", source, **more)
    if value:
        info = site.folder / f"{module}-2.5.dist-info" / "entry_points.txt"
        info.write_text(f"[{ENTRY_POINT_GROUP}]\n{point} = {module}{value}\n")


def check(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "fd_core.cli", "plugins", "check", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Return the paragraphs about all broken plugins, installed alongside a sound one, by entry point."""
    site = Site(tmp_path_factory.mktemp("broken"))
    (site.folder / "torch.py").write_text("")  # any module of this name counts as the framework
    for point, (what, *_) in BROKEN.items():
        install(site, point, **what)
    install(site, "sound", GOOD, CHIP)
    install(site, "one", GOOD.replace("{name!r}", "'twice'"), CHIP, "twice")
    install(site, "two", GOOD.replace("{name!r}", "'twice'"), CHIP, "twice")
    ended = check(site.folder)
    assert (ended.returncode, ended.stderr) == (4, "")
    found = {}
    for paragraph in ended.stdout.split("\n\n"):
        if paragraph.strip():
            found.setdefault(paragraph.partition("entry point ")[2].partition(" ")[0], []).append(paragraph)
    return found


@pytest.mark.parametrize("point, cause, remedy", [(point, *rest) for point, (_, *rest) in BROKEN.items()], ids=BROKEN)
def test_each_fault_is_explained_in_one_paragraph(report, point, cause, remedy):
    (paragraph,) = report[point]
    assert paragraph.startswith(f"fd-{point} 2.5, entry point {point} = fd_{point}")
    explained, _, advice = paragraph.partition(" Remedy: ")
    assert cause in explained
    assert remedy in advice
    assert len(paragraph.splitlines()) == 1
    assert len(paragraph) < 700


def test_duplicate_name_is_explained_for_both(report):
    for point in ("one", "two"):
        (paragraph,) = report[point]
        assert "backend twice: the name is offered by fd-one and fd-two" in paragraph


def test_sound_plugin_among_broken_ones_has_no_paragraph(report):
    assert "sound" not in report
    assert len(report) == len(BROKEN) + 2


def test_one_name_checks_one_plugin_and_success_is_brief(tmp_path):
    site = Site(tmp_path)
    install(site, "sound", GOOD, CHIP)
    install(site, "broken", "FD_CONTRACT = 99")
    ended = check(tmp_path, "sound")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        "fd-sound 2.5: sound",
        "  backend sound can run here: it is here",
        "1 plugin checked, no problems found",
    ]
    ended = check(tmp_path, "FD_Broken")  # the distribution's name, normalized as installers do
    assert ended.returncode == 4
    assert ended.stdout.count("Remedy") == 1


@pytest.mark.parametrize(
    "name, code, words",
    [
        ("nosuch", 4, "plugin 'nosuch' is not installed (installed: "),
        ("cpu", 2, "cpu is part of fd_core"),
        ("forgetful", 4, "fd-forgetful 2.5: it is installed but has no entry point in group fd_core"),
        pytest.param(
            *("elsewhere", 4, "fd-elsewhere 2.5: it is installed but has no entry point in group fd_core"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_unknown_plugin_name_is_explained(tmp_path, monkeypatch, name, code, words):
    site = Site(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Every installed plugin would be inspected in a separate process to compare names; none has this one.
    monkeypatch.setattr("fd_core.cli.plugins.plugin_check._inspect_isolated", lambda *_: Inspection())
    if code == 4 and name != "nosuch":
        install(site, name, "FD_CONTRACT = 1")
        info = site.folder / f"fd_{name}-2.5.dist-info" / "entry_points.txt"
        info.unlink() if name == "forgetful" else info.write_text(f"[fdcore]\n{name} = fd_{name}\n")
    ended = CliRunner().invoke(app, ["plugins", "check", name])
    assert ended.exit_code == code
    assert words in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
