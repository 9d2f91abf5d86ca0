"""What the linker is made of, without SGLang: options, the order of offloads, pages of a device in calls."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.integrations.sglang.desk import Desk
from hicache_tier.integrations.sglang.linker_calls import DeviceStore, as_view
from hicache_tier.integrations.sglang.linker_offloads import Offload, Offloads
from hicache_tier.integrations.sglang.linker_options import LinkerOptions
from hicache_tier.integrations.sglang.linker_pools import Wanted, device_pools
from hicache_tier.integrations.sglang.ranks import Ranks
from hicache_tier.integrations.sglang.tally import Tally
from hicache_tier.layout import Layout
from hicache_tier.testing.array_pool import keys_of
from hicache_tier_storage.posix import PosixEngine

PAGE, PAGES = 8, 16


class MHATokenToKVPool:
    """An MHA device pool, as SGLang describes one."""

    layer_num, head_num, head_dim, v_head_dim, start_layer = 3, 2, 16, 16, 0
    dtype = store_dtype = torch.float16

    def __init__(self, seed=1):
        torch.manual_seed(seed)
        shape = PAGES * PAGE, self.head_num, self.head_dim
        self.k_buffer = [torch.randn(shape).half() for _ in range(3)]
        self.v_buffer = [torch.randn(shape).half() for _ in range(3)]

    @property
    def rows(self):
        return torch.stack([*self.k_buffer, *self.v_buffer])


class Gated(PosixEngine):
    """An engine whose reads and writes wait."""

    def __init__(self):
        super().__init__(direct=False, threads=2)
        self.free = threading.Event()
        self.free.set()

    def read(self, batch):
        self.free.wait(20)
        return super().read(batch)

    def write(self, batch):
        self.free.wait(20)
        return super().write(batch)


@pytest.fixture(params=["plain", "encrypted"])
def rig(tmp_path, request):
    root, sealed = tmp_path / "root", {}
    if request.param == "encrypted":
        pytest.importorskip("cryptography")
        key = tmp_path / "key"
        key.write_text("11" * 32)
        key.chmod(0o600)
        sealed["encryption"] = str(key)

    class Rig:
        engine, kvcache = Gated(), MHATokenToKVPool()
        options = LinkerOptions.parse(
            {"root": str(root), "capacity_bytes": "4 MiB", "deadline_s": 4, "metrics": False} | sealed
        )
        tally = Tally("tp0", None)
        desk = Desk(options.common, tally)
        (view,) = device_pools(kvcache, ["full"], Wanted(PAGE, options.layout, None), lambda: None).views
        ranks = Ranks("m", (0, 1), (0, 1), (0, 1), replicated=False, writer=True)
        store = DeviceStore(as_view(view), options.common, ranks, {}, engine=engine)
        desk.pools["kv"] = store

        def move(self, verb, names, pages):
            (statuses,) = getattr(self.desk, verb)([self.store.at(names, np.array(pages, np.int64))])
            return [status.kind for status in statuses]

    made = Rig()
    yield made
    made.engine.free.set()
    made.desk.close()
    made.engine.close()


def rows_of(pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def test_pages_go_to_storage_and_back(rig):
    names, was = keys_of("linker", 4), rig.kvcache.rows[:, rows_of(range(4))].clone()
    assert rig.move("put", names, range(4)) == ["stored"] * 4
    assert rig.store.contains(names) == [True] * 4
    assert rig.move("get", names, [9, 8, 5, 15]) == ["loaded"] * 4
    assert torch.equal(rig.kvcache.rows[:, rows_of([9, 8, 5, 15])], was)
    assert rig.tally.reasons["get", "loaded"] == 4


def test_a_late_read_lands_nowhere_and_a_late_write_is_not_stored(rig):
    names = keys_of("linker", 4)
    assert rig.move("put", names, range(4)) == ["stored"] * 4
    rig.engine.free.clear()
    was = rig.kvcache.rows.clone()
    rig.desk.deadline_s = 0.2
    started_s = time.monotonic()
    assert rig.move("get", names, range(8, 12)) == ["late"] * 4
    assert time.monotonic() - started_s < 3.0
    assert rig.move("put", keys_of("other", 2), [0, 1]) == ["breaker_open"] * 2
    rig.engine.free.set()
    assert rig.desk.health.reads_open
    until_s = time.monotonic() + 10
    while rig.desk.health.reads_open and time.monotonic() < until_s:
        time.sleep(0.02)
    assert torch.equal(rig.kvcache.rows, was)
    rig.desk.deadline_s = 4
    assert rig.move("get", names, range(8, 12)) == ["loaded"] * 4


@pytest.mark.parametrize("first", [4, PAGES * PAGE, -PAGE])
def test_slots_that_are_no_pages_are_refused(rig, first):
    with pytest.raises(InvalidArgumentError, match="not pages of this pool"):
        rig.store.device_view.pages(torch.arange(first, first + PAGE), 1, unique=True)


def test_a_page_that_is_named_twice_is_not_loaded(rig):
    slots = torch.arange(PAGE).repeat(2)
    assert rig.store.device_view.pages(slots, 2, unique=False).tolist() == [0, 0]
    with pytest.raises(InvalidArgumentError, match="named twice"):
        rig.store.device_view.pages(slots, 2, unique=True)


def test_options():
    options = LinkerOptions.parse({"root": "/r", "layout": "page_first", "deadline_s": 2})
    assert (options.layout, options.common.deadline_s) == (Layout.PAGE_FIRST, 2)
    assert LinkerOptions.parse({"root": "/r"}).layout is Layout.PAGE_FIRST_DIRECT
    for wrong, said in [
        ({"layuot": 1}, "'layout'"),
        ({"layout": "page_fist"}, "'page_first'"),
        ({}, "neither"),
    ]:
        with pytest.raises(InvalidArgumentError, match=said):
            LinkerOptions.parse(({"root": "/r"} if wrong else {}) | wrong)


def test_offloads_are_stored_together_and_reported_in_order():
    begun, free, batches = threading.Event(), threading.Event(), []

    def store(batch):
        begun.set()
        assert free.wait(10)
        batches.append([one.parts[0][0] for one in batch])
        if len(batches) == 2:
            raise OSError("gone")
        return [name != "c" for name in batches[-1]]

    offloads = Offloads(store)

    def submit(name, **known):
        offloads.submit(Offload([(name, ["k"], None)], **known))

    submit("a")
    assert begun.wait(10)
    submit("b")
    submit("own", stored=True)  # another rank's
    submit("c")
    assert offloads.completed == 0
    with pytest.raises(IndexError):
        offloads.pop()
    free.set()
    until_s = time.monotonic() + 10
    while offloads.completed < 4 and time.monotonic() < until_s:
        time.sleep(0.002)
    assert batches == [["a"], ["b", "c"]]
    assert [offloads.pop() for _ in range(4)] == [True, False, True, False]
    submit("c")  # the thread lives on
    submit("d")
    assert offloads.drain(time.monotonic() + 10)
    assert offloads.completed == 0
    offloads.close(time.monotonic() + 5)
    assert not offloads._thread.is_alive()


def test_offloads_that_hang_are_given_up():
    rounds, batches = [], []

    def store(batch):
        batches.append(len(batch))
        while not offloads.stopping:  # as many rounds as it takes
            rounds.append(time.sleep(0.01))
        return [False] * len(batch)

    offloads = Offloads(store)
    offloads.submit(Offload([("a", ["k"] * 1000, None)]))
    offloads.submit(Offload([("b", ["k"], None)]))
    assert not offloads.drain(time.monotonic() + 0.05)
    count = len(rounds)
    assert offloads.completed == 0
    time.sleep(0.05)
    assert len(rounds) == count  # nothing is read any more
    assert batches == [1]
    offloads.close(time.monotonic() + 5)
