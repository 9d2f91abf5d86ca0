"""Which prefixes count as hits: against the definition, and against SGLang's own file backend."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.integrations.sglang.hits import HitPolicy, SidePool, combine, leading


@st.composite
def presences(draw):
    """A span, which of its pages the anchor has, and up to three side pools."""
    span = draw(st.integers(0, 12))
    bits = st.lists(st.booleans(), min_size=span, max_size=span)
    often = st.lists(st.sampled_from([True, True, True, False]), min_size=span, max_size=span)
    anchor = draw(often)
    pools = []
    for name in draw(st.lists(st.sampled_from(["draft", "mamba", "swa"]), unique=True, max_size=3)):
        policy = draw(st.sampled_from(["all_pages", "trailing_pages"]))
        pools.append((name, policy, draw(bits | often), draw(st.integers(0, 4))))
    return anchor, pools


def by_definition(anchor, pools):
    """Lengths of prefix for which every pool has what it must have."""
    lengths = []
    for length in range(1, len(anchor) + 1):
        good = all(anchor[:length])
        for _, policy, present, trailing in pools:
            start = 0 if policy == "all_pages" else max(0, length - max(1, trailing))
            good = good and all(present[start:length])
        if good:
            lengths.append(length)
    return lengths


@given(presences())
@settings(deadline=None, max_examples=300)
def test_restorable_prefixes_are_those_of_the_definition(case):
    anchor, pools = case
    sides = [
        SidePool(name, HitPolicy(policy), present, max(1, trailing))
        for name, policy, present, trailing in pools
    ]
    hit = combine("kv", leading(anchor), len(anchor), sides)
    assert hit.restorable == by_definition(anchor, pools)
    assert hit.pages == max(hit.restorable, default=0)


@pytest.mark.parametrize(
    "present, block, group, covered",
    [
        ([True] * 6, 4, 2, 12),
        ([True] * 5, 4, 2, 8),
        ([True, False, True, True], 4, 2, 0),
        ([], 4, 2, 0),
        ([True] * 6, 0, 0, 0),
        ([True] * 9, 4, 1, 13),
    ],
)
def test_groups_cover_whole_blocks_and_never_gate(present, block, group, covered):
    side = SidePool("groups", HitPolicy.BLOCK_GROUPS, present, 1, block, group)
    hit = combine("kv", 5, 13, [side, SidePool("draft", HitPolicy.ALL_PAGES, [True] * 4 + [False] * 9)])
    assert hit.restorable == [1, 2, 3, 4]
    assert hit.by_pool == {"kv": 5, "draft": 4} | ({"groups": covered} if covered else {})
    assert combine("kv", 0, 13, [side]).by_pool == ({"groups": covered} if covered else {})


def test_a_policy_that_is_not_known_is_named():
    with pytest.raises(InvalidArgumentError, match="Did you mean 'all_pages'"):
        HitPolicy.parse("all_page")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Our adapter and SGLang's file backend, side by side."""
    from hicache_tier.testing.sglang_cpu import prepare

    prepare()
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

    from hicache_tier.integrations.sglang import HiCacheTierStorage

    folder = tmp_path_factory.mktemp("oracle")
    options = {"root": str(folder / "ours"), "capacity_bytes": "256 MiB", "metrics": False}
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name="m", extra_config=options,
    )  # fmt: skip
    ours, oracle = HiCacheTierStorage(config), HiCacheFile(config, str(folder / "file"))
    pools = {}
    for name in ("kv", "draft", "mamba", "swa"):
        buffers = [torch.zeros(16, 64, dtype=torch.uint8)]
        pools[name] = DeepSeekV4PagedHostPool(name, buffers, 64, 16, 4, "page_first", pin_memory=False)
        ours.register_mem_host_pool_v2(pools[name], name)
    yield ours, oracle, pools
    ours.close()


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
@given(case=presences(), salt=st.integers(0, 2**32), given_keys=st.booleans())
@settings(
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_file_backend_says_the_same(pair, case, salt, given_keys):
    import torch
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

    ours, oracle, _ = pair
    anchor, pools = case
    keys = [hashlib.sha256(f"{salt}/{case}/{page}".encode()).hexdigest() for page in range(len(anchor))]
    slot = torch.arange(4)
    for name, present in [("kv", anchor), *((name, present) for name, _, present, _ in pools)]:
        there = [key for key, is_there in zip(keys, present, strict=True) if is_there]
        for key in there:
            Path(oracle.file_path, f"{oracle._get_component_key(key, PoolName(name))}.bin").touch()
        where = slot.repeat(len(there))
        put = PoolTransfer(name=PoolName(name), keys=there, host_indices=where)
        assert all(ours.batch_set_v2([put])[PoolName(name)])
    ask = [
        PoolTransfer(
            name=PoolName(name),
            keys=keys[-trailing:] if given_keys and trailing else None,
            hit_policy=PoolHitPolicy(policy),
        )
        for name, policy, _, trailing in pools
    ]
    wanted, found = oracle.batch_exists_v2(keys, ask), ours.batch_exists_v2(keys, ask)
    assert found.kv_hit_pages == wanted.kv_hit_pages
    assert found.restorable_prefix_pages == wanted.restorable_prefix_pages
    assert found.extra_pool_hit_pages == wanted.extra_pool_hit_pages
    assert ours.batch_exists(keys) == leading(anchor) == oracle.batch_exists(keys)
