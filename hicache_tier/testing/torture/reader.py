"""A process that reads."""

from __future__ import annotations

from .board import Field, Phase
from .pages import NUMBERS
from .resources import held
from .worker import Worker


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
        self.close(store, before)
