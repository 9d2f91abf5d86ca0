"""Ranges that copy engines move, carried out with plain moves of memory."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.testing.transfer import CopyEngineSuite
from hicache_tier_kernels import CopyPlan, RowMap, byte_plane
from hicache_tier_kernels.runs import Ranges, fragment_nbytes
from hicache_tier_kernels.staged import find_windows

MHA = KVGeometry.mha(num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=4)


class TestRanges(CopyEngineSuite):
    def run(self, plan):
        # Source pages that repeat are read more than once: no order among ranges is needed.
        for destination, source, nbytes in Ranges(plan).of(range(len(plan.source.planes))).T.tolist():
            ctypes.memmove(destination, source, nbytes)


def flat(pages=8, nbytes=64, seams=()):
    memory = torch.zeros(pages * nbytes, dtype=torch.uint8)
    plane = byte_plane(memory, 0, (pages, 1, 1, nbytes), (nbytes, nbytes, nbytes))
    ends = [*seams, pages]
    starts = [0, *seams]
    registered = tuple(
        (memory.data_ptr() + start * nbytes, (end - start) * nbytes)
        for start, end in zip(starts, ends, strict=True)
    )
    return RowMap((plane,), registered)


def lengths(source, destination, sources, destinations):
    plan = CopyPlan(
        source, destination, *(torch.tensor(n, dtype=torch.int64) for n in (sources, destinations))
    )
    return [int(n) // 64 for n in Ranges(plan).of((0,))[2]]


@pytest.mark.parametrize(
    ("sources", "destinations", "expected"),
    [
        ([0, 1, 2, 3], [4, 5, 6, 7], [4]),
        ([3, 1, 0, 2], [7, 5, 4, 6], [4]),  # the order given does not matter
        ([0, 1, 2, 3], [4, 5, 7, 6], [2, 1, 1]),
        ([0, 1, 3], [0, 1, 2], [2, 1]),
        ([0, 0, 0], [0, 1, 2], [1, 1, 1]),
        ([5], [0], [1]),
        ([], [], []),
    ],
)
def test_pages_that_follow_on_both_sides_are_one_run(sources, destinations, expected):
    assert lengths(flat(), flat(), sources, destinations) == expected


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_what_is_written_in_a_row_lies_together(layout):
    pages, slots = torch.tensor([4, 0, 3, 1]), torch.tensor([5, 2, 0, 3])
    with HostPool(MHA, "layer_first", 6, pinned=False) as far, HostPool(MHA, layout, 6, pinned=False) as near:
        backup = Ranges(CopyPlan(far.row_map(), near.row_map(), pages, slots))
        assert np.all(np.diff(backup.of(range(8))[0].astype(np.int64)) > 0)
        load = Ranges(CopyPlan(near.row_map(), far.row_map(), slots, pages))
        assert np.all(np.diff(load.of(range(8))[0].astype(np.int64)) > 0)


def test_planes_of_one_width_only():
    wide = KVGeometry.mha(
        num_layers=2, num_kv_heads=1, head_dim=8, v_head_dim=4, dtype="uint8", page_tokens=2
    )
    with HostPool(wide, "layer_first", 4, pinned=False) as pool:
        ranges = Ranges(CopyPlan(pool.row_map(), pool.row_map(), torch.tensor([1]), torch.tensor([3])))
        assert ranges.of((0, 1))[2].tolist() == [16, 16]
        assert ranges.of((2, 3))[2].tolist() == [8, 8]
        assert sorted(ranges.of((1, 3))[2].tolist()) == [8, 16]
        assert ranges.of([0, 1]).tolist() == ranges.of(range(2)).tolist()


def test_no_run_crosses_a_seam_on_either_side():
    every = list(range(8))
    assert lengths(flat(seams=(3,)), flat(), every, every) == [3, 5]
    assert lengths(flat(), flat(seams=(1, 5)), every, every) == [1, 4, 3]
    assert lengths(flat(seams=(3,)), flat(seams=(1, 5)), every, every) == [1, 2, 2, 3]


def test_the_pool_tells_its_seams():
    with HostPool(MHA, "layer_first", 600, pinned=False, chunk_nbytes=8192) as pool:
        assert not pool.row_map().registered
        assert not pool.row_map().pinned
        assert len(pool.chunks) > 4


@pytest.mark.parametrize(
    ("layout", "fragment", "windows"),
    [
        ("layer_first", 4 * 32, 8),
        ("page_first", 32, 2),
        ("page_first_direct", 4 * 32, 2),
        ("page_head", 16, 2),
    ],
)
def test_fragments_and_windows(layout, fragment, windows):
    device = HostPool(MHA, "layer_first", 6, pinned=False)
    with HostPool(MHA, layout, 6, pinned=False) as pool, device:
        near, far = pool.row_map(), device.row_map()
        assert fragment_nbytes(near, far) == fragment
        found = find_windows(near, far)
        assert len(found) == windows
        assert sum(window.nbytes for window in found) == pool.page_nbytes
        covered = np.zeros(pool.nbytes, dtype=int)
        for window in found:
            for page in range(6):
                at = window.base - pool.address + page * window.nbytes
                covered[at : at + window.nbytes] += 1
        assert covered.max() == 1
        assert covered.sum() == 6 * pool.page_nbytes


def test_part_of_the_planes_fills_no_window():
    with HostPool(MHA, "page_first", 6, pinned=False) as pool:
        one = pool.row_map().select([1, 5])
        assert find_windows(one, one) == ()


@given(
    pages=st.permutations(range(12)),
    count=st.integers(1, 12),
    shift=st.integers(0, 3),
    seams=st.tuples(*[st.sets(st.integers(1, 35), max_size=6)] * 2),
)
def test_ranges_of_several_planes_keep_within_registered_memory(pages, count, shift, seams):
    planes, numbers = 3, torch.tensor(pages[:count])
    sides = []
    for cuts in seams:
        memory = torch.zeros(planes * 12 * 64, dtype=torch.uint8)
        views = tuple(byte_plane(memory, n * 12 * 64, (12, 1, 1, 64), (64, 64, 64)) for n in range(planes))
        ends = [0, *sorted(cuts), planes * 12]
        registered = [(memory.data_ptr() + a * 64, (b - a) * 64) for a, b in itertools.pairwise(ends)]
        sides.append((memory, RowMap(views, tuple(registered))))
    (ours, source), (theirs, destination) = sides
    ours.random_(0, 256)
    plan = CopyPlan(source, destination, (numbers + shift) % 12, numbers)
    found = Ranges(plan).of((0, 2))
    for to, start, nbytes in found.T.tolist():
        ctypes.memmove(to, start, nbytes)
        for at, side in ((to, destination), (start, source)):
            assert any(low <= at and at + nbytes <= low + size for low, size in side.registered)
    expected = torch.zeros(planes, 12, 64, dtype=torch.uint8)
    expected[::2, numbers] = ours.view(planes, 12, 64)[::2, (numbers + shift) % 12]
    assert torch.equal(theirs.view(planes, 12, 64), expected)
    assert int(found[2].sum()) == 2 * count * 64
