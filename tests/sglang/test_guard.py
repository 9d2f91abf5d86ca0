"""What no fault may do to SGLang: raise, hang, leave it half attached, serve pages of old weights."""

from __future__ import annotations

import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def caches(tmp_path, context):
    from hicache_tier.testing.sglang_rig import Caches

    made = Caches(context(), "page_first")
    yield made
    made.close()


def attach(caches, root, **options):
    from hicache_tier.testing.sglang_rig import extra_config

    assert caches.attach(extra_config(root, **options))[0]
    return caches.storage


@pytest.mark.parametrize(
    "keys", [None, [None], [7], [b"x" * 32], ["\ud800"], 5, iter(["a"])], ids=lambda keys: repr(keys)[:12]
)
def test_keys_that_are_none_are_misses(tmp_path, caches, keys):
    storage = attach(caches, tmp_path / "root")
    slots = torch.arange(16)
    nothing = [False] * (len(keys) if isinstance(keys, list) else 0)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_exists_v2(keys, None).kv_hit_pages == 0
    assert storage.batch_get_v1(keys, slots) == nothing
    assert storage.batch_set_v1(keys, slots) == nothing
    assert not storage.batch_set(keys, [torch.zeros(1)])
    assert storage.batch_get(keys) == [None] * len(nothing)
    part = SimpleNamespace(name="kv", keys=keys, host_indices=slots, hit_policy="of a later release")
    assert storage.batch_get_v2([part]) == {"kv": nothing}
    assert storage.batch_set_v2([part]) == {"kv": nothing}
    assert storage.batch_exists_v2(["a"], [part]).kv_hit_pages == 0
    assert storage.tally.reasons["get", "error"] >= 1


def test_calls_after_the_end_are_misses(tmp_path, caches):
    storage = attach(caches, tmp_path / "root")
    keys, slots = ["0" * 64], torch.arange(16)
    assert storage.batch_set_v1(keys, slots) == [True]
    storage.close()
    storage.close()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, slots) == [False]
    assert storage.batch_set_v1(keys, slots) == [False]
    assert storage.batch_get(keys) == [None]
    assert not storage.batch_set(keys, [torch.zeros(1)])
    assert not storage.clear()


def test_a_child_of_fork_gets_misses_at_once(tmp_path, caches):
    storage = attach(caches, tmp_path / "root")
    keys, slots = ["0" * 64], torch.arange(16)
    assert storage.batch_set_v1(keys, slots) == [True]
    with storage.tally._lock:  # as a thread of ours may at that moment
        child = os.fork()
    if not child:
        missed = storage.batch_exists(keys) == 0 and storage.batch_get_v1(keys, slots) == [False]
        missed &= storage.batch_set_v1(["1" * 64], slots) == [False] and storage.close() is None
        os._exit(0 if missed else 1)
    until_s, ended = time.monotonic() + 60, (0, 0)
    while not ended[0] and time.monotonic() < until_s:
        time.sleep(0.05)
        ended = os.waitpid(child, os.WNOHANG)
    if not ended[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended == (child, 0)
    assert storage.batch_get_v1(keys, slots) == [True]


def test_a_refused_pool_leaves_nothing_attached(tmp_path, caches):
    from hicache_tier.testing.sglang_rig import extra_config

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        config = extra_config(tmp_path / "root", metrics_port=free.getsockname()[1])
    entries = caches.cache.cache_controller.mem_pool_host.entries
    shared = SimpleNamespace(page_size=16, size=64, layout="page_first", shared_allocation_domain=object())
    before = set(threading.enumerate())
    entries.append(SimpleNamespace(name="draft", host_pool=shared, is_primary_index_anchor=True))
    ok, message = caches.attach(config)
    entries.pop()
    assert not ok
    assert "shared arena" in message
    until_s = time.monotonic() + 30
    while time.monotonic() < until_s and any(
        thread.name.startswith("hct-") for thread in set(threading.enumerate()) - before
    ):
        time.sleep(0.05)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("hct-")]
    assert caches.detach()[0]  # SGLang wants that, whatever it said of the attach
    assert caches.attach(config)[0]  # the port is free again


def test_weights_that_are_updated_while_the_server_runs_get_no_pages_of_the_old(tmp_path, caches):
    from sglang.srt.runtime_context import get_context

    from hicache_tier.testing.sglang_rig import prompt

    tokens = prompt(1, 6)
    attach(caches, tmp_path / "root")
    caches.compute(tokens)
    get_context().override(
        "scheduler.weight_version", weight_version="2"
    )  # as /update_weights_from_disk does
    caches.forget()
    assert caches.prefetch(tokens) == 0
    caches.compute(tokens)
    assert caches.storage.tally.reasons["set", "weights_changed"]
    for hits in (0, len(tokens)):
        caches.detach()
        caches.forget()
        attach(caches, tmp_path / "root")
        assert caches.prefetch(tokens) == hits
        if not hits:
            caches.compute(tokens)
    get_context().override("scheduler.weight_version", weight_version="default")
    caches.detach()
    caches.forget()
    attach(caches, tmp_path / "root")
    assert caches.prefetch(tokens) == len(tokens)
