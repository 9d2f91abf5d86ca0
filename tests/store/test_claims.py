"""Which pages of a batch a put takes for itself: the short way and the long one agree."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_tier_storage.putter import Claim, Putter

KEYS = [bytes([number]) * 8 for number in range(12)]
some = st.sets(st.sampled_from(KEYS), max_size=3)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5),
    own=some,
    foreign=some,
    claims=st.lists(st.tuples(some, st.booleans()), max_size=2),
    pin=st.booleans(),
)
def test_a_batch_is_all_new_where_every_row_is_chosen(keys, own, foreign, claims, pin):
    core = SimpleNamespace(
        index={key: at for at, key in enumerate(sorted(own))},
        foreign=SimpleNamespace(index=dict.fromkeys(foreign)),
        writing=[Claim(keys=busy, over=over) for busy, over in claims],
    )
    putter, claim, known = Putter(core, None, checksums=False), Claim(), []
    chosen = putter._choose(keys, claim, known, pin=pin)
    every_row = claim.rows == list(range(len(keys)))
    assert putter._all_new(keys, pin=pin) == (chosen if every_row else set())
    if every_row:
        assert not claim.elsewhere
        assert not known
