"""Several threads, processes and ranks that use tiers; numbers are the kinds of the fault list."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import warnings
from pathlib import Path

import pytest

import hicache_tier
import hicache_tier_storage
from hicache_tier import open_store
from hicache_tier.errors import ClosedError
from hicache_tier.testing.memory_store import MemoryStore
from hicache_tier.testing.tier_rig import GEOMETRY, Rig, chain


@pytest.mark.parametrize("resets", [False, True])
def test_18_threads_on_one_tier(any_rig, resets):
    rig = any_rig(
        host_pages=24, prefetch="timeout", prefetch_timeout_s=2.0, batch_pages=4, lookup_timeout_s=2.0
    )
    keys = chain(1, 12)
    rig.compute(keys)
    problems = []

    def work(seed):
        try:
            mine = Rig.__new__(Rig)
            mine.__dict__.update(rig.__dict__)
            mine.scratch = type(rig.device).empty(GEOMETRY, 16)
            for turn in range(25):
                length = 1 + (seed * 7 + turn * 5) % len(keys)
                if (seed + turn) % 3 == 0:
                    rig.tier.insert(keys[:length], rig.device, range(length))
                elif (seed + turn) % 3 == 1:
                    rig.tier.prefetch(keys[:length]).wait()
                elif resets and seed == 3:
                    rig.tier.reset()
                rig.tier.match(keys[:length])
                with rig.tier.lock(keys[:length]) as lock:
                    loaded = mine.load(keys[:length])
                    assert resets or loaded >= lock.pages
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, problems
    rig.idle()
    rig.check_stored(keys)


def test_24_a_forked_child_is_told_so_and_harms_nobody(rig):
    rig = rig()
    keys = chain(1, 4)
    rig.insert(keys)
    lock = rig.tier.lock(keys)
    handle = rig.tier.prefetch(chain(2, 2))
    calls = [
        lambda: rig.tier.match(keys),
        lambda: rig.insert(keys),
        lambda: rig.tier.prefetch(keys),
        lambda: rig.tier.load(keys, rig.scratch, range(4)),
        rig.tier.stats,
        rig.tier.reset,
        rig.tier.flush,
        handle.wait,
        handle.cancel,
        lambda: handle.done,
        lambda: rig.tier.lock(keys),
    ]
    with rig.tier._core.lock, warnings.catch_warnings():  # the worst moment: the lock is taken in the parent
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                told = 0
                for call in calls:
                    try:
                        call()
                    except ClosedError as error:
                        told += "forked" in str(error)
                lock.release()
                code = 0 if told == len(calls) and rig.tier.close(1).clean else 2
            finally:
                os._exit(code)
    end = time.monotonic() + 10
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        assert time.monotonic() < end, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0
    lock.release()
    assert rig.load(keys) == 4


def _spawned(root, queue):
    with open_store(root, GEOMETRY, "page_first", model="m", capacity_bytes="4 MiB") as store:
        rig = Rig(store, prefetch="wait_complete")
        found = rig.tier.match(chain(1, 4)).store_pages
        rig.tier.prefetch(chain(1, 4)).wait()
        queue.put((found, rig.load(chain(1, 4)), rig.tier.close(5).clean))


@pytest.mark.slow
def test_24_a_spawned_process_reads_the_same_store(tmp_path):
    with open_store(tmp_path / "store", GEOMETRY, "page_first", model="m", capacity_bytes="4 MiB") as store:
        rig = Rig(store)
        rig.insert(chain(1, 4))
        assert rig.tier.flush(5) == 0, rig.tier.stats()
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=_spawned, args=(tmp_path / "store", queue))
        process.start()
        assert queue.get(timeout=60) == (4, 4, True)
        process.join(10)
        rig.tier.close(5)


def test_25_ranks_may_disagree_and_the_tier_decides_nothing_for_all():
    """Hits 8, 5, 8, 8: each rank says what it has, and the engine takes the least."""
    keys, hits = chain(1, 8), [8, 5, 8, 8]
    rigs = [Rig(MemoryStore(GEOMETRY, "page_first"), prefetch="wait_complete") for _ in hits]
    for rig, count in zip(rigs, hits, strict=True):
        rig.preload(keys[:count])
    found = [rig.tier.match(keys) for rig in rigs]
    assert [match.pages for match in found] == hits
    assert all(type(match.pages) is int for match in found)
    arrived = [rig.tier.prefetch(keys).wait() for rig in rigs]
    assert arrived == hits
    least = min(arrived)  # an all-reduce, which is the engine's business
    assert [rig.load(keys[:least]) for rig in rigs] == [5] * 4
    rigs[3].tier.reset()  # one rank loses everything between the decision and the copy
    assert [rig.load(keys[:least]) for rig in rigs] == [5, 5, 5, 0]
    for rig in rigs:
        rig.tier.close(5)
        rig.host.close()


def test_25_nothing_of_ours_talks_to_other_ranks():
    roots = [Path(module.__file__).parent for module in (hicache_tier, hicache_tier_storage)]
    sources = [path for root in roots for path in root.rglob("*.py") if "testing" not in path.parts]
    assert len(sources) > 150
    # SGLang leaves it to a linker to have the ranks agree, over groups that SGLang made.
    assert [path.name for path in sources if "torch.distributed" in path.read_text()] == ["linker.py"]
