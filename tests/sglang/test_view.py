"""Slots as SGLang names them, and the pages that they are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.integrations.sglang.view import pages_named

PAGE = 4
POOL = SimpleNamespace(name="kv", page_tokens=PAGE, num_pages=8)


def slots_of(pages):
    return torch.tensor([page * PAGE + at for page in pages for at in range(PAGE)], dtype=torch.int64)


@given(st.lists(st.integers(0, 7), max_size=8), st.booleans())
def test_whole_pages_are_named_in_any_order(pages, unique):
    slots = slots_of(pages)
    if unique and len(set(pages)) < len(pages):
        with pytest.raises(InvalidArgumentError, match="named twice"):
            pages_named(POOL, slots, len(pages), unique=True)
    else:
        assert pages_named(POOL, slots, len(pages), unique=unique).tolist() == pages


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.data())
def test_one_slot_that_is_another_is_refused(pages, data):
    slots = slots_of(pages)
    at = data.draw(st.integers(0, len(slots) - 1))
    other = data.draw(st.integers(-(2**63), 2**63 - 1).filter(lambda slot: slot != int(slots[at])))
    slots[at] = other
    with pytest.raises(InvalidArgumentError, match="not pages of this pool"):
        pages_named(POOL, slots, len(pages), unique=False)


@pytest.mark.parametrize("page", [-1, 8, 2**61 - 1, -(2**61)])
def test_whole_pages_outside_of_the_pool_are_refused(page):
    with pytest.raises(InvalidArgumentError, match="not pages of this pool"):
        pages_named(POOL, slots_of([page]), 1, unique=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_whole_numbers_of_any_dtype_and_shape_name_slots(dtype):
    slots = slots_of([3, 1])
    assert pages_named(POOL, slots.to(dtype), 2, unique=True).tolist() == [3, 1]
    assert pages_named(POOL, slots.reshape(2, PAGE), 2, unique=True).tolist() == [3, 1]
    apart = torch.stack((slots, slots), 1)[:, 0]
    assert not apart.is_contiguous()
    assert pages_named(POOL, apart, 2, unique=True).tolist() == [3, 1]


def test_page_numbers_are_the_callers_own_memory():
    slots = slots_of([3, 1])
    numbers = pages_named(POOL, slots, 2, unique=True)
    slots.zero_()
    assert numbers.tolist() == [3, 1]
    assert numbers.dtype == np.int64


@pytest.mark.parametrize(
    "slots", [slots_of([0]).float(), slots_of([0]).bfloat16(), slots_of([0]).tolist(), None]
)
def test_what_is_no_tensor_of_whole_numbers_is_refused(slots):
    with pytest.raises(InvalidArgumentError, match="must be a tensor of whole numbers"):
        pages_named(POOL, slots, 1, unique=True)
