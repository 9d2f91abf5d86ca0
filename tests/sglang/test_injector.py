"""SGLang's own failure injector between its controllers and the adapter, for 500 calls."""

from __future__ import annotations

import random
import threading

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CALLS = 500


def test_failures_and_delays_cost_hits_and_nothing_else(tmp_path, context, monkeypatch):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.2")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    caches = Caches(context(), "page_first", pages=48)
    assert caches.attach(extra_config(tmp_path / "root", prefetch_threshold=16))[0]
    injector = caches.storage
    assert isinstance(injector, HiCacheStorageFailureInjector)
    calls = []
    delay = HiCacheStorageFailureInjector._inject_delay

    def counted(self, name):
        calls.append(name)
        delay(self, name)

    monkeypatch.setattr(HiCacheStorageFailureInjector, "_inject_delay", counted)
    threads = threading.active_count()
    host = caches.cache.cache_controller.mem_pool_host
    chance = random.Random(5)
    hits = wrong = 0
    while len(calls) < CALLS:
        tokens = prompt(chance.randrange(6), 8)[: 16 * chance.randrange(2, 9)]
        if chance.random() < 0.3:
            caches.compute(tokens)
        caches.forget()
        assert host.available_size() == host.size, "host pages leaked"
        if caches.prefetch(tokens):
            hits += caches.load_back(tokens) > 0
            wrong += not caches.right(tokens)
    assert not wrong
    assert hits > 20
    assert {"batch_exists", "batch_get_v1", "batch_set_v1"} <= set(calls)
    caches.forget()
    assert host.available_size() == host.size
    assert caches.detach()[0]
    assert threading.active_count() <= threads + 1
