"""A right observer passes the kit, and each of these wrong ones fails the case that names its fault."""

import gzip
import itertools
import json
import logging
import os
import queue
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from uuid import uuid4

import msgspec
import numpy as np
import pytest

from fd_core.runner.observing import Observer
from fd_core.testing.hooks import observers
from fd_core.testing.hooks.observed import OBSERVED
from fd_core.testing.hooks.observers import ObserverSuite
from fd_core.testing.kit.requirements import closed
from tests.testing.witnesses import check_of


class Counts(Observer):
    """Counts tokens and accepted drafts."""

    def __init__(self):
        self.counts = Counter()

    def observe(self, step):
        for request in step.requests:
            self.counts["tokens"] += len(request.token_ids)
            self.counts["accepted"] += request.drafts_accepted


class KeepsTheLastSteps(Observer):
    """A ring of 10,000 steps, which is bounded."""

    def __init__(self):
        self.last = deque(maxlen=10_000)

    def observe(self, step):
        self.last.append((step.epoch, step.step, len(step.requests)))


@pytest.mark.in_turn(2)
class TestLastSteps(ObserverSuite):
    def observer_class(self):
        return KeepsTheLastSteps


class WritesPages(Observer):
    """Opens another file every so many requests: an observer may wait for a medium."""

    rows = 64

    def __init__(self):
        self.folder, self.lines = TemporaryDirectory(), []
        self.page = 0

    def observe(self, step):
        self.lines += [request.request_id for request in step.requests]
        if len(self.lines) >= self.rows:
            text, self.page, self.lines = "\n".join(self.lines), self.page + 1, []  # lost if the disk is full
            Path(self.folder.name, str(self.page - 1)).write_text(text)

    def close(self):
        self.folder.cleanup()


def test_an_observer_may_open_files_now_and_then(monkeypatch):
    monkeypatch.setattr(observers, "_ROUND", 256)
    suite = ObserverSuite()
    suite.observer_class = lambda: WritesPages
    suite.test_memory_does_not_grow_with_steps()
    suite.test_memory_does_not_grow_while_no_file_can_be_written()


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", ["WritesTheRestOfAPage", "NamesItsFilesByTime", "CompressesEarlierFiles"])
def test_an_observer_that_writes_all_steps_passes(name, monkeypatch):
    monkeypatch.setattr(observers, "_LARGE_STEPS", 16)
    suite = ObserverSuite()
    suite.observer_class = lambda: globals()[name]
    suite.test_files_that_it_opens_later_are_private()
    suite.test_an_ordinary_day()


class CountsByEpoch(Counts):
    """Counts each epoch on its own, and how many drafts each row had; what it counts is no total."""

    def observe(self, step):
        self.counts[step.epoch] += sum(len(request.token_ids) for request in step.requests)
        self.counts.update(f"{request.drafts_accepted} accepted" for request in step.requests)
        self.next_step = step.step + 1


@pytest.mark.in_turn(2)
class TestCountsByEpoch(ObserverSuite):
    bounded = closed("it counts each epoch")

    def observer_class(self):
        return CountsByEpoch


class DividesByDrafts(Counts):
    def observe(self, step):
        for request in step.requests:
            self.counts[request.drafts_accepted / request.drafts_proposed] += 1


class ReadsTheFirstRequest(Counts):
    def observe(self, step):
        self.counts[step.requests[0].request_id] = 1


class ExpectsEveryStep(Counts):
    last = None

    def observe(self, step):
        assert self.last is None or step.step == self.last + 1
        self.last = step.step


class PacksTokensIn16Bits(Counts):
    def observe(self, step):
        for request in step.requests:
            struct.pack(f"{len(request.token_ids)}H", *request.token_ids)


class PacksStepsIn32Bits(Counts):
    def observe(self, step):
        struct.pack("i", step.step)


class EncodesNamesAsAscii(Counts):
    def observe(self, step):
        for request in step.requests:
            request.request_id.encode("ascii")


class SkipsTokenZero(Counts):
    def observe(self, step):
        assert all(all(request.token_ids) for request in step.requests)


class SharesAnIterator(Counts):
    open = 0

    def __init__(self):
        type(self).open += 1
        assert type(self).open == 1, "one observer at a time"

    def close(self):
        type(self).open -= 1


class LeavesAThread(Counts):
    def __init__(self):
        super().__init__()
        self.ending = threading.Event()
        threading.Thread(target=self.ending.wait, args=(5,), daemon=True).start()


class LeavesAFile(Counts):
    files = []  # noqa: RUF012 - that is the fault

    def __init__(self):
        super().__init__()
        self.files.append(Path("/dev/null").open())  # noqa: SIM115


class LosesTheRestOfAPage(WritesPages):
    """Closes without the lines of the last, incomplete page."""

    def close(self):
        self.lines = []


class WritesTheRestOfAPage(WritesPages):
    rows = 1024

    def close(self):
        Path(self.folder.name, "last").write_text("\n".join(self.lines))


class KeepsRequestsInItsClass(Counts):
    seen = {}  # noqa: RUF012 - that is the fault

    def observe(self, step):
        self.seen.update((request.request_id, len(request.token_ids)) for request in step.requests)


class LeavesAProcess(Counts):
    def __init__(self):
        super().__init__()
        subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


class SearchesEveryRequest(Counts):
    def __init__(self):
        self.seen = []

    def observe(self, step):
        for request in step.requests:
            if request.request_id not in self.seen[-2000:]:
                self.seen.append(request.request_id)


class RegistersItself(Counts):
    alive = []  # noqa: RUF012 - that is the fault

    def __init__(self):
        super().__init__()
        self.alive.append(self)


class CountsStepsByEpoch(Counts):
    def observe(self, step):
        self.counts[step.epoch] += 1


class DropsRepeatedSteps(Counts):
    """Takes a step whose number it has passed for one that it has seen."""

    last = -1

    def observe(self, step):
        if step.step > self.last:
            self.last = step.step
            super().observe(step)


class CountsTheFirstRow(Counts):
    def observe(self, step):
        if step.requests:
            self.counts["tokens"] += len(step.requests) * len(step.requests[0].token_ids)


class CountsFullBatches(Counts):
    """Counts eight steps at a time, and forgets the others when it is closed."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def observe(self, step):
        self.steps.append(step)
        if len(self.steps) == 8:
            for each in self.steps:
                super().observe(each)
            self.steps.clear()


class CountsInItsClass(Counts):
    requests = 0

    def observe(self, step):
        CountsInItsClass.requests += len(step.requests)


class CountsOneBatch(Counts):
    def observe(self, step):
        super().observe(msgspec.structs.replace(step, requests=step.requests[:256]))


class CountsInSixteenBits(Counts):
    def __init__(self):
        self.counts = np.zeros(2, np.int16)

    def observe(self, step):
        for request in step.requests:
            self.counts += np.array([len(request.token_ids), request.drafts_accepted], np.int16)


class RewritesItsLog(Counts):
    """Encodes the last steps anew in each step."""

    def __init__(self):
        super().__init__()
        self.steps = deque(maxlen=1000)

    def observe(self, step):
        self.steps.append(step)
        self.log = [json.dumps(msgspec.to_builtins(each)) for each in self.steps]


class CountsShortNames(Counts):
    """Counts one request for each beginning of a name."""

    def observe(self, step):
        rows = {request.request_id[:16]: request for request in step.requests}
        super().observe(msgspec.structs.replace(step, requests=tuple(rows.values())))


class SetsNoClockBack(Counts):
    """Fails where the time since the last step is negative."""

    last = 0.0

    def observe(self, step):
        self.last, before = time.time(), self.last
        assert self.last >= before
        super().observe(step)


class WritesOneFile(WritesTheRestOfAPage):
    """Each observer begins the same file anew."""

    path = Path(gettempdir(), f"observed-{os.getpid()}")

    def __init__(self):
        super().__init__()
        self.file = self.path.open("w")

    def observe(self, step):
        self.file.writelines(f"{request.request_id}\n" for request in step.requests)

    def close(self):
        self.file.close()


class NumbersItsFiles(Counts):
    """The first file of a process replaces that of another one with its id, as in a container that restarts."""

    numbers = itertools.count()

    def __init__(self):
        path = Path(gettempdir(), f"observed-{os.getpid()}-{next(self.numbers)}")
        self.file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w")

    def observe(self, step):
        self.file.writelines(f"{request.request_id}\n" for request in step.requests)

    def close(self):
        self.file.close()


class NamesItsFilesByTime(NumbersItsFiles):
    """Intact: the name also has the second at which the process began."""

    def __init__(self):
        number = f"{time.time():.0f}-{next(self.numbers)}"
        self.file = Path(gettempdir(), f"observed-{os.getpid()}-{number}").open("w")  # noqa: SIM115


class WritesTokensForAll(Counts):
    """A file that other users of the machine may read: its ids of tokens are the texts of answers."""

    def __init__(self):
        self.file = Path(gettempdir(), f"tokens-{uuid4()}").open("w")  # noqa: SIM115

    def observe(self, step):
        self.file.writelines(f"{request.request_id} {request.token_ids}\n" for request in step.requests)

    def close(self):
        self.file.close()


class ReliesOnItsFolder(WritesTokensForAll):
    """Only a folder that it makes itself is private."""

    def __init__(self):
        folder = Path(gettempdir(), "tokens")
        folder.mkdir(0o700, exist_ok=True)
        self.file = Path(folder, f"{uuid4()}").open("w")  # noqa: SIM115


class WarnsOfRejectedDrafts(Counts):
    """The log of a server gets as many lines as there are steps."""

    def observe(self, step):
        super().observe(step)
        if rejected := sum(row.drafts_proposed - row.drafts_accepted for row in step.requests):
            logging.getLogger("drafts").warning("step %d: %d drafts were rejected", step.step, rejected)


class BeginsAnotherFile(Observer):
    """The first file is private, unlike those that follow."""

    def __init__(self):
        descriptor, self.path = tempfile.mkstemp()
        self.file, self.written = os.fdopen(descriptor, "w"), 0
        self.begun = self.now()

    def now(self):
        return self.written >> 26

    def observe(self, step):
        if (now := self.now()) != self.begun:
            self.begun = now
            self.file.close()
            self.file = Path(f"{self.path}.{now}").open("w")  # noqa: SIM115
        self.written += self.file.write(json.dumps([each.token_ids for each in step.requests]))

    def close(self):
        self.file.close()


class BeginsAFileEachDay(BeginsAnotherFile):
    def now(self):
        return time.time() // 86_400


class CompressesEarlierFiles(Observer):
    """Intact: a private file of 4 MB, and compressed ones, as private, of what was written before."""

    mode = 0o600

    def __init__(self):
        descriptor, self.path = tempfile.mkstemp()
        self.file, self.number = os.fdopen(descriptor, "w+b"), 0

    def observe(self, step):
        rows = ((each.request_id, *each.token_ids) for each in step.requests)
        self.file.write("".join(f"{row}\n" for row in rows).encode())
        if self.file.tell() > 1 << 22:
            self.file.seek(0)
            self.number += 1
            descriptor = os.open(f"{self.path}.{self.number}", os.O_WRONLY | os.O_CREAT, self.mode)
            with os.fdopen(descriptor, "wb") as plain, gzip.open(plain, "wb", 1) as file:
                shutil.copyfileobj(self.file, file)
            self.file.truncate(0)
            self.file.seek(0)

    def close(self):
        self.file.close()


class CompressesForAll(CompressesEarlierFiles):
    mode = 0o644


class WritesAFirst(WritesTokensForAll):
    """Writes the first token of each request: with drafts, most of them are missing."""

    def __init__(self):
        self.folder = TemporaryDirectory()
        self.file = Path(self.folder.name, "tokens").open("w")  # noqa: SIM115

    def observe(self, step):
        self.file.writelines(f"{request.token_ids[0]}\n" for request in step.requests)


class SendsFromAThread(Counts):
    """Intact: a thread takes the steps from a queue, until `close`."""

    def __init__(self):
        super().__init__()
        self.queue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def observe(self, step):
        self.queue.put(step)

    def run(self):
        while (step := self.queue.get()) is not None:
            super().observe(step)

    def close(self):
        self.queue.put(None)
        self.thread.join()


def test_an_observer_with_a_thread_passes():
    suite = ObserverSuite()
    suite.observer_class = lambda: SendsFromAThread
    suite.test_closing_releases_threads_and_files()
    suite.test_a_step_of_many_requests_takes_little_time()


class PollsWithoutAPause(SendsFromAThread):
    """Yields the lock of the interpreter, unlike the processor."""

    def run(self):
        step = self
        while step is not None:
            time.sleep(0)
            with suppress(queue.Empty):
                if (step := self.queue.get_nowait()) is not None:
                    Counts.observe(self, step)


class ClosesSlowly(Counts):
    def close(self):
        time.sleep(3.1)


class LogsTokens(Counts):
    def observe(self, step):
        super().observe(step)
        for row in step.requests:
            logging.getLogger("tokens").debug("%s has the tokens %s", row.request_id, row.token_ids)


class PrintsTheLastStep(Counts):
    last = None

    def observe(self, step):
        super().observe(step)
        self.last = step

    def close(self):
        print(self.last)


class KeepsWhatItCannotWrite(WritesPages):
    """Keeps lines that cannot be written, and tries again at the next page."""

    def observe(self, step):
        self.lines += [request.request_id for request in step.requests]
        if len(self.lines) % self.rows == 0:
            with suppress(OSError):
                Path(self.folder.name, str(self.page)).write_text("\n".join(self.lines))
                self.page, self.lines = self.page + 1, []


class StopsAtAnError(NamesItsFilesByTime):
    """Writes nothing any more once a file could not be written."""

    works = True

    def observe(self, step):
        if self.works:
            with suppress(OSError):
                super().observe(step)
                self.file.flush()
                return
            self.works = False

    def close(self):
        with suppress(OSError):
            super().close()


@pytest.mark.in_turn(8, by=lambda wrong, case: check_of(case))
@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (StopsAtAnError, "test_an_ordinary_day"),
        (KeepsWhatItCannotWrite, "test_memory_does_not_grow_while_no_file_can_be_written"),
        (DropsRepeatedSteps, "first=32766,restarts=true"),
        (CountsTheFirstRow, "drafts=some accepted,tokens=6"),
        (CountsFullBatches, "plain"),
        (CountsInItsClass, "observers=2"),
        (CountsOneBatch, "requests=257"),
        (CountsInSixteenBits, "steps=4,requests=1024,tokens=33,drafts=all accepted"),
        (CountsShortNames, "names=long"),
        (SetsNoClockBack, "test_an_ordinary_day"),
        (DividesByDrafts, "plain"),
        (ReadsTheFirstRequest, "requests=0"),
        (ExpectsEveryStep, "gaps=2"),
        (PacksTokensIn16Bits, "token_id=151935"),
        (PacksStepsIn32Bits, "first=2147483646"),
        (EncodesNamesAsAscii, "names=unicode"),
        (SkipsTokenZero, "token_id=0"),
        (SharesAnIterator, "observers=2"),
        (LeavesAThread, "test_closing_releases_threads_and_files"),
        (LeavesAFile, "test_closing_releases_threads_and_files"),
        (LeavesAProcess, "test_closing_releases_threads_and_files"),
        (WritesOneFile, "test_an_ordinary_day"),
        (NumbersItsFiles, "test_an_ordinary_day"),
        (WritesAFirst, "test_an_ordinary_day"),
        (WritesTokensForAll, "test_files_that_it_opens_later_are_private"),
        (LogsTokens, "test_an_ordinary_day"),
        (PrintsTheLastStep, "test_an_ordinary_day"),
        (WarnsOfRejectedDrafts, "test_an_ordinary_day"),
        (ReliesOnItsFolder, "test_files_that_it_opens_later_are_private"),
        (BeginsAnotherFile, "test_files_that_it_opens_later_are_private"),
        (CompressesForAll, "test_files_that_it_opens_later_are_private"),
        (BeginsAFileEachDay, "test_files_that_it_opens_later_are_private"),
        (LosesTheRestOfAPage, "test_an_ordinary_day"),
        (KeepsRequestsInItsClass, "test_memory_does_not_grow_with_steps"),
        (CountsStepsByEpoch, "test_memory_does_not_grow_with_steps"),
        (RegistersItself, "test_closing_releases_threads_and_files"),
        pytest.param(
            PollsWithoutAPause, "test_a_step_of_many_requests_takes_little_time", marks=pytest.mark.soak
        ),  # beside other tests it may pass by chance
        (ClosesSlowly, "test_a_step_of_many_requests_takes_little_time"),
        (RewritesItsLog, "test_a_step_of_many_requests_takes_little_time"),
        (SearchesEveryRequest, "test_the_time_of_a_step_does_not_grow_with_past_steps"),
    ],
)
def test_wrong_observer_fails_the_case_that_names_its_fault(wrong, case, monkeypatch):
    if wrong is CompressesForAll:
        monkeypatch.setattr(observers, "_LARGE_STEPS", 16)
    suite = ObserverSuite()
    suite.observer_class = lambda: wrong
    check = getattr(suite, case, None) or (lambda: suite.test_case(OBSERVED.case(case)))
    with pytest.raises(AssertionError):
        check()
