"""A model's cache to a device pool and back."""

from __future__ import annotations

import pytest
import torch

from hicache_tier import DevicePool
from hicache_tier.demo.bridge import fill_cache, fill_pool, fingerprint, geometry_of, new_cache
from hicache_tier.demo.generate import generate
from hicache_tier.demo.toy import random_llama
from hicache_tier.errors import InvalidArgumentError

transformers = pytest.importorskip("transformers")

PAGE = 4
PROMPT = [(7 * i * i + 3) % 251 for i in range(30)]


@pytest.fixture(scope="module")
def model():
    return random_llama(2).eval()


@pytest.fixture
def filled(model):
    """A cache of the prompt, and the run that made it."""
    cache = new_cache(model)
    return cache, generate(model, PROMPT, cache, 6, started=0.0)


def cache_of(k_heads=2, v_heads=2, k_dim=6, v_dim=4, tokens=9, layers=2, batch=1):
    cache = transformers.DynamicCache()
    for layer in range(layers):
        cache.update(
            torch.randn(batch, k_heads, tokens, k_dim), torch.randn(batch, v_heads, tokens, v_dim), layer
        )
    return cache


def test_geometry_is_read_from_the_cache():
    geometry = geometry_of(cache_of(), PAGE)
    assert geometry.as_dict() == {
        "kind": "mha",
        "num_layers": 2,
        "components": [{"name": "k", "heads": 2, "width": 6}, {"name": "v", "heads": 2, "width": 4}],
        "dtype": "float32",
        "page_tokens": PAGE,
        "rows": PAGE,
    }


@pytest.mark.parametrize("cache", [cache_of(batch=2), cache_of(v_heads=3), transformers.DynamicCache()])
def test_a_cache_that_makes_no_pages_is_refused(cache):
    with pytest.raises(InvalidArgumentError):
        geometry_of(cache, PAGE)


def test_layers_of_different_shape_are_refused():
    cache = cache_of(layers=1)
    cache.update(torch.randn(1, 1, 9, 6), torch.randn(1, 1, 9, 4), 1)
    with pytest.raises(InvalidArgumentError, match="differ in shape"):
        geometry_of(cache, PAGE)


def test_round_trip_is_exact_and_pages_lie_anywhere():
    cache = cache_of(tokens=11)
    pool = DevicePool.empty(geometry_of(cache, PAGE), num_pages=5)
    places = torch.tensor([3, 0])
    fill_pool(cache, pool, places)
    back = transformers.DynamicCache()
    fill_cache(pool, places, back)
    for ours, theirs in zip(back.layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys[:, :, :8])
        assert torch.equal(ours.values, theirs.values[:, :, :8])


def test_generation_from_pages_equals_generation_without(model, filled):
    cache, run = filled
    pool = DevicePool.empty(geometry_of(cache, PAGE), num_pages=7)
    places = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    fill_pool(cache, pool, places)
    warm = new_cache(model)
    fill_cache(pool, places, warm)
    again = generate(model, PROMPT, warm, 6, started=0.0)
    assert (run.cached_tokens, again.cached_tokens) == (0, 28)
    assert again.tokens == run.tokens
    assert torch.equal(again.logits.argmax(-1), run.logits.argmax(-1))


@pytest.mark.parametrize("spoil", ["zeros", "keys of other pages"])
def test_a_wrong_page_would_be_noticed(model, filled, spoil):
    """What the demo compares depends on every page: otherwise equal tokens would prove nothing."""
    cache, run = filled
    pool = DevicePool.empty(geometry_of(cache, PAGE), num_pages=7)
    fill_pool(cache, pool, torch.arange(7))
    for keys, values in pool.layers:
        if spoil == "zeros":
            keys[:PAGE], values[:PAGE] = 0, 0
        else:
            keys[8:12], keys[20:24] = keys[20:24].clone(), keys[8:12].clone()
    warm = new_cache(model)
    fill_cache(pool, torch.arange(7), warm)
    again = generate(model, PROMPT, warm, 6, started=0.0)
    assert (again.logits - run.logits).abs().max() > 1e-2


def test_fingerprint_tells_what_attention_does_not_mind(filled):
    cache, _ = filled
    pool = DevicePool.empty(geometry_of(cache, PAGE), num_pages=7)
    fill_pool(cache, pool, torch.arange(7))
    same, swapped = transformers.DynamicCache(), transformers.DynamicCache()
    fill_cache(pool, torch.arange(7), same)
    fill_cache(pool, torch.tensor([0, 1, 5, 3, 4, 2, 6]), swapped)
    assert fingerprint(same, 28) == fingerprint(cache, 28) != fingerprint(swapped, 28)


def test_sliding_windows_and_linear_attention_are_refused():
    sliding = transformers.MistralConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, sliding_window=8
    )
    model = type("Model", (), {"config": sliding})()
    with pytest.raises(InvalidArgumentError, match="DynamicSlidingWindowLayer; the demo supports"):
        new_cache(model)


def test_random_llama_is_the_same_each_time_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = random_llama(1), random_llama(1)
    assert torch.equal(torch.rand(1), expected)
    for (name, ours), (_, theirs) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
