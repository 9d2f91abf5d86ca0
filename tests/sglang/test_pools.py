"""Every kind of host pool that SGLang has: what is loaded is, byte for byte, what was stored."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache_tier.testing.desk_rig import until

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
PAGE = 8
PAGES = 24
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


@pytest.fixture(autouse=True)
def ready(context):
    context()


def key(number, salt=""):
    return hashlib.sha256(f"{salt}/{number}".encode()).hexdigest()


def mha(layout, heads=2, width=32, v_width=None, dtype=torch.float16):
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    wide = {} if v_width is None else {"v_head_dim": v_width}
    pool = MHATokenToKVPool(
        size=PAGES * PAGE, page_size=PAGE, dtype=dtype, head_num=heads, head_dim=width, layer_num=3,
        device="cpu", enable_memory_saver=False, **wide,
    )  # fmt: skip
    cls, info, options = _mha_host_inputs(pool)
    return cls(info, 1.0, 0, PAGE, layout, pin_memory=False, **options)


def mla(layout):
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    pool = MLATokenToKVPool(
        size=PAGES * PAGE, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16,
        layer_num=3, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        pool.get_device_pool_infos()[0].buffer_info, 1.0, 0, PAGE, layout, pin_memory=False,
        device_capacity_tokens=PAGES * PAGE, start_layer=0, end_layer=3, target_layer_num=3,
    )  # fmt: skip


def mamba(layout, *, extra=False):
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    slots = PAGES * 2
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, slots, 4, 6, dtype=torch.float32),
        conv=(torch.zeros(2, slots, 5, 3, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(slots, 7, dtype=torch.int32),) if extra else (),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout=layout)


def indexer(layout):
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost

    anchor = mla(layout)
    stride = PAGE * 132
    device = SimpleNamespace(
        store_dtype=torch.uint8, start_layer=0, end_layer=3, layer_num=3, layer_shard_enabled=False,
        device="cpu", index_k_with_scale_buffer=[torch.zeros(PAGES, stride, dtype=torch.uint8)] * 3,
    )  # fmt: skip
    info = SimpleNamespace(
        dtype=torch.uint8,
        page_bytes=lambda page_size: page_size * 132,
        bytes_per_token_per_layer=132,
        host_bytes=lambda page_num, layer_num, page_size: page_num * layer_num * page_size * 132,
    )
    declared = SimpleNamespace(storage_info=info, device_pool=device, owned_device_layers=None)
    return DSAIndexerPoolHost(declared, anchor, pin_memory=False)


def v4(layout):
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    buffers = [torch.zeros(PAGES, 640, dtype=torch.uint8) for _ in range(2)]
    return DeepSeekV4PagedHostPool(
        "c4", buffers, 640, PAGES, PAGE, layout, pin_memory=False, page_aligned_only=True
    )


def logical(layout):
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    return LogicalHostPool(PAGES * PAGE, PAGE, layout)


POOLS = {
    **{f"mha-{layout}": (mha, layout) for layout in (*LAYOUTS, "page_head")},
    **{f"wide-{layout}": (lambda one: mha(one, v_width=20), layout) for layout in LAYOUTS[1:]},
    **{f"mla-{layout}": (mla, layout) for layout in LAYOUTS},
    **{f"mamba-{layout}": (mamba, layout) for layout in LAYOUTS[1:]},
    "mamba-with-side-state": (lambda one: mamba(one, extra=True), "page_first"),
    **{f"indexer-{layout}": (indexer, layout) for layout in LAYOUTS},
    **{f"v4-{layout}": (v4, layout) for layout in LAYOUTS},
}


def config(root, rank=0, size=1, *, mla_model=False, **options):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=mla_model, enable_storage_metrics=False, is_page_first_layout=False,
        model_name="org/model",
        extra_config={"root": str(root), "capacity_bytes": "64 MiB", "metrics": False, **options},
    )  # fmt: skip


@pytest.fixture
def storages(tmp_path):
    from hicache_tier.integrations.sglang import HiCacheTierStorage

    made = []

    def make(rank=0, size=1, *, mla_model=False, **options):
        root = options.pop("root", tmp_path / "root")
        made.append(HiCacheTierStorage(config(root, rank, size, mla_model=mla_model, **options), {}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def tensors(pool):
    found = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else [pool.kv_buffer]
    flat = []
    for one in found:
        flat += one if isinstance(one, (list, tuple)) else [one]
    return flat


def fill(pool, seed):
    generator = np.random.default_rng(seed)
    for tensor in tensors(pool):
        raw = tensor.view(torch.uint8).reshape(-1).numpy()
        raw[:] = generator.integers(0, 256, raw.size, np.uint8)


def slots(pool, pages):
    size = pool.page_size
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def raw_pages(pool, pages):
    """Bytes of pages, piece by piece as SGLang lists them, or as it flattens them."""
    import ctypes

    found = []
    for page in pages:
        try:
            pointers, sizes = pool.get_page_buffer_meta(slots(pool, [page]))
            found.append(b"".join(ctypes.string_at(p, n) for p, n in zip(pointers, sizes, strict=True)))
        except (NotImplementedError, ValueError):
            found.append(pool.get_data_page(page * pool.page_size).view(torch.uint8).numpy().tobytes())
    return found


def everything(pool):
    return b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors(pool))


def transfer(name, keys, indices, policy="all_pages", **more):
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    return PoolTransfer(
        name=PoolName(name), keys=keys, host_indices=indices, hit_policy=PoolHitPolicy(policy), **more
    )


@pytest.mark.parametrize("name", POOLS)
def test_pages_come_back_to_other_slots(storages, name):
    make, layout = POOLS[name]
    pool = make(layout)
    fill(pool, 1)
    storage = storages()
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, "kv")
    storage.on_host_pools_registered()
    assert len(storage.desk.pools) == 1
    keys = [key(number, name) for number in range(10)]
    source, target = list(range(1, 11)), [20, 3, 17, 5, 22, 2, 11, 13, 7, 19]
    wanted = raw_pages(pool, source)
    assert storage.batch_set_v1(keys, slots(pool, source)) == [True] * 10
    assert storage.batch_set_v1(keys, slots(pool, source)) == [True] * 10
    assert storage.batch_exists(keys) == 10
    fill(pool, 2)
    before = raw_pages(pool, range(PAGES))
    assert storage.batch_get_v1(keys, slots(pool, target)) == [True] * 10
    after = raw_pages(pool, range(PAGES))
    assert [after[page] for page in target] == wanted
    others = set(range(PAGES)) - set(target)
    assert all(after[page] == before[page] for page in others)
    view = storage.desk.pools["kv"].view
    assert view.copied == (name in {"mamba-with-side-state", "indexer-layer_first"})


@pytest.mark.parametrize("name", [name for name in POOLS if not name.startswith("wide")])
def test_flat_pages_and_pages_in_place_are_the_same_pages(storages, name):
    make, layout = POOLS[name]
    pool = make(layout)
    fill(pool, 3)
    storage = storages()
    storage.register_mem_pool_host(pool)
    keys = [key(number, name) for number in range(6)]
    size = pool.page_size
    assert storage.batch_set(keys[:3], [pool.get_data_page(page * size) for page in (1, 2, 3)])
    assert all(storage.batch_set_v1(keys[3:], slots(pool, [4, 5, 6])))
    wanted = raw_pages(pool, range(1, 7))
    flat = [pool.get_data_page(page * size).clone() for page in range(1, 7)]
    fill(pool, 4)
    assert all(storage.batch_get_v1(keys, slots(pool, range(10, 16))))
    assert raw_pages(pool, range(10, 16)) == wanted
    places = [torch.zeros_like(one) for one in flat]
    found = storage.batch_get(keys, places)
    assert all(one is place for one, place in zip(found, places, strict=True))
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(found, flat, strict=True)
    )
    assert storage.get(keys[0]) is not None
    assert storage.exists(keys[5])
    assert storage.batch_get([key(99)], [places[0]]) == [None]
    assert storage.batch_get(keys[:1], [torch.zeros(3, dtype=torch.uint8)]) == [None]
    assert not storage.batch_set(keys[:1], [torch.zeros(3, dtype=torch.uint8)])


def test_a_logical_anchor_stores_markers(storages):
    anchor, side = logical("layer_first"), v4("page_first")
    storage = storages(mla_model=True)
    storage.register_mem_pool_host(anchor)
    storage.register_mem_host_pool_v2(anchor, "kv")
    storage.register_mem_host_pool_v2(side, "deepseek_v4_c4")
    fill(side, 5)
    keys = [key(number) for number in range(8)]
    assert storage.batch_exists(keys) == 0
    sides = transfer("deepseek_v4_c4", keys[:6], slots(side, range(6)), indices_from_pool="kv")
    (verdicts,) = storage.batch_set_v2([sides]).values()
    assert verdicts == [True] * 6
    assert storage.batch_set_v1(keys[:7], slots(anchor, range(7))) == [True] * 7
    assert storage.batch_exists(keys) == 7
    hit = storage.batch_exists_v2(keys, [transfer("deepseek_v4_c4", None, None)])
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (6, [1, 2, 3, 4, 5, 6])
    assert hit.extra_pool_hit_pages == {"kv": 7, "deepseek_v4_c4": 6}
    assert storage.batch_get_v1(keys, slots(anchor, range(8))) == [True] * 7 + [False]
    wanted = raw_pages(side, range(6))
    fill(side, 6)
    (verdicts,) = storage.batch_get_v2(
        [transfer("deepseek_v4_c4", keys, slots(side, range(10, 18)))]
    ).values()
    assert verdicts == [True] * 6 + [False] * 2
    assert raw_pages(side, range(10, 16)) == wanted


def test_several_pools_in_one_call_and_pools_that_come_later(storages):
    anchor, draft, state = mha("page_first"), mha("page_first", heads=1), mamba("page_first")
    storage = storages()
    storage.register_mem_pool_host(anchor)
    storage.register_mem_host_pool_v2(anchor, "kv")
    storage.register_mem_host_pool_v2(draft, "draft")
    storage.on_host_pools_registered()
    keys = [key(number) for number in range(5)]
    for seed, pool in enumerate((anchor, draft, state)):
        fill(pool, 10 + seed)
    late = storage.batch_set_v2([transfer("mamba", keys[-1:], slots(state, [3]), "trailing_pages")])
    assert list(late.values()) == [[False]]
    storage.register_mem_host_pool_v2(state, "mamba")
    moves = [
        transfer("draft", keys, slots(draft, range(5))),
        transfer("mamba", keys[-1:], slots(state, [3]), "trailing_pages"),
    ]
    assert list(storage.batch_set_v2(moves).values()) == [[True] * 5, [True]]
    assert all(storage.batch_set_v1(keys, slots(anchor, range(5))))
    ask = [transfer("draft", None, None), transfer("mamba", None, None, "trailing_pages")]
    hit = storage.batch_exists_v2(keys, ask)
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (5, [5])
    wanted = [raw_pages(draft, range(5)), raw_pages(state, [3])]
    for pool in (draft, state):
        fill(pool, 20)
    moves = [
        transfer("draft", keys, slots(draft, range(9, 14))),
        transfer("mamba", keys[-1:], slots(state, [8]), "trailing_pages"),
    ]
    assert list(storage.batch_get_v2(moves).values()) == [[True] * 5, [True]]
    assert [raw_pages(draft, range(9, 14)), raw_pages(state, [8])] == wanted


def test_what_differs_misses(storages):
    keys = [key(number) for number in range(3)]
    pools = {
        "as it is": mha("page_first"),
        "dtype": mha("page_first", dtype=torch.bfloat16),
        "heads": mha("page_first", heads=4, width=16),
        "width of V": mha("page_first", v_width=20),
        "layout": mha("page_head"),
        "kind": mla("page_first"),
    }
    tagged = mha("page_first")
    tagged.storage_format_tag = "other"
    pools["format tag"] = tagged
    stage = mha("page_first")
    stage.start_layer = 3
    pools["layers"] = stage
    for what, pool in pools.items():
        storage = storages()
        storage.register_mem_pool_host(pool)
        assert storage.batch_exists(keys) == 0, what
        fill(pool, 1)
        assert all(storage.batch_set_v1(keys, slots(pool, range(3)))), what
        assert storage.batch_exists(keys) == 3
        storage.close()
    for options in (
        {"rank": 0, "size": 2},
        {"scales": "per-tensor"},
        {"model": "org/other"},
        {"rope": "yarn"},
    ):
        storage = storages(**options)
        storage.register_mem_pool_host(pools["as it is"])
        assert storage.batch_exists(keys) == 0, options
        storage.close()


def test_fp8_pools_are_told_apart_by_what_the_server_was_told(storages, context):
    pool = mha("page_first", dtype=torch.uint8)
    keys = [key(number) for number in range(3)]
    for dtype, label in (("fp8_e5m2", "float8_e5m2"), ("fp8_e4m3", "float8_e4m3fn")):
        server = context(kv_cache_dtype=dtype)
        storage = storages()
        storage.register_mem_pool_host(pool)
        assert storage.desk.pools["kv"].store.geometry.dtype.label == label
        assert storage.batch_exists(keys) == 0
        assert all(storage.batch_set_v1(keys, slots(pool, range(3))))
        storage.close()
        server.close()


def test_fp8_of_a_draft_is_what_the_server_was_told_for_the_draft(storages, context):
    pool = mha("page_first", dtype=torch.uint8)
    context(kv_cache_dtype="fp8_e4m3", speculative_draft_kv_cache_dtype="fp8_e5m2")
    storage = storages()
    for name in ("kv", "draft"):
        storage.register_mem_host_pool_v2(pool, name)
    dtypes = {name: pool.store.geometry.dtype.label for name, pool in storage.desk.pools.items()}
    assert dtypes == {"kv": "float8_e4m3fn", "draft": "float8_e5m2"}


def test_pools_that_cannot_be_stored_are_refused_with_the_reason(storages):
    from hicache_tier.errors import InvalidArgumentError

    storage = storages()
    shared = mha("page_first")
    shared.shared_allocation_domain = object()
    dealt = mha("page_first")
    dealt.placement = object()
    silent = mha("page_first")
    silent.get_page_buffer_meta = silent.get_data_page = lambda *_, **__: (_ for _ in ()).throw(
        NotImplementedError("no pages")
    )
    astray = mha("page_first")
    astray.get_page_buffer_meta = lambda indices: ([4096 + int(indices[0])] * 2, [64, 64])
    for pool, said in [
        (shared, "shared arena"),
        (dealt, "sharding"),
        (silent, "no pages"),
        (astray, "outside of its buffers"),
        (object(), "no host pool"),
    ]:
        with pytest.raises(InvalidArgumentError, match=said):
            storage.register_mem_pool_host(pool)
    assert not storage.desk.pools


def test_wrong_indices_fail_and_touch_nothing(storages):
    pool = mha("page_first")
    fill(pool, 1)
    storage = storages()
    storage.register_mem_pool_host(pool)
    keys = [key(number) for number in range(3)]
    assert all(storage.batch_set_v1(keys, slots(pool, range(3))))
    before = everything(pool)
    beyond = slots(pool, [0, 1]).tolist() + (slots(pool, [0]) + pool.size).tolist()
    wrong = [
        slots(pool, range(2)),
        slots(pool, range(3)) + 1,
        slots(pool, range(3)) - PAGE,
        torch.tensor(beyond),
        slots(pool, range(3)).float(),
        slots(pool, [1, 1, 2]),
        slots(pool, range(3)).bfloat16(),
        slots(pool, range(3)).tolist(),
        slots(pool, range(3)).reshape(3, PAGE).flip(1),  # a page's slots, but not in their order
        slots(pool, range(3)).to("meta"),
        None,
    ]
    more = [key(number, "more") for number in range(3)]
    for indices in wrong:
        assert storage.batch_get_v1(keys, indices) == [False] * 3
        if indices is not wrong[5]:
            assert storage.batch_set_v1(more, indices) == [False] * 3
    assert storage.batch_exists(more) == 0
    assert everything(pool) == before
    assert storage.batch_get_v1([], torch.empty(0, dtype=torch.int64)) == []


def test_keys_of_any_text(storages):
    pool = mha("page_first")
    fill(pool, 1)
    storage = storages()
    storage.register_mem_pool_host(pool)
    keys = ["a", "A", "ab", "AB", "00" * 32, "0 " * 32, "é", "x" * 200]
    assert all(storage.batch_set_v1(keys, slots(pool, range(8))))
    wanted = raw_pages(pool, range(8))
    assert len(set(wanted)) == 8
    fill(pool, 2)
    assert all(storage.batch_get_v1(keys, slots(pool, range(8, 16))))
    assert raw_pages(pool, range(8, 16)) == wanted


def test_mla_is_written_once_and_read_by_every_rank(storages):
    pools = [mla("page_first") for _ in range(4)]
    for pool in pools:
        fill(pool, 7)
    ranks = [storages(rank, 4, mla_model=True) for rank in range(4)]
    for storage, pool in zip(ranks, pools, strict=True):
        storage.register_mem_pool_host(pool)
    assert [storage.ranks.writer for storage in ranks] == [True, False, False, False]
    keys = [key(number) for number in range(6)]
    assert all(ranks[0].batch_set_v1(keys, slots(pools[0], range(6))))
    wanted = raw_pages(pools[0], range(6))
    for rank, (storage, pool) in enumerate(zip(ranks, pools, strict=True)):
        fill(pool, 100 + rank)
        assert until(lambda storage=storage: storage.batch_exists(keys) == 6), rank
        assert all(storage.batch_get_v1(keys, slots(pool, range(8, 14)))), rank
        assert raw_pages(pool, range(8, 14)) == wanted, rank
    stored = [storage.desk.pools["kv"].store.stats()["pages"] for storage in ranks]
    assert stored == [6, 0, 0, 0]


def test_state_of_an_mla_model_is_each_ranks_own(storages):
    pools = [mamba("page_first") for _ in range(2)]
    anchors = [mla("page_first") for _ in range(2)]
    ranks = [storages(rank, 2, mla_model=True) for rank in range(2)]
    keys = [key(0)]
    for rank, (storage, anchor, pool) in enumerate(zip(ranks, anchors, pools, strict=True)):
        storage.register_mem_pool_host(anchor)
        storage.register_mem_host_pool_v2(pool, "mamba")
        fill(pool, rank)
        (verdicts,) = storage.batch_set_v2([transfer("mamba", keys, slots(pool, [1]))]).values()
        assert verdicts == [True]
    wanted = [raw_pages(pool, [1]) for pool in pools]
    assert wanted[0] != wanted[1]
    for rank, (storage, pool) in enumerate(zip(ranks, pools, strict=True)):
        fill(pool, 50)
        storage.batch_get_v2([transfer("mamba", keys, slots(pool, [4]))])
        assert raw_pages(pool, [4]) == wanted[rank]


def test_statistics_are_in_sglangs_class_and_drained(storages):
    from sglang.srt.observability.metrics_collector import StorageMetrics

    pool = mha("page_first")
    storage = storages()
    storage.register_mem_pool_host(pool)
    assert storage.get_stats() is None
    keys = [key(number) for number in range(4)]
    storage.batch_set_v1(keys, slots(pool, range(4)))
    storage.batch_get_v1(keys[:3], slots(pool, range(3)))
    stats = storage.get_stats()
    assert type(stats) is StorageMetrics
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([4], [3])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert min(stats.backup_bandwidth + stats.prefetch_bandwidth) > 0
    assert storage.get_stats() is None
