"""Keys of the store for SGLang's keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_tier.integrations.sglang import names as names_module
from hicache_tier.integrations.sglang.names import LookedUp, name_of, names_of


@given(st.lists(st.text() | st.from_regex(r"[0-9a-fA-F ]{64}", fullmatch=True), unique=True, min_size=2))
def test_no_two_texts_share_a_name(texts):
    assert len({name_of(text) for text in texts}) == len(texts)
    assert names_of(texts) == [name_of(text) for text in texts]


def test_names_of_hashes_are_their_bytes():
    assert name_of("0f" * 32) == b"\x0f" * 32
    assert name_of("0F" * 32) != b"\x0f" * 32
    hashes = [f"{number:064x}" for number in range(300)]
    assert names_of(hashes) == [number.to_bytes(32, "big") for number in range(300)]
    mixed = [*hashes[:3], "0F" * 32]
    assert names_of(mixed) == [name_of(text) for text in mixed]
    assert names_of([]) == []


@pytest.fixture
def looked_up(monkeypatch):
    """What was looked up, and which keys were named anew since."""
    named = []
    monkeypatch.setattr(names_module, "names_of", lambda keys: named.append(list(keys)) or names_of(keys))
    return LookedUp(), named


def test_batches_of_what_was_looked_up_are_not_named_again(looked_up):
    known, named = looked_up
    keys = [f"{number:064x}" for number in range(300)]
    known.note(keys, names_of(keys))
    for batch in (keys[:128], keys[128:256], keys[256:], keys[128:140]):
        assert known.names_of(batch) == names_of(batch)
    assert named == []


def test_any_other_batch_is_named_anew(looked_up):
    known, named = looked_up
    keys = [f"{number:064x}" for number in range(300)]
    known.note(keys, names_of(keys))
    others = [keys[1:128], keys[:129], [keys[0], keys[2]], [*keys[:127], "other"], ["other", *keys[1:128]]]
    for batch in others:
        assert known.names_of(batch) == names_of(batch)
    assert named == others
    known.note(keys[:2], names_of(keys[:2]))  # the last lookup that begins with a key counts
    assert known.names_of(keys[:3]) == names_of(keys[:3])
    assert named[len(others) :] == [keys[:3]]
    assert known.names_of([]) == []


def test_what_was_looked_up_long_ago_is_forgotten(looked_up):
    known, named = looked_up
    for number in range(100):
        keys = [f"{number:032x}{at:032x}" for at in range(3)]
        known.note(keys, names_of(keys))
    assert len(known) == 64
    long = [f"{at:064x}" for at in range(200 * 128)]
    known.note(long, names_of(long))
    assert len(known) == 64
    assert known.names_of(long[:128]) == names_of(long[:128])
    assert named == []
    assert known.names_of(keys) == names_of(keys)
    assert named == [keys]
