"""The report card: its counts, its contents, and that failures are prominent."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.errors import ConfigError
from fd_core.testing.kit.target import environment_of, parse_target
from fd_core.testing.report.coverage import Gap, PluginCoverage
from fd_core.testing.report.model import Card, ConformanceReport, Result, read_report, values_text
from fd_core.testing.report.page import html_of, markdown_of
from fd_core.testing.report.runs import KITS
from fd_core.testing.report.scratch import scratch_folder
from fd_core.testing.report.terminal import print_report

pytestmark = pytest.mark.slow

RESULTS = [
    Result(section="signals", test="test_one[0]", outcome="pass"),
    Result(section="signals", test="test_one[1]", outcome="fail", reason="<b>lost</b> a token"),
    Result(section="models", test="test_two[a]", outcome="limit", reason="no experts"),
]
GOOD = Card(target="good", dtype="float32", device="a chip", results=RESULTS[:1])
BAD = Card(target="bad", device="another chip", results=RESULTS)
PLAYED = Card(target="played", emulated=True, results=[RESULTS[0], RESULTS[2]])
DEAD = Card(target="dead", error="test_x ended the process with signal 11", results=RESULTS[:1])
REPORT = ConformanceReport(
    fd_core="1", python="3", machine="m", command="fdcore conformance good bad", cards=[GOOD, BAD, PLAYED, DEAD]
)


def in_terminal(report):
    text = io.StringIO()
    print_report(report, Console(file=text, width=200))
    return text.getvalue()


def test_card_passes_if_everything_ran_and_nothing_failed():
    assert [card.passed for card in REPORT.cards] == [True, False, True, False]
    assert not Card(target="empty").passed


@pytest.mark.parametrize("show", [in_terminal, html_of, markdown_of])
def test_failures_limits_crashes_and_emulation_are_shown(show):
    shown = show(REPORT)
    for words in ("lost", "no experts", "signal 11", "not run on"):
        assert words in shown
    assert "emulated" in shown.lower()
    assert "hardware" not in show(msgspec.structs.replace(REPORT, cards=[GOOD, BAD]))


@pytest.mark.parametrize("show", [in_terminal, html_of, markdown_of])
def test_untested_sections_are_always_shown(show):
    card = Card(
        target="hasty", results=RESULTS[:1], sections=("signals", "scale"), deselected={"signals": 3, "scale": 9}
    )
    report = msgspec.structs.replace(REPORT, cards=[card])
    assert "not tested" in show(report)
    assert "scale, signals (3 of 4 tests)" in show(report)
    whole = msgspec.structs.replace(card, sections=("signals",), deselected={})
    assert "not tested" not in show(msgspec.structs.replace(REPORT, cards=[whole]))


@pytest.mark.parametrize("suite", sorted({kit.suite for kit in KITS}))
def test_every_file_and_folder_of_a_suite_is_a_section_of_its_kit(suite):
    tests = list(Path(find_spec(suite).origin).parent.rglob("test_*.py"))
    assert tests
    found = {path.stem.removeprefix("test_") if path.parent.name == "suite" else path.parent.name for path in tests}
    assert found == {section for kit in KITS if kit.suite == suite for section in kit.sections}


def test_table_has_a_row_per_backend_and_merges_common_notes():
    again = msgspec.structs.replace(PLAYED, target="played again")
    shown = markdown_of(msgspec.structs.replace(REPORT, cards=[GOOD, PLAYED, again]))
    assert "| backend | result | computes in | on | models | signals |" in shown
    assert "| `good` | passes | float32 | a chip | not run | 1 pass |" in shown
    assert "\n`played`, `played again`:\n" in shown
    assert shown.count("- limit: no experts") == 1


def test_page_escapes_backend_output_and_needs_no_network():
    page = html_of(REPORT)
    assert "<b>lost" not in page
    assert "&lt;b&gt;lost" in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.parametrize("show", [in_terminal, html_of, markdown_of])
def test_expected_failures_envelope_and_tested_values_are_shown(show):
    line, gone = "test_one[1]  # one is odd", "test_one[0]  # was wrong"
    results = [
        Result(section="signals", test="test_one[1]", outcome="expected", reason="lost", expected=line),
        Result(section="signals", test="test_one[0]", outcome="pass", expected=gone),
    ]
    held = {"layer": {"decodes": "1 to 257 (3 values)", "window": "none"}}
    card = Card(target="mine", results=results, envelope={"hidden": 4096}, held=held, seeds=(77,))
    assert card.passed
    shown = " ".join(show(msgspec.structs.replace(REPORT, cards=[card])).split())
    for words in (line, gone, "hidden=4096", "expected to fail"):
        assert " ".join(words.split()) in shown
    if show is not markdown_of:
        for words in ("Passes now", "Held where tested", "decodes", "1 to 257 (3 values)", "77"):
            assert words.lower() in shown.lower()


@pytest.mark.parametrize("show", [in_terminal, html_of, markdown_of])
def test_code_that_no_check_executed_is_shown(show):
    gaps = [
        Gap(file="fd_x/ops.py", lines="40-44", count=5, source="if rows > 130000:"),
        Gap(file="fd_x/ops.py", lines="61->exit", count=0, source="if rows:"),
        Gap(file="fd_x/ops.py", lines="70", count=1, source="raise Lost", excuse="coverage:*:raise Lost # no device"),
    ]
    coverage = PluginCoverage(plugins="fd-x", lines=340, gaps=gaps, invisible=["fd_x/kernels.so"])
    other = msgspec.structs.replace(REPORT, coverage=[coverage])
    shown = show(msgspec.structs.replace(REPORT, cards=[GOOD]).beside([other])).replace("&gt;", ">")
    for words in (
        "not looked at: 5 lines and 1 branch of fd-x never executed by a check: fd_x/ops.py 40-44, 61->exit",
        "never executed, excused: coverage:*:raise Lost # no device",
        "cannot be measured: fd_x/kernels.so",
    ):
        assert words in shown


def test_coverage_of_the_best_backend_needs_its_name():
    ended = CliRunner().invoke(app, ["conformance", "auto", "--coverage"])
    assert ended.exit_code == 2
    assert "name the backend" in ended.stderr


def test_values_of_an_axis_are_a_range_only_if_they_are_numbers():
    assert values_text([65, 1, 257]) == "1 to 257 (3 values)"
    assert values_text([None, 7]) == "7; none"
    assert values_text([True, False]) == "false; true"
    assert values_text(["silu", "gelu", 32_768]) == "32,768; gelu; silu"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="draws the page in chromium, and there is none")
@pytest.mark.parametrize("width", [420, 1300])
def test_page_renders_under_its_policy_with_the_summary_first(tmp_path, width):
    (page := tmp_path / "page.html").write_text(html_of(REPORT), encoding="utf-8")
    words = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    words += [f"--user-data-dir={tmp_path}", f"--window-size={width},900"]
    done = subprocess.run([*words, page.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert "2 of 2 tests" in done.stdout
    assert done.stdout.index('id="summary"') < done.stdout.index("<table>")


def test_json_round_trips_and_rejects_another_version():
    assert read_report(msgspec.json.encode(REPORT)) == REPORT
    with pytest.raises(ValueError, match="expected a report of schema 1, got 99"):
        read_report(msgspec.json.encode(msgspec.structs.replace(REPORT, schema=99)))


def test_reports_of_several_environments_are_merged():
    other = msgspec.structs.replace(REPORT, command="fdcore conformance dead", cards=[DEAD])
    both = msgspec.structs.replace(REPORT, cards=[GOOD]).beside([other])
    assert [card.target for card in both.cards] == ["good", "dead"]
    assert both.command.splitlines() == ["fdcore conformance good bad", "fdcore conformance dead"]


def test_pytest_plugin_imports_nothing_heavy():
    # pytest itself is imported before it loads plugins.
    code = (
        "import pytest, sys; before = set(sys.modules); import fd_core.testing.kit.plugin;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "assert not new & {'numpy', 'msgspec', 'hypothesis', 'torch', 'zmq', 'rich'}, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def conformance(*arguments):
    command = [sys.executable, "-m", "fd_core.cli", "conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_command_writes_a_report_of_its_cases(tmp_path):
    json, html = tmp_path / "card.json", tmp_path / "card.html"
    files = ("--json", str(json), "--html", str(html))
    ended = conformance("null", "-k", "id_zero or limits_are", "--require-coverage", *files)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search("coverage is incomplete, for -k excluded [0-9,]+ tests\n", ended.stdout)
    report = read_report(json.read_bytes())
    [card], [coverage] = report.cards, report.coverage
    assert card.passed and report.command.endswith(" --require-coverage")
    assert {gap.file for gap in coverage.unexcused} == {"null.py"}
    assert (card.target, card.dtype, card.emulated, card.error) == ("null", "float32", False, None)
    assert {result.function for result in card.results} == {
        "test_token_id_zero_is_a_token",
        "test_limits_are_known_and_have_reasons",
    }
    assert "token id zero is a token" in html.read_text()
    assert "budget" in card.unseen
    assert "scale" in card.unseen
    assert any(words.startswith("lifetime (") for words in card.unseen)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("nosuch", "unknown backend"),
        ("null:FD_ISA=abacus", "FD_ISA='abacus' is unknown; use one of native"),
    ],
)
def test_unusable_backend_is_reported_in_one_line(backend, words):
    ended = CliRunner().invoke(app, ["conformance", backend])
    assert ended.exit_code == 4
    output = " ".join(ended.stdout.split())
    assert output.startswith(f"{backend} WAS NOT TESTED: ")
    assert words in output
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["null:speed=9"], "is not a setting"),
        (["null", "null:max_num_seqs=x"], "null:max"),
        (["--postprocess", "numpy:dtype"], "is not a setting"),
    ],
)
def test_unknown_setting_is_an_error_of_usage(words, message):
    ended = CliRunner().invoke(app, ["conformance", *words])
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def test_progress_is_logged_and_quick_reports_skipped_sections(monkeypatch):
    monkeypatch.setattr("fd_core.cli.plugins.conformance._PROGRESS_SECONDS", 0.0)
    ended = CliRunner().invoke(app, ["conformance", "null", "--quick", "-k", "id_zero or postprocess"])
    assert ended.exit_code == 0
    assert re.search(r"not tested: .*scale", " ".join(ended.stdout.split()))
    assert re.search(r"null: \d+ tests", ended.stderr)


def test_instruction_set_has_to_match_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("FD_ISA", raising=False)
    assert environment_of("cpu:dtype=float32,FD_ISA=avx2") == {"FD_ISA": "avx2"}
    with pytest.raises(ConfigError, match="FD_ISA is not 'avx2' in the environment"):
        parse_target("cpu:dtype=float32,FD_ISA=avx2", tmp_path)


def test_quantized_weights_are_compared_with_the_oracles(tmp_path):
    json = tmp_path / "card.json"
    ended = conformance(
        "reference:quantization=int4", "-k", "(id_zero or llama-whole) and not cases", "--json", str(json)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [card] = read_report(json.read_bytes()).cards
    assert {result.section for result in card.results} == {"signals", "models"}


def test_scheduler_card_lists_its_rules():
    ended = conformance("--scheduler", "continuous", "--quick", "-k", "another_gen or id_of_a_request")
    output = " ".join(ended.stdout.split())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rules held: 1.5, 1.7 rules not tested: 1.1, 1.2," in output
    assert "not tested: budget" in output


@pytest.mark.parametrize("show", [in_terminal, html_of, markdown_of])
def test_rules_enforced_elsewhere_are_shown_with_their_owner(show):
    card = Card(target="mine", results=[Result(section="signals", test="a", outcome="pass", rules=("1.1",))])
    card = msgspec.structs.replace(card, others={"1": "the postprocessor does"})
    assert "rule 1 is enforced elsewhere: the postprocessor does" in show(msgspec.structs.replace(REPORT, cards=[card]))
    assert "1" not in card.rules("limit")


@pytest.mark.parametrize("show", [in_terminal, html_of, markdown_of])
def test_dtype_that_was_not_tested_is_named_with_the_target_that_tests_it(show):
    card = Card(target="mine:threads=1", dtype="float32", results=RESULTS[:1], sections=())
    assert "not tested" in (shown := show(msgspec.structs.replace(REPORT, cards=[card])))
    assert "bfloat16 (mine:threads=1,dtype=bfloat16)" in shown
    excluded = msgspec.structs.replace(card, limits={"bfloat16": "no units"})
    assert excluded.unseen == []
    assert msgspec.structs.replace(card, target="mine:dtype=float32").unseen == []


def test_rule_with_a_failed_case_is_not_held():
    held = Result(section="signals", test="a", outcome="pass", rules=("1.1", "1.2"))
    broken = Result(section="signals", test="b", outcome="fail", reason="law 1.2: twice", rules=("1.2", "1.7"))
    card = Card(target="mine", results=[held, broken])
    assert (card.rules("pass"), card.rules("fail")) == (["1.1"], ["1.2"])
    assert {"1.7", "2.1"} <= set(card.rules("limit"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--scheduler", "nosuch"], 4, "unknown scheduler"),
        (["null", "--scheduler", "continuous"], 2, "either backends or one of"),
        (["--scheduler", "continuous", "--postprocess", "numpy"], 2, "either backends or one of"),
        (["--tool-parser", "mistral", "--reasoning-parser", "mistral"], 2, "either backends or one of"),
        (["--tool-parser", "best"], 4, "unknown tool parser 'best'"),
        ([], 2, "either backends or one of"),
    ],
)
def test_exactly_one_kind_of_target_is_required(arguments, code, words):
    ended = CliRunner().invoke(app, ["conformance", *arguments])
    assert ended.exit_code == code
    assert words in " ".join((ended.stdout + ended.stderr).replace("│", " ").split())


def test_folder_of_a_killed_run_is_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, young = (Path(tempfile.mkdtemp(prefix="run-")) for _ in range(2))
    (left / "results").touch()
    os.utime(left, (0, 0))
    with scratch_folder("run-") as held:
        os.utime(held, (0, 0))
        with scratch_folder("run-") as second:
            assert {*tmp_path.iterdir()} == {young, held, second}
    assert {*tmp_path.iterdir()} == {young}
