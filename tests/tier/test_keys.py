"""Page keys: the byte layout, against an independent implementation; what is refused; fault kind 4."""

from __future__ import annotations

import hashlib
import itertools
import struct
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_tier import page_keys
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.keys import KeyChain

TOKENS = list(range(100, 170))


def reference(tokens, page_tokens, salt, adapter):
    """The documented layout, written again from its text with struct and one token at a time."""

    def field(tag, value):
        if value is None:
            return tag + struct.pack("<B", 0)
        raw = value.encode("utf-8")
        return tag + struct.pack("<BI", 1, len(raw)) + raw

    digest = hashlib.sha256(b"hicache_tier.keys.v1" + field(b"S", salt) + field(b"A", adapter)).digest()
    out = []
    for page in range(len(tokens) // page_tokens):
        h = hashlib.new("sha256")
        h.update(digest)
        for token in tokens[page * page_tokens : (page + 1) * page_tokens]:
            h.update(struct.pack("<I", token))
        digest = h.digest()
        out.append(digest)
    return out


def test_known_answers():
    """Frozen: stores on disk hold these names, so they never change."""
    assert page_keys(range(64), 32)[-1].hex() == (
        "bbb160002daf5506c1a993ee8ea2f4a4aba63d53b13d17309390f3ae207adc2c"
    )
    assert page_keys([4294967295] * 16, 16, salt="", adapter="LoRÄ")[0].hex() == (
        "7a8f694d11eeaac1acaa16cb1bc576e3eddc57cf956a46d25e0821a4e3f6ea1c"
    )


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    page_tokens=st.integers(1, 20),
    salt=st.none() | st.text(max_size=5),
    adapter=st.none() | st.text(max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_equals_an_independent_implementation(tokens, page_tokens, salt, adapter):
    keys = page_keys(tokens, page_tokens, salt=salt, adapter=adapter)
    assert keys == reference(tokens, page_tokens, salt, adapter)
    chain = KeyChain(page_tokens, salt=salt, adapter=adapter)
    cuts = [0, len(tokens) // 3, len(tokens) // 3, len(tokens) // 2, len(tokens)]
    fresh = [chain.extend(tokens[a:b]) for a, b in itertools.pairwise(cuts)]
    assert list(itertools.chain(*fresh)) == keys == chain.keys
    assert chain.num_tokens == len(tokens)


def test_salts_and_adapters_are_disjoint():
    """Fault kind 4."""
    names = [None, "", "a", "ab", "b", "ba", "a\0", "S\1"]
    seen = {}
    for salt, adapter in itertools.product(names, names):
        key = page_keys(TOKENS, 16, salt=salt, adapter=adapter)[0]
        assert key not in seen, (seen.get(key), (salt, adapter))
        seen[key] = (salt, adapter)


@pytest.mark.parametrize(
    "form",
    [
        tuple,
        np.array,
        torch.tensor,
        lambda t: np.array(t, np.uint32),
        lambda t: np.array(t, np.int16),
        lambda t: np.repeat(np.array(t), 2)[::2],
        lambda t: np.array(t, ">i8"),
        lambda t: torch.tensor(t, dtype=torch.uint8),
        lambda t: torch.tensor(t).repeat_interleave(2)[::2],
        lambda t: [np.int64(x) for x in t],
    ],
)
def test_forms_of_the_same_tokens_agree(form):
    assert page_keys(form(TOKENS), 16) == page_keys(TOKENS, 16) == page_keys(range(100, 170), 16)


@pytest.mark.parametrize(
    "empty", [[], (), np.empty(0, np.int32), torch.empty(0, dtype=torch.int64), [1] * 15]
)
def test_less_than_a_page_has_no_key(empty):
    assert page_keys(empty, 16) == []


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, 2.0, 3], "2.0 at position 1"),
        ([1, True, 3], "True at position 1"),
        (np.array([True, False]), "bool"),
        (torch.tensor([True, False]), "bool"),
        (np.array([1.0]), "float64"),
        (torch.tensor([1.0]), "float32"),
        ([1, -2], "-2 at position 1"),
        (np.array([5, 2**32]), "4294967296 at position 1"),
        ([5, 2**70], "1180591620717411303424 at position 1"),
        ([5, 2**63], "9223372036854775808 at position 1"),
        (np.array([2**63], np.uint64), "9223372036854775808"),
        ([[1, 2], [3, 4]], "flat"),
        (np.zeros((2, 2), int), "shape (2, 2)"),
        (torch.zeros((2, 2), dtype=torch.int64), "shape (2, 2)"),
        (torch.tensor(3), "shape ()"),
        ("text", "str"),
        (b"bytes", "bytes"),
        (None, "NoneType"),
        (7, "int"),
        ([None], "None at position 0"),
        ({1, 2}, "set"),
    ],
)
def test_refused_tokens(tokens, says):
    with pytest.raises(InvalidArgumentError) as caught:
        page_keys(tokens, 1)
    assert says in str(caught.value)


@pytest.mark.parametrize("page_tokens", [0, -1, True, 1.5, None, "16"])
def test_refused_page_sizes(page_tokens):
    with pytest.raises(InvalidArgumentError, match="page_tokens"):
        page_keys(TOKENS, page_tokens)
    with pytest.raises(InvalidArgumentError, match="page_tokens"):
        KeyChain(page_tokens)


@pytest.mark.parametrize("bad", [b"bytes", 3, "\ud800"])
def test_refused_names(bad):
    with pytest.raises(InvalidArgumentError, match="salt"):
        page_keys(TOKENS, 16, salt=bad)
    with pytest.raises(InvalidArgumentError, match="adapter"):
        page_keys(TOKENS, 16, adapter=bad)


def test_a_refused_extension_leaves_the_chain_as_it_was():
    chain = KeyChain(16)
    chain.extend(TOKENS[:20])
    with pytest.raises(InvalidArgumentError):
        chain.extend([-1])
    chain.extend(TOKENS[20:])
    assert chain.keys == page_keys(TOKENS, 16)


def test_the_cost_is_that_of_hashing():
    """No Python work a token: 1M tokens from an array take well under half a second on any machine."""
    tokens = np.arange(1_000_000, dtype=np.int64)
    start = time.perf_counter()
    page_keys(tokens, 64)
    assert time.perf_counter() - start < 0.5
