"""Round trips against oracles that share nothing with the code: addresses are spelled out by layout."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_tier.device_pool import DevicePool
from hicache_tier.geometry import KVGeometry, PoolKind
from hicache_tier.host_pool import HostPool
from hicache_tier.layout import Layout
from hicache_tier.paths import path_rows
from hicache_tier.transfer import backup, load

DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
PIECE = {
    "layer_first": lambda L, P, T, H, l, p, t, h: ((l * P + p) * T + t) * H + h,
    "page_first": lambda L, P, T, H, l, p, t, h: ((p * T + t) * L + l) * H + h,
    "page_first_direct": lambda L, P, T, H, l, p, t, h: ((p * L + l) * T + t) * H + h,
    "page_head": lambda L, P, T, H, l, p, t, h: ((p * H + h) * T + t) * L + l,
}


def naive_offset(geometry, layout, num_pages, component, layer, page, token, head):
    """Byte offset in the host pool of one head of one row."""
    region = 0
    for index, part in enumerate(geometry.components):
        piece = part.width * geometry.dtype.itemsize
        total = piece * part.heads * geometry.rows * geometry.num_layers * num_pages
        if index == component:
            sizes = (geometry.num_layers, num_pages, geometry.rows, part.heads)
            return region + PIECE[layout](*sizes, layer, page, token, head) * piece
        region += (total + 4095) // 4096 * 4096
    raise AssertionError(component)


def host_bytes(host):
    return np.frombuffer(ctypes.string_at(host.address, host.nbytes), dtype=np.uint8).copy()


def fill_host(host, seed):
    data = np.random.default_rng(seed).integers(0, 256, host.nbytes, dtype=np.uint8)
    ctypes.memmove(host.address, data.ctypes.data, host.nbytes)


def storage_bytes(tensor):
    """All bytes of the storage below a tensor, gaps included, as a copy."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat.cpu().numpy().copy()


def tensors(pool):
    return [t for layer in pool.layers for t in (layer if isinstance(layer, tuple) else (layer,))]


def token_span(geometry, tensor, component, page, row):
    """Byte offset in the tensor's storage and length of one row of one page."""
    itemsize = geometry.dtype.itemsize
    width = component.heads * component.width * itemsize
    start = tensor.storage_offset() * itemsize
    if geometry.kind is PoolKind.INDEXER:
        per_page = tensor.stride(0) if tensor.shape[1] == width else width
        return start + page * per_page, width
    return start + (page * geometry.page_tokens + row) * tensor.stride(0) * itemsize, width


def make_device(geometry, num_pages, owned, *, gap=0, extra=0, seed=0):
    """A device pool of noise whose rows are `gap` elements further apart and `extra` tokens longer."""
    layers = []
    rng = np.random.default_rng(seed)
    for _ in owned:
        made = []
        for part in geometry.components:
            n = num_pages * geometry.rows + (extra if geometry.rows > 1 else 0)
            width = part.heads * part.width
            raw = rng.integers(0, 256, n * (width + gap) * geometry.dtype.itemsize, dtype=np.uint8)
            flat = torch.from_numpy(raw).view(geometry.dtype.torch)
            if geometry.kind is PoolKind.MHA:
                shape, strides = (n, part.heads, part.width), (width + gap, part.width, 1)
            else:
                shape, strides = (n, width), (width + gap, 1)
            made.append(flat.as_strided(shape, strides))
        layers.append(tuple(made) if len(made) > 1 else made[0])
    return DevicePool(geometry, layers, owned)


@st.composite
def geometries(draw):
    kind = draw(st.sampled_from(["mha", "mla", "indexer"]))
    layers = draw(st.integers(1, 4))
    page_tokens = draw(st.sampled_from([1, 2, 3, 4]))
    if kind == "indexer":
        return KVGeometry.indexer(
            num_layers=layers, bytes_per_token=draw(st.sampled_from([1, 5, 132])), page_tokens=page_tokens
        )
    dtype = draw(st.sampled_from(DTYPES))
    if kind == "mla":
        width = draw(st.sampled_from([1, 3, 16, 576, 656]))
        return KVGeometry.mla(num_layers=layers, latent_dim=width, dtype=dtype, page_tokens=page_tokens)
    return KVGeometry.mha(
        num_layers=layers,
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 4, 6, 24])),
        v_head_dim=draw(st.sampled_from([None, 2, 16])),
        dtype=dtype,
        page_tokens=page_tokens,
    )


def layouts_for(geometry):
    return [layout for layout in Layout if layout is not Layout.PAGE_HEAD or geometry.kind is PoolKind.MHA]


@st.composite
def cases(draw):
    geometry = draw(geometries())
    layout = draw(st.sampled_from(layouts_for(geometry)))
    every = list(range(geometry.num_layers))
    owned = sorted(draw(st.sets(st.sampled_from(every), min_size=1)))
    sharded = len(owned) < len(every)
    backends = [
        row["io_backend"]
        for row in path_rows()
        if (row["pool"], row["layout"], row["sharded"], row["op"], row["ok"])
        == (geometry.kind.value, layout.value, sharded, "load", True)
    ]
    if not backends:
        owned, backends = every, ["auto", "kernel"]
    pages = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return {
        "geometry": geometry,
        "layout": layout.value,
        "owned": owned,
        "io_backend": draw(st.sampled_from(["auto", *backends])),
        "device_pages": pages[0],
        "host_pages": pages[1],
        "host_holds": draw(st.sampled_from(["all", "owned", "owned, unnamed"])),
        "gap": 0 if geometry.kind is PoolKind.INDEXER else draw(st.sampled_from([0, 1, 8])),
        "extra": draw(st.integers(0, geometry.page_tokens - 1)),
        "layer": draw(st.sampled_from([None, *owned])),
        "index": draw(st.sampled_from(["int32", "int64", "list", "numpy"])),
        "seed": draw(st.integers(0, 2**31)),
    }


def index_of(kind, pages):
    if kind == "list":
        return list(pages)
    if kind == "numpy":
        return np.array(pages, dtype=np.int64)
    return torch.tensor(pages, dtype=getattr(torch, kind))


def host_for(case):
    geometry, owned = case["geometry"], case["owned"]
    if case["host_holds"] == "all":
        return HostPool(geometry, case["layout"], case["host_pages"], pinned=False), range(
            geometry.num_layers
        )
    if case["host_holds"] == "owned":
        return HostPool(geometry, case["layout"], case["host_pages"], False, owned), owned
    local = geometry.with_layers(len(owned))
    return HostPool(local, case["layout"], case["host_pages"], pinned=False), owned


def pick_pages(rng, sources, destinations):
    n = int(rng.integers(0, destinations + 1))
    return rng.integers(0, sources, n).tolist(), rng.permutation(destinations)[:n].tolist()


def naive_pieces(case, host, held, device, pairs, layers):
    """Yield (tensor number, span in it, host offset) of every piece of every page in `pairs`."""
    geometry = case["geometry"]
    for i, layer in enumerate(case["owned"]):
        if layer not in layers:
            continue
        for c, part in enumerate(geometry.components):
            number = i * len(geometry.components) + c
            tensor = tensors(device)[number]
            for device_page, host_page in pairs:
                for row in range(geometry.rows):
                    start, nbytes = token_span(geometry, tensor, part, device_page, row)
                    piece = nbytes // part.heads
                    for head in range(part.heads):
                        at = naive_offset(
                            host.geometry,
                            case["layout"],
                            host.num_pages,
                            c,
                            list(held).index(layer),
                            host_page,
                            row,
                            head,
                        )
                        yield number, slice(start + head * piece, start + (head + 1) * piece), at


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_backup_equals_the_naive_copy(case):
    rng = np.random.default_rng(case["seed"])
    device = make_device(
        case["geometry"], case["device_pages"], case["owned"], gap=case["gap"], extra=case["extra"]
    )
    host, held = host_for(case)
    with host:
        fill_host(host, case["seed"])
        sources, destinations = pick_pages(rng, device.num_pages, host.num_pages)
        before = [storage_bytes(t) for t in tensors(device)]
        expected = host_bytes(host)
        pairs = list(zip(sources, destinations, strict=True))
        for number, span, at in naive_pieces(case, host, held, device, pairs, case["owned"]):
            data = before[number][span]
            expected[at : at + data.size] = data
        done = backup(
            device,
            host,
            index_of(case["index"], sources),
            index_of(case["index"], destinations),
            io_backend=case["io_backend"],
        )
        assert done.done()
        assert done.nbytes == len(pairs) * device.local_geometry.page_nbytes
        assert np.array_equal(host_bytes(host), expected)
        for t, b in zip(tensors(device), before, strict=True):
            assert np.array_equal(storage_bytes(t), b)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_load_equals_the_naive_copy(case):
    rng = np.random.default_rng(case["seed"])
    device = make_device(
        case["geometry"], case["device_pages"], case["owned"], gap=case["gap"], extra=case["extra"]
    )
    host, held = host_for(case)
    with host:
        fill_host(host, case["seed"])
        sources, destinations = pick_pages(rng, host.num_pages, device.num_pages)
        before = host_bytes(host)
        expected = [storage_bytes(t) for t in tensors(device)]
        layers = case["owned"] if case["layer"] is None else [case["layer"]]
        pairs = list(zip(destinations, sources, strict=True))
        for number, span, at in naive_pieces(case, host, held, device, pairs, layers):
            expected[number][span] = before[at : at + span.stop - span.start]
        done = load(
            host,
            device,
            index_of(case["index"], sources),
            index_of(case["index"], destinations),
            io_backend=case["io_backend"],
            layer=case["layer"],
        )
        for layer in layers:
            done.wait_layer(layer)
        done.wait(timeout=1.0)
        assert np.array_equal(host_bytes(host), before)
        for t, e in zip(tensors(device), expected, strict=True):
            assert np.array_equal(storage_bytes(t), e)


def test_one_host_page_to_128_device_pages(mha):
    device = make_device(mha, 128, range(4))
    with HostPool(mha, "layer_first", 4, pinned=False) as host:
        fill_host(host, 3)
        load(host, device, [2] * 128, range(128))
        views = host.page_views(2)
        for layer, (k, v) in enumerate(device.layers):
            for name, tensor in (("k", k), ("v", v)):
                pages = tensor.view(torch.uint8).view(128, 4, 2, 16)
                assert (pages == views[name][layer].view(torch.uint8)).all()


def test_offsets_beyond_32_bits_for_real():
    # 6 GiB each are mapped and only a few pages of them touched.
    geometry = KVGeometry.mla(num_layers=1, latent_dim=1 << 19, dtype="uint8", page_tokens=1)
    pages = (6 << 30) >> 19
    device = DevicePool.empty(geometry, pages)
    sources = torch.tensor([0, pages - 1, 4096, 4095, 8191, 8193], dtype=torch.int32)
    destinations = torch.tensor([8193, 8192, 4096, pages - 1, 0, 4097], dtype=torch.int32)
    with HostPool(geometry, "page_first", pages, pinned=False, limits=()) as host:
        for i, page in enumerate(sources.tolist()):
            device.layers[0][page].fill_(i + 1)
        backup(device, host, sources, destinations)
        for i, page in enumerate(destinations.tolist()):
            assert ctypes.string_at(host.address + page * (1 << 19), 1 << 19) == bytes([i + 1]) * (1 << 19)
        load(host, device, destinations, destinations)
        for i, page in enumerate(destinations.tolist()):
            assert (device.layers[0][page] == i + 1).all()


def test_tensors_made_in_inference_mode_are_loaded(mha):
    with torch.inference_mode():
        device = DevicePool.empty(mha, 4)
    with HostPool(mha, "page_first", 4, pinned=False) as host:
        fill_host(host, 1)
        load(host, device, [0], [3])
        assert torch.equal(
            device.layers[1][0][12:16].view(torch.uint8), host.page_views(0)["k"][:, 1].view(torch.uint8)
        )


def test_bits_of_signalling_nans_survive():
    geometry = KVGeometry.mla(num_layers=1, latent_dim=4, dtype="float32", page_tokens=1)
    bits = torch.tensor([[0x7F800001, -1, 0x7FA00000, -0x800000 + 1]], dtype=torch.int32)
    device = DevicePool(geometry, [bits.clone().view(torch.float32)])
    with HostPool(geometry, "layer_first", 1, pinned=False) as host:
        backup(device, host, [0], [0])
        device.layers[0].zero_()
        load(host, device, [0], [0])
    assert torch.equal(device.layers[0].view(torch.int32), bits)
