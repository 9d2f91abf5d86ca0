"""What the parts of an open store share: the index, the lock, the partitions, the counters."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING

from hicache_tier.errors import ClosedError

from .device_choice import DeviceEngines
from .reader_partition import ReaderPartition
from .status import kind_of
from .writer import WriterPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hicache_tier.geometry import KVGeometry

    from .engine import ByteEngine
    from .foreign import ForeignPages
    from .partition import Partition
    from .payload import Payload
    from .putter import Claim
    from .status import PageStatus

_LOG = logging.getLogger(__name__)
_BRIEFLY_S = 1.0


class StoreCore:
    """State of an open store. Fields are read and changed under `lock` unless said otherwise.

    Attributes
    ----------
    index : dict
        Key to slot in this process's partition. Lookups need no lock.
    writing : list of Claim
        What puts of this process are storing now; `written` tells when some is done.
    devices : DeviceEngines
        What moves pages of CUDA devices; needs no lock.
    closed : str
        Why the store cannot be used any more, or "".
    when_idle : callable, optional
        Called under the lock once the last call in flight has returned, after a `close` that gave up waiting.
    """

    def __init__(
        self,
        *,
        root: Path,
        geometry: KVGeometry,
        engine: ByteEngine,
        writer: WriterPartition | None,
        foreign: ForeignPages,
        asked: str = "",
        encrypted: bool = False,
    ) -> None:
        self.root = root
        self.geometry = geometry
        self.engine = engine
        self.devices = DeviceEngines(root, asked, engine, encrypted=encrypted)
        self.writer = writer
        self.foreign = foreign
        self._make_locks()
        self.index: dict[bytes, int] = {}
        if writer is not None:
            self.index = {key: slot for slot, key in writer.keys.items()}
        self.writing: list[Claim] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.slabs_dropped = 0
        self.closed = ""
        self.when_idle: Callable[[], object] | None = None
        self._users = 0

    def _make_locks(self) -> None:
        self.lock = threading.Lock()
        self._idle = threading.Condition(self.lock)
        self.written = threading.Condition(self.lock)

    def after_fork(self, closed: str) -> None:
        """Close for a child of fork; its parent's threads may have held the lock."""
        self.closed = closed
        self._users = 0
        self._make_locks()
        self.devices.after_fork()

    def check_open(self) -> None:
        """Raise `ClosedError` where the store cannot be used any more."""
        if self.closed:
            raise ClosedError(f"{self.closed}: {self.root}.")

    @contextmanager
    def briefly(self) -> Iterator[bool]:
        """Hold the lock for a look that is not worth waiting for storage that hangs.

        Yields whether it is held: a call that hangs with it may keep it for good, and then nobody else
        changes anything either.
        """
        held: list[bool] = []
        try:
            # One call notes what the lock answered: between two of them a signal's handler could raise.
            held.extend(map(self.lock.acquire, (True,), (_BRIEFLY_S,)))
            yield held[0]
        finally:
            if any(held):
                self.lock.release()

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count a call in flight, which `close` waits for."""
        counted = False
        try:
            with self.lock:
                self.check_open()
                self._users += 1
                counted = True  # with no call in between, where a signal could raise
            yield
        finally:
            if counted:
                with self.lock:
                    self._users -= 1
                    if not self._users:
                        self._idle.notify_all()
                        if self.when_idle is not None:
                            self.when_idle()
                            self.when_idle = None

    @property
    def users(self) -> int:
        """Calls in flight."""
        return self._users

    def drain(self, timeout: float) -> int:
        """Wait under the lock for calls in flight; return how many are left after `timeout` seconds."""
        self._idle.wait_for(lambda: self._users == 0, timeout)
        return self._users

    def engine_for(self, payload: Payload) -> ByteEngine:
        """Return what moves these pages; raises `EngineUnavailableError` as `DeviceEngines.get` does."""
        return self.engine if payload.device is None else self.devices.get()

    def due(self) -> bool:
        """Whether it is time to follow other writers, and nobody else is at it."""
        return self.foreign.due() and not self.lock.locked()

    def refresh(self) -> None:
        """Follow other writers, if it is time and nobody else is at it. Takes the lock itself."""
        self.check_open()
        if not self.due():
            return
        with self.lock:
            self.check_open()  # or what a `close` let go of meanwhile would be mapped again
            if self.foreign.due():
                try:
                    self.foreign.refresh()
                except OSError as error:
                    _LOG.warning("%s: other writers' pages cannot be followed: %s", self.root, error)

    def lost_partition(self) -> bool:
        """Whether this process's partition may be another writer's by now; its pages are forgotten then.

        Asked by each call: it costs one look at a file. Takes the lock itself, where it is lost.
        """
        if self.writer is None or not self.writer.is_gone:
            return False
        with self.lock:
            if not self.closed:
                self.forget(self.writer.leave())
        return True

    def touch(self, slots: NDArray[np.int64]) -> None:
        """Make pages of this process's partition recent: the first of the chain most."""
        if self.writer is not None:
            self.writer.touch(slots)

    def count(self, verb: str, status: list[PageStatus]) -> None:
        """Count verdicts by reason. Takes the lock itself."""
        if status and all(map(is_, status, repeat(status[0]))):  # as most batches are
            tally = Counter({status[0].reason: len(status)})
        else:
            tally = Counter(map(attrgetter("reason"), status))
        with self.lock:
            for reason, count in tally.items():
                self.counts[verb, kind_of(reason)] += count

    def forget(self, keys: list[bytes]) -> None:
        """Take keys out of the index."""
        for key in keys:
            self.index.pop(key, None)

    def shed(self) -> bool:
        """Give up a slab of this process's partition, if one is idle."""
        if self.writer is None:
            return False
        shed, moved, lost = self.writer.shed()
        self.index.update({key: slot for slot, key in moved})
        self.forget(lost)
        return shed

    def drop_slabs(self, partition: Partition, damage: dict[int, str]) -> None:
        """Drop damaged slabs and the pages in them, saying so."""
        if isinstance(partition, ReaderPartition):
            self.foreign.lose_slabs(partition, damage)
        elif isinstance(partition, WriterPartition):
            for number, why in damage.items():
                if number in partition.slabs:
                    self.forget(partition.drop_slab(number, why))
                    self.slabs_dropped += 1

    def lose(self, partition: Partition, pages: list[tuple[int, bytes]]) -> None:
        """Drop pages (slot, key) that turned out damaged, so that the next put repairs them."""
        if isinstance(partition, ReaderPartition):
            self.foreign.lose_pages(partition, pages)
        elif isinstance(partition, WriterPartition):
            self.drop_slabs(partition, partition.damaged_slabs([slot for slot, _ in pages]))
            once = dict.fromkeys(pages)  # a call may name a page twice
            mine = [slot for slot, key in once if partition.keys.get(slot) == key]
            self.forget(partition.free(mine))
