"""Slots that are free, against a plain model."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_tier_storage.free_slots import FreeSlots

SLAB, SLABS = 8, 12


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_the_lowest_goes_first_however_slots_came_back(data):
    free, model, waiting = FreeSlots(SLAB), set(), set()
    pins = np.zeros(SLAB * SLABS, np.int32)
    slabs: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        verb = data.draw(
            st.sampled_from(["add slab", "take", "take", "give back", "release", "drop", "outside"])
        )
        taken = [slot for slot in range(len(pins)) if slot // SLAB in slabs and slot not in model | waiting]
        some = st.lists(st.sampled_from(taken or [0]), unique=True, max_size=len(taken))
        if verb == "add slab" and len(slabs) < SLABS:
            slab = min(set(range(SLABS)) - slabs)
            slabs.add(slab)
            free.add(range(slab * SLAB, (slab + 1) * SLAB))
            model.update(range(slab * SLAB, (slab + 1) * SLAB))
        elif verb == "take":
            count = data.draw(st.integers(0, 2 * SLAB))
            expected = sorted(model)[:count]
            assert free.take(count) == expected
            model.difference_update(expected)
        elif verb == "give back":
            back = data.draw(some)
            pins[back] = data.draw(st.lists(st.integers(0, 1), min_size=len(back), max_size=len(back)))
            free.give_back(np.array(back, np.int64), pins)
            model.update(slot for slot in back if not pins[slot])
            waiting.update(slot for slot in back if pins[slot])
        elif verb == "release" and waiting:
            ended = data.draw(st.lists(st.sampled_from(sorted(waiting)), unique=True))
            pins[ended] = 0
            free.release(np.array([*ended, *waiting], np.int64), pins)
            model.update(ended)
            waiting.difference_update(ended)
        elif verb == "drop" and slabs:
            slab = data.draw(st.sampled_from(sorted(slabs)))
            slabs.discard(slab)
            gone = range(slab * SLAB, (slab + 1) * SLAB)
            free.drop(gone)
            model.difference_update(gone)
            waiting.difference_update(gone)
        elif verb == "outside":
            slab = data.draw(st.integers(0, SLABS))
            others = sorted(slot for slot in model if slot // SLAB != slab)
            assert free.count_outside(slab) == len(others)
            assert free.take_outside(slab) == (others[0] if others else None)
            model.difference_update(others[:1])
        assert sorted(free) == sorted(model)
        assert len(free) == len(model)
        assert free.waiting == waiting
