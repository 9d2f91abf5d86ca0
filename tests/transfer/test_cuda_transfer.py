"""Transfers on a device: every engine through `backup` and `load`, order, ownership and refusals."""

from __future__ import annotations

import threading

import pytest
import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.errors import ClosedError, InvalidArgumentError
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.transfer import TransferOptions, backup, explain, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROWS = {
    "mha_2048": KVGeometry.mha(num_layers=4, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=16),
    "mha_256": KVGeometry.mha(num_layers=4, num_kv_heads=1, head_dim=128, dtype="bfloat16", page_tokens=16),
    "wide_k": KVGeometry.mha(
        num_layers=3, num_kv_heads=2, head_dim=192, v_head_dim=128, dtype="bfloat16", page_tokens=8
    ),
    "mla_1152": KVGeometry.mla(num_layers=5, latent_dim=576, dtype="bfloat16", page_tokens=16),
    "mla_656": KVGeometry.mla(num_layers=5, latent_dim=656, dtype="uint8", page_tokens=1),
    "rows_132": KVGeometry.mla(num_layers=3, latent_dim=132, dtype="uint8", page_tokens=4),
    "indexer": KVGeometry.indexer(num_layers=4, bytes_per_token=132, page_tokens=64),
}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
ENGINES = (None, "cuda", "staged", "copy_engine")
PAGES = 64


def noise(device, seed=0):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for plane in device.row_map().planes:
        plane.copy_(torch.randint(0, 256, plane.shape, dtype=torch.uint8, device="cuda", generator=generator))


def copies(device):
    return [plane.clone() for plane in device.row_map().planes]


def orders(n=PAGES, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randperm(n, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("index", ["cpu-int64", "cpu-int32", "cuda-int64", "cuda-int32"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ROWS)
def test_there_and_back(name, layout, engine, index):
    geometry = ROWS[name]
    if layout == "page_head" and geometry.kind.value != "mha":
        pytest.skip("MHA only")
    where, dtype = index.split("-")
    device = DevicePool.empty(geometry, PAGES, device="cuda")
    noise(device)
    before = copies(device)
    ours, theirs, back = (order.to(where, getattr(torch, dtype)) for order in orders())
    options = TransferOptions(engine=engine)
    with HostPool(geometry, layout, PAGES) as host:
        try:
            done = backup(device, host, ours[:40], theirs[:40], options=options)
        except InvalidArgumentError as error:
            pytest.skip(str(error))
        done.wait(10)
        for plane in device.row_map().planes:
            plane.fill_(7)
        completion = load(host, device, theirs[:40], back[:40], options=options)
        for layer in completion.layers:
            completion.wait_layer_on(layer)
        after = copies(device)
        completion.wait(10)
        for plane, old in zip(after, before, strict=True):
            assert torch.equal(plane[back[:40].long()], old[ours[:40].long()])
            assert bool((plane[back[40:].long()] == 7).all())
    assert completion.path.engine == (engine or completion.path.engine)
    assert completion.path.reason


@pytest.mark.parametrize("engine", [None, "cuda", "copy_engine"])
def test_one_layer_of_a_sharded_pool(engine):
    geometry = ROWS["mla_1152"]
    device = DevicePool.empty(geometry, PAGES, device="cuda", owned_layers=[1, 4])
    noise(device)
    before = copies(device)
    ours, theirs, _ = orders()
    for layout in ("layer_first", "page_first"):
        if engine == "copy_engine" and layout == "page_first":
            continue
        with HostPool(geometry, layout, PAGES) as host:
            options = TransferOptions(engine=engine)
            backup(device, host, ours, theirs, options=options).wait(10)
            device.row_map().planes[1].zero_()
            done = load(host, device, theirs, ours, layer=4, options=options)
            assert done.layers == (4,)
            done.wait_layer(4, 10)
            torch.cuda.synchronize()
            assert torch.equal(device.row_map().planes[1], before[1])


def test_work_before_comes_first_and_work_after_goes_on():
    geometry = ROWS["mha_2048"]
    device = DevicePool.empty(geometry, PAGES, device="cuda")
    pages = torch.arange(PAGES)
    with HostPool(geometry, "layer_first", PAGES) as host:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # the engine is still busy with these pages
            for plane in device.row_map().planes:
                plane.fill_(9)
            done = backup(device, host, pages, pages)
            assert not done.done()
        assert not stream.query(), "nothing waited for the device"
        done.wait(10)
        assert bool((host.component_tensor("k").view(torch.uint8) == 9).all())


def test_layers_arrive_in_order():
    geometry = KVGeometry.mha(num_layers=16, num_kv_heads=8, head_dim=128, dtype="bfloat16", page_tokens=64)
    device = DevicePool.empty(geometry, 128, device="cuda")
    pages = torch.arange(128)
    with HostPool(geometry, "layer_first", 128) as host:
        for engine in ("cuda", "copy_engine"):
            done = load(host, device, pages, pages, options=TransferOptions(engine=engine))
            arrivals = []
            for layer in done.layers:
                done.wait_layer(layer, 10)
                arrivals.append(done.done())
            assert not any(arrivals[:8]), engine
            done.wait(10)


def test_host_pools_above_4_gib():
    geometry = KVGeometry.mla(num_layers=2, latent_dim=1152, dtype="bfloat16", page_tokens=64)
    pages = (5 << 30) // geometry.page_nbytes
    with HostPool(geometry, "layer_first", pages) as host:
        assert host.nbytes > 4 << 30
        device = DevicePool.empty(geometry, 8, device="cuda")
        noise(device)
        before = copies(device)
        theirs = torch.tensor([pages - 1, 0, pages // 2, 7])
        for engine in ("cuda", "copy_engine"):
            options = TransferOptions(engine=engine)
            backup(device, host, [0, 1, 2, 3], theirs, options=options).wait(10)
            load(host, device, theirs, [4, 5, 6, 7], options=options).wait(10)
            for plane, old in zip(device.row_map().planes, before, strict=True):
                assert torch.equal(plane[4:], old[:4])


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([0, PAGES], [0, 1], "device_pages must be within"),
        ([0, -1], [0, 1], "device_pages must be within"),
        ([0, 1], [0, 1 << 40], "host_pages must be within"),
        ([0, 1], [3, 3], "host_pages must not repeat"),
    ],
)
@pytest.mark.parametrize("engine", [None, "copy_engine"])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_wrong_pages_copy_nothing(sources, destinations, message, engine, where):
    geometry = ROWS["mha_256"]
    device = DevicePool.empty(geometry, PAGES, device="cuda")
    noise(device)
    with HostPool(geometry, "layer_first", PAGES) as host:
        indices = [torch.tensor(pages, device=where) for pages in (sources, destinations)]
        with pytest.raises(InvalidArgumentError, match=message):
            backup(device, host, *indices, options=TransferOptions(engine=engine)).wait(10)
        assert not host.component_tensor("k").view(torch.uint8).any()
        pages = torch.arange(PAGES, device=where)
        backup(device, host, pages, pages, options=TransferOptions(engine=engine)).wait(10)


def test_a_closed_pool_is_refused_and_one_in_use_stays_mapped():
    geometry = ROWS["mha_2048"]
    device = DevicePool.empty(geometry, PAGES, device="cuda")
    pages = torch.arange(PAGES)
    host = HostPool(geometry, "layer_first", PAGES)
    torch.cuda._sleep(400_000_000)
    backup(device, host, pages, pages)
    closer = threading.Thread(target=host.close)
    closer.start()
    closer.join(10)
    assert torch.cuda.current_stream().query(), "the pool was closed after the transfer"
    with pytest.raises(ClosedError):
        backup(device, host, pages, pages)


def test_a_stream_of_another_device_is_refused():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    from hicache_tier_kernels import CopyPlan, run_plan

    device = DevicePool.empty(ROWS["mha_256"], 4, device="cuda:0")
    with HostPool(ROWS["mha_256"], "layer_first", 4) as host:
        plan = CopyPlan(device.row_map(), host.row_map(), torch.arange(4), torch.arange(4))
        with pytest.raises(InvalidArgumentError, match="stream is of cuda:1"):
            run_plan("cuda", plan, torch.cuda.Stream("cuda:1"))


def test_plain_memory_goes_by_the_reference_engine():
    geometry = ROWS["mha_256"]
    device = DevicePool.empty(geometry, PAGES, device="cuda")
    noise(device)
    with HostPool(geometry, "page_first", PAGES, pinned=False) as host:
        done = backup(device, host, [1, 2], [2, 1])
        assert done.done()
        assert done.path.engine == "reference"
        with pytest.raises(InvalidArgumentError, match="cannot run here"):
            backup(device, host, [1], [1], options=TransferOptions(engine="cuda"))


def test_the_choice_can_be_asked_for():
    geometry = ROWS["mha_2048"]
    device = DevicePool.empty(geometry, PAGES, device="cuda")
    with HostPool(geometry, "layer_first", PAGES) as host:
        path = explain(device, host, "load", [0, 1], [0, 1])
        assert path.engine in {"cuda", "copy_engine", "staged"}
        assert "chosen" in path.reason
