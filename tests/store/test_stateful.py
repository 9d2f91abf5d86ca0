"""The store against a dictionary, whatever happens in whatever order."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hicache_tier.testing.array_pool import key_of
from hicache_tier.testing.store_rig import StoreRig, writer_of

KEYS = [key_of(number, "state") for number in range(70)]
ROOM_NBYTES = 400 << 10  # fewer pages than there are keys, in slabs of two


def parent_of(number):
    """Pages form chains of ten."""
    return KEYS[number - 1] if number % 10 else None


numbers = st.lists(st.integers(0, len(KEYS) - 1), min_size=1, max_size=14)
runs = st.tuples(st.integers(0, len(KEYS) - 1), st.integers(1, 14)).map(
    lambda run: list(range(run[0], min(run[0] + run[1], len(KEYS))))
)


class StoreMachine(RuleBasedStateMachine):
    """`stored` holds what was stored and not deleted; pages may leave it by eviction only."""

    @initialize(checksums=st.booleans(), verify=st.sampled_from(["suspect", "always"]))
    def start(self, checksums, verify):
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="hct-test-", dir=shm if shm.is_dir() else None))
        self.options = {"capacity_bytes": ROOM_NBYTES, "checksums": checksums, "verify": verify, "threads": 1}
        self.rig = StoreRig(self.folder / "root")
        self.store = self.rig.open(**self.options)
        self.second = None
        self.stored = set()
        self.pinned = set()
        self.counted = {"put": 0, "get": 0, "delete": 0}
        self.evictions = 0

    def settle(self):
        """Forget what eviction took, having made sure that nothing else is missing."""
        there = {number for number, key in enumerate(KEYS) if key in self.store._core.index}
        gone = self.stored - there
        evictions = self.store.stats()["evictions"]
        assert len(gone) <= evictions - self.evictions, "pages are missing that were not evicted"
        assert not there - self.stored, "pages are there that were never stored"
        assert not gone & self.pinned, "a pinned page was evicted"
        self.evictions = evictions
        self.stored = there

    @rule(batch=st.one_of(numbers, runs), pin=st.sampled_from([False, False, False, True]))
    def put(self, batch, pin):
        pin = pin and len(self.pinned) + len(batch) < 10
        before = set(self.stored)
        reasons = self.rig.put(
            self.store, [KEYS[n] for n in batch], parents=[parent_of(n) for n in batch], pin=pin
        )
        self.counted["put"] += len(batch)
        good = {n for n, reason in zip(batch, reasons, strict=True) if reason.endswith("stored")}
        assert set(reasons) <= {"stored", "already_stored", "capacity"}
        for number, reason in zip(batch, reasons, strict=True):
            if number in before and number in self.store._core.foreign.index:
                assert reason == "already_stored"
        own = {n for n in good if KEYS[n] in self.store._core.index}
        assert own | {n for n in good if KEYS[n] in self.store._core.foreign.index} == good
        self.stored |= own
        if pin:
            self.pinned |= own - before
        self.settle()

    @rule(batch=numbers)
    def get(self, batch):
        reasons = self.rig.get(self.store, [KEYS[n] for n in batch])
        self.counted["get"] += len(batch)
        for number, reason in zip(batch, reasons, strict=True):
            if number in self.stored:
                assert reason == "loaded"
            elif self.second is None:
                assert reason == "absent"

    @rule(batch=numbers)
    def delete(self, batch):
        reasons = [status.reason for status in self.store.delete([KEYS[n] for n in batch])]
        self.counted["delete"] += len(batch)
        for at, (number, reason) in enumerate(zip(batch, reasons, strict=True)):
            if number in self.stored and number not in batch[:at]:
                assert reason == "deleted"
            else:
                assert reason in {"absent", "other_writer"}
        self.stored -= set(batch)
        self.pinned -= set(batch)

    @rule(batch=numbers)
    def unpin(self, batch):
        self.store.unpin([KEYS[n] for n in batch])
        self.pinned -= set(batch)

    @rule(number=st.integers(0, len(KEYS) - 1))
    def match(self, number):
        chain = list(range(number // 10 * 10, number + 1))
        expected = next((at for at, n in enumerate(chain) if n not in self.stored), len(chain))
        found = self.store.match_prefix([KEYS[n] for n in chain])
        assert found == expected or (self.second is not None and found > expected)

    @precondition(lambda self: len(self.stored) > 8)
    @rule()
    def clear(self):
        assert self.store.clear() == len(self.stored)
        self.stored.clear()
        self.pinned.clear()

    @rule(kill=st.booleans())
    def reopen(self, kill):
        if kill:
            self.store._keeper.stop(5)
            writer_of(self.store).abandon()
            self.store._core.writer = self.store._putter = self.store._keeper = None
        self.store.close()
        self.stop_second()
        self.store = self.rig.open(**self.options)
        self.counted = dict.fromkeys(self.counted, 0)
        self.evictions = 0
        self.settle()

    @precondition(lambda self: self.second is None)
    @rule(batch=numbers)
    def second_writer(self, batch):
        self.second = self.rig.open(**self.options)
        reasons = self.rig.put(self.second, [KEYS[n] for n in batch])
        for number, reason in zip(batch, reasons, strict=True):
            if number in self.stored:
                assert reason == "already_stored"
        self.rig.get(self.second, KEYS[:20])

    @precondition(lambda self: self.second is not None)
    @rule()
    def stop_second(self):
        if self.second is not None:
            self.second.clear()
            self.second.close()
            self.second = None

    @rule()
    def shed(self):
        with self.store._core.lock:
            self.store._core.shed()
        self.settle()

    @invariant()
    def books_balance(self):
        writer, core = writer_of(self.store), self.store._core
        assert {key: slot for slot, key in writer.keys.items()} == core.index
        assert len(writer._free) == len(set(writer._free))
        assert len(writer._free) + len(writer.keys) == len(writer.slabs) * writer.facts.shape.slots
        assert not writer.pins.any()
        assert not core.writing
        assert len(writer.lru) == len(writer.keys)
        stats = self.store.stats()
        assert stats["pages"] == len(self.stored)
        for verb, count in self.counted.items():
            assert sum(stats[verb].values()) == count, verb

    @invariant()
    def the_cap_holds(self):
        used = sum(path.stat().st_size for path in self.rig.root.rglob("c.*") if path.parent.name != "state")
        assert used <= ROOM_NBYTES

    def teardown(self):
        if hasattr(self, "rig"):
            self.rig.close()
            shutil.rmtree(self.folder)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=30,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
