"""Many pages: opening is quick, and nothing that is done often grows with their number."""

from __future__ import annotations

import time

import numpy as np

from hicache_tier.geometry import KVGeometry
from hicache_tier.testing.array_pool import ArrayPool
from hicache_tier_storage import open_store
from hicache_tier_storage import slab as slabs
from hicache_tier_storage.record import COMMITTED, as_words, new_records, seal

GEOMETRY = KVGeometry.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="int8", page_tokens=2)
SLABS, SLOTS = 16, 65_536


def sparse_slab(path, shape, *_):
    """Make a slab without taking disk: a hole, then the index."""
    with path.open("wb") as file:
        file.seek(shape.data_nbytes)
        file.write(shape.tail())


def test_a_million_slots_open_soon_and_match_at_once(memory_path, monkeypatch):
    from hicache_tier_storage import growth

    monkeypatch.setattr(slabs, "SLAB_TARGET_NBYTES", SLOTS * 4096)
    monkeypatch.setattr(growth, "create_slab", sparse_slab)
    options = {"capacity_bytes": "64 GiB", "io_mode": "buffered", "threads": 1, "model": "m"}
    with open_store(memory_path, GEOMETRY, "page_first", **options) as store:
        writer = store._core.writer
        assert writer.facts.shape.slots == SLOTS
        monkeypatch.setattr(writer._growth._budget, "room_for", lambda *_: "")
        for number in range(SLABS):
            writer._growth._add_slab(number)
        tables = [writer.paths.table(number) for number in range(SLABS)]
    rng = np.random.default_rng(5)
    keys = rng.integers(0, 256, (SLABS * SLOTS, 32), np.uint8)
    for number, table in enumerate(tables):
        records = new_records(SLOTS)
        records["state"], records["generation"], records["key_nbytes"] = COMMITTED, 2, 32
        records["key"] = keys[number * SLOTS : (number + 1) * SLOTS]
        records["sequence"] = np.arange(number * SLOTS, (number + 1) * SLOTS)
        records["valid_nbytes"] = GEOMETRY.page_nbytes
        seal(records)
        table.write_bytes(as_words(records).tobytes())
    started = time.perf_counter()
    store = open_store(memory_path, GEOMETRY, "page_first", **options)
    opened = time.perf_counter() - started
    try:
        assert len(store) == SLABS * SLOTS
        names = [key.tobytes() for key in keys[::64]]
        started = time.perf_counter()
        assert store.match_prefix(names) == len(names)
        matched = time.perf_counter() - started
        host = ArrayPool(GEOMETRY, "page_first", 1)
        assert store.put([b"new"], host, [0]) == [1]
        assert store.get([b"new"], host, [0]) == [1]
        assert all(store.delete(names[:10]))
    finally:
        store.close()
    print(
        f" [{SLABS * SLOTS} slots open in {opened:.2f} s, {len(names) / matched / 1e6:.1f} M keys/s matched]",
        end="",
    )
    assert opened < 20
