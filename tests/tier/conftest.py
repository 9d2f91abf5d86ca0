from __future__ import annotations

import pytest

from hicache_tier import open_store
from hicache_tier.testing.faults import Gate
from hicache_tier.testing.memory_store import MemoryStore
from hicache_tier.testing.tier_rig import GEOMETRY, Rig


@pytest.fixture
def rig():
    """Make rigs over a memory store; at the end gates open, and every page must have come back."""
    made = []

    def make(layout="page_first", **options):
        made.append(Rig(MemoryStore(GEOMETRY, layout), **options))
        return made[-1]

    yield make
    for each in made:
        for plan in each.store.plan.values():
            if isinstance(plan, Gate):
                plan.open()
        each.tier.close(5)
        each.until(lambda s: s["host"]["free_pages"] == s["host"]["total_pages"])
        each.host.close()


@pytest.fixture(params=["memory", "real"])
def any_rig(request, tmp_path):
    """Make rigs over the memory store and over the real one."""
    made = []

    def make(layout="page_first", **options):
        if request.param == "memory":
            store = MemoryStore(GEOMETRY, layout)
        else:
            store = open_store(tmp_path / "store", GEOMETRY, layout, model="m", capacity_bytes="4 MiB")
        made.append(Rig(store, **options))
        return made[-1]

    yield make
    for each in made:
        assert each.tier.close(10).abandoned_pages == 0
        assert each.host.owned_pages == 0
        each.store.close()
        each.host.close()
