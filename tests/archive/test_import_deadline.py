"""An import where storage hangs."""

from __future__ import annotations

import threading

import pytest

from hicache_tier.testing.faults import FaultyEngine, Hang
from hicache_tier_storage import DeadlineError
from hicache_tier_storage.archive import export_archive, import_archive, import_run
from hicache_tier_storage.posix import PosixEngine


def test_it_ends_by_the_deadline_and_what_it_had_stored_stays(shop, tmp_path, monkeypatch):
    root, keys = shop.fill()
    export_archive(root, tmp_path / "archive")
    hang = Hang(lambda call: call.number >= 3)
    real = import_run.open_store

    def hanging(*arguments, **options):
        engine = FaultyEngine(PosixEngine(direct=False, threads=1), hang)
        return real(*arguments, **options | {"engine": engine, "io_mode": "auto", "deadline_s": 0.5})

    monkeypatch.setattr(import_run, "open_store", hanging)
    monkeypatch.setattr(import_run, "_BATCH_NBYTES", 2 * shop.geometry.page_nbytes)
    back = threading.Timer(2, hang.gate.open)  # the store is closed with a call that hangs
    back.start()
    with pytest.raises(DeadlineError, match=r"did not answer within 0\.5 s"):
        import_archive(tmp_path / "archive", tmp_path / "new", capacity_bytes="8 MiB", threads=1)
    back.join()
    monkeypatch.undo()
    there = shop.read(tmp_path / "new", keys)
    assert len(there) >= 4
    assert import_archive(tmp_path / "archive", tmp_path / "new").already_stored == len(there)
    assert len(shop.read(tmp_path / "new", keys)) == len(keys)
