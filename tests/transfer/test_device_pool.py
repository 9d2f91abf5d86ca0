from __future__ import annotations

import pytest
import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry

MHA = KVGeometry.mha(num_layers=3, num_kv_heads=2, head_dim=8, v_head_dim=4, dtype="bfloat16", page_tokens=4)
MLA = KVGeometry.mla(num_layers=2, latent_dim=576, dtype="float8_e4m3fn", page_tokens=4)
INDEX = KVGeometry.indexer(num_layers=2, bytes_per_token=132, page_tokens=4)


def mha_layers(tokens=16, count=3, **change):
    kwargs = {"dtype": torch.bfloat16} | change
    return [(torch.zeros(tokens, 2, 8, **kwargs), torch.zeros(tokens, 2, 4, **kwargs)) for _ in range(count)]


def test_empty_shapes():
    pool = DevicePool.empty(MHA, 5)
    assert [tuple(t.shape) for t in pool.layers[2]] == [(20, 2, 8), (20, 2, 4)]
    assert not pool.sharded
    assert (pool.num_pages, pool.owned_layers, pool.device) == (5, (0, 1, 2), torch.device("cpu"))
    assert pool.local_geometry == pool.geometry == MHA
    pool = DevicePool.empty(MLA, 5)
    assert [tuple(t.shape) for t in pool.layers] == [(20, 576)] * 2
    assert pool.layers[0].dtype == torch.float8_e4m3fn
    assert [tuple(t.shape) for t in DevicePool.empty(INDEX, 5).layers] == [(5, 528)] * 2
    one_head = KVGeometry.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="int8", page_tokens=2)
    assert DevicePool.empty(one_head, 3).layers[0][0].shape == (6, 1, 8)


def test_sharded():
    pool = DevicePool.empty(MHA, 4, owned_layers=[0, 2])
    assert pool.sharded
    assert pool.owned_layers == (0, 2)
    assert pool.geometry == MHA
    assert pool.local_geometry.num_layers == 2
    assert len(pool.row_map().planes) == 4
    assert not DevicePool.empty(MHA, 4, owned_layers=range(3)).sharded
    assert repr(pool) == "DevicePool(mha, 2 of 3 layers, 4 pages, cpu)"


def test_wrapping_copies_nothing():
    layers = mha_layers()
    pool = DevicePool(MHA, layers)
    assert [t.data_ptr() for pair in pool.layers for t in pair] == [t.data_ptr() for p in layers for t in p]
    ptrs = pool.row_map().ptrs
    assert ptrs == tuple(pair[i].data_ptr() for i in range(2) for pair in layers)
    assert pool.row_map().row_nbytes == (32, 32, 32, 16, 16, 16)


def test_tokens_beyond_the_last_page_are_left_alone():
    assert DevicePool(MHA, mha_layers(tokens=19)).num_pages == 4


def test_rows_further_apart():
    both = [torch.zeros(16, 2 * 8 + 2 * 4 + 3, dtype=torch.bfloat16) for _ in range(3)]
    layers = [(b[:, :16].view(16, 2, 8), b[:, 16:24].unflatten(1, (2, 4))) for b in both]
    pool = DevicePool(MHA, layers)
    rows = pool.row_map()
    assert rows.row_strides == (54,) * 6
    assert rows.page_strides == (216,) * 6
    assert rows.address(3, 2, 1) == both[0].data_ptr() + 2 * 16 + (2 * 4 + 1) * 54


def test_an_engines_other_shapes():
    assert DevicePool(MLA, [torch.zeros(8, 1, 576, dtype=torch.uint8) for _ in range(2)]).num_pages == 2
    pool = DevicePool(INDEX, [torch.zeros(9, 132, dtype=torch.uint8) for _ in range(2)])
    assert pool.num_pages == 2
    assert pool.row_map().row_nbytes == (528, 528)
    pool = DevicePool(INDEX, [torch.zeros(3, 600, dtype=torch.uint8)[:, :528] for _ in range(2)])
    assert pool.row_map().page_strides == (600, 600)


def test_offsets_beyond_32_bits():
    memory = torch.empty(5 << 30, dtype=torch.uint8)  # mapped, not touched
    geometry = KVGeometry.mla(num_layers=1, latent_dim=656, dtype="uint8", page_tokens=64)
    step = 1024
    latent = memory.view(-1, step)[:, :656]
    rows = DevicePool(geometry, [latent]).row_map()
    assert rows.num_pages == (5 << 30) // step // 64
    last = rows.address(0, rows.num_pages - 1, 63)
    assert last - memory.data_ptr() == (5 << 30) - step
    assert rows.planes[0][-1, -1].data_ptr() == last


def swap(layer, part, tensor):
    layers = [list(pair) for pair in mha_layers()]
    layers[layer][part] = tensor
    return [tuple(pair) for pair in layers]


def z(*shape, dtype=torch.bfloat16, **kwargs):
    return torch.zeros(*shape, dtype=dtype, **kwargs)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (mha_layers(count=2), r"one entry for each of the 3 owned layers, got 2 entries"),
        (z(3, 2), r"got Tensor"),
        (None, r"got NoneType"),
        ([z(16, 2, 8)] * 3, r"layer 0 is 1 tensors; expected the tensors k, v"),
        ([None] * 3, r"layer 0 is NoneType; expected the tensors k, v"),
        (swap(1, 0, None), r"layer 1 k is NoneType; expected a dense torch.Tensor"),
        (swap(1, 0, z(16, 2, 8).to_sparse()), r"layer 1 k is torch.sparse_coo; expected"),
        (
            swap(2, 1, z(16, 2, 4, dtype=torch.float16)),
            r"layer 2 v is torch.float16; expected torch.bfloat16",
        ),
        (swap(1, 1, z(16, 2, 8)), r"layer 1 v has shape \(16, 2, 8\); expected \[n, 2, 4\]"),
        (swap(1, 0, z(16, 16)), r"layer 1 k has shape \(16, 16\); expected \[n, 2, 8\]"),
        (swap(1, 0, z(())), r"layer 1 k has shape \(\)"),
        (swap(1, 0, z(3, 2, 8)), r"layer 1 k has 3 rows; expected at least the 4 of one page"),
        (swap(1, 0, z(20, 2, 8)), r"layer 1 k holds 5 pages; expected 4, as layer 0"),
        (swap(1, 0, z(16, 8, 2).transpose(1, 2)), r"layer 1 k has strides .* expected contiguous elements"),
        (swap(1, 0, z(16, 2, 16)[:, :, :8]), r"layer 1 k has strides .* expected contiguous elements"),
        (swap(1, 0, z(1, 2, 8).expand(16, 2, 8)), r"layer 1 k has rows 0 bytes apart; expected at least 32"),
        (swap(1, 0, z(64).as_strided((16, 2, 8), (3, 8, 1))), r"layer 1 k has rows 6 bytes apart"),
        (swap(1, 0, z(16, 2, 8, device="meta")), r"layer 1 k is on meta; expected cpu, as layer 0"),
    ],
)
def test_wrong_tensors(layers, message):
    with pytest.raises(InvalidArgumentError, match=message):
        DevicePool(MHA, layers)


def test_the_same_memory_twice():
    layers = mha_layers()
    layers[2] = (layers[0][0], layers[2][1])
    with pytest.raises(InvalidArgumentError, match="layer 2 k is the same memory as layer 0 k"):
        DevicePool(MHA, layers)


def test_an_indexer_block_must_not_have_gaps():
    layers = [torch.zeros(8, 140, dtype=torch.uint8)[:, :132] for _ in range(2)]
    with pytest.raises(InvalidArgumentError, match="rows 140 bytes apart; expected exactly 132"):
        DevicePool(INDEX, layers)


@pytest.mark.parametrize("owned", [[], [3], [-1], [0, 0], [1, 0], "01", [0.5], [True]])
def test_wrong_owned_layers(owned):
    with pytest.raises(InvalidArgumentError, match="owned_layers"):
        DevicePool.empty(MHA, 2, owned_layers=owned)


@pytest.mark.parametrize("num_pages", [0, -1, 1.5, None])
def test_wrong_num_pages(num_pages):
    with pytest.raises(InvalidArgumentError, match="num_pages"):
        DevicePool.empty(MHA, num_pages)
    with pytest.raises(InvalidArgumentError, match="geometry"):
        DevicePool("mha", [])
