"""TensorStore on a store in use."""

from __future__ import annotations

import numpy as np
import pytest

ts = pytest.importorskip("tensorstore")


def opened(path):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return ts.open(spec, open=True, read=True).result()


def test_every_page_reads_as_it_was_put(live):
    pages, table = opened(live.partition / "pages"), opened(live.partition / "slots")
    assert pages.domain.labels[0] == "slot"
    for key, slot in live.slots(table.read().result()).items():
        page = np.ascontiguousarray(pages[slot].read().result())
        assert page.tobytes() == live.expected(key)


def test_slots_picked_by_number_read_in_one_call(live):
    slots = live.slots(opened(live.partition / "slots").read().result())
    chosen = list(slots)[::3]
    batch = opened(live.partition / "pages")[np.array([slots[key] for key in chosen])].read().result()
    for key, page in zip(chosen, batch, strict=True):
        assert np.ascontiguousarray(page).tobytes() == live.expected(key)


def test_state_is_plain_bytes(live):
    state = opened(live.partition / "state").read().result()
    assert state.tobytes() == (live.partition / "state" / "c.0").read_bytes()


def test_chunks_are_slots_and_shards_are_slabs(live):
    pages = opened(live.partition / "pages")
    layout = pages.chunk_layout
    assert layout.read_chunk.shape[0] == 1
    assert layout.write_chunk.shape[0] == (live.partition / "slots" / "c.0.0").stat().st_size // 128
