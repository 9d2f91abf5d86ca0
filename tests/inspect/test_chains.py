"""Chains by pointer doubling equal chains walked one page at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hicache_tier_storage.chains import Chains

numbers = st.integers(0, 12)


@given(st.lists(st.tuples(st.integers(1, 12), numbers), unique_by=lambda pair: pair[0], max_size=12))
def test_equals_a_walk(pairs):
    parents = dict(pairs)

    def depth(head):
        seen = []
        while head != 0:
            if head not in parents or head in seen:
                return 0
            seen.append(head)
            head = parents[head]
        return len(seen)

    heads = np.array([head for head, _ in pairs], np.uint64)
    chains = Chains.build(heads, np.array([parent for _, parent in pairs], np.uint64))
    assert chains.depth.tolist() == [depth(head) for head, _ in pairs]
    assert chains.root.tolist() == [parent == 0 for _, parent in pairs]
    assert chains.leaf.tolist() == [head not in parents.values() for head, _ in pairs]


def test_a_long_chain_is_quick():
    count = 200_000
    heads = np.arange(1, count + 1, dtype=np.uint64)
    order = np.random.default_rng(0).permutation(count)
    chains = Chains.build(heads[order], (heads - np.uint64(1))[order])
    every = np.ones(count, np.bool_)
    assert chains.summary(every) == {"roots": 1, "leaves": 1, "longest": count, "orphans": 0}


def test_keys_that_share_their_beginning_count_as_one_page():
    heads = np.array([7, 7, 7], np.uint64)
    chains = Chains.build(heads, np.array([7, 0, 7], np.uint64))
    assert chains.depth.tolist() == [1, 1, 1]


def test_no_pages():
    none = np.zeros(0, np.uint64)
    assert Chains.build(none, none).summary(np.zeros(0, np.bool_))["longest"] == 0
