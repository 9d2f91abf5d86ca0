"""The linker with SGLang's own tree and factory: from the device to storage and back, with no host pool."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
KINDS = ("mha", "wide_k", "mla")
LAYOUTS = ("page_first_direct", "page_first", "layer_first")


@pytest.fixture
def linked(tmp_path, context):
    """Make caches with a linker; they are closed with the test."""
    from hicache_tier.testing.sglang_linker_rig import LinkedCaches, linker_config

    made = []
    server = context()

    def make(kind="mha", root="root", **options):
        config = linker_config(tmp_path / root, **{"deadline_s": 4, "probe_interval_s": 0.1} | options)
        made.append(LinkedCaches(server, config, kind))
        return made[-1]

    yield make
    for caches in made:
        caches.close()


def of(seed, pages):
    from hicache_tier.testing.sglang_rig import prompt

    return prompt(seed, pages)


class Gate:
    """Storage that can be made to hang, for reads or for writes."""

    def __init__(self, monkeypatch):
        from hicache_tier_storage.posix import PosixEngine

        self.free = {"read": threading.Event(), "write": threading.Event()}
        for name, event in self.free.items():
            event.set()
            monkeypatch.setattr(PosixEngine, name, self._gated(getattr(PosixEngine, name), event))

    @staticmethod
    def _gated(real, event):
        def call(engine, batch):
            event.wait(30)
            return real(engine, batch)

        return call


def test_it_is_what_sglang_asks_for():
    """Every method of this release's interface is there, and takes what SGLang passes."""
    from hicache_tier.testing.sglang_cpu import prepare

    prepare()
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

    from hicache_tier.integrations import sglang

    cls = sglang.HiCacheTierLinker
    assert issubclass(cls, UnifiedCacheLinker)
    assert not inspect.isabstract(cls)
    for name in UnifiedCacheLinker.__abstractmethods__:
        asked = inspect.signature(getattr(UnifiedCacheLinker, name)).parameters
        assert list(inspect.signature(getattr(cls, name)).parameters) == list(asked), name
    with pytest.raises(AttributeError, match="HiCacheTierLinkr"):
        sglang.HiCacheTierLinkr  # noqa: B018


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_from_device_to_storage_and_back(linked, kind, layout):
    caches = linked(kind, layout=layout)
    first, second = of(1, 9), of(1, 4) + of(2, 5)
    for tokens in (first, second):
        caches.compute(tokens)
    assert caches.linker.tally.reasons["set", "stored"] == 14
    caches.forget()
    assert caches.load(first) == len(first)
    assert caches.right(first)
    assert caches.found(second) == 5 * 16  # the four pages before are on the device
    assert caches.load(second) == 5 * 16
    assert caches.right(second)
    assert caches.found(of(3, 4)) == 0
    caches.forget()
    assert caches.load(second) == len(second)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_either_hook_reads_what_the_other_wrote(tmp_path, context, linked, kind, layout):
    from hicache_tier.testing.sglang_rig import Caches, extra_config

    if (kind, layout) == ("wide_k", "layer_first"):
        pytest.skip("SGLang has no such host pool")
    hosted = Caches(context(layout), layout, kind)
    assert hosted.attach(extra_config(tmp_path / "root"))[0]
    caches = linked(kind, layout=layout)
    first, second = of(1, 6), of(2, 7)
    hosted.compute(first)
    assert caches.pump(lambda: caches.found(first) == len(first), 5.0)
    assert caches.load(first) == len(first)
    assert caches.right(first)
    caches.compute(second)
    hosted.forget()
    assert hosted.pump(lambda: hosted.prefetch(second) == len(second))  # another writer is news
    assert hosted.load_back(second) == len(second)
    assert hosted.right(second)
    assert hosted.detach()[0]


@pytest.mark.parametrize(
    "other", [{"model": "org/n"}, {"model_revision": "2"}, {"tenant": "t"}, {"weight_version": "7"},
              {"layout": "page_first"}]
)  # fmt: skip
def test_pages_of_another_identity_are_misses(linked, other):
    caches, tokens = linked(), of(1, 4)
    caches.compute(tokens)
    assert linked(**other).found(tokens) == 0
    assert linked().found(tokens) == len(tokens)


def test_a_page_that_is_gone_by_the_read_is_computed(linked):
    """The request goes on without the load, and its slots are free again."""
    caches, tokens = linked(), of(1, 6)
    caches.compute(tokens)
    caches.forget()
    free = caches.allocator.available_size()
    store = caches.linker.stores["kv"].store
    store.delete([next(iter(store.tables()[0]))])
    caches.linker.lookup = lambda *_: list(range(1, 7))
    assert caches.load(tokens) == 0
    assert caches.allocator.available_size() == free
    assert caches.ready_is_idle()
    del caches.linker.lookup
    caches.compute(tokens)
    caches.forget()
    assert caches.load(tokens) == len(tokens)


def test_a_damaged_page_is_computed(linked):
    caches, tokens = linked(verify="always"), of(1, 6)
    caches.compute(tokens)
    caches.forget()
    core = caches.linker.stores["kv"].store._core
    stride, slot = core.writer.facts.shape.stride, next(iter(core.index.values()))
    with core.writer.slabs[0].path.open("r+b") as slab:
        slab.seek(slot * stride + 100)
        byte = slab.read(1)[0]
        slab.seek(slot * stride + 100)
        slab.write(bytes([byte ^ 1]))
    assert caches.found(tokens) == len(tokens)
    assert caches.load(tokens) == 0
    assert caches.linker.tally.reasons["get", "checksum"] == 1
    caches.compute(tokens)
    caches.forget()
    assert caches.load(tokens) == len(tokens)


def test_a_read_that_hangs_is_left_and_lands_nowhere(linked, monkeypatch):
    gate = Gate(monkeypatch)
    caches, tokens = linked(), of(1, 6)
    caches.compute(tokens)
    caches.forget()
    caches.linker.desk.deadline_s = 0.5
    gate.free["read"].clear()
    started_s = time.monotonic()
    assert caches.load(tokens) == 0
    assert time.monotonic() - started_s < 5.0
    assert caches.found(tokens) == 0  # the breaker is open
    assert caches.load(tokens) == 0
    caches.linker.desk.deadline_s = 4
    gate.free["read"].set()
    assert caches.pump(lambda: caches.found(tokens) == len(tokens), 10.0)  # it closes by itself
    assert all(not buffer.any() for buffer in caches._buffers())
    assert caches.load(tokens) == len(tokens)


def test_a_write_that_hangs_lets_the_pages_go(linked, monkeypatch):
    gate = Gate(monkeypatch)
    caches, tokens = linked(), of(1, 6)
    caches.linker.desk.deadline_s = 0.5
    gate.free["write"].clear()
    started_s = time.monotonic()
    caches.compute(tokens)  # which waits until the tree holds no page for storage
    assert time.monotonic() - started_s < 5.0
    assert caches.found(tokens + of(2, 1)) == 0
    caches.linker.desk.deadline_s = 4
    gate.free["write"].set()
    assert caches.pump(lambda: not caches.linker.desk.health.reads_open, 10.0)
    time.sleep(0.3)
    caches.compute(tokens)  # a failure is tried again
    caches.forget()
    assert caches.load(tokens) == len(tokens)


def test_nothing_that_is_asked_wrongly_raises_into_the_scheduler(linked):
    from types import SimpleNamespace

    linker = linked().linker
    slots = torch.arange(16)
    for keys, indices in [
        (["a", None], slots),
        ([7], slots),
        (["\ud800"], slots),
        (["a"], [1]),
        (["a"], slots + 1),
    ]:
        ask = [SimpleNamespace(name="kv", keys=keys, device_indices=indices, hit_policy="of a later release")]
        assert linker.lookup("r", ask) == []
        assert not linker.load("r", ask)
        if linker.offload(ask):
            linker._offloads.drain(time.monotonic() + 10)
    assert linker.lookup("r", None) == []
    assert not linker.offload(None)
    assert linker.reset() is None


def test_weights_that_are_updated_while_the_server_runs_get_no_pages_of_the_old(linked):
    from sglang.srt.runtime_context import get_context

    caches, tokens = linked(), of(1, 4)
    caches.compute(tokens)
    caches.forget()
    get_context().override("scheduler.weight_version", weight_version="2")
    assert caches.found(tokens) == 0
    caches.linker.lookup = lambda *_: list(range(1, 5))  # one that was made before the update
    assert caches.load(tokens) == 0
    assert linked().found(tokens) == 0


def test_no_wrong_byte_from_storage_that_fails(linked, monkeypatch):
    """Random requests: a third of all reads and writes fail, some are late; what is loaded is right."""
    import random

    from hicache_tier_storage.posix import PosixEngine

    luck = random.Random(7)

    def unlucky(real):
        def call(engine, batch):
            if luck.random() < 0.3:
                return ["io_error: Input/output error"] * len(batch)
            time.sleep(0.3 if luck.random() < 0.02 else 0.001)
            return real(engine, batch)

        return call

    for name in ("read", "write"):
        monkeypatch.setattr(PosixEngine, name, unlucky(getattr(PosixEngine, name)))
    caches = linked(deadline_s=0.2, probe_interval_s=0.02)
    prompts = [of(seed, 5) + of(10 + branch, 4) for seed in range(3) for branch in range(3)]
    loaded = 0
    for _ in range(200):
        tokens = luck.choice(prompts)
        action = luck.random()
        if action < 0.35:
            have = caches.match(tokens, "have")[1].device_prefix_len
            if have < len(tokens):
                caches.forget()
            caches.compute(tokens)
        elif action < 0.6:
            caches.forget()
        count = caches.load(tokens)
        assert count >= 0, "wrong bytes"
        assert caches.right(tokens)
        loaded += count
        if caches.allocator.available_size() < 2 * len(tokens):
            caches.forget()
    assert loaded > 20 * 16
    assert caches.linker.tally.reasons["get", "io_error"] > 0
    caches.forget()
    assert caches.allocator.available_size() == 64 * 16


def test_reset_close_and_begin_again(linked, monkeypatch):
    gate = Gate(monkeypatch)
    caches, tokens = linked(), of(1, 5)
    caches.compute(tokens)
    caches.linker.desk.deadline_s = 0.5
    gate.free["write"].clear()
    slots = caches.allocator.alloc(16)
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    caches.cache.insert(InsertParams(key=RadixKey(array("q", of(4, 1))), value=slots))
    assert caches.cache.linker.pending_offloads
    started_s = time.monotonic()
    caches.forget()  # with an offload under way
    assert time.monotonic() - started_s < 9.0
    assert not caches.cache.linker.pending_offloads
    gate.free["write"].set()
    descriptors = threads = 0
    for turn in range(20):
        caches.close()
        caches.link()
        caches.forget()
        assert caches.load(tokens) == len(tokens), turn
        if turn == 4:
            descriptors, threads = open_files(), threading.active_count()
    assert open_files() <= descriptors + 2
    assert threading.active_count() <= threads + 2


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_request_that_ends_before_its_batch(linked):
    caches, tokens = linked(), of(1, 5)
    caches.compute(tokens)
    caches.forget()
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

    request, match = caches.match(tokens, "gone")
    params = InitLoadBackParams(
        best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request
    )
    assert caches.cache.init_load_back(params)[0] == len(tokens)
    slots = caches.cache.linker.private_load_indices["gone"]
    caches.cache.linker.release_request("gone")
    caches.allocator.free(slots)
    assert caches.ready_is_idle()
    assert caches.load(tokens) == len(tokens)


def test_a_wrong_option_is_one_clear_line(linked, tmp_path):
    for options, said in [
        ({"capcity_bytes": 1}, "option 'capcity_bytes' is not known. Did you mean 'capacity_bytes'?"),
        ({"layuot": "page_first"}, "Did you mean 'layout'?"),
        ({"layout": "page_fist"}, "Did you mean 'page_first'?"),
        ({"layout": "page_head"}, "rows are split by head"),
        ({"engine": "posx"}, "Did you mean 'posix'?"),
    ]:
        with pytest.raises(ValueError) as caught:
            linked(**options)
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("root/*"))


def test_several_drives(tmp_path, context):
    from hicache_tier.testing.sglang_linker_rig import LinkedCaches, linker_config

    config = linker_config("")
    extra = config["linker_extra_config"]
    del extra["root"]
    extra["roots"] = [str(tmp_path / name) for name in ("one", "two")]
    caches, tokens = LinkedCaches(context(), config), of(1, 24)
    caches.compute(tokens)
    caches.forget()
    assert caches.load(tokens) == len(tokens)
    stats = caches.linker.stores["kv"].store.stats()
    assert all(root["pages"] for root in stats["roots"])
    assert sum(root["pages"] for root in stats["roots"]) == 24
    caches.close()


def test_no_more_is_found_than_storage_loads_in_time(linked):
    caches, tokens = linked(), of(1, 9)
    caches.linker.stores["kv"].paces["set"].pages = 1  # and stored in rounds of two
    caches.compute(tokens)
    assert caches.linker.tally.reasons["set", "stored"] == 9
    caches.forget()
    caches.linker.stores["kv"].paces["get"].pages = 2
    assert caches.found(tokens) == 6 * 16
    assert caches.load(tokens) == 6 * 16
    caches.forget()
    assert caches.load(tokens) == 9 * 16  # it was faster than thought


def test_the_flags_at_start(tmp_path, context):
    """The flags of the command line, by SGLang's own way from them to the caches."""
    from types import SimpleNamespace

    from hicache_tier.testing.sglang_linker_rig import LinkedCaches, linker_config

    config = linker_config(tmp_path / "root")
    server = context(
        enable_hierarchical_cache=False,
        enable_unified_cache_external_linker=True,
        unified_cache_external_linker_backend="dynamic",
        unified_cache_external_linker_config=config,
    )
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.runtime_context import get_server_args

    counters = []
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(forward_stream=None),
        register_hicache_layer_transfer_counter=counters.append,
    )
    caches = LinkedCaches(server, config)
    caches.close()
    caches.cache = create_unified_radix_cache(
        SimpleNamespace(
            server_args=get_server_args(),
            params=caches._params,
            is_hybrid_swa=False,
            is_hybrid_ssm=False,
            enable_hierarchical_cache=False,
            tp_worker=worker,
        )
    )
    assert counters == [caches.linker.layer_done_counter] == [caches.pool.layer_transfer_counter]
    tokens = of(1, 5)
    caches.compute(tokens)
    caches.forget()
    assert caches.load(tokens) == len(tokens)
    caches.close()


RANK = """
import json, sys, time
from hicache_tier.testing.sglang_cpu import ServerContext
from hicache_tier.testing.sglang_linker_rig import LinkedCaches, linker_config
from hicache_tier.testing.sglang_rig import prompt
root, meet, rank, size = sys.argv[1:]
context = ServerContext(f"file://{meet}", int(rank), int(size), page_size=16, served_model_name="org/model")
tokens, answer = prompt(1, 7), {}
for kind in ("mha", "mla"):
    caches = LinkedCaches(context, linker_config(root), kind)
    caches.compute(tokens)
    caches.forget()
    for _ in range(100):  # lookups do not wait for what another rank wrote; ranks agree on each answer
        if caches.found(tokens) == len(tokens):
            break
        time.sleep(0.05)
    assert caches.load(tokens) == len(tokens), "load"
    answer[kind] = caches.linker.tally.reasons["set", "stored"]
    caches.forget()
    if rank == "1":  # one rank's storage fails after all of them found the pages
        caches.linker.desk.get = lambda parts: [[False] * len(part.names) for part in parts]
    assert caches.found(tokens) == len(tokens)
    assert caches.load(tokens) == 0, "a rank that lacks pages"
    answer[kind, "other"] = caches.linker.tally.reasons["get", "other_rank"]
    caches.close()
context.close()
print(json.dumps({str(name): value for name, value in answer.items()}))
"""


def test_ranks_agree_on_every_load(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", RANK, tmp_path / "root", tmp_path / "meet"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, (_, err) in zip(ranks, told, strict=True):
        assert process.returncode == 0, err[-3000:]
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in told)
    assert (first["mha"], second["mha"]) == (7, 7)
    assert (first["mla"], second["mla"]) == (7, 0)  # latents are written by one
    assert first["('mha', 'other')"] == 1
    assert second["('mha', 'other')"] == 0
