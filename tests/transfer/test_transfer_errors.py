from __future__ import annotations

import ctypes

import pytest
import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.errors import ClosedError, InvalidArgumentError, UnsupportedTransferError
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.transfer import backup, load, transfer_path


@pytest.fixture
def device(mha):
    pool = DevicePool.empty(mha, 8)
    for pair in pool.layers:
        for tensor in pair:
            tensor.fill_(1)
    return pool


def untouched(device, host):
    assert all((tensor == 1).all() for pair in device.layers for tensor in pair)
    if not host.closed:
        assert not any(ctypes.string_at(host.address, host.nbytes))


WRONG = [
    ([0, 1], [0], "one to one"),
    ([8], [0], r"device_pages must be within"),
    ([0], [16], "must be within"),
    ([-1], [0], "must be within"),
    ([0], [-1], "must be within"),
    ([0.0], [0], "device_pages must hold whole numbers"),
    ([0], [True], "host_pages must hold whole numbers"),
    (torch.tensor([0.5]), [0], "device_pages must be int32 or int64"),
    ([0], torch.tensor([True]), "host_pages must be int32 or int64"),
    ([0], torch.tensor([[0]]), "host_pages must be int32 or int64"),
    (None, [0], "device_pages must be page numbers"),
    ([0], {0}, "host_pages must be page numbers"),
]


@pytest.mark.parametrize(("device_pages", "host_pages", "message"), WRONG)
def test_wrong_pages_touch_nothing(device, host, device_pages, host_pages, message):
    with pytest.raises(InvalidArgumentError, match=message):
        backup(device, host, device_pages, host_pages)
    with pytest.raises(InvalidArgumentError, match=message):
        load(host, device, host_pages, device_pages)
    untouched(device, host)


def test_destinations_must_not_repeat(device, host):
    with pytest.raises(InvalidArgumentError, match="must not repeat, got page 3"):
        backup(device, host, [0, 1], [3, 3])
    with pytest.raises(InvalidArgumentError, match="must not repeat, got page 2"):
        load(host, device, [0, 1], [2, 2])
    untouched(device, host)


@pytest.mark.parametrize("layer", [4, -1, "0", True, 1.5])
def test_a_layer_that_is_not_owned(device, host, layer):
    with pytest.raises(InvalidArgumentError, match="not one that the device pool owns"):
        load(host, device, [0], [0], layer=layer)
    untouched(device, host)


def test_a_layer_of_another_rank(mha):
    sharded = DevicePool.empty(mha, 4, owned_layers=[1, 3])
    with HostPool(mha, "page_first", 4, pinned=False) as host:
        with pytest.raises(InvalidArgumentError, match=r"layer 2 is not one .* \[1, 3\]"):
            load(host, sharded, [0], [0], layer=2)
        done = load(host, sharded, [0], [0], layer=3)
        assert (done.layers, done.pages, done.path.per_layer) == ((3,), 1, True)
        assert done.nbytes == mha.page_nbytes // 4
        done.wait_layer(3)
        with pytest.raises(InvalidArgumentError, match="layer 1 is not part"):
            done.wait_layer(1)


OTHER = {
    "dtype": KVGeometry.mha(num_layers=4, num_kv_heads=2, head_dim=8, dtype="float16", page_tokens=4),
    "heads": KVGeometry.mha(num_layers=4, num_kv_heads=4, head_dim=4, dtype="bfloat16", page_tokens=4),
    "page size": KVGeometry.mha(num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=2),
    "layers": KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=4),
    "kind": KVGeometry.mla(num_layers=4, latent_dim=16, dtype="bfloat16", page_tokens=4),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_geometry(device, what):
    with HostPool(OTHER[what], "page_first", 16, pinned=False) as host:
        for call in (lambda: backup(device, host, [0], [0]), lambda: load(host, device, [0], [0])):
            with pytest.raises(InvalidArgumentError, match="the pools do not match"):
                call()
        untouched(device, host)


@pytest.mark.parametrize("owned", [[0], [0, 2], [0, 1, 2]])
def test_a_host_pool_of_other_layers(mha, owned):
    sharded = DevicePool.empty(mha, 4, owned_layers=[1, 3])
    with (
        HostPool(mha, "page_first", 4, pinned=False, owned_layers=owned) as host,
        pytest.raises(InvalidArgumentError, match="the pools do not match"),
    ):
        backup(sharded, host, [0], [0])


def test_refused_by_the_table(mha, device):
    sharded = DevicePool.empty(mha, 4, owned_layers=[1, 3])
    with HostPool(mha, "page_first", 4, pinned=False) as host:
        with pytest.raises(
            UnsupportedTransferError, match="Layer-sharded direct HiCache backup only supports"
        ):
            backup(sharded, host, [0], [0], io_backend="direct")
        with pytest.raises(UnsupportedTransferError, match="Layer-sharded direct HiCache load only supports"):
            load(host, sharded, [0], [0], io_backend="direct")
        with pytest.raises(UnsupportedTransferError, match="does not support IO backend: kernal"):
            backup(device, host, [0], [0], io_backend="kernal")
        untouched(device, host)
        assert transfer_path(device, host, "auto", "load") is transfer_path(device, host, "auto", "load")


def test_closed(device, host):
    host.close()
    for call in (lambda: backup(device, host, [0], [0]), lambda: load(host, device, [0], [0])):
        with pytest.raises(ClosedError):
            call()
    untouched(device, host)


def test_pools_in_the_wrong_order(device, host):
    with pytest.raises(InvalidArgumentError, match="got HostPool as device and DevicePool as host"):
        backup(host, device, [0], [0])
    with pytest.raises(InvalidArgumentError, match="got HostPool as device"):
        load(device, host, [0], [0])


def test_no_pages(device, host):
    assert backup(device, host, [], []).nbytes == 0
    assert load(host, device, torch.empty(0, dtype=torch.int32), ()).pages == 0
    untouched(device, host)
