"""The kit detects faults: each of these connectors breaks one promise, and a case fails."""

import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fd_core.disagg.connectors.contract import ConnectorError
from fd_core.disagg.connectors.kv_store import KVStoreConnector
from fd_core.testing.connectors import ConnectorSuite, cases
from fd_core.testing.connectors.cases import TRANSFERS, ConnectorPair
from fd_core.testing.connectors.day import SERVERS, require_an_ordinary_day
from fd_core.testing.connectors.remote import Recipe, RemoteProcess
from tests.testing.witnesses import check_of
from tests.testing.wrong.moving import WRONG

ROOT = Path(__file__).parents[2]


def test_missing_package_is_named_with_the_extra_that_has_it():
    code = "import sys; sys.modules['hypothesis'] = None; import fd_core.testing.connectors"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "the conformance kit needs hypothesis (pip install 'fd-core[conformance]')" in done.stderr


def test_processes_name_their_leases_differently():
    """As the workers of `pytest -n 2`, which test a connector that finds a lease by its name."""
    first, second = (runpy.run_path(cases.__file__)["lease_name"] for _ in range(2))
    for kind in ("random", "last letter", "first letter", "middle letter"):
        names = [name(kind, number) for name in (first, second) for number in range(9)]
        assert len(set(names)) == 18 and {len(name) for name in names} == {32}
    assert first("last letter", 0)[:-1] == first("last letter", 9)[:-1]


SHARED = "shared_memory:SharedMemoryConnector"
DISK = "kv_store:KVStoreConnector"
TCP = "tcp:TCPConnector"

PLAIN = "test_case[transfer:plain]"
DAY = "test_an_ordinary_day_costs_no_more_than_with_a_connector_of_the_core[large blocks]"
BROKEN = {
    "waits for a piece as long as it likes": (
        TCP,
        "i.take = lambda n, r, f: whole.take(n, r, f or __import__('time').sleep(3) or f)",
        "no_call_waits_for_a_side",
    ),
    "joins parts in another order": (TCP, "o.put = lambda i, parts: whole.put(i, parts[::-1])", PLAIN),
    "raises another exception": (TCP, "i.take = lambda n, r, f: f[0] + f[1]", "garbage_for_a_piece"),
    "writes pieces to a file that other users may read": (
        TCP,
        "from pathlib import Path; file = Path('/tmp', lease); "
        "o.put = lambda i, parts: (file.write_bytes(b'piece'), whole.put(i, parts))[1]; "
        "o.close = lambda: (file.unlink(missing_ok=True), whole.close())",
        "other_users",
    ),
    "logs pieces that it refuses": (
        TCP,
        "import logging; i.take = lambda n, r, f: logging.debug('piece %d is %s', n, f) or whole.take(n, r, f)",
        "other_users",
    ),
    "keeps pieces to the end of the lease": (
        DISK,
        "i.close = lambda: ([whole.done(*each) for each in done], whole.close()); done = []; "
        "i.done = lambda *each: done.append(each)",
        "done_take_no_room",
    ),
    "leaves memory mapped": (SHARED, "o.close = lambda: None", PLAIN),
    "leaks values": (DISK, "i.close = lambda: None; o.close = lambda: None", PLAIN),
    "leaks pieces beyond the first window": (
        DISK,
        "i.close = lambda: (setattr(whole, '_known', 0), whole.close())",
        "the_prefill_side_is_killed",
    ),
    "leaves the memory of a dead decode side": (
        TCP,
        "from pathlib import Path; memory = Path('/dev/shm', lease); isinstance(o, Ignored) and memory.touch(0o600); "
        "i.close = lambda: (memory.unlink(missing_ok=True), whole.close())",
        "the_decode_side_is_killed",
    ),
    "leaks pieces of a dead peer": (
        DISK,
        "o.close = lambda: (whole._left.pop(0), whole.close())",
        "the_decode_side_is_killed",
    ),
    "keeps what was taken and never done": (
        TCP,
        "i.take = lambda n, *p: (self.__dict__.setdefault('held', []).append((lease, n)), whole.take(n, *p))[1]; "
        "i.done = lambda n, r: self.held.remove((lease, n))",
        "nothing_is_held",
    ),
    "opens no lease after a failed take": (
        TCP,
        "1 / (not getattr(self, 'failed', 0)); "
        "i.take = lambda *p: (setattr(self, 'failed', 1), whole.take(*p), setattr(self, 'failed', 0))[1]",
        DAY,
    ),
    "leaves a file of each lease": (
        TCP,
        "from pathlib import Path; import tempfile, shutil; folder = Path(tempfile.gettempdir()); "
        "isinstance(i, Ignored) or (folder / f'left-{lease[:9]}').touch(0o600)",
        DAY,
    ),
    "has a buffer for each piece of a prompt": (
        TCP,
        "import mmap; memory = mmap.mmap(-1, len(limits.get('pieces', '.')) * limits['value_bytes']); "
        "end = i if isinstance(o, Ignored) else o; end.close = lambda: (memory.close(), whole.close())",
        "memory_for_its_window",
    ),
    "sleeps until a piece is there": (
        TCP,
        "i.take = lambda *p: (__import__('time').sleep(0.02), whole.take(*p))[1]",
        "take_little_time",
    ),
    "greets the other side for each lease": (
        TCP,
        "__import__('time').sleep(0.06)",
        "take_little_time",
    ),
    "numbers the pieces of a lease with ten bits": (
        TCP,
        "import itertools; numbers, done = itertools.count(), set(); "
        "o.put = lambda n, parts: whole.put(n, parts)._replace(reference=(next(numbers) % 1024).to_bytes(2)); "
        "i.take = lambda n, r, f: 1 / (r not in done) and whole.take(n, b'', f); i.done = lambda n, r: done.add(r)",
        "beyond_sixteen_bits",
    ),
    "has another port for each lease": (
        TCP,
        "self.port = getattr(self, 'port', 50_000) + 1; 1 / (self.port < 65_536)",
        "beyond_sixteen_bits",
    ),
    "deletes each value with a whole timeout": (
        DISK,
        "self.delete = lambda keys: [ignored(Whole.delete, self, [key]) for key in keys]",
        "silent_store",
    ),
    "allows calls of the store a second": (
        DISK,
        "self.settings = self.settings._replace(timeout=min(self.settings.timeout, 1.0))",
        "a_slow_store",
    ),
}
"""Intact connector, change of each end, and the case that fails, by fault."""

FILE = """
import pytest
from types import SimpleNamespace
from hypothesis import Phase, settings
from fd_core.disagg.connectors.{module} import {cls} as Whole
from fd_core.testing.connectors import ConnectorSuite, cases

settings.register_profile("as found", phases=[Phase.generate])  # shrinking takes long and is for people
settings.load_profile("as found")

class Broken(Whole):
    def open_inbox(self, lease, **limits):
        whole = super().open_inbox(lease, **limits)
        i, o = SimpleNamespace(address=whole.address, take=whole.take, done=whole.done, close=whole.close), Ignored()
        {change}
        return i

    def open_outbox(self, lease, address, **limits):
        whole = super().open_outbox(lease, address, **limits)
        i, o = Ignored(), SimpleNamespace(put=whole.put, close=whole.close)
        {change}
        return o

class Ignored:
    pass

def ignored(call, *arguments):
    try:
        return call(*arguments)
    except Exception:
        pass

class TestBroken(ConnectorSuite):
    examples = 5
    timeout = 1.0

    @pytest.fixture
    def kv_store(self, tmp_path):
        return f"disk:{{tmp_path / 'kv'}}"

    def left_behind(self, kv_store):
        from pathlib import Path
        return {{found.name for found in Path(kv_store[5:]).rglob("*.kv")}}

    def connector_class(self):
        return Broken
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    """Results of the kit for those that are tested, in one run."""
    folder = tmp_path_factory.mktemp("kit")
    cases = []
    tested = {item.callspec.params.get("what") for item in request.session.items if hasattr(item, "callspec")}
    for number, (what, (built_in, change, case)) in enumerate(BROKEN.items()):
        if what not in tested:
            continue
        module, _, cls = built_in.partition(":")
        (folder / f"test_broken_{number}.py").write_text(FILE.format(module=module, cls=cls, change=change))
        names = [name for name in vars(ConnectorSuite) if name.startswith("test_") and case in name]
        [name] = [case] if case in (PLAIN, DAY) else names
        cases.append(f"test_broken_{number}.py::TestBroken::{name}")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=no", *cases],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout


@pytest.mark.in_turn(8, by=lambda number, what: BROKEN[what][2])
@pytest.mark.parametrize("number, what", list(enumerate(BROKEN)), ids=BROKEN)
def test_connector_that_breaks_a_promise_fails(outcomes, number, what):
    assert re.search(rf"(FAILED|ERROR) test_broken_{number}.py::TestBroken::", outcomes), outcomes


@pytest.fixture(scope="module")
def far():
    """The other process."""
    side = RemoteProcess()
    yield side
    side.close()


@pytest.mark.in_turn(8, by=lambda cls: check_of(WRONG[cls][0]))
@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_wrong_connector_fails_the_case_that_names_its_fault(cls, far, tmp_path):
    text, right = WRONG[cls]
    for each in (right, cls):
        kv_store = f"disk:{tmp_path / each.__name__}"
        recipe = Recipe(f"{each.__module__}:{each.__qualname__}", None if text in SERVERS else kv_store, 1.0)
        if text in SERVERS:
            check = partial(require_an_ordinary_day, each, recipe, text)
        elif text.startswith("test_"):
            test, *arguments = text.strip("]").split("[")
            check = partial(getattr(ConnectorSuite(), test), recipe, *arguments)
        else:
            pair = ConnectorPair(recipe.make, partial(far.make, recipe))
            check = partial(TRANSFERS.case(text).check, pair, "pytest")
        if each is right:
            check()
        else:
            with pytest.raises((AssertionError, OSError)):
                check()


class ReachesOtherWorkers(KVStoreConnector):
    """Opens one end of a lease, as a network device may have no way from a worker to itself."""

    def __init__(self, settings):
        super().__init__(settings)
        self._leases = set()

    def open_inbox(self, lease, **limits):
        self._leases.add(lease)
        return super().open_inbox(lease, **limits)

    def open_outbox(self, lease, address, **limits):
        if lease in self._leases:
            raise ConnectorError("the decode worker is this worker")
        return super().open_outbox(lease, address, **limits)


def test_kit_lets_no_connector_be_both_ends_of_a_lease(far, tmp_path):
    suite, kv_store = ConnectorSuite(), f"disk:{tmp_path / 'kv'}"
    suite.connector_class = lambda: ReachesOtherWorkers
    recipe = Recipe(f"{__name__}:{ReachesOtherWorkers.__qualname__}", kv_store, 1.0)
    pair = ConnectorPair(recipe.make, partial(far.make, recipe))
    for before in next(axis.values for axis in TRANSFERS.axes if axis.name == "before"):
        TRANSFERS.case(f"before={before}").check(pair, "pytest")
    doomed = RemoteProcess()
    try:
        suite.test_no_call_waits_for_a_side_that_stands_still(recipe, doomed)
    finally:
        doomed.close()
    suite.test_no_call_waits_for_a_silent_store_more_than_once(recipe)
