"""A process with a tier: pages move between a device pool, a host pool and the store, and none is lost."""

from __future__ import annotations

import time

from hicache_tier.testing.faults import Delay, Fail, FailPages, FaultyStore, coming_in, every, verbs
from hicache_tier.testing.tier_rig import GEOMETRY, Rig, chain

from .board import Field, Phase
from .resources import held
from .worker import Worker

_PROMPTS, _PAGES = 40, 12
_HOST_PAGES = 48
_POLICIES = ("write_through", "write_through_selective", "write_back")
_PREFETCHES = ("best_effort", "wait_complete", "timeout")


class Tiered(Worker):
    """Opens a tier over a store that fails and hangs, uses it, and leaves no host page behind."""

    def work(self) -> None:
        """Work on one opening of the store."""
        before = held()
        store = self.open(read_only=False, geometry=GEOMETRY, model="tiered")
        bad = FaultyStore(
            store,
            Delay(0.8, every(97)),
            Fail("io_error: tortured", every(61)),
            Fail(OSError("tortured"), every(71, verbs("match_prefix", "contains"))),
            FailPages("io_error: tortured", 0.05, coming_in, seed=self.duty.seed),
        )
        rig = Rig(
            bad,
            _HOST_PAGES,
            _PAGES,
            policy=self.random.choice(_POLICIES),
            prefetch=self.random.choice(_PREFETCHES),
            deadline_s=0.4,
            probe_interval_s=0.05,
        )
        self.board[Field.PHASE] = Phase.RUNNING
        for _ in range(self.random.randrange(50, 300)):
            if self._over():
                break
            self.step(rig)
        with self.operation("close tier"):
            rig.tier.close(8.0)
        self.count_host_pages(rig)
        rig.host.close()
        del rig, bad
        self.close(store, before)

    def step(self, rig: Rig) -> None:
        """Use the tier for a request, or reset it."""
        keys = chain(self.random.randrange(_PROMPTS), self.random.randrange(1, _PAGES + 1))
        with self.operation("request"):
            rig.tier.match(keys)
            rig.tier.prefetch(keys).wait()
            try:
                loaded = rig.load(keys)
            except AssertionError as wrong:
                self.board.add(Field.WRONG, 1)
                self.find("wrong bytes from a tier", error=str(wrong))
                return
            self.board.add(Field.READS, loaded)
            rig.insert(keys)
            if self.random.random() < 0.02:
                rig.tier.reset()

    def count_host_pages(self, rig: Rig) -> None:
        """See all pages of the host pool free, once the calls that were late have returned."""
        until_s = time.monotonic() + 5
        while rig.host.owned_pages and time.monotonic() < until_s:
            time.sleep(0.01)
        if rig.host.owned_pages:
            self.board.add(Field.LEAKS, rig.host.owned_pages)
            self.find("host pages", owned=rig.host.owned_pages, stats=str(rig.tier.stats()["host"]))
