"""A process that writes, and finds what it or another wrote before it was killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hicache_tier_storage import DeadlineError

from .board import Field, Phase
from .ledger import Ledger
from .pages import BATCH, CHAIN, keys_of, numbers_of, parents_of
from .resources import held
from .worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_tier_storage import PageStore

_PUTS, _DELETES, _CLEARS, _JUMPS = 0.3, 0.03, 0.0005, 0.01  # of all steps; the rest are reads


class Writer(Worker):
    """Takes a partition, looks whether all is there that was, then puts, gets, removes."""

    ledger: Ledger

    def work(self) -> None:
        """Work on one opening of the store."""
        before = held()
        store = self.open(read_only=False)
        self.board[Field.PHASE] = Phase.VERIFYING
        self.take(store)
        self.verify(store)
        self.tell(store)
        self.board[Field.PHASE] = Phase.RUNNING
        for _ in range(self.random.randrange(100, 2000)):
            if self._over():
                break
            self.step(store)
        del self.ledger  # its map has a descriptor
        self.close(store, before)

    def take(self, store: PageStore) -> None:
        """Take up the ledger of the partition that this process writes now."""
        name = f"{self.duty.arena}-{store.stats()['partition']}".replace("/", "-")
        self.ledger = Ledger(Path(self.duty.board).with_name(name))

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
        self.count_late(statuses)
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
            try:
                store.clear()
            except DeadlineError:
                self.board.add(Field.LATE, 1)
        self.tell(store)
