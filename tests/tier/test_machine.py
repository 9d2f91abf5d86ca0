"""A state machine over the tier: whatever is called in whatever order, pages are accounted for and right.

The store's calls wait at gates that the machine opens one at a time, so that calls, ends, cancellations and
resets meet in every order. Fault kinds 19 and 20.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hicache_tier.testing.faults import Gate
from hicache_tier.testing.memory_store import MemoryStore
from hicache_tier.testing.tier_rig import GEOMETRY, Rig, chain

HOST_PAGES = 8
TRUNK = chain(0, 3)
PROMPTS = [TRUNK + chain(seed, 5)[:5] for seed in (1, 2)] + [chain(seed, 6) for seed in (3, 4)]
prefixes = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(1, 8)).map(lambda p: PROMPTS[p[0]][: p[1]])


class TierMachine(RuleBasedStateMachine):
    handles = Bundle("handles")
    locks = Bundle("locks")

    @initialize(
        policy=st.sampled_from(["write_through", "write_through_selective", "write_back"]),
        prefetch=st.sampled_from(["best_effort", "timeout", "wait_complete"]),
        layout=st.sampled_from(["page_first", "layer_first"]),
        held=st.sets(st.sampled_from(["put", "get"])),
        seeded=st.lists(prefixes, max_size=2),
    )
    def start(self, policy, prefetch, layout, held, seeded):
        self.store = MemoryStore(GEOMETRY, layout)
        self.rig = Rig(
            self.store,
            host_pages=HOST_PAGES,
            policy=policy,
            prefetch=prefetch,
            prefetch_timeout_s=0.01,
            deadline_s=0.05,
            probe_interval_s=0.01,
            write_yield_s=0.001,
            lookup_timeout_s=1.0,
            write_queue_pages=4,
            batch_pages=2,
            max_stuck_threads=2,
        )
        self.tier = self.rig.tier
        for keys in seeded:
            self.rig.preload(keys)
        self.gates = {verb: Gate() for verb in sorted(held)}
        self.store.plan.update(self.gates)
        self.held_locks = []

    @rule(keys=prefixes)
    def insert(self, keys):
        held = self.rig.insert(keys)
        assert 0 <= held <= len(keys)

    @rule(keys=prefixes)
    def match(self, keys):
        match = self.tier.match(keys)
        assert 0 <= match.host_pages <= match.pages <= len(keys)

    @rule(keys=prefixes)
    def load(self, keys):
        ready = self.tier.match(keys).host_pages
        assert self.rig.load(keys) >= ready if not self.tier.stats()["queues"]["prefetches"] else True

    @rule(keys=prefixes, target=handles)
    def prefetch(self, keys):
        return self.tier.prefetch(keys)

    @rule(handle=handles)
    def wait(self, handle):
        count = handle.wait(0.02)
        assert handle.done
        assert handle.result == count
        assert (handle.reason is None) == (count == len(handle.keys))

    @rule(handle=consumes(handles))
    def cancel(self, handle):
        count = handle.cancel()
        assert handle.done
        assert handle.result == count

    @rule(keys=prefixes, target=locks)
    def lock(self, keys):
        lock = self.tier.lock(keys)
        self.held_locks.append((lock, list(keys[: lock.pages])))
        return lock

    @rule(lock=locks)
    def unlock(self, lock):
        self.tier.unlock(lock)
        self.held_locks = [pair for pair in self.held_locks if pair[0] is not lock]

    @rule(verb=st.sampled_from(["put", "get"]))
    def complete(self, verb):
        if verb in self.gates and self.gates[verb].waiting:
            self.gates[verb].let_one_pass()

    @rule(verb=st.sampled_from(["put", "get"]))
    def come_back(self, verb):
        if verb in self.gates:
            self.gates.pop(verb).open()
            self.store.plan.pop(verb)

    @rule(verb=st.sampled_from(["put", "get"]))
    def hang(self, verb):
        if verb not in self.gates:
            self.gates[verb] = self.store.plan[verb] = Gate()

    @rule(keys=prefixes, bad=st.booleans())
    def page_fails(self, keys, bad):
        if bad:
            self.store.refuse[keys[-1]] = "io_error"
        else:
            self.store.refuse.clear()

    @rule(keys=prefixes)
    def store_loses(self, keys):
        self.store.claims.add(keys[-1])
        self.store.pages.pop(keys[-1], None)

    @rule()
    def reset(self):
        self.tier.reset()
        self.held_locks = []  # the pages stay owned until unlocked, but are no longer found

    @rule()
    def flush(self):
        unsaved = self.tier.flush(0.02)
        assert unsaved >= 0

    @invariant()
    def every_page_has_one_place(self):
        if hasattr(self, "rig"):
            stats = self.rig.account()
            assert stats["queues"]["write_pages"] <= 4
            assert all(lane["threads"] <= 3 for lane in stats["lanes"].values())
            assert all(entry.pins >= 0 for entry in list(self.tier._core.index))

    @invariant()
    def locked_pages_stay(self):
        for lock, keys in getattr(self, "held_locks", []):
            assert self.tier.match(keys).host_pages == lock.pages

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        for gate in self.gates.values():
            gate.open()
        self.store.plan.clear()
        self.store.refuse.clear()
        self.rig.idle()
        for lock in list(self.tier._core.locks):
            lock.release()
        assert not any(entry.pins for entry in self.tier._core.index), (
            "nothing uses a page, yet one is pinned"
        )
        assert self.rig.account()["host"]["detached_pages"] == 0
        for keys in PROMPTS:
            self.rig.load(keys)
            self.rig.check_stored(keys)
        report = self.tier.close(5)
        assert not report.abandoned_calls
        self.rig.until(lambda stats: stats["host"]["free_pages"] == HOST_PAGES)
        assert not any(lane["threads"] for lane in self.tier.stats()["lanes"].values())
        self.rig.host.close()


TestTier = TierMachine.TestCase
TestTier.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
