"""What every process of a torture does: work at a post, check each page read, write down findings."""

from __future__ import annotations

import json
import os
import random
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import HiCacheTierError
from hicache_tier_storage import open_store

from .bad_engine import bad_engine
from .board import Board, Field, Phase
from .clock import JumpingClock
from .pages import CHAIN, CHAINS, GEOMETRY, LAYOUT, TorturePool, keys_of
from .resources import held, more

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout
    from hicache_tier_storage import ByteEngine, PageStatus, PageStore

    from .duty import Duty

MODEL = "tortured"
_OPEN_PATIENCE_S = 20.0
_END_S = 5.0  # in which threads that were told to end must have ended
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
        self._bad_engine: ByteEngine | None = None

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

    def open(
        self, *, read_only: bool, geometry: KVGeometry = GEOMETRY, layout: Layout = LAYOUT, model: str = MODEL
    ) -> PageStore:
        """Open the store; where another process stands still with the root's lock, once more."""
        duty, until_s = self.duty, time.monotonic() + _OPEN_PATIENCE_S
        while True:
            try:
                with self.operation("open"):
                    return open_store(
                        duty.root,
                        geometry,
                        layout,
                        model=model,
                        capacity_bytes=duty.capacity_bytes,
                        verify=duty.verify,
                        read_only=read_only,
                        deadline_s=duty.deadline_s,
                        **self._engine(),
                    )
            except HiCacheTierError as error:
                if time.monotonic() > until_s:
                    self.find("not opened", error=str(error), kind=error.kind)
                    self.board.add(Field.ERRORS, 1)
                    raise
            time.sleep(0.05)

    def _engine(self) -> dict[str, Any]:
        """Return what moves the bytes: options of `open_store`."""
        threads = 1 + self.duty.seed % 2
        if self.duty.bad_engine:
            self._bad_engine = bad_engine(threads, self.duty.seed)
            return {"engine": self._bad_engine}
        return {"io_mode": "buffered", "threads": threads}

    def close(self, store: PageStore, before: tuple[int, int]) -> None:
        """Close the store, and count what it has left behind.

        Parameters
        ----------
        store : PageStore
        before : tuple
            What the process held before it opened the store.
        """
        with self.operation("close"):
            store.close()
        if self._bad_engine is not None:
            self._bad_engine.close()
        self.count_leaks(before)

    def get(self, store: PageStore, numbers: Sequence[int]) -> list[bool]:
        """Load pages and check every byte of them; tell which came."""
        if not numbers:
            return []
        self.pool.blank(len(numbers))
        with self.operation("get"):
            statuses = store.get(keys_of(numbers), self.pool, range(len(numbers)))
        loaded = [bool(status) for status in statuses]
        wrong = self.pool.wrong(numbers, loaded)
        came = sum(loaded)
        self.board.add(Field.READS, came)
        self.board.add(Field.MISSED, len(loaded) - came)
        self.count_late(statuses)
        if wrong:
            self.board.add(Field.WRONG, len(wrong))
            self.find("wrong bytes", pages=wrong[:5], count=len(wrong))
        return loaded

    def count_late(self, statuses: Sequence[PageStatus]) -> None:
        """Count pages of a call that was left, whose memory is used again at once."""
        if not statuses[0] and statuses[0].kind == "timeout":
            self.board.add(Field.LATE, len(statuses))

    def prefix(self) -> range:
        """Return the pages of a prompt, or the first of them."""
        start = self.random.randrange(CHAINS) * CHAIN
        return range(start, start + self.random.randrange(CHAIN // 2, CHAIN + 1))

    def read_prefix(self, store: PageStore) -> None:
        """Read a prompt: as much of it as there is, or whatever there is of it, holes and all."""
        numbers = self.prefix()
        if self.random.random() < 0.5:
            with self.operation("match"):
                found = store.match_prefix(keys_of(numbers))
            numbers = numbers[:found]
        self.get(store, numbers)

    def count_leaks(self, before: tuple[int, int]) -> None:
        """Compare descriptors and threads with those of before."""
        until_s = time.monotonic() + _END_S
        while (leaks := more(now := held(), before)) and time.monotonic() < until_s:
            time.sleep(0.01)  # threads that were told to end
        if leaks:
            self.board.add(Field.LEAKS, leaks)
            self.find("leak", before=before, after=now)
