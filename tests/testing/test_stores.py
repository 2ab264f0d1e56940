"""The kit detects faults: each of these stores breaks one promise, and a case fails."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BROKEN = {
    "returns values in another order": "def get(self, *a): return sorted(super().get(*a), key=lambda v: v is None)",
    "omits absent values": "def get(self, *a): return [v for v in super().get(*a) if v is not None]",
    "ignores the limit": "def get(self, keys, limit, timeout): return super().get(keys, 1 << 40, timeout)",
    "has another limit for prefixes": (
        "def longest_prefix(self, keys, limit, timeout): return super().longest_prefix(keys, limit - 1, timeout)"
    ),
    "counts beyond holes": (
        "def longest_prefix(self, keys, limit, timeout):\n"
        "        return sum(v is not None for v in self.get(keys, limit, timeout))"
    ),
    "keeps the existing value": (
        "def put(self, values, timeout):\n"
        "        super().put([v for v in values if v[0] not in self._values], timeout)\n"
        "        return len(values)"
    ),
    "stores the first part only": (
        "def put(self, values, timeout): return super().put([(k, p[:1]) for k, p in values], timeout)"
    ),
    "cuts keys": "def put(self, values, timeout): return super().put([(k[:16], p) for k, p in values], timeout)",
    "does not delete": "def delete(self, keys, timeout): return sum(k in self._values for k in set(keys))",
    "counts deletions twice": "def delete(self, keys, timeout): return 2 * super().delete(keys, timeout)",
    "hides a value in its error": "def stats(self, timeout): raise KeyError('prompt')",
    "takes its time": (
        "def delete(self, keys, timeout):\n"
        "        import time\n"
        "        time.sleep(1.6 if timeout == 0 else 0)\n"
        "        return super().delete(keys, timeout)"
    ),
    "works after close": "def close(self): pass",
    "takes any parameter": (
        "def __init__(self, location):\n        super().__init__(type(location)(location.scheme, location.text, {}))"
    ),
    "forgets the newest first": (
        "def get(self, *a):\n"
        "        found = super().get(*a)\n"
        "        for k in a[0]: k in self._values and self._values.move_to_end(k, last=False)\n"
        "        return found"
    ),
    "returns every fiftieth value from an earlier read": (
        "def get(self, keys, limit, timeout):\n"
        "        seen = self.__dict__.setdefault('seen', {})\n"
        "        self.reads = getattr(self, 'reads', 0) + len(keys)\n"
        "        found = super().get(keys, limit, timeout)\n"
        "        if self.reads % 50 == 0: return [seen.get(k, v) for k, v in zip(keys, found)]\n"
        "        seen.update(zip(keys, found))\n"
        "        return found"
    ),
    "caches every value forever": (
        "def get(self, keys, limit, timeout):\n"
        "        seen = self.__dict__.setdefault('seen', {})\n"
        "        found = super().get(keys, limit, timeout)\n"
        "        seen.update({k: v for k, v in zip(keys, found) if v is not None and k not in seen})\n"
        "        return [seen.get(k) for k in keys]"
    ),
    "counts removed values in a prefix": (
        "def longest_prefix(self, keys, limit, timeout):\n"
        "        self.had = getattr(self, 'had', set()) | {k for k in keys if k in self._values}\n"
        "        return next((n for n, k in enumerate(keys) if k not in self.had), len(keys))"
    ),
    "returns values that were not written": (
        "def put(self, values, timeout):\n"
        "        self.written = getattr(self, 'written', {}) | {k: b''.join(p) for k, p in values}\n"
        "        return len(values)\n"
        "    def get(self, keys, limit, timeout):\n"
        "        return [getattr(self, 'written', {}).get(k) for k in keys]"
    ),
}

FIRST_FAILURE = """
import pytest

failed = set()

def pytest_runtest_logreport(report):
    if report.failed:
        failed.add(report.nodeid.partition("::")[0])

def pytest_runtest_setup(item):
    if item.nodeid.partition("::")[0] in failed:
        pytest.skip("another case has noticed")
"""
"""Ends the cases of a store with the first that notices: some of the others wait for what it broke."""

FILE = """
import pytest
from hypothesis import Phase, settings
from fd_core.kv.stores.memory import MemoryStore
from tests.kv.stores.test_memory import TestMemoryStore as Whole

settings.register_profile("as found", phases=[Phase.generate])  # shrinking takes long and is for people
settings.load_profile("as found")

class Broken(MemoryStore):
    {method}

class TestBroken(Whole):
    examples = 3

    def new_store(self, location):
        return Broken(location)

    @pytest.fixture
    def make_store(self, location):
        from fd_core.kv.stores.location import parse_location
        return lambda text=location: self.new_store(parse_location(text))

del Whole
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Results of the kit for all of them, in one run."""
    folder = tmp_path_factory.mktemp("kit")
    (folder / "conftest.py").write_text(FIRST_FAILURE)
    for number, method in enumerate(["pass", *BROKEN.values()]):
        (folder / f"test_{number}.py").write_text(FILE.format(method=method))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-rf", "--tb=no", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout


def test_intact_store_passes(outcomes):
    assert "test_0.py::" not in outcomes
    assert " passed" in outcomes


@pytest.mark.parametrize("number, what", list(enumerate(BROKEN, 1)), ids=BROKEN)
def test_store_that_breaks_a_promise_fails(outcomes, number, what):
    assert f"test_{number}.py::TestBroken::" in outcomes
