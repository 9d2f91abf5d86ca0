"""`backup` and `load` by an engine on streams, without a device: the engine copies when it is submitted."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hicache_tier import lanes, routing, transfer
from hicache_tier.device_pool import DevicePool
from hicache_tier.errors import ClosedError, InvalidArgumentError, UnsupportedTransferError
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.paths import Capabilities, Offer
from hicache_tier.transfer import TransferOptions, backup, explain, load
from hicache_tier_kernels import CalibrationTable, Support, run_reference

MLA = KVGeometry.mla(num_layers=5, latent_dim=16, dtype="uint8", page_tokens=2)


class Event:
    def __init__(self, **_):
        pass

    def record(self, stream):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait(self, stream=None):
        pass


class Stream:
    def __init__(self, *_):
        pass

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class Inline:
    def __init__(self, name, *, cheap=True, ok=True):
        self.name, self.cheap, self.ok = name, cheap, ok
        self.submitted = []
        self.plans = []

    def available(self, device):
        return Support(ok=True)

    def supports(self, plan):
        return Support(ok=self.ok, reason="" if self.ok else f"{self.name} does not like it")

    def prepare(self, plan, stream, options):
        self.plans.append(plan)
        return Prepared(self, plan)


class Prepared:
    by_layer, streams = True, 2

    def __init__(self, engine, plan):
        self.engine, self.plan = engine, plan

    def seconds(self, planes):
        return 0.0 if self.engine.cheap else 1.0

    def submit(self, planes, stream):
        self.engine.submitted.append(tuple(planes))
        run_reference(self.plan, planes)

    def fault(self):
        return None


@pytest.fixture
def engines(monkeypatch):
    known = {"first": Inline("first"), "second": Inline("second", cheap=False), "third": Inline("third")}
    offers = [
        tuple(Offer(name, Support(ok=True)) for name in names) for names in (("first", "second"), ("third",))
    ]
    able = Capabilities(kernel=offers[0], one_layer_kernel=offers[0], direct=offers[1])
    monkeypatch.setattr(transfer, "machine_capabilities", lambda *_, **__: able)
    for module in (transfer, routing):
        monkeypatch.setattr(module, "engine_named", known.__getitem__)
    monkeypatch.setattr(routing, "table_for", CalibrationTable)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "none")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(lanes, "new_event", Event)
    monkeypatch.setattr(lanes, "new_stream", Stream)
    lanes.lane_of.cache_clear()
    yield known
    lanes.lane_of.cache_clear()


@pytest.fixture
def pools():
    device = DevicePool.empty(MLA, 6)
    for number, plane in enumerate(device.row_map().planes):
        plane.copy_(torch.arange(plane.numel(), dtype=torch.int32).view(plane.shape).to(torch.uint8) + number)
    with HostPool(MLA, "layer_first", 6, pinned=False) as host:
        yield device, host


@pytest.mark.parametrize("engine", ["first", "second", "third", None])
def test_there_and_back(engines, pools, engine):
    device, host = pools
    before = [plane.clone() for plane in device.row_map().planes]
    options = TransferOptions(engine=engine)
    pages, places = torch.tensor([4, 0, 3]), torch.tensor([1, 5, 0])
    done = backup(device, host, pages, places, options=options)
    done.wait(5)
    for plane in device.row_map().planes:
        plane.zero_()
    done = load(host, device, places, pages, options=options)
    for layer in done.layers:
        done.wait_layer_on(layer, "compute")
    done.wait(5)
    assert done.path.reason
    for plane, old in zip(device.row_map().planes, before, strict=True):
        assert torch.equal(plane[pages], old[pages])
        assert not plane[[1, 2, 5]].any()


def test_backups_by_a_cheap_engine_are_one_launch_and_loads_go_in_groups(engines, pools, monkeypatch):
    device, host = pools
    monkeypatch.setattr(transfer, "GROUP_NBYTES", (2 * 6 * 32, 2 * 6 * 32))  # two layers of these pages
    options = TransferOptions(engine="first")
    backup(device, host, range(6), range(6), options=options).wait(5)
    assert engines["first"].submitted.pop() == (0, 1, 2, 3, 4)
    load(host, device, range(6), range(6), options=options).wait(5)
    assert engines["first"].submitted == [(0, 1), (2, 3), (4,)]


def test_page_numbers_may_be_written_over_once_the_call_returns(engines, pools):
    device, host = pools
    pages = torch.tensor([1, 2])
    done = backup(device, host, pages, pages, options=TransferOptions(engine="second"))
    pages.fill_(5)
    done.wait(5)
    assert engines["second"].plans[0].source_pages.tolist() == [1, 2]


@pytest.mark.parametrize("engine", ["first", "second"])
def test_the_same_page_numbers_are_prepared_once_and_others_anew(engines, pools, engine):
    device, host = pools
    for plane in host.row_map().planes:
        plane.random_(0, 256)
    options, found = TransferOptions(engine=engine), engines[engine]
    places, pages = torch.tensor([1, 5]), torch.tensor([4, 0])
    for layer in range(5):
        load(host, device, places.clone(), pages.clone(), layer=layer, options=options).wait(5)
    assert len(found.plans) == 1
    assert found.submitted == [(layer,) for layer in range(5)]
    load(host, device, places, pages, options=TransferOptions(engine=engine, max_sms=2)).wait(5)
    load(host, device, places.to(torch.int32), pages, options=options).wait(5)
    assert len(found.plans) == 3
    places[1] = 3  # the same tensor with another number in it
    load(host, device, places, pages, options=options).wait(5)
    assert len(found.plans) == 4
    for theirs, ours in zip(host.row_map().planes, device.row_map().planes, strict=True):
        assert torch.equal(theirs[[1, 3]], ours[[4, 0]])


def test_numbers_that_were_not_checked_are_checked_when_it_is_asked_for(engines, pools):
    device, host = pools
    unchecked = TransferOptions(engine="first", check_indices=False)
    load(host, device, [1, 2], [3, 3], options=unchecked).wait(5)
    with pytest.raises(InvalidArgumentError, match="repeat"):
        load(host, device, [1, 2], [3, 3])


def test_a_backend_bounds_the_engines(engines, pools):
    device, host = pools
    assert backup(device, host, [0], [0], "direct").path.engine == "third"
    assert backup(device, host, [0], [0], "kernel").path.engine in {"first", "second"}
    with pytest.raises(
        InvalidArgumentError, match=r"engine 'third' cannot run this transfer. Allowed: first, second"
    ):
        backup(device, host, [0], [0], "kernel", options=TransferOptions(engine="third"))
    path = explain(device, host, "load", [0], [0], "direct")
    assert (path.engine, path.io_backend, path.op) == ("third", "direct", "load")
    assert "the one engine" in path.reason


def test_no_engine_likes_it(engines, pools):
    device, host = pools
    for engine in engines.values():
        engine.ok = False
    with pytest.raises(
        UnsupportedTransferError, match="first does not like it; second: second does not like it"
    ):
        backup(device, host, [0], [0])


def test_mistakes_are_raised_before_anything_is_submitted(engines, pools):
    device, host = pools
    for pages, places in (([6], [0]), ([0], [-1]), ([0, 1], [2, 2]), ([0, 1], [2])):
        with pytest.raises(InvalidArgumentError):
            backup(device, host, pages, places)
    assert backup(device, host, [], []).done()
    assert host.close()
    with pytest.raises(ClosedError):
        backup(device, host, [0], [0])
    assert not any(engine.submitted for engine in engines.values())
