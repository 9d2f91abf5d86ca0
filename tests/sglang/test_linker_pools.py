"""Kinds of device pool that the linker stores: each page's bytes are back where they belong."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
PAGE = 64
PAGES = 12


@pytest.fixture
def make(tmp_path, context):
    """Make a linker of a KV cache."""
    context()
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from hicache_tier.integrations.sglang import HiCacheTierLinker

    made = []

    def make(kvcache, *components, **fields):
        params = SimpleNamespace(
            **{
                "token_to_kv_pool_allocator": SimpleNamespace(get_kvcache=lambda: kvcache),
                "page_size": PAGE,
                "attn_cp_cache_group": None,
                "attn_tp_cache_group": None,
                "tp_cache_group": None,
                "mtp_draft_device_pools": (),
                "sidecar_draft_device_pools": (),
            }
            | fields
        )
        options = {"root": str(tmp_path / "root"), "capacity_bytes": "64 MiB", "metrics": False}
        kinds = {ComponentType[name] for name in ("FULL", *components)}
        made.append(HiCacheTierLinker(None, params, components=kinds, extra_config=options))
        return made[-1]

    yield make
    for linker in made:
        linker.close()


def keys(count):
    return [hashlib.sha256(f"{number}".encode()).hexdigest() for number in range(count)]


def slots(pages):
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


def transfer(name, names, pages=None, *, trailing=False):
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    policy = PoolHitPolicy.TRAILING_PAGES if trailing else PoolHitPolicy.ALL_PAGES
    indices = None if pages is None else slots(pages)
    return PoolTransfer(name=PoolName(name), keys=list(names), device_indices=indices, hit_policy=policy)


def fill(buffers):
    generator = torch.Generator().manual_seed(1)
    for buffer in buffers:
        raw = buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def same(one, other):
    """Whether tensors have the same bytes."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def offload(linker, transfers):
    assert linker.offload(transfers)
    assert linker._offloads._order  # reported only when it is asked for
    while not linker.num_completed_offloads():
        pass
    return linker.pop_completed_offload()


def test_windows_of_a_model_are_stored_beside_its_whole_context(make):
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = SWAKVPool(
        PAGE * PAGES, PAGE * PAGES, PAGE, torch.bfloat16, 2, 32,
        swa_attention_layer_ids=[0, 2, 3], full_attention_layer_ids=[1, 4], device="cpu",
    )  # fmt: skip
    linker = make(pool, "SWA")
    full = [*pool.full_kv_pool.k_buffer, *pool.full_kv_pool.v_buffer]
    windows = [*pool.swa_kv_pool.k_buffer, *pool.swa_kv_pool.v_buffer]
    fill([*full, *windows])
    names = keys(4)
    assert offload(
        linker,
        [transfer("kv", names, [1, 2, 3, 4]), transfer("swa", names[2:], [7, 8], trailing=True)],
    )
    asked = [transfer("kv", names), transfer("swa", names[2:], trailing=True)]
    assert linker.lookup("r", asked) == [4]  # a window of two pages ends only there
    assert linker.lookup("r", [transfer("kv", names), transfer("swa", names[3:], trailing=True)]) == [3, 4]
    assert linker.lookup("r", [transfer("kv", names)]) == []
    was = [buffer[slots([1, 2, 3, 4])].clone() for buffer in full]
    was_windows = [buffer[slots([7, 8])].clone() for buffer in windows]
    for buffer in (*full, *windows):
        buffer.zero_()
    parts = [transfer("kv", names, [9, 8, 3, 2]), transfer("swa", names[2:], [1, 5], trailing=True)]
    assert linker.load("r", parts)
    for buffer, rows in zip(full, was, strict=True):
        assert same(buffer[slots([9, 8, 3, 2])], rows)
    for buffer, rows in zip(windows, was_windows, strict=True):
        assert same(buffer[slots([1, 5])], rows)
    assert linker.start_layer_wise_loading() == 0


@pytest.fixture
def dsa():
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    def make(skip=(False, False, False)):
        return DSATokenToKVPool(
            size=PAGE * PAGES, page_size=PAGE, kv_lora_rank=64, dtype=torch.bfloat16, qk_rope_head_dim=16,
            layer_num=3, device="cpu", index_head_dim=128, enable_memory_saver=False, kv_cache_dim=80,
            skip_topk_layers=list(skip),
        )  # fmt: skip

    return make


@pytest.mark.parametrize("skip", [(False, False, False), (False, True, False)])
def test_index_keys_are_stored_beside_the_latents(make, dsa, skip, context):
    context()
    try:
        pool = dsa(skip)
    except AssertionError as error:
        pytest.skip(f"SGLang makes no such pool here: {error}")
    linker = make(pool)
    assert set(linker.stores) == {"kv", "indexer"}
    assert linker.ranks.replicated
    index = [buffer for buffer in pool.index_k_with_scale_buffer if buffer.shape[0]]
    fill([*pool.kv_buffer, *index])
    names = keys(3)
    assert offload(linker, [transfer("kv", names, [1, 2, 3])])
    latents = [buffer[slots([1, 2, 3])].clone() for buffer in pool.kv_buffer]
    packed = [buffer[[1, 2, 3]].clone() for buffer in index]
    for buffer in (*pool.kv_buffer, *index):
        buffer.zero_()
    assert linker.lookup("r", [transfer("kv", names)]) == [1, 2, 3]
    assert linker.load("r", [transfer("kv", names, [9, 4, 7])])
    for buffer, rows in zip(pool.kv_buffer, latents, strict=True):
        assert same(buffer[slots([9, 4, 7])], rows)
    for buffer, rows in zip(index, packed, strict=True):
        assert same(buffer[[9, 4, 7]], rows)
    store = linker.stores["indexer"].store
    store.delete([bytes.fromhex(names[1])])
    assert linker.lookup("r", [transfer("kv", names)]) == [1]  # the indexer reaches no further
    assert not linker.load("s", [transfer("kv", names, [9, 4, 7])])


def test_pools_that_only_sglang_describes_are_blocks(make, monkeypatch):
    """States of Mamba beside KV of layers in one buffer each, as the group says; one state a key."""
    from sglang.srt.mem_cache.hicache_storage import PoolName
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup

    from hicache_tier.integrations.sglang import linker as module

    packed = [torch.zeros(PAGES, 200, dtype=torch.uint8)[:, :168] for _ in range(3)]
    temporal = torch.zeros(2, PAGES, 4, 6)
    conv = torch.zeros(2, PAGES, 5, 3, dtype=torch.bfloat16)
    fill([temporal, conv])
    for buffer in packed:
        buffer.random_(0, 255)
    entries = [
        DevicePoolEntry(
            name=PoolName.DEEPSEEK_V4_C4, indices_from_pool=PoolName.KV, device_pool=SimpleNamespace(),
            components=[packed], layer_mapping={0: 0, 1: 1, 2: 2}, page_size=PAGE, rows_are_pages=True,
        ),
        DevicePoolEntry(
            name=PoolName.MAMBA, indices_from_pool=PoolName.MAMBA, device_pool=SimpleNamespace(),
            components=[list(temporal), list(conv)], layer_mapping={3: 0, 4: 1}, page_size=1,
            rows_are_pages=True,
        ),
    ]  # fmt: skip
    group = DevicePoolGroup(entries, 5, PAGE)
    monkeypatch.setattr(module, "resolve_hybrid_device_pool_group", lambda **_: group)
    told = []
    requests = SimpleNamespace(register_layer_transfer_counter=told.append)
    linker = make(SimpleNamespace(), "MAMBA", req_to_token_pool=requests)
    assert told == [linker.layer_done_counter]
    names = keys(3)
    state = transfer("mamba", names[-1:], trailing=True)
    state.device_indices = torch.tensor([7])
    assert offload(linker, [transfer("kv", names, [1, 2, 3]), state])
    state = transfer("mamba", names[-1:], trailing=True)
    linker.stores["mamba"].paces["get"].pages = 0  # one state is loaded, however long the prefix
    assert linker.lookup("r", [transfer("kv", names), state]) == [3]
    linker.stores["mamba"].paces["get"].pages = 1
    was = [buffer[[1, 2, 3]].clone() for buffer in packed], temporal[:, 7].clone(), conv[:, 7].clone()
    for buffer in (*packed, temporal, conv):
        buffer.zero_()
    state.device_indices = torch.tensor([2])
    assert linker.load("r", [transfer("kv", names, [5, 4, 9]), state])
    assert all(same(buffer[[5, 4, 9]], rows) for buffer, rows in zip(packed, was[0], strict=True))
    assert same(temporal[:, 2], was[1])
    assert same(conv[:, 2], was[2])
    assert not temporal[:, 3].any()


def test_what_cannot_be_stored_is_refused_by_name(make):
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    def pool(**fields):
        made = MHATokenToKVPool(
            size=PAGE * PAGES, page_size=PAGE, dtype=torch.bfloat16, head_num=2, head_dim=32, layer_num=2,
            device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    for kvcache, fields, said in [
        (pool(kv_cache_layout="hnd"), {}, "only nhd"),
        (pool(k_scale_buffer=[1]), {}, "keeps scales"),
        (pool(), {"sidecar_draft_device_pools": (pool(),)}, "draft model's KV"),
        (pool(), {"pp_size": 2}, "--pp-size must be 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            make(kvcache, **fields)
