"""Hostile worlds of files and batches: the real store and service, two keys, and a failing disk, in virtual time.

Acknowledgements to clients are kept in a plain model. A killed server is followed by another on the same
folder, finally by one without faults; then everything acknowledged must exist, exactly once, and be counted.
`python -m tests.server.batches.world` runs many worlds, or repeats one.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import random
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from fd_core.http.errors import ApiError
from fd_core.http.supervision import Supervisor
from fd_core.server.batches.running import OWNER
from fd_core.server.batches.service import BatchService
from fd_core.server.batches.store import BatchStore, StoredBatch
from tests.server.batches import virtual_time
from tests.server.batches.faulty_disk import FaultyDisk, Killed

KEYS: Final = ("alice", "bob")
ENDPOINT: Final = "/v1/completions"
_SLOTS: Final = 3
_ERRORS: Final = (errno.ENOSPC, errno.EIO)


class World:
    """One world. `fault` is the number of the call at which the disk fails; None means no fault."""

    def __init__(self, folder: Path, seed: int, fault: int | None = None, count: int = 1, error: int | None = None):
        self.folder = folder
        self.random = random.Random(seed)
        self.limit = self.random.choice((4_000, 12_000, 1_000_000))
        self.fault = FaultyDisk(folder, fault, count, error)
        self.files: dict[str, tuple[str, bytes]] = {}
        """Owner and content of every acknowledged upload that no client asked to delete."""
        self.batches: dict[str, tuple[str, int, str]] = {}
        """Owner, requests and input of every acknowledged batch."""
        self.on_disk: dict[str, set[str]] = {}
        """Finished lines left by a killed server, by batch."""
        self.occurred: Counter[str] = Counter()
        self._numbers = 0

    def run(self) -> None:
        """Run the world to its end. Raises `AssertionError` on any violation."""
        with self.fault.installed():
            virtual_time.run(self._life(hostile=True))
        if self.fault.killed:
            self.occurred["kill"] += 1
        for path in self.folder.glob("batch_*.jsonl.partial"):
            whole = [each for each in path.read_bytes().splitlines(keepends=True) if each.endswith(b"\n")]
            self.on_disk.setdefault(path.name[:30], set()).update(json.loads(each)["id"] for each in whole)
        virtual_time.run(self._life(hostile=False))

    async def _life(self, *, hostile: bool) -> None:
        """Run one server; clients are active only in the hostile life."""
        supervisor = Supervisor()
        opened: list[BatchStore] = []

        def open_store() -> BatchStore:
            opened.append(BatchStore(self.folder, self.limit, None, lambda: len(KEYS)))
            return opened[-1]

        service = BatchService(self._app, open_store, self.folder, supervisor, longest=10_000, at_once=_SLOTS)
        try:
            service.resume()
            store = await self._open(service)
            if hostile:
                await self._until_killed(asyncio.gather(*(self._client(service, store, key) for key in KEYS)))
            await self._until_killed(self._settled(service, store))
            if not self.fault.killed or not hostile:
                self._check(service, store, final=not hostile)
        except Killed:
            pass
        finally:
            with suppress(Killed):
                await service.close()
            await supervisor.close()
            for each in opened:
                each.close()

    async def _open(self, service: BatchService) -> BatchStore:
        while True:
            try:
                return await service.open()
            except ApiError:
                await asyncio.sleep(1)

    async def _until_killed(self, work: Any) -> None:
        """Wait for work, or for the end of the process."""
        task = asyncio.ensure_future(work)
        while not task.done() and not self.fault.killed:
            await asyncio.wait({task}, timeout=0.5)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise Killed
        task.result()

    async def _settled(self, service: BatchService, store: BatchStore) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + 7200
        while store.waiting:
            assert loop.time() < until, f"batches did not end: {[*map(store.next_batch, store.waiting)]}"
            await asyncio.sleep(1)

    # Clients ----------------------------------------------------------------------------------------------

    async def _client(self, service: BatchService, store: BatchStore, owner: str) -> None:
        actions = (self._upload, self._upload, self._begin, self._begin, self._cancel, self._delete, self._read)
        for _ in range(self.random.randint(3, 10)):
            await asyncio.sleep(self.random.choice((0, 0, 0.1, 2, 20)))
            action = self.random.choice(actions)
            try:
                await action(service, store, owner)
            except (ApiError, OSError) as error:
                status = error.status if isinstance(error, ApiError) else 503
                assert status in (400, 413, 429, 503), error
                self.occurred[f"{action.__name__} {status}"] += 1
            self._counted(store)

    async def _upload(self, service: BatchService, store: BatchStore, owner: str) -> None:
        lines = self.random.choice((0, 1, 3, 10))
        content = b"".join(self._line() for _ in range(lines)) or b"no requests\n"
        with store.upload(owner) as upload:
            for at in range(0, len(content), 200):
                upload.reserve(len(content[at : at + 200]) + 100)  # of the form, more arrives than is written
                await asyncio.to_thread(partial(upload.write, content[at : at + 200]))
                self._counted(store)
            file = upload.keep("../\ud800\n.jsonl", "batch")
        self.files[file.id] = owner, content
        self.occurred["file"] += 1

    def _line(self) -> bytes:
        self._numbers += 1
        body = {"prompt": "x" * self.random.choice((1, 100))}
        line = {"custom_id": f"c{self._numbers}", "method": "POST", "url": ENDPOINT, "body": body}
        return json.dumps(line).encode() + b"\n"

    async def _begin(self, service: BatchService, store: BatchStore, owner: str) -> None:
        mine = [name for name, (whose, _) in self.files.items() if whose == owner]
        if not mine:
            return
        source = self.random.choice(mine)
        self._numbers += 1
        now = 1_900_000_000 + self._numbers
        batch = StoredBatch(
            id=f"batch_{self._numbers:024x}",
            endpoint=ENDPOINT,
            input_file_id=source,
            completion_window="24h",
            created_at=now,
            expires_at=2_000_000_000 * 2,
        )
        await service.begin(batch, owner)
        self.batches[batch.id] = owner, self.files[source][1].count(b"custom_id"), source
        self.occurred["batch"] += 1

    async def _cancel(self, service: BatchService, store: BatchStore, owner: str) -> None:
        for name, (whose, _, _) in list(self.batches.items()):
            if whose != owner:
                try:
                    await service.cancel(name, owner)
                except ApiError as error:
                    assert error.status == 404
                else:
                    raise AssertionError("a batch of another key was cancelled")
        mine = [name for name, (whose, _, _) in self.batches.items() if whose == owner]
        if not mine:
            return
        batch = await service.cancel(self.random.choice(mine), owner)
        await asyncio.sleep(0.01)
        assert store.batch(batch.id, owner).status not in ("validating", "in_progress")
        self.occurred[f"cancel {batch.status}"] += 1

    async def _delete(self, service: BatchService, store: BatchStore, owner: str) -> None:
        mine = [name for name, (whose, _) in self.files.items() if whose == owner]
        if not mine:
            return
        name = self.random.choice(mine)
        kept = self.files.pop(name)
        try:
            if self.random.random() < 0.3:
                with store.read(name, owner) as read:
                    store.delete(name, owner)
                    self._counted(store, open_files=len(kept[1]))
                    assert read.content.read() == kept[1], "an open file must be readable to its end"
            else:
                store.delete(name, owner)
        except ApiError as error:
            if error.code == "file_in_use" or not self.fault.killed:
                self.files[name] = kept  # it was rejected, so the file stays
            raise
        self.occurred["delete"] += 1

    async def _read(self, service: BatchService, store: BatchStore, owner: str) -> None:
        page, _ = store.files.page(owner, 1000, None) or ([], False)
        seen = {each.id for each in page}
        for name, (whose, content) in list(self.files.items()):
            assert (name in seen) == (whose == owner)
            if whose == owner and self.random.random() < 0.3:
                with store.read(name, owner) as read:
                    await asyncio.sleep(0.1)
                    assert read.content.read() == content

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request of a batch: late, with an error, or with a retry delay."""
        kind = self.random.random()
        limited = scope[OWNER] == "bob" and kind < 0.5
        await asyncio.sleep(self.random.choice((0, 0.1, 3)))
        headers = [(b"retry-after", b"%d" % self.random.choice((1, 30)))] if limited else []
        status = 429 if limited else 503 if kind < 0.55 else 400 if kind < 0.75 else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"text": "y" * 300}).encode()})

    # Invariants -------------------------------------------------------------------------------------------

    def _counted(self, store: BatchStore, open_files: int = 0) -> None:
        """Check that every byte on disk is counted, and that limits hold except for errors of a description."""
        if self.fault.killed:
            return
        on_disk = sum(path.stat().st_size for path in self.folder.iterdir() if path.name != "lock")
        assert on_disk + open_files <= store.bytes.used, "bytes on disk are not counted"
        slack = 1000 * (1 + len(self.batches) * 3)
        assert store.bytes.used <= self.limit + slack
        for owner in KEYS:
            assert store.bytes.used_by(owner) <= self.limit // 2 + slack

    def _check(self, service: BatchService, store: BatchStore, *, final: bool) -> None:
        """Check a settled store against everything acknowledged to clients."""
        self._counted(store)
        if self.fault.sound:
            on_disk = sum(path.stat().st_size for path in self.folder.iterdir() if path.name != "lock")
            assert store.bytes.used == on_disk, "bytes are counted that are not on disk"
        assert service._slots._value == _SLOTS, "a slot leaked"
        for name, (owner, content) in self.files.items():
            assert store.file(name, owner).bytes == len(content)
            assert store.content(name).read_bytes() == content
        for name, (owner, total, _) in self.batches.items():
            batch = store.batch(name, owner)
            outputs = [each for each in (batch.output_file_id, batch.error_file_id) if each is not None]
            lines = [json.loads(line) for each in outputs for line in store.content(each).read_bytes().splitlines()]
            ids = [line["id"] for line in lines]
            assert len(ids) == len(set(ids)), "a line is duplicated"
            assert self.on_disk.get(name, set()) <= set(ids), "a finished line is lost"
            counts = batch.request_counts
            assert len(ids) == counts.completed + counts.failed, batch
            assert batch.status != "completed" or len(ids) == total
            if batch.status != "completed":
                assert batch.errors is not None or batch.cancelling_at is not None, batch
            assert all(each in store.files and store.files.owner(each) == owner for each in outputs)
            self.occurred[batch.status] += 1
        if not final:
            return
        left = [path for path in self.folder.iterdir() if path.name != "lock"]
        assert all(path.suffix in (".json", ".data") for path in left), left
        counted = store.bytes.used, sum(map(store.bytes.used_by, KEYS))
        assert counted == (sum(path.stat().st_size for path in left),) * 2


def run_world(seed: int) -> Counter[str]:
    """Run the world of a seed without faults, then with faults at calls drawn from the seed; return event counts."""
    chosen = random.Random(f"fault {seed}")
    with tempfile.TemporaryDirectory() as sound:
        world = World(Path(sound), seed)
        world.run()
    occurred = world.occurred
    for error in (None, *_ERRORS):
        with tempfile.TemporaryDirectory() as faulty:
            count = 1 if error is None else chosen.choice((1, 3, 40))
            again = World(Path(faulty), seed, chosen.randrange(max(1, world.fault.calls)), count, error)
            again.run()
        occurred += again.occurred
    return occurred


def main() -> int:
    """Return 0 if no world violated an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.server.batches.world", description=__doc__)
    parser.add_argument("--worlds", type=int, default=5000, help="how many worlds to run (default: 5000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: 0)")
    options = parser.parse_args()
    occurred = Counter[str]()
    for seed in range(options.first, options.first + options.worlds):
        try:
            occurred += run_world(seed)
        except BaseException:
            print(f"seed {seed}: python -m tests.server.batches.world --first {seed} --worlds 1", file=sys.stderr)
            raise
    print(dict(sorted(occurred.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
