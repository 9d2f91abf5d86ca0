"""What the processes of a torture do: operations at random on one root, each page read checked."""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hicache_tier.errors import HiCacheTierError, StoreError
from hicache_tier_storage import open_store
from hicache_tier_storage.archive import export_archive, open_archive
from hicache_tier_storage.capacity import partition_paths

from .board import Board, Field, Phase
from .clock import JumpingClock
from .duty import Duty
from .ledger import Ledger
from .pages import (
    CHAIN,
    GEOMETRY,
    LAYOUT,
    NUMBERS,
    PAGE_NBYTES,
    TorturePool,
    content,
    keys_of,
    numbers_of,
    parents_of,
)
from .resources import held, more

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_tier_storage import PageStore
    from hicache_tier_storage.archive import ArchivePart


MODEL = "tortured"
BATCH = 32  # pages a put, at most
_PUTS, _DELETES, _CLEARS, _JUMPS = 0.3, 0.03, 0.0005, 0.01  # of all steps; the rest are reads
_CHAINS = NUMBERS // CHAIN
_OPEN_PATIENCE_S = 20.0
_STRANGE_S = 0.5  # between two pages that a stranger writes
_PARENT_EVERY = 64  # operations between two looks at whether there is still somebody to work for


class Worker:
    """One process at its post.

    Parameters
    ----------
    duty : Duty
    """

    def __init__(self, duty: Duty) -> None:
        self.duty = duty
        self.board = Board(Path(duty.board))
        self.random = random.Random(duty.seed)
        self.pool = TorturePool(CHAIN)
        self.clock = JumpingClock(self.random) if duty.clock_jumps else None
        self._parent = os.getppid()
        self._turn = 0

    def run(self) -> None:
        """Work until told to stop."""
        while not self._over():
            self.work()
        self.board[Field.PHASE] = Phase.ENDED

    def work(self) -> None:
        """Do whatever the post is for, for a while."""
        raise NotImplementedError

    def _over(self) -> bool:
        self._turn += 1
        if self._turn % _PARENT_EVERY == 0 and os.getppid() != self._parent:
            os._exit(3)
        return bool(self.board[Field.STOP])

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Have the block watched: one that does not end in time is stuck."""
        self.board.begin()
        try:
            yield
        finally:
            self.board.end(name)

    def find(self, what: str, **facts: object) -> None:
        """Write down a finding."""
        line = json.dumps({"what": what, "role": self.duty.role, "pid": os.getpid(), **facts}) + "\n"
        fd = os.open(self.duty.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def open(self, *, read_only: bool) -> PageStore:
        """Open the store; where another process stands still with the root's lock, once more."""
        duty, until_s = self.duty, time.monotonic() + _OPEN_PATIENCE_S
        while True:
            try:
                with self.operation("open"):
                    return open_store(
                        duty.root,
                        GEOMETRY,
                        LAYOUT,
                        model=MODEL,
                        capacity_bytes=duty.capacity_bytes,
                        verify=duty.verify,
                        io_mode="auto" if read_only else duty.io_mode,
                        threads=1 + duty.seed % 2,
                        read_only=read_only,
                    )
            except HiCacheTierError as error:
                if time.monotonic() > until_s:
                    self.find("not opened", error=str(error), kind=error.kind)
                    self.board.add(Field.ERRORS, 1)
                    raise
            time.sleep(0.05)

    def get(self, store: PageStore, numbers: Sequence[int]) -> list[bool]:
        """Load pages and check every byte of them; tell which came."""
        self.pool.blank(len(numbers))
        with self.operation("get"):
            statuses = store.get(keys_of(numbers), self.pool, range(len(numbers)))
        loaded = [bool(status) for status in statuses]
        wrong = self.pool.wrong(numbers, loaded)
        came = sum(loaded)
        self.board.add(Field.READS, came)
        self.board.add(Field.MISSED, len(loaded) - came)
        if wrong:
            self.board.add(Field.WRONG, len(wrong))
            self.find("wrong bytes", pages=wrong[:5], count=len(wrong))
        return loaded

    def prefix(self) -> range:
        """Return the pages of a prompt, or the first of them."""
        start = self.random.randrange(_CHAINS) * CHAIN
        return range(start, start + self.random.randrange(CHAIN // 2, CHAIN + 1))

    def read_prefix(self, store: PageStore) -> None:
        """Read a prompt: as much of it as there is, or whatever there is of it, holes and all."""
        numbers = self.prefix()
        if self.random.random() < 0.5:
            with self.operation("match"):
                found = store.match_prefix(keys_of(numbers))
            numbers = numbers[:found]
        self.get(store, numbers)


class Reader(Worker):
    """Opens the root for reading, again and again, and reads."""

    def work(self) -> None:
        """Read for a while, and leave nothing behind."""
        before = held()
        store = self.open(read_only=True)
        self.board[Field.PHASE] = Phase.RUNNING
        for _ in range(self.random.randrange(20, 400)):
            if self._over():
                break
            if self.random.random() < 0.95:
                self.read_prefix(store)
            else:
                self.get(store, self.random.sample(range(NUMBERS), 16))
        with self.operation("close"):
            store.close()
        self.count_leaks(before)

    def count_leaks(self, before: tuple[int, int]) -> None:
        """Compare descriptors and threads with those of before."""
        until_s = time.monotonic() + 2
        while (leaks := more(now := held(), before)) and time.monotonic() < until_s:
            time.sleep(0.01)  # threads that were told to end
        if leaks:
            self.board.add(Field.LEAKS, leaks)
            self.find("leak", before=before, after=now)


class Writer(Reader):
    """Takes a partition, looks whether all is there that was, then puts, gets, removes."""

    ledger: Ledger

    def work(self) -> None:
        """Work on one opening of the store."""
        before = held()
        store = self.open(read_only=False)
        self.board[Field.PHASE] = Phase.VERIFYING
        name = f"{self.duty.arena}-{store.stats()['partition']}".replace("/", "-")
        self.ledger = Ledger(Path(self.duty.board).with_name(name))
        self.verify(store)
        self.tell(store)
        self.board[Field.PHASE] = Phase.RUNNING
        for _ in range(self.random.randrange(100, 2000)):
            if self._over():
                break
            self.step(store)
        with self.operation("close"):
            store.close()
        del self.ledger  # its map has a descriptor
        self.count_leaks(before)

    def verify(self, store: PageStore) -> None:
        """Read every page that was committed and not removed before this process took the partition."""
        numbers = self.ledger.promised.tolist()
        self.board.add(Field.VERIFIED, len(numbers))
        for at in range(0, len(numbers), CHAIN):
            some = numbers[at : at + CHAIN]
            loaded = self.get(store, some)
            self.miss("missing", [number for number, came in zip(some, loaded, strict=True) if not came])

    def miss(self, what: str, numbers: Sequence[int]) -> None:
        """Note pages that are not there although nobody else may have removed them."""
        if numbers and self.duty.strict:
            self.board.add(Field.MISSING, len(numbers))
            self.find(what, pages=list(numbers[:5]), count=len(numbers))

    def tell(self, store: PageStore) -> None:
        """State what this process holds."""
        self.ledger.tell(numbers_of(list(store.tables(follow=False)[0])))

    def step(self, store: PageStore) -> None:
        """Do one thing."""
        if self.clock is not None and self.random.random() < _JUMPS:
            self.clock.jump()
        what = self.random.random()
        if what < _PUTS:
            self.put(store)
        elif what < _PUTS + _DELETES:
            self.delete(store, self.prefix()[self.random.randrange(CHAIN // 2) :])
        elif what < _PUTS + _DELETES + _CLEARS:
            self.clear(store)
        else:
            self.read_prefix(store)

    def put(self, store: PageStore) -> None:
        """Store some pages of a prompt."""
        numbers = self.prefix()
        first = self.random.randrange(len(numbers))
        numbers = numbers[first : first + self.random.randrange(1, BATCH + 1)]
        self.pool.fill(numbers)
        with self.operation("put"):
            statuses = store.put(
                keys_of(numbers), self.pool, range(len(numbers)), parents=parents_of(numbers)
            )
        self.tell(store)
        stored = [n for n, status in zip(numbers, statuses, strict=True) if status.reason == "stored"]
        self.board.add(Field.STORED, len(stored))
        self.board.add(Field.REFUSED, sum(not status for status in statuses))
        held = self.ledger.held
        self.miss("stored and gone", [number for number in stored if not held[number]])

    def delete(self, store: PageStore, numbers: Sequence[int]) -> None:
        """Remove pages of a prompt."""
        self.ledger.at_risk[list(numbers)] = True
        with self.operation("delete"):
            store.delete(keys_of(numbers))
        self.tell(store)

    def clear(self, store: PageStore) -> None:
        """Remove everything that this process holds."""
        self.ledger.at_risk[:] = True
        with self.operation("clear"):
            store.clear()
        self.tell(store)


class Exporter(Worker):
    """Exports the root while others write to it, and reads the archive."""

    def work(self) -> None:
        """Make one archive, and check every page of it."""
        self.board[Field.PHASE] = Phase.RUNNING
        target = Path(self.duty.board).with_suffix(".archive")
        try:
            with self.operation("export"):
                export_archive(self.duty.root, target, threads=1, overwrite=True)
            with self.operation("read archive"), open_archive(target) as archive:
                for part in archive.parts:
                    self.check(part)
        except StoreError:  # a root that nobody has made yet, or without a page
            self.board.add(Field.REFUSED, 1)
            time.sleep(0.2)
        else:
            self.board.add(Field.EXPORTS, 1)

    def check(self, part: ArchivePart) -> None:
        """Read all pages of a part of an archive."""
        out = np.zeros((CHAIN, PAGE_NBYTES), np.uint8)
        for first, rows in part.chunks():
            for at in range(0, len(rows), CHAIN):
                some = rows[at : at + CHAIN]
                numbers = numbers_of(key.tobytes() for key in some["key"])
                reasons = part.read_pages(first + at + np.arange(len(some)), out[: len(some)])
                equal = (out[: len(some)].view(np.uint64) == content(numbers)).all(axis=1)
                wrong = [
                    reason or "other bytes" for reason, same in zip(reasons, equal, strict=True) if not same
                ]
                self.board.add(Field.READS, len(some))
                if wrong:
                    self.board.add(Field.WRONG, len(wrong))
                    self.find("wrong bytes in an archive", reasons=wrong[:5], count=len(wrong))


class Stranger(Worker):
    """Writes pages as a Zarr library does that knows nothing of us: it replaces slabs, or tears them."""

    def work(self) -> None:
        """Write to any page of any partition."""
        import zarr

        self.board[Field.PHASE] = Phase.RUNNING
        time.sleep(self.random.uniform(0, 2 * _STRANGE_S))
        places = list(partition_paths(Path(self.duty.root))) if Path(self.duty.root).is_dir() else []
        if not places:
            return
        try:
            pages = zarr.open_array(self.random.choice(places).pages, mode="r+")
            pages[self.random.randrange(BATCH)] = np.full(pages.shape[1:], 7, pages.dtype)
        except Exception:  # noqa: BLE001 - a library of others, on files that are damaged
            self.board.add(Field.REFUSED, 1)
        else:
            self.board.add(Field.FOREIGN_WRITES, 1)


ROLES: dict[str, type[Worker]] = {
    "reader": Reader,
    "writer": Writer,
    "exporter": Exporter,
    "stranger": Stranger,
}


def at_work(duty: Duty) -> None:
    """Do a duty until told to stop; what is raised is a finding."""
    worker = ROLES[duty.role](duty)
    try:
        worker.run()
    except BaseException:
        worker.find("raised", error=traceback.format_exc())
        worker.board.add(Field.ERRORS, 1)
        raise


if __name__ == "__main__":
    at_work(Duty.loads(sys.argv[1]))
