"""Several processes and threads at once; fork; what is left behind."""

from __future__ import annotations

import gc
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_process import StoreProcess
from hicache_tier.testing.store_rig import CAPACITY_NBYTES, StoreRig, paths_of, writer_of


def test_processes_that_write_the_same_keys_and_check_every_byte(tmp_path):
    root = tmp_path / "root"
    workers = [StoreProcess(root, capacity_bytes=CAPACITY_NBYTES) for _ in range(3)]
    try:
        for seed, worker in enumerate(workers):
            worker.tell("hammer", salt="same", count=60, seconds=2.0, seed=1000 * seed)
        results = [worker.answer() for worker in workers]
        assert all(result["turns"] > 20 for result in results), results
        assert all(result["loaded"] > 20 for result in results), results
    finally:
        for worker in workers:
            worker.__exit__()
    rig = StoreRig(root)
    store = rig.open()
    rig.get(store, keys_of("same", 60))
    rig.close()


def test_a_page_is_seen_by_another_process_soon(tmp_path):
    root = tmp_path / "root"
    with (
        StoreProcess(root, capacity_bytes=CAPACITY_NBYTES) as writer,
        StoreProcess(root, capacity_bytes=CAPACITY_NBYTES) as reader,
    ):
        assert writer.call("stats")["partition"] != reader.call("stats")["partition"]
        delays = []
        for number in range(20):
            reader.tell("wait_for", salt="seen", number=number)
            time.sleep(0.02)
            writer.call("put", salt="seen", count=1, first=number)
            stored = time.monotonic()  # one clock for all processes of a host
            delays.append(max(0.0, reader.answer() - stored))
        assert reader.call("get", salt="seen", count=20) == ["loaded"] * 20
        assert writer.call("delete", salt="seen", count=5) == ["deleted"] * 5
        time.sleep(0.2)
        assert reader.call("get", salt="seen", count=20) == ["absent"] * 5 + ["loaded"] * 15
        assert reader.call("delete", salt="seen", count=6) == ["absent"] * 5 + ["other_writer"]
    print(f" [seen after {1000 * statistics.median(delays):.1f} ms]", end="")
    assert statistics.median(delays) < 1.0


def test_a_killed_writers_pages_are_read_by_others_and_taken_over(tmp_path):
    root = tmp_path / "root"
    with StoreProcess(root) as reader:
        victim = StoreProcess(root)
        assert victim.call("put", salt="victim", count=20) == ["stored"] * 20
        victim.kill()
        victim.__exit__()
        time.sleep(0.2)
        assert reader.call("get", salt="victim", count=20) == ["loaded"] * 20
        with StoreProcess(root) as heir:
            assert heir.call("stats")["pages"] == 20
            assert heir.call("delete", salt="victim", count=5) == ["deleted"] * 5
            time.sleep(0.2)
            assert reader.call("get", salt="victim", count=20) == ["absent"] * 5 + ["loaded"] * 15


def test_other_hash_seeds_find_the_same_and_evict_the_same(tmp_path, monkeypatch):
    """Nothing that is stored, counted or evicted depends on the order of a set."""
    rooms, left = [], []
    for seeds in (("0", "1"), ("7", "0")):
        root = tmp_path / seeds[0]
        monkeypatch.setenv("PYTHONHASHSEED", seeds[0])
        first = StoreProcess(root, capacity_bytes=640 << 10)
        room = first.call("put", salt="seed", count=200).count("stored")
        first.call("get", salt="seed", count=7, first=3)
        first.kill()
        first.__exit__()
        monkeypatch.setenv("PYTHONHASHSEED", seeds[1])
        with StoreProcess(root, capacity_bytes=640 << 10) as second:
            assert second.call("match", salt="seed", count=200) == room
            assert second.call("stats")["pages"] == room
            assert second.call("get", salt="seed", count=room) == ["loaded"] * room
            second.call("put", salt="more", count=room // 2)
            assert second.call("stats")["pages"] == room
            left.append(second.call("get", salt="seed", count=room))
        rooms.append(room)
    assert rooms[0] == rooms[1]
    assert left[0] == left[1]
    assert left[0].count("loaded") == rooms[0] - rooms[0] // 2


def test_threads_on_one_store(memory_path):
    rig = StoreRig(memory_path / "root")
    store = rig.open(capacity_bytes=640 << 10)
    keys = keys_of("threads", 90)
    stop = time.monotonic() + 2.5
    failures = []

    def work(seed):
        rng = random.Random(seed)
        while time.monotonic() < stop:
            first = rng.randrange(80)
            some = keys[first : first + rng.randrange(1, 10)]
            verb = rng.randrange(7)
            if verb < 2:
                rig.chain(store, some)
            elif verb < 4:
                rig.get(store, some)
            elif verb == 4:
                store.match_prefix(some)
                store.delete(some[:2])
            elif verb == 5:
                store.pin(some[:1])
                rig.get(store, some)
                store.unpin(some)
            else:
                with store._core.lock:
                    writer_of(store)._times.used[:] += 1
                    writer_of(store).publish_access(older_than_s=0)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, seed) for seed in range(8)]:
            try:
                future.result(30)
            except BaseException as error:
                failures.append(error)
    assert not failures
    writer, core = writer_of(store), store._core
    assert not writer.pins.any()
    assert not core.writing
    assert {key: slot for slot, key in writer.keys.items()} == core.index
    assert len(writer._free) + len(writer.keys) == len(writer.slabs) * writer.facts.shape.slots
    assert not writer._free.waiting
    rig.close()


def test_publishing_access_times_and_pins_costs_no_reader_a_miss(memory_path):
    rig = StoreRig(memory_path / "root")
    store, other = rig.open(), rig.open()
    keys = keys_of("publish", 60)
    assert rig.put(store, keys) == ["stored"] * 60
    time.sleep(0.1)
    stop = time.monotonic() + 2

    def publish():
        while time.monotonic() < stop:
            store.pin(keys)
            store.unpin(keys)
            with store._core.lock:
                writer_of(store)._times.used[:] += 1
                writer_of(store).publish_access(older_than_s=0)
            time.sleep(0.001)

    def read(reader):
        while time.monotonic() < stop:
            assert rig.get(reader, keys) == ["loaded"] * 60

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(publish), pool.submit(read, store), pool.submit(read, other)]
        for future in futures:
            future.result(30)
    rig.close()


def test_slabs_damaged_and_given_up_under_running_threads(memory_path):
    """Slabs vanish, are cut and are shed all the time; nothing raises, no byte is wrong."""
    rig = StoreRig(memory_path / "root")
    stores = [rig.open(), rig.open()]  # two partitions: each reads the other's
    keys = keys_of("damage", 120)
    stop = time.monotonic() + 2.5

    def work(seed):
        rng = random.Random(seed)
        store = stores[seed % 2]
        while time.monotonic() < stop:
            first = rng.randrange(100)
            some = keys[first : first + rng.randrange(1, 20)]
            if rng.random() < 0.5:
                rig.put(store, some)
            rig.get(stores[rng.randrange(2)], some)

    def harm():
        rng = random.Random(99)
        while time.monotonic() < stop:
            time.sleep(0.05)
            store = stores[rng.randrange(2)]
            paths = paths_of(store)
            slabs = sorted(paths.pages.glob("c.*"))
            kind = rng.randrange(3)
            if kind == 0 and slabs:
                rng.choice(slabs).unlink(missing_ok=True)
            elif kind == 1 and slabs:
                table = paths.table(int(rng.choice(slabs).name.split(".")[1]))
                copy = table.with_name("copy")
                copy.write_bytes(bytes(16 * 128))
                copy.replace(table)
            else:
                with store._core.lock:
                    store._core.shed()

    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(work, seed) for seed in range(5)] + [pool.submit(harm)]
        for future in futures:
            future.result(30)
    for store in stores:
        assert not writer_of(store).pins.any()
        assert not store._core.writing
        fresh = keys_of(f"after{id(store)}", 10)
        put = rig.put(store, fresh)
        assert rig.get(store, fresh).count("loaded") == put.count("stored")
    rig.close()


FORK = """
import os, sys, time
from pathlib import Path
from hicache_tier.errors import ClosedError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig

rig = StoreRig(Path(sys.argv[1]))
store = rig.open()
keys = keys_of("fork", 4)
rig.put(store, keys)
store._core.lock.acquire()  # as another thread of the parent might hold it
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: rig.put(store, keys), lambda: rig.get(store, keys), lambda: store.match_prefix(keys),
                 store.clear, lambda: store.delete(keys)):
        try:
            call()
        except ClosedError:
            refused += 1
    store.stats(), len(store), repr(store)
    store.close()
    own = rig.open()
    good = rig.get(own, keys).count("loaded") == 4 and own.stats()["partition"].split("/")[0].endswith("w1")
    rig.put(own, keys_of("child", 2))
    own.close()
    os._exit(0 if refused == 5 and good else 3)
store._core.lock.release()
_, status = os.waitpid(child, 0)
assert rig.put(store, keys_of("parent", 2)) == ["stored"] * 2  # the parent goes on
assert rig.get(store, keys).count("loaded") == 4
sleeper = os.fork()
if sleeper == 0:
    time.sleep(30)
    os._exit(0)
print(status, sleeper, store.stats()["partition"], flush=True)
os.kill(os.getpid(), 9)  # the parent dies, the sleeper lives on
"""


def test_fork(tmp_path):
    root = tmp_path / "root"
    told = tmp_path / "told"  # a pipe would stay open as long as the sleeper lives
    with told.open("w") as file:
        run = subprocess.run([sys.executable, "-c", FORK, root], stdout=file, timeout=60, check=False)
    status, sleeper, partition = told.read_text().split()
    try:
        assert run.returncode == -signal.SIGKILL
        assert status == "0"
        rig = StoreRig(root)
        store = rig.open()
        assert store.stats()["partition"] == partition, "the sleeping child keeps its parent's lock"
        assert rig.get(store, keys_of("fork", 4)) == ["loaded"] * 4
        rig.close()
    finally:
        os.kill(int(sleeper), signal.SIGKILL)


def test_a_hundred_opens_leak_nothing(memory_path):
    def held():
        gc.collect()
        links = [str(path.resolve()) for path in Path("/proc/self/fd").iterdir()]
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").count(str(memory_path))
        return sum(str(memory_path) in link for link in links), len(links), threading.active_count(), maps

    def turn(number):
        rig = StoreRig(memory_path / "root")
        store = rig.open()
        other = rig.open()
        rig.put(store, keys_of("leak", 5, 5 * number))
        rig.get(other, keys_of("leak", 5, 5 * number))
        rig.close()

    turn(0)
    before = held()
    for number in range(1, 50):  # a hundred stores
        turn(number)
    deadline = time.monotonic() + 5
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.05)  # I/O threads that were told to end
    after = held()
    assert after[0] == after[3] == 0
    assert after[1] <= before[1] + 1
    assert after[2] <= before[2]


@pytest.mark.parametrize("moment", ["opening", "reading"])
def test_too_many_open_files_lose_nothing(memory_path, moment):
    rig = StoreRig(memory_path / "root")
    keys = keys_of("files", 100)
    rig.put(rig.open(), keys)
    rig.close()
    code = f"""
import resource, sys
from pathlib import Path
from hicache_tier.errors import HiCacheTierError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig
import os
rig = StoreRig(Path(sys.argv[1]))
keys = keys_of("files", 100)
limit = len(os.listdir("/proc/self/fd")) + 4
if "{moment}" == "opening":
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        rig.open()
    except HiCacheTierError as error:
        print("refused:", error)
else:
    store = rig.open()
    rig.get(store, keys[:1])  # what is imported late is imported now
    store._cache.close()
    store._cache._closed = False
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    now = max(map(int, os.listdir("/proc/self/fd"))) + 1
    for fd in range(now):
        try:
            os.fstat(fd)
        except OSError:
            os.open("/dev/null", os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (now, now))
    print(set(rig.get(store, keys)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code, memory_path / "root"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert ("refused" if moment == "opening" else "too_many_files") in run.stdout, run.stdout + run.stderr
    store = rig.open()
    assert rig.get(store, keys) == ["loaded"] * 100
    rig.close()
