"""Which ranks hold which heads, and how long that takes to say for numbers that an archive makes up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry
from hicache_tier.layout import Layout
from hicache_tier_storage.archive import Conversion
from hicache_tier_storage.archive.codecs import Codec
from hicache_tier_storage.archive.conversion import heads_of, holders_of
from hicache_tier_storage.archive.documents import PartName
from hicache_tier_storage.archive.manifest import PartFacts
from hicache_tier_storage.archive.targets import plan_targets
from hicache_tier_storage.identity import Identity

SIZES = (1, 2, 3, 4, 6, 8, 12, 24, 48)


@pytest.mark.parametrize("total", [1, 2, 4, 6, 24])
def test_holders_are_the_ranks_that_hold_a_head(total):
    for size in (size for size in SIZES if not total % size or not size % total):
        for head in range(total):
            wanted = [rank for rank in range(size) if head in heads_of(rank, size, total)]
            assert [*holders_of(head, size, total)] == wanted, (head, size)


def archive_of(heads, ranks, size):
    """Return what stands for an archive: parts without pages of some ranks of one namespace."""
    geometry = KVGeometry.mha(num_layers=1, num_kv_heads=heads, head_dim=1, dtype="bfloat16", page_tokens=1)
    parts, spaces = [], {}
    for rank in ranks:
        ranks_of = {"tp": (rank, size), "pp": (0, 1), "cp": (0, 1)}
        unset = dict.fromkeys(("revision", "tenant", "adapter"))
        identity = Identity.build(geometry, Layout.PAGE_FIRST, model="m", pool="kv", **unset, **ranks_of)
        name = PartName(identity.namespace, identity.rank, identity.pool)
        parts.append(SimpleNamespace(facts=PartFacts(name, geometry, Layout.PAGE_FIRST, Codec.NONE, 1, 1)))
        spaces[name.namespace] = identity.as_attributes()
    return SimpleNamespace(parts=parts, manifest=SimpleNamespace(identities=spaces))


def test_many_heads_are_one_piece():
    plan = plan_targets(archive_of(1 << 20, [0], 4096), Conversion())
    assert [piece.heads.count for piece in plan.targets[0].pieces] == [1 << 20]


def test_many_ranks_that_are_missing_are_told_in_a_line():
    plan = plan_targets(archive_of(16, [0], 4096), Conversion.parse(tp=1))
    ((_, reason),) = plan.refused
    assert reason.startswith("rank: tp1of4096, tp2of4096, ") and len(reason) < 300


def test_a_page_that_would_be_too_large_is_refused():
    plan = plan_targets(archive_of(1 << 20, [0], 4096), Conversion.parse(tp=1))
    ((_, reason),) = plan.refused
    assert reason.startswith("size: ")


def test_more_ranks_than_there_are_machines_for_are_refused():
    with pytest.raises(InvalidArgumentError, match="tp must be at most"):
        Conversion.parse(tp=10**8)
