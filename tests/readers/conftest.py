"""A store whose writer is at work while other people's readers open it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from hicache_tier import HostPool, KVGeometry, open_store
from hicache_tier.testing.array_pool import fill_pages, key_of, page_bytes

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

CASES = {
    "mha-page_first-bfloat16": (
        "page_first",
        KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16", page_tokens=8),
    ),
    "mha-layer_first-float16": (
        "layer_first",
        KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=32, dtype="float16", page_tokens=8),
    ),
    "mha-page_first_direct-float32": (
        "page_first_direct",
        KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", page_tokens=8),
    ),
    "mha-page_head-bfloat16": (
        "page_head",
        KVGeometry.mha(num_layers=3, num_kv_heads=4, head_dim=16, dtype="bfloat16", page_tokens=8),
    ),
    "mha-page_first-e4m3fn": (
        "page_first",
        KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=32, dtype="float8_e4m3fn", page_tokens=8),
    ),
    "mla-page_first-bfloat16": (
        "page_first",
        KVGeometry.mla(num_layers=3, latent_dim=72, dtype="bfloat16", page_tokens=8),
    ),
    "mla-layer_first-e5m2": (
        "layer_first",
        KVGeometry.mla(num_layers=3, latent_dim=82, dtype="float8_e5m2", page_tokens=8),
    ),
    "indexer-page_first": ("page_first", KVGeometry.indexer(num_layers=3, bytes_per_token=33, page_tokens=8)),
    "wide_k-page_first-bfloat16": (
        "page_first",
        KVGeometry.mha(
            num_layers=3, num_kv_heads=2, head_dim=24, v_head_dim=16, dtype="bfloat16", page_tokens=8
        ),
    ),
}
STABLE = 20


@dataclass
class Live:
    """A store that a thread keeps putting to, with `STABLE` pinned pages that stay where they are."""

    geometry: KVGeometry
    layout: str
    root: Path
    partition: Path
    keys: list[bytes]
    rounds: list[int]

    @property
    def pool(self) -> str:
        return self.partition.name

    def slots(self, table: np.ndarray) -> dict[bytes, int]:
        """Slot of each stable page, from a slot table as any reader returns it."""
        held = {bytes(row[16 : 16 + row[7]]): slot for slot, row in enumerate(table) if row[5] == 2}
        return {key: held[key] for key in self.keys}

    def expected(self, key: bytes) -> bytes:
        return page_bytes(key, self.geometry.page_nbytes)


@pytest.fixture(scope="module", params=CASES, ids=str)  # not longer: other tests patch what its thread uses
def live(request, tmp_path_factory):
    layout, geometry = CASES[request.param]
    root = tmp_path_factory.mktemp("live") / "store"
    keys = [key_of(number, request.param) for number in range(STABLE)]
    stop, rounds, failures = threading.Event(), [0], []

    def churn(store, host, pages):
        try:
            while not stop.wait(0.02):
                batch = [key_of(rounds[0] * 8 + at, "churn") for at in range(8)]
                fill_pages(host, pages.tolist(), batch, geometry.page_nbytes)
                assert all(store.put(batch, host, pages))
                rounds[0] += 1
        except BaseException as error:
            failures.append(error)

    with (
        HostPool(geometry, layout, STABLE + 8) as host,
        open_store(root, geometry, layout, model="org/model", capacity_bytes="1 MiB") as store,
    ):
        pages = host.alloc(STABLE)
        fill_pages(host, pages.tolist(), keys, geometry.page_nbytes)
        parents = [None, *keys[:-1]]
        assert all(store.put(keys, host, pages, parents=parents, pin=True))
        thread = threading.Thread(target=churn, args=(store, host, host.alloc(8)))
        thread.start()
        try:
            (arrays,) = root.glob("*/*-w0/*/pages")
            yield Live(geometry, layout, root, arrays.parent, keys, rounds)
            while not rounds[0] and thread.is_alive():  # a slow machine may not have come to the first
                time.sleep(0.01)
        finally:
            stop.set()
            thread.join()
        assert not failures
        assert rounds[0], "the writer was at work meanwhile"


@pytest.fixture
def small():
    return KVGeometry.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16", page_tokens=4)
