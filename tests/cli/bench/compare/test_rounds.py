import pytest

from fd_core.cli.bench.compare import rounds
from fd_core.cli.bench.compare.processes import EngineFailedError
from fd_core.cli.bench.compare.rounds import measure, order_of
from fd_core.cli.bench.compare.stats import PeerRun, RequestResult


class FakeEngine:
    def __init__(self, name):
        self.name = name


class FakeSession:
    """Answers each workload with the right number of tokens, or according to `behave`."""

    def __init__(self, name, journal, behave=None):
        self.engine = FakeEngine(name)
        self.closed = False
        self._journal = journal
        self._behave = behave or (lambda number: 0)

    def run(self, workload, number):
        self._journal.append((number, workload.name, self.engine.name))
        return PeerRun(
            self.engine.name,
            workload.name,
            number,
            1.0,
            tuple(RequestResult((7,) * (count + self._behave(number)), 0.1, 1.0) for count in workload.max_tokens),
        )

    def close(self):
        self.closed = True


class FakeProbe:
    def measure(self):
        return 1e9


@pytest.fixture(autouse=True)
def no_settling(monkeypatch):
    monkeypatch.setattr(rounds, "SETTLE_SECONDS", 0)


def go(sessions, count=2):
    return measure(sessions, ["smoke"], count, list(range(500)), 0, FakeProbe(), lambda *_: None)


def test_engines_alternate_and_the_warm_up_does_not_count():
    journal = []
    result = go([FakeSession(name, journal) for name in "abc"])
    assert [number for number, _, _ in journal] == [0] * 3 + [1] * 3 + [2] * 3
    assert [name for number, _, name in journal if number == 1] == ["b", "c", "a"]
    assert {r.round for r in result.runs} == {1, 2}
    assert len(result.runs) == 6
    assert len(result.bandwidths) == 3


def test_engine_with_too_few_tokens_is_excluded_and_others_continue():
    bad, good = FakeSession("bad", [], lambda number: -number), FakeSession("good", [])
    result = go([bad, good])
    assert "3 tokens instead of 4" in result.failures["bad"]
    assert bad.closed
    assert [r.engine for r in result.runs] == ["good", "good"]


def test_failed_engine_is_excluded():
    def broken(number):
        raise EngineFailedError("it burns")

    result = go([FakeSession("bad", [], broken), FakeSession("good", [])])
    assert "it burns" in result.failures["bad"]
    assert len(result.runs) == 2


def test_no_runs_if_all_engines_fail():
    def broken(number):
        raise EngineFailedError("it burns")

    assert go([FakeSession("bad", [], broken)]).runs == []


def test_order_rotates():
    assert order_of("abc", 4) == ["b", "c", "a"]


def test_warm_up_may_be_another_workload():
    journal = []
    measure([FakeSession("a", journal)], ["w1"], 1, list(range(500)), 0, FakeProbe(), lambda *_: None, ["smoke"])
    assert journal == [(0, "smoke", "a"), (1, "w1", "a")]
