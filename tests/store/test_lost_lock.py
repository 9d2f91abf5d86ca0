"""A partition whose lock is taken away while its writer lives: the next writer's pages are never touched."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading

import pytest

from hicache_tier.testing.faults import FaultyEngine, Hang
from hicache_tier.testing.store_rig import paths_of, writer_of
from hicache_tier_storage import locks
from hicache_tier_storage.posix import PosixEngine


@pytest.fixture
def folders_without_locks(monkeypatch):
    """As on file systems that lock no folders: the next writer takes the partition."""

    def refuse(fd, operation, flock=fcntl.flock):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, operation)

    monkeypatch.setattr(locks.fcntl, "flock", refuse)


def take_lock(store, what):
    paths = paths_of(store)
    if what == "lock":
        paths.lock.unlink()
    elif what == "state":
        shutil.rmtree(paths.state.parent)
    else:  # another writer's, which was renamed over it
        (paths.lock.parent / "other").touch()
        (paths.lock.parent / "other").replace(paths.lock)


def stop_keeper(store):
    """Let nothing but calls see what becomes of the lock."""
    store._keeper.stop(10)


@pytest.mark.parametrize("what", ["lock", "state", "another"])
@pytest.mark.usefixtures("folders_without_locks")
def test_nothing_is_stored_or_loaded_once_the_lock_is_lost(shop, keys, what, caplog):
    first = shop.open()
    stop_keeper(first)
    assert shop.put(first, keys[:20]) == ["stored"] * 20
    take_lock(first, what)
    second = shop.open()
    assert paths_of(second) == paths_of(first)
    assert shop.get(first, keys[:4]) == ["store_gone"] * 4
    assert shop.put(first, keys[:8]) == ["store_gone"] * 8, "there are free slots, and they are the other's"
    assert shop.get(first, keys[20:24]) == ["store_gone"] * 4
    assert shop.put(second, keys[20:40]) == ["stored"] * 20
    assert not any(first.contains(keys[:40]))
    told = first.stats()
    assert (told["get"]["store_gone"], told["put"]["store_gone"]) == (8, 8)
    assert sum("opened again" in line for line in told["damage"]) == 1
    assert sum("opened again" in record.message for record in caplog.records) == 1
    assert not first.close().synced
    assert shop.get(second, keys[:40]) == ["loaded"] * 40
    assert second.close().synced


@pytest.mark.parametrize("what", ["lock", "state", "another"])
def test_a_partition_is_taken_by_nobody_else_while_a_put_of_its_writer_is_under_way(shop, keys, what):
    """Its bytes may land at any time, in whichever slots they were meant for."""
    hang = Hang()
    first = shop.open(engine=FaultyEngine(PosixEngine(direct=False, threads=1), hang), deadline_s=None)
    stop_keeper(first)
    answer = []
    thread = threading.Thread(target=lambda: answer.extend(shop.put(first, keys[:10])))
    thread.start()
    hang.gate.wait_for(1)
    take_lock(first, what)
    second = shop.open()
    assert paths_of(second) != paths_of(first)
    assert shop.put(second, keys[20:30]) == ["stored"] * 10
    hang.gate.open()
    thread.join(30)
    assert answer == ["store_gone"] * 10
    assert shop.get(second, keys[20:30]) == ["loaded"] * 10
    first.close()
    third = shop.open()
    assert paths_of(third) == paths_of(first)
    assert shop.put(third, keys[40:50]) == ["stored"] * 10
    assert shop.get(third, keys[40:50]) == ["loaded"] * 10


def test_slabs_of_a_partition_whose_lock_was_taken_make_room_for_the_next_writer(shop, keys):
    first = shop.open()
    stop_keeper(first)
    assert shop.put(first, keys[:240]) == ["stored"] * 240
    paths_of(first).lock.unlink()
    second = shop.open()
    assert shop.put(second, keys[240:300]) == ["stored"] * 60
    assert shop.get(second, keys[240:300]) == ["loaded"] * 60
    assert shop.get(first, keys[:4]) == ["store_gone"] * 4


def test_a_store_whose_lock_comes_back_stays_gone(shop, keys):
    store = shop.open()
    stop_keeper(store)
    shop.put(store, keys[:20])
    lock = paths_of(store).lock
    lock.rename(lock.with_name("aside"))
    assert shop.put(store, keys[20:24]) == ["store_gone"] * 4
    lock.with_name("aside").rename(lock)
    assert shop.put(store, keys[20:24]) == ["store_gone"] * 4
    assert shop.get(store, keys[:4]) == ["store_gone"] * 4


def test_the_keeper_sees_it_where_nobody_calls(shop, keys):
    store = shop.open()
    shop.put(store, keys[:20])
    paths_of(store).lock.unlink()
    store._keeper._thread.join(30)
    assert not store._keeper._thread.is_alive()
    assert len(store) == 0
    assert not writer_of(store).slabs


@pytest.mark.usefixtures("folders_without_locks")
def test_a_put_that_began_before_commits_nothing(shop, keys):
    """Its bytes have moved; meanwhile the next writer gives its slots to other pages."""
    hang = Hang(after=True)
    engine = FaultyEngine(PosixEngine(direct=False, threads=1), hang)
    first = shop.open(engine=engine, deadline_s=None)
    stop_keeper(first)
    answer = []
    thread = threading.Thread(target=lambda: answer.extend(shop.put(first, keys[:10])))
    thread.start()
    hang.gate.wait_for(1)
    paths_of(first).lock.unlink()
    second = shop.open()
    assert paths_of(second) == paths_of(first)
    assert shop.put(second, keys[20:30]) == ["stored"] * 10
    assert sorted(writer_of(second).keys) == list(range(10))
    hang.gate.open()
    thread.join(30)
    assert answer == ["store_gone"] * 10
    assert shop.get(second, keys[20:30]) == ["loaded"] * 10
    assert not any(second.contains(keys[:10]))
    assert shop.get(shop.open(read_only=True), keys[20:30]) == ["loaded"] * 10


@pytest.mark.parametrize("call", ["delete", "clear", "unpin", "shed", "publish"])
@pytest.mark.usefixtures("folders_without_locks")
def test_records_of_the_next_writer_are_left_alone(shop, keys, call):
    first = shop.open()
    stop_keeper(first)
    shop.put(first, keys[:60], pin=call == "unpin")
    first.delete(keys[40:50])  # where a slab that is given up has room for its pages
    paths_of(first).lock.unlink()
    second = shop.open()
    tables = [table.words.copy() for table in writer_of(second).tables.tables.values()]
    if call == "shed":
        with first._core.lock:
            first._core.shed()
    elif call == "publish":
        writer_of(first)._times.used[:] += 1
        writer_of(first).publish_access(older_than_s=0)
    elif call == "clear":
        first.clear()
    else:
        getattr(first, call)(keys[:40])
    assert all(
        (old == table.words).all()
        for old, table in zip(tables, writer_of(second).tables.tables.values(), strict=True)
    )
    assert shop.get(second, keys[:40]) == ["loaded"] * 40


@pytest.mark.usefixtures("folders_without_locks")
def test_two_writers_of_one_partition_serve_no_wrong_bytes(shop, keys):
    """Both are at work in few slots; every byte is checked."""
    first = shop.open(capacity_bytes=600_000)
    shop.put(first, keys[:40])
    paths_of(first).lock.unlink()
    second = shop.open(capacity_bytes=600_000)
    wrong, rounds = [], 10

    def work(store, mine):
        try:
            for at in range(0, 100 * rounds, 20):
                shop.put(store, mine[at % 100 : at % 100 + 20])
                shop.get(store, mine[at % 100 : at % 100 + 40])
        except AssertionError as error:
            wrong.append(error)

    threads = [
        threading.Thread(target=work, args=(store, mine))
        for store, mine in ((first, keys[:100]), (second, keys[100:200]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert set(first.stats()["put"]) == {"stored", "store_gone"}
    assert first.stats()["put"]["stored"] == 40
    assert second.stats()["put"]["stored"] > 0
