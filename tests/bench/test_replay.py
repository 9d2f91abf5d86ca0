"""`bench replay`: hits as an ideal cache has them, every byte checked, losses counted, peers beside."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from hicache_tier.bench.device_cache import DeviceCache
from hicache_tier.bench.errors import BenchError
from hicache_tier.bench.replay_models import MODELS
from hicache_tier.bench.replay_pages import KeyedPages, block_keys
from hicache_tier.bench.replay_peers import PEERS
from hicache_tier.bench.replay_run import ReplayShape, replay
from hicache_tier.bench.replay_summary import summary
from hicache_tier.bench.trace_generator import generate
from hicache_tier.bench.trace_statistics import ideal_hits
from hicache_tier.bench.traces import write_trace
from hicache_tier.geometry import KVGeometry
from hicache_tier.layout import Layout
from hicache_tier.testing.memory_store import MemoryStore

SMALL = KVGeometry.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16", page_tokens=2)
CPU = torch.device("cpu")


def shape(longest, **options):
    defaults = {
        "geometry": SMALL,
        "layout": Layout.PAGE_FIRST,
        "device": CPU,
        "pages_a_block": 1,
        "longest": longest,
        "device_pages": 0,
        "host_pages": 4 * longest,
        "capacity_nbytes": 1 << 30,
        "policy": "write_through",
        "prefetch": "wait_complete",
        "lookup_timeout_s": 5.0,
        "speed": 0.0,
    }
    return ReplayShape(**(defaults | options))


@pytest.fixture(scope="module")
def requests():
    return [request for request in generate(400, seed=1) if len(request.blocks) < 60][:300]


def run(requests, store, **options):
    longest = max(len(request.blocks) for request in requests) * options.get("pages_a_block", 1)
    wanted = shape(longest, **options)
    outcome = replay(requests, wanted, store, lambda: None)
    return summary(outcome, wanted, ideal_hits(requests))


@pytest.mark.parametrize(
    "options", [{}, {"pages_a_block": 3}, {"device_pages": 150}, {"policy": "write_back"}]
)
def test_hits_equal_the_ideal_where_all_fits(requests, options):
    found = run(requests, MemoryStore(SMALL, "page_first"), **options)
    assert found["hit_rate"] == pytest.approx(found["ideal_hit_rate"])
    assert found["ideal_hit_rate"] > 0.05
    assert found["wrong_pages"] == 0
    assert found["unsaved_pages"] == 0
    assert found["drops"] == {}
    hits = {name: tier["hit_pages"] for name, tier in found["tiers"].items()}
    assert hits["host"] + hits["store"] == found["checked_pages"] > 0
    assert (hits["device"] > 0) == ("device_pages" in options)
    assert hits["store"] > 0
    last = found["timeline"][-1]
    total = sum(last[f"{tier}_hit_rate"] for tier in hits)
    assert (last["requests"], total) == (len(requests), pytest.approx(found["hit_rate"]))
    assert last["ideal_hit_rate"] == pytest.approx(found["ideal_hit_rate"])


def test_a_wrong_byte_is_seen(requests):
    store = MemoryStore(SMALL, "page_first")
    flipped = []

    def flip(keys):
        if not flipped:
            data = bytearray(store.pages[keys[-1]])
            data[7] ^= 1
            store.pages[keys[-1]] = bytes(data)
            flipped.append(keys[-1])

    store.plan["get"] = flip
    found = run(requests, store)
    assert flipped
    assert found["wrong_pages"] >= 1
    assert found["hit_rate"] < found["ideal_hit_rate"]


def test_a_page_of_another_key_is_seen(requests):
    store = MemoryStore(SMALL, "page_first")
    store.plan["get"] = lambda keys: store.pages.update({keys[0]: next(iter(store.pages.values()))})
    assert run(requests, store)["wrong_pages"] >= 1


def test_what_is_lost_is_counted_with_its_reason(requests):
    store = MemoryStore(SMALL, "page_first")
    refused = {key for request in requests[:100] for key in block_keys(request.blocks[1:2], 1)}
    store.refuse = dict.fromkeys(refused, "no_luck")
    found = run(requests, store)
    assert found["hit_rate"] < found["ideal_hit_rate"]
    assert found["drops"]["writes.failed_pages.no_luck"] > 0
    assert found["unsaved_pages"] > 0


@pytest.mark.parametrize("name", sorted(MODELS))
def test_pages_of_every_model_are_checked_to_the_byte(name):
    pages = KeyedPages(MODELS[name](1), 4, CPU)
    keys = block_keys([1, 2], 1)
    pages.compute([3, 0], keys)
    assert pages.wrong([3, 0], keys) == []
    assert pages.wrong([0, 3], keys) == [0, 1]
    for plane in (pages._planes[0], pages._planes[-1]):
        octets = plane.view(torch.uint8)
        for at in (0, octets.shape[1] - 1):
            octets[0, at] ^= 1
            assert pages.wrong([3, 0], keys) == [1]
            octets[0, at] ^= 1
    pages.blank([3])
    assert pages.wrong([3, 0], keys) == [0]


def test_device_pages_leave_last_used_first_leaves_before_heads():
    cache = DeviceCache(4, keeps=True)
    a = cache.take(["a0", "a1", "a2"])
    cache.release(["a0", "a1", "a2"], a)
    b = cache.take(["a0", "b1", "b2"])
    assert b[0] == a[0]
    cache.release(["a0", "b1", "b2"], b)
    assert cache.resident(["a0", "a1", "a2"]) == 2  # b2 took the free page's fellow: the leaf a2
    assert cache.resident(["a0", "b1", "b2"]) == 3
    every = cache.take(["c0", "c1", "c2", "c3"])
    assert sorted(every) == [0, 1, 2, 3]
    assert cache.resident(["a0"]) == 0


def test_a_device_without_a_cache_forgets():
    cache = DeviceCache(3, keeps=False)
    cache.release(["a", "b"], cache.take(["a", "b"]))
    assert cache.resident(["a"]) == 0
    assert sorted(cache.take(["a", "b", "c"])) == [0, 1, 2]


def test_the_first_requests_of_the_real_trace(bench, conversation, tmp_path):
    result = bench("replay", conversation, "--requests", 150, "--root", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["requests"] == 150
    assert found["hit_rate"] == pytest.approx(found["ideal_hit_rate"], abs=0.005)
    assert found["model"]["page_nbytes"] == 65536
    assert set(found["tiers"]) == {"device", "host", "store"}
    assert found["seconds"] < 60
    assert list(tmp_path.iterdir()) == []


def test_peers_in_the_same_run(bench, tmp_path):
    arguments = ("generated", "--requests", 60, "--root", tmp_path, "--page-tokens", 1)
    result = bench("replay", *arguments, "--peer", "file-a-page", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (peer,) = found["peers"]
    assert peer["hit_rate"] == found["hit_rate"] == pytest.approx(found["ideal_hit_rate"])
    for run in (found, peer):
        assert run["wrong_pages"] == 0
        assert run["paths"]["host to store"]["bytes"] == found["trace"]["distinct_blocks"] * 4096
        assert run["latency_ms"]["match"]["count"] == 60
    text = bench("replay", *arguments, "--peer", "file-a-page")
    assert "file-a-page" in text.stdout
    assert "ideal" in text.stdout


@pytest.mark.sglang
@pytest.mark.skipif(bool(PEERS["sglang-file"].why_not()), reason=PEERS["sglang-file"].why_not())
def test_sglangs_file_backend_as_a_peer(bench, tmp_path):
    result = bench(
        "replay", "generated", "--requests", 60, "--root", tmp_path, "--peer", "sglang-file", "--json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    (peer,) = found["peers"]
    assert peer["hit_rate"] == found["hit_rate"]
    assert (peer["wrong_pages"], list(tmp_path.iterdir())) == (0, [])


def test_a_store_that_is_too_small_misses(bench, tmp_path):
    trace = tmp_path / "trace"
    write_trace(trace, generate(250, seed=1))
    root = tmp_path / "root"
    root.mkdir()
    result = bench(
        "replay",
        trace,
        "--root",
        root,
        "--page-tokens",
        1,
        "--capacity",
        "4MiB",
        "--host-size",
        "4MiB",
        "--json",
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["hit_rate"] < found["ideal_hit_rate"]
    assert found["wrong_pages"] == 0
    assert found["evictions"]


def test_a_paced_replay_takes_its_time(bench, tmp_path):
    result = bench(
        "replay",
        "generated",
        "--requests",
        40,
        "--root",
        tmp_path,
        "--page-tokens",
        1,
        "--speed",
        8,
        "--json",
    )
    found = json.loads(result.stdout)
    assert found["seconds"] >= found["trace"]["seconds"] / 8 > 0.5
    assert found["held_seconds"] == 0


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("missing.jsonl",), "missing.jsonl"),
        (("generated", "--model", "llama"), "not known"),
        (("generated", "--requests", 5, "--host-size", "64KiB"), "longest prompt"),
        (("generated", "--requests", 5, "--device-pages", 1), "longest prompt"),
        (("generated", "--model", "llama-3.1-8b", "--pages-per-block", 4096), "GB free"),
        (("generated", "--requests", 5, "--host-size", "big"), "not a size"),
        (("generated", "--requests", 5, "--host-size", "1PiB"), "Ask for fewer pages"),
        (("generated", "--requests", 5, "--layout", "rows"), "rows"),
        (("generated", "--requests", 5, "--policy", "never"), "never"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(bench, tmp_path, arguments, fault):
    result = bench("replay", *arguments, "--root", tmp_path)
    assert result.exit_code == 2
    assert fault in " ".join(result.output.split())
    assert list(tmp_path.iterdir()) == []


def test_peers_that_are_not_there_are_refused(bench, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    result = bench("replay", "generated", "--root", tmp_path, "--peer", "sglang-file")
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])


def test_plot(bench, tmp_path):
    pytest.importorskip("matplotlib")
    arguments = ("--requests", 30, "--root", tmp_path, "--page-tokens", 1, "--peer", "file-a-page")
    assert bench("replay", "generated", *arguments, "--plot", tmp_path / "a.png").exit_code == 0
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_plot_without_matplotlib_names_the_extra(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("replay", "generated", "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "hicache-tier[plot]" in result.output
    assert issubclass(BenchError, RuntimeError)
