"""HTML report: self-contained, complete, small, and rendered by a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fd_core.errors import ConfigError
from fd_core.simulation.results.page.pack import facts_of, page_of, write_page
from fd_core.simulation.results.report import Report, ReportedRun, reported
from fd_core.simulation.results.slo import parse_slo
from fd_core.simulation.results.summary import Run
from tests.simulation.results.made_up import queued

SLO = parse_slo("ttft_p99=2,tpot=0.1")


@pytest.fixture(scope="module")
def report() -> Report:
    slowness = {"scheduling_policy=fcfs": 1.0, "scheduling_policy=srpt": 0.9}
    runs = [
        reported(
            queued(120, rate, seed=seed, slower=slowness[name] * (1 + 8 / slots)),
            name,
            {"rate": rate, "max_num_seqs": slots},
            slo=SLO,
            price_per_worker_hour=2.5,
        )
        for name in slowness
        for rate in (4.0, 12.0, 30.0)
        for slots in (32.0, 64.0)
        for seed in range(2)
    ]
    return Report(
        title="Two policies",
        runs=tuple(runs),
        slo=SLO,
        settings={"model": "llama", "limits": {"block_size": 16}},
        command="fdcore simulate --compare fcfs,srpt",
        traces={"mixed-0": "mixed-0.html"},
    )


def unpacked(page: str) -> Any:
    found = re.search(r'<script id="facts" type="application/json">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_page_is_self_contained(report: Report) -> None:
    page = page_of(report)
    assert not re.search(r"https?://|<link|<img|\bsrc=|@import|url\(|\bfetch\(", page)
    assert "default-src 'none'" in page and "/* style */" not in page and "{facts}" not in page
    assert 'name="viewport"' in page and '[data-theme="dark"]' in page


def test_every_script_target_exists_in_page(report: Report) -> None:
    page = page_of(report)
    targets = set(re.findall(r'byId\("(\w+)"\)', page))
    assert {"summary", "forest", "loadPlots", "map", "curvePlots", "strips"} <= targets
    assert targets <= set(re.findall(r'id="(\w+)"', page))


def test_scrollable_regions_are_keyboard_accessible(report: Report) -> None:
    page = page_of(report)
    for element in re.findall(r'<div[^>]*class="wide"[^>]*>', page):
        assert 'tabindex="0"' in element and "aria-label=" in element
    assert re.search(r'role: "img", tabindex: "0"', page)


def test_page_contains_the_report(report: Report) -> None:
    facts = unpacked(page_of(report))
    assert facts["calculated"] == ["made up, calculated, never measured"]
    assert (facts["seeds"], facts["settings"]) == ([0, 1], ["scheduling_policy=fcfs", "scheduling_policy=srpt"])
    assert facts["axes"] == {"rate": [4.0, 12.0, 30.0], "max_num_seqs": [32.0, 64.0]}
    assert facts["about"] == [["model", "llama"], ["limits.block_size", "16"]]
    assert len(facts["cases"]) == 12 and len(facts["comparisons"]) == 6 and len(facts["loadCurves"]) == 4
    first = facts["cases"][0]
    goodputs = [run.summary.slo.goodput for run in report.runs[:2] if run.summary.slo]
    names = [figure[0] for figure in facts["figures"]]
    goodput = first["figures"][names.index("goodput")]
    assert goodput[0] == pytest.approx(sum(goodputs) / 2, rel=1e-3)
    assert len(goodput) == 3  # mean, and the interval of two seeds
    assert len(first["curves"]["ttft"]) == len(facts["shares"])
    assert [worker[0] for worker in first["workers"]] == list(report.runs[0].bins.rows if report.runs[0].bins else ())
    assert {"goodput", "price", "ttft_p99"} <= set(names)


def test_measured_costs_show_no_calculation_warning() -> None:
    measured = msgspec.structs.replace(queued(40), profile="measured here")
    facts = facts_of(Report(title="Measured", runs=(reported(measured),)))
    assert (facts["calculated"], facts["profiles"]) == ([], ["measured here"])


def test_report_text_is_escaped(report: Report) -> None:
    evil = "</script><script>alert(1)</script>{facts}"
    run = msgspec.structs.replace(report.runs[0], setting=evil)
    page = page_of(msgspec.structs.replace(report, runs=(run,), title=evil, command=evil, settings={evil: evil}))
    assert page.count("<script") == 2 and unpacked(page)["title"] == evil


def test_equal_runs_give_equal_pages() -> None:
    quick, slow = (msgspec.structs.replace(queued(50), wall_seconds=seconds) for seconds in (0.1, 99.0))
    pages = [page_of(Report(title="Same", runs=(reported(each),))) for each in (quick, slow)]
    assert pages[0] == pages[1]


def test_many_requests_and_workers_keep_page_small() -> None:
    run: Run = queued(2000, 200.0, workers=2)
    outcomes = [msgspec.structs.replace(each, worker=i % 500) for i, each in enumerate(run.outcomes)] * 10
    samples = [msgspec.structs.replace(each, worker=i % 500) for i, each in enumerate(run.samples)] * 10
    fleet = msgspec.structs.replace(
        run,
        outcomes=tuple(outcomes),
        samples=tuple(samples),
        waits=run.waits * 10,
        workers=tuple(f"mixed-{index}" for index in range(500)),
        blocks=(500,) * 500,
    )
    facts = facts_of(Report(title="Fleet", runs=(reported(fleet, slo=SLO),)))
    assert len(msgspec.json.encode(facts)) < 200_000
    assert facts["cases"][0]["moreWorkers"] == 500 - 64


def sweep(report: Report, count: int) -> Report:
    runs: list[ReportedRun] = [
        msgspec.structs.replace(
            report.runs[seed],
            setting=f"policy-{index % 4}",
            values={"rate": float(index // 4 % 16), "slots": index // 64},
        )
        for index in range(count)
        for seed in range(2)
    ]
    return msgspec.structs.replace(report, runs=tuple(runs))


def test_thousand_cases_stay_below_two_megabytes(report: Report) -> None:
    page = page_of(sweep(report, 1000))
    assert len(page.encode()) < 2_000_000
    cases = unpacked(page)["cases"]
    assert cases[0]["bins"] and cases[0]["curves"] and not cases[-1]["bins"] and cases[-1]["figures"]


def test_too_many_cases_are_rejected(report: Report) -> None:
    with pytest.raises(ConfigError, match="1,001 cases exceed the limit of a page"):
        page_of(sweep(report, 1001))


def test_unwritable_page_is_a_user_error(report: Report, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*no such file or directory"):
        write_page(tmp_path / "nowhere" / "page.html", report)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="draws the page in chromium, and there is none")
def test_page_renders_in_browser(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, report)
    dark = "byId('theme').click(); byId('tail').click(); byId('every').click()"
    digest = base64.b64encode(hashlib.sha256(dark.encode()).digest()).decode()
    page = path.read_text().replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    path.write_text(page.replace("</html>", f"<script>{dark}</script></html>"))
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    drawn = done.stdout
    assert "CALCULATED, NEVER MEASURED" in drawn and re.search("knee of (fcfs|all)", drawn), (
        "what all names begin with is left out"
    )
    for words in (
        '<th scope="row">TTFT p99</th>',
        'class="best"',
        "Requests a second",
        "mixed-1",
        "End to end p50",
    ):
        assert words in drawn
    assert "waiting for a slot" in drawn and 'class="absent"' not in drawn
    assert drawn.count('class="plot"') == 3 + 4 + 3  # load, distributions, over time
    assert "NaN" not in drawn.split("<script")[0] and "undefined" not in drawn.split("<script")[0]
