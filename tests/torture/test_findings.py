"""The torture notices what it is there for: each finding, made to happen."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from hicache_tier.testing.torture import writer as writing
from hicache_tier.testing.torture.arena import Arena
from hicache_tier.testing.torture.board import Board, Field
from hicache_tier.testing.torture.duty import Duty
from hicache_tier.testing.torture.pages import CHAIN, KEYS, NUMBERS, TorturePool, content, numbers_of
from hicache_tier.testing.torture.post import Post
from hicache_tier.testing.torture.resources import held
from hicache_tier.testing.torture.writer import Writer
from hicache_tier_storage.capacity import partition_paths

NUMBERS_READ = list(range(CHAIN))


@pytest.fixture
def duty(tmp_path):
    return Duty(
        role="writer",
        root=str(tmp_path / "root"),
        arena="test",
        board=str(tmp_path / "board"),
        log=str(tmp_path / "log"),
        seed=2,
        capacity_bytes=16 << 20,
        strict=True,
    )


@pytest.fixture
def writer(duty):
    """A writer that has stored the first prompt."""
    Board(Path(duty.board), create=True)
    writer = Writer(duty)
    writer.store = writer.open(read_only=False)
    writer.take(writer.store)
    writer.pool.fill(NUMBERS_READ)
    assert all(writer.store.put([KEYS[n] for n in NUMBERS_READ], writer.pool, range(CHAIN)))
    writer.tell(writer.store)
    yield writer
    writer.store.close()


def findings(duty):
    log = Path(duty.log)
    return [json.loads(line)["what"] for line in log.read_text().splitlines()] if log.exists() else []


def slab(duty):
    (paths,) = partition_paths(Path(duty.root))
    return next(path for path in paths.pages.iterdir() if path.name.startswith("c.0"))


def test_no_two_pages_share_a_word_and_keys_tell_their_number():
    words = content(np.arange(NUMBERS))
    assert all(len(np.unique(words[:, at])) == NUMBERS for at in (0, 7, 511))
    assert numbers_of(KEYS).tolist() == list(range(NUMBERS))
    assert len(set(KEYS)) == NUMBERS


def test_one_other_bit_in_a_page_is_seen():
    pool = TorturePool(4)
    pool.fill([5, 6, 7, 8])
    assert pool.wrong([5, 6, 7, 8], [True] * 4) == []
    pool.words[2, 100] ^= np.uint64(1 << 63)
    assert pool.wrong([5, 6, 7, 8], [True] * 4) == [7]
    assert pool.wrong([5, 6, 7, 8], [True, True, False, True]) == [], "a miss may hold anything"
    assert pool.wrong([6, 5, 7, 8], [True] * 4) == [6, 5, 7], "pages in each other's place"
    pool.blank(1)
    assert pool.wrong([5], [True]) == [5]


def test_all_is_well(writer, duty):
    assert writer.get(writer.store, NUMBERS_READ) == [True] * CHAIN
    writer.verify(writer.store)
    assert writer.board[Field.READS] == 2 * CHAIN
    assert writer.board[Field.VERIFIED] == CHAIN
    assert findings(duty) == []


def test_wrong_bytes_that_a_store_serves(writer, duty):
    with slab(duty).open("r+b") as file:  # a page of this writer, which it trusts
        file.seek(100)
        file.write(b"!")
    writer.get(writer.store, NUMBERS_READ)
    assert writer.board[Field.WRONG] == 1
    assert findings(duty) == ["wrong bytes"]


def test_pages_that_a_restart_does_not_find(writer, duty):
    writer.store.close()
    slab(duty).unlink()
    heir = Writer(duty)
    with heir.open(read_only=False) as store:
        heir.take(store)
        heir.verify(store)
    assert heir.board[Field.MISSING] == CHAIN
    assert findings(duty) == ["missing"]


def test_pages_that_were_being_removed_are_not_missed(writer, duty):
    writer.ledger.at_risk[:10] = True
    writer.store.delete(KEYS[:10])  # and killed right here
    writer.store.close()
    heir = Writer(duty)
    with heir.open(read_only=False) as store:
        heir.take(store)
        heir.verify(store)
    assert heir.board[Field.VERIFIED] == CHAIN - 10
    assert heir.board[Field.MISSING] == 0


def test_a_page_that_was_stored_and_is_not_there(writer, duty, monkeypatch):
    monkeypatch.setattr(Writer, "tell", lambda self, store: self.ledger.tell(np.empty(0, np.int64)))
    writer.put(writer.store)
    assert writer.board[Field.MISSING] > 0
    assert findings(duty) == ["stored and gone"]


def test_a_descriptor_that_is_left(writer, duty, monkeypatch):
    monkeypatch.setattr("hicache_tier.testing.torture.worker._END_S", 0.1)
    before = held()
    with Path(duty.log).with_name("left").open("wb"):
        writer.count_leaks(before)
    assert writer.board[Field.LEAKS] == 1
    assert findings(duty) == ["leak"]


def test_more_bytes_than_the_capacity_and_files_that_are_left(tmp_path):
    arena = Arena("test", tmp_path / "root", tmp_path, 16 << 20, {"writer": 1})
    assert arena.excess_nbytes() < 0
    assert arena.leftovers() == []
    worker = Writer(arena.writers[0].duty)
    with worker.open(read_only=False) as store:
        worker.pool.fill(NUMBERS_READ)
        store.put([KEYS[n] for n in NUMBERS_READ], worker.pool, range(CHAIN))
        assert arena.excess_nbytes() < 0
        arena.capacity_nbytes = 4096
        assert arena.excess_nbytes() > 0
    (paths,) = partition_paths(tmp_path / "root")
    (paths.pages / "c.9.0.tmp").write_bytes(b"")
    assert len(arena.leftovers()) == 1


def test_a_call_that_is_stuck_and_one_whose_process_stands_still(duty):
    post = Post("test", duty)
    assert not post.stuck()
    post.board[Field.STARTED_NS] = time.monotonic_ns() - 31 * 10**9
    assert post.stuck()
    post.resume_s = time.monotonic() + 5
    assert not post.stuck()
    post.resume_s = 0.0
    post._awake_ns = time.monotonic_ns()
    assert not post.stuck(), "it has just gone on"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_ends_by_itself(duty, monkeypatch):
    post = Post("test", duty)

    def broken(self, store):
        raise RuntimeError("a bug")

    monkeypatch.setattr(writing.Writer, "step", broken)
    post.start(1, afresh=False)
    assert not post.ended(time.monotonic() + 20)
    assert (post.code, post.killed) == (1, False)
    assert post.board[Field.ERRORS] == 1
    assert findings(duty) == ["raised"]
    post.start(1, afresh=False)
    post.kill()
    assert (post.code, post.killed, post.kills) == (-9, True, 1)
