"""Faults of NIXL and of what it moves: a verdict a page, a deadline on every wait, nothing left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.engine import Bench, HookLog, Memory
from hicache_tier.testing.store import PageStoreSuite
from hicache_tier.testing.store_rig import StoreRig, writer_of
from hicache_tier_storage import nixl_lane, open_store
from hicache_tier_storage.accelerators import nixl_posix
from hicache_tier_storage.engine import STILL_UNDER_WAY
from hicache_tier_storage.nixl_engine import NixlEngine
from hicache_tier_storage.nixl_lane import QUEUES, LaneError, NixlLane, posix_plugin
from hicache_tier_storage.nixl_package import why_no_nixl
from hicache_tier_storage.slab import StoreFile

pytestmark = [
    pytest.mark.nixl,
    pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl()),
]
DRIVER = Path(__file__).with_name("kill_rounds.py")


class TestStoreOnNixl(PageStoreSuite):
    @pytest.fixture(autouse=True)
    def shared_engine(self):
        self.engine = NixlEngine(direct=False, threads=2, min_piece_nbytes=1)
        yield
        self.engine.close()

    def open_store(self, root):
        room = 256 * max(8192, self.geometry.page_nbytes)
        return open_store(root, self.geometry, self.layout, capacity_bytes=room, engine=self.engine)


@pytest.fixture(params=QUEUES)
def queue(request, tmp_path):
    """A queue, where the machine allows it."""
    (found,) = [row for row in nixl_posix(tmp_path, direct=False) if row.mode == f"POSIX {request.param}"]
    if not found.usable:
        pytest.skip(found.reason)
    return request.param


@pytest.fixture
def engine(queue):
    engine = NixlEngine(direct=False, queue=queue, threads=2, min_piece_nbytes=1)
    yield engine
    engine.close()


def places(slab, count):
    return [(slab, slot) for slot in range(count)]


def test_a_short_file_in_a_batch_fails_its_pages_alone(engine, tmp_path, monkeypatch):
    """Cut after it was opened and checked, so that only the transfer can see it."""
    bench = Bench(tmp_path, [4096], slots=64)
    slabs = [bench.slab("whole"), bench.slab("cut")]
    memory = Memory([4096], 128, between=0)
    memory.fill()
    everything = places(slabs[0], 64) + places(slabs[1], 64)
    assert not any(engine.write(bench.batch(memory, everything)))
    os.truncate(slabs[1].path, 40 * 4096 + 100)
    monkeypatch.setattr(StoreFile, "check", lambda *_: None)
    target = Memory([4096], 128, between=0)
    batch = bench.batch(target, everything)
    log = batch.hook = HookLog(128)
    reasons = engine.read(batch)
    good = 64 + 40
    assert not any(reasons[:good])
    assert all(reason.startswith("io_error") for reason in reasons[good:])
    assert log.calls == [1] * good + [0] * (128 - good)
    assert all(target.page(page) == memory.page(page) for page in range(good))
    assert engine.retried_pages >= 24
    # The queue serves the next transfer.
    assert not any(engine.read(bench.batch(Memory([4096], 64, between=0), places(slabs[0], 64))))
    bench.close()


def test_batches_larger_than_a_queue_are_split(engine, tmp_path):
    bench = Bench(tmp_path, [512] * 16, slots=512)
    slab = bench.slab()
    source, target = (Memory([512] * 16, 300, between=512) for _ in range(2))
    source.fill()
    order = [(slab, slot) for slot in np.random.default_rng(1).permutation(512)[:300].tolist()]
    assert not any(engine.write(bench.batch(source, order)))
    assert not any(engine.read(bench.batch(target, order)))
    assert all(target.page(page) == source.page(page) for page in range(300))
    assert target.between_untouched()
    assert engine.retried_pages == 0
    bench.close()


def test_reads_and_writes_never_share_an_agent(engine, tmp_path):
    bench = Bench(tmp_path, [4096], slots=256)
    slab = bench.slab()
    used = {True: set(), False: set()}
    real = NixlLane.transfer

    def seen(lane, pieces, files, *, write):
        used[write].add(id(lane))
        return real(lane, pieces, files, write=write)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlLane, "transfer", seen)

        def work(first):
            memory = Memory([4096], 100, between=0, seed=first)
            memory.fill()
            mine = [(slab, slot) for slot in range(first, first + 100)]
            for _ in range(5):
                assert not any(engine.write(bench.batch(memory, mine)))
                assert not any(engine.read(bench.batch(memory, mine)))

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 128)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert used[True]
    assert used[False]
    assert not used[True] & used[False]
    bench.close()


def never_done(monkeypatch):
    """Let transfers run, and never say that they are done."""
    real = nixl_lane.NixlLane.post

    def blind(lane, pieces, files, *, write):
        lane._agent.check_xfer_state = lambda _: "PROC"
        return real(lane, pieces, files, write=write)

    monkeypatch.setattr(nixl_lane.NixlLane, "post", blind)


def test_a_backend_that_never_completes(tmp_path, monkeypatch):
    engine = NixlEngine(direct=False, threads=2, deadline_s=0.2, min_piece_nbytes=1)
    bench = Bench(tmp_path, [4096])
    slab = bench.slab()
    memory = Memory([4096], 4, between=0)
    memory.fill()
    with monkeypatch.context() as patch:
        never_done(patch)
        start = time.monotonic()
        reasons = engine.write(bench.batch(memory, places(slab, 4)))
        assert time.monotonic() - start < 5
    assert [reason.partition(":")[0] for reason in reasons] == ["timeout"] * 4
    assert not any(engine.write(bench.batch(memory, places(slab, 4))))  # on a new agent
    engine.close()
    bench.close()


def test_an_interrupt_waits_for_what_is_under_way(tmp_path, monkeypatch):
    """Through further interrupts; the agent is used again."""
    engine = NixlEngine(direct=False, threads=1, min_piece_nbytes=1)
    bench = Bench(tmp_path, [4096])
    memory = Memory([4096], 4, between=0)
    memory.fill()
    batch = bench.batch(memory, places(bench.slab(), 4))
    assert not any(engine.write(batch))
    (lane,) = engine._idle[True]
    real, asked = NixlLane.ask, []

    def ask(lane, handle):
        if asked.append(1) or len(asked) in {2, 3}:
            raise KeyboardInterrupt
        return real(lane, handle) if len(asked) > 4 else "PROC"

    with monkeypatch.context() as patch:
        patch.setattr(NixlLane, "ask", ask)
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.write(batch)
    assert not hasattr(caught.value, "__notes__")
    assert not lane._under_way
    assert engine._idle[True] == [lane]
    assert not any(engine.write(batch))
    engine.close()
    bench.close()


def test_an_interrupt_does_not_wait_for_ever(tmp_path, monkeypatch):
    engine = NixlEngine(direct=False, threads=1, deadline_s=0.2, min_piece_nbytes=1)
    bench = Bench(tmp_path, [4096])
    memory = Memory([4096], 4, between=0)
    batch, asked = bench.batch(memory, places(bench.slab(), 4)), []

    def ask(*_):
        if asked.append(1) or len(asked) == 2:
            raise KeyboardInterrupt
        return "PROC"

    with monkeypatch.context() as patch:
        patch.setattr(NixlLane, "ask", ask)
        with pytest.raises(KeyboardInterrupt) as caught:
            engine.write(batch)
    assert caught.value.__notes__ == [STILL_UNDER_WAY]
    assert not engine._idle[True]
    assert not any(engine.write(batch))  # on a new agent
    engine.close()
    bench.close()


def test_helpers_are_waited_for_however_often_that_is_interrupted(tmp_path, monkeypatch):
    engine = NixlEngine(direct=False, threads=2, min_piece_nbytes=1)
    bench = Bench(tmp_path, [1 << 20], slots=4)
    memory = Memory([1 << 20], 4, between=0)
    memory.fill()
    batch = bench.batch(memory, places(bench.slab(), 4))
    mine, gate, helping, done = threading.get_ident(), threading.Event(), threading.Event(), []
    real, wait_for = NixlLane.transfer, threading.Condition.wait_for

    def transfer(*arguments, **options):
        if threading.get_ident() == mine:
            helping.wait(10)
            raise KeyboardInterrupt
        helping.set()
        gate.wait(10)
        real(*arguments, **options)
        done.append(1)

    def interrupted(condition, predicate, timeout=None):
        if not gate.is_set():
            gate.set()
            raise KeyboardInterrupt
        return wait_for(condition, predicate, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(NixlLane, "transfer", transfer)
        patch.setattr(threading.Condition, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.write(batch)
        assert done == [1]
    engine.close()
    bench.close()


def test_an_agent_that_has_something_under_way_is_not_made_anew():
    lane = NixlLane(posix_plugin("aio"), 0.1)
    lane.usable = False
    lane._under_way.add("a transfer")
    assert not lane.retire()
    lane.ended("a transfer")
    assert lane.retire()
    with pytest.raises(LaneError, match="closed"):
        lane.post(None, {}, write=True)


def test_slots_of_a_write_that_never_ended_are_set_aside(tmp_path, monkeypatch):
    engine = NixlEngine(direct=False, threads=2, deadline_s=0.2, min_piece_nbytes=1)
    rig = StoreRig(tmp_path)
    store = rig.open(engine=engine)
    keys = keys_of("late", 40)
    with monkeypatch.context() as patch:
        never_done(patch)
        assert {reason.partition(":")[0] for reason in rig.put(store, keys[:8])} == {"timeout"}
    assert store.stats()["stranded_slots"] == 8
    late = set(np.flatnonzero(writer_of(store).pins).tolist())
    assert len(late) == 8
    assert rig.put(store, keys) == ["stored"] * 40
    assert not late & set(store._core.index.values())
    assert rig.get(store, keys) == ["loaded"] * 40
    rig.close()
    engine.close()
    again = StoreRig(tmp_path)
    assert again.get(again.open(), keys) == ["loaded"] * 40
    again.close()


def test_an_agent_that_cannot_be_made_costs_speed_alone(tmp_path, monkeypatch):
    engine = NixlEngine(direct=False, threads=2, min_piece_nbytes=1)
    bench = Bench(tmp_path, [4096])
    slab = bench.slab()
    memory = Memory([4096], 4, between=0)
    memory.fill()
    monkeypatch.setattr(nixl_lane.NixlLane, "__init__", lambda *_: 1 / 0)
    assert not any(engine.write(bench.batch(memory, places(slab, 4))))
    assert engine.retried_pages == 4
    assert bench.on_disk(slab, 3) == memory.page(3)
    engine.close()
    bench.close()


MANY = """
import json, os, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig
from hicache_tier_storage.nixl_engine import NixlEngine
rig = StoreRig(Path(sys.argv[1]))
engine = NixlEngine(direct=False, queue=sys.argv[2], threads=2, min_piece_nbytes=1)
store = rig.open(engine=engine, capacity_bytes="8 MiB")
keys, bad, counts = keys_of("many", 300), 0, []
for turn in range(10_000 // 300 + 1):
    bad += sum(reason not in {"stored", "already_stored"} for reason in rig.put(store, keys))
    bad += sum(reason != "loaded" for reason in rig.get(store, keys))
    store.clear()
    counts.append(len(os.listdir("/proc/self/fd")))
print(json.dumps({"bad": bad, "fds": counts, "retried": engine.retried_pages}))
rig.close()
engine.close()
print(json.dumps({"left": len(os.listdir("/proc/self/fd"))}))
"""


def test_ten_thousand_pages_with_64_open_files(tmp_path, queue):
    run = subprocess.run(
        [sys.executable, "-c", MANY, tmp_path, queue], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    work, end = map(json.loads, run.stdout.splitlines()[-2:])
    assert work["bad"] == 0
    assert work["retried"] == 0
    # A second lane may be made late, in either direction; what is left open each turn would be 32.
    assert work["fds"][-1] <= work["fds"][1] + 4
    assert end["left"] < work["fds"][0]


def test_a_child_of_fork_uses_no_agent_of_its_parent(tmp_path):
    run = subprocess.run([sys.executable, "-c", FORK, tmp_path], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["closed", "own", "0", "parent"]


FORK = """
import os, sys
from pathlib import Path
from hicache_tier.errors import ClosedError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig
from hicache_tier_storage.nixl_engine import NixlEngine
def engine():
    return NixlEngine(direct=False, threads=2, min_piece_nbytes=1)
rig = StoreRig(Path(sys.argv[1]))
mine = engine()
store = rig.open(engine=mine)
keys = keys_of("fork", 4)
assert all(rig.put(store, keys))
pid = os.fork()
if pid == 0:
    try:
        rig.get(store, keys)
    except ClosedError:
        print("closed")
    assert mine.write([0]) == ["engine_error: the engine was made by another process"]
    mine.close()
    again = StoreRig(Path(sys.argv[1]))
    assert again.get(again.open(engine=engine()), keys) == ["loaded"] * 4
    again.close()
    print("own", flush=True)
    sys.exit(0)
print(os.waitpid(pid, 0)[1])
assert rig.get(store, keys) == ["loaded"] * 4
rig.close()
print("parent")
"""


def spawned(root, answer):
    rig = StoreRig(root)
    store = rig.open(engine=NixlEngine(direct=False, threads=2, min_piece_nbytes=1))
    answer.put([rig.put(store, keys_of("spawn", 4)), rig.get(store, keys_of("spawn", 4))])
    rig.close()


def test_spawn_works(tmp_path):
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=spawned, args=(tmp_path, answer))
    child.start()
    assert answer.get(timeout=60) == [["stored"] * 4, ["loaded"] * 4]
    child.join(30)
    assert child.exitcode == 0


def test_sigkill_in_mid_transfer(tmp_path, queue):
    rounds = int(os.environ.get("HICACHE_KILL_ROUNDS", "12"))
    run = subprocess.run(
        [sys.executable, DRIVER, tmp_path, str(rounds), "11", queue],
        capture_output=True,
        text=True,
        timeout=30 + 4 * rounds,
    )
    assert run.returncode == 0, run.stderr
    totals = json.loads(run.stdout.splitlines()[-1])
    assert "error" not in totals, (totals, run.stderr)
    assert totals["rounds"] == rounds
    assert totals["acknowledged"] > 0
    assert [totals[name] for name in ("missing", "alien", "bad", "leftovers")] == [0, 0, 0, 0], totals


def test_descriptors_return_to_the_base_line(tmp_path):
    bench = Bench(tmp_path, [4096])
    slab = bench.slab()
    memory = Memory([4096], 4, between=0)
    memory.fill()

    def turn():
        engine = NixlEngine(direct=False, queue="io_uring", threads=2, min_piece_nbytes=1)
        assert not any(engine.write(bench.batch(memory, places(slab, 4))))
        engine.close()

    queues = [row.usable for row in nixl_posix(tmp_path, direct=False)]
    if not queues[1]:
        pytest.skip("io_uring does not work here")
    turn()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        turn()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before
    bench.close()
