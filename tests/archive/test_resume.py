"""An export that is stopped, by whatever, goes on where it was."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hicache_tier.keys import page_keys
from hicache_tier.testing.array_pool import keys_of
from hicache_tier_storage.archive import (
    ArchiveError,
    ArchiveExistsError,
    NotAnArchiveError,
    Selection,
    export_archive,
    exporting,
    filling,
    open_archive,
)


@pytest.mark.parametrize(
    ("stop", "told", "match"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ArchiveError, "No space left.*goes on"),
    ],
    ids=["interrupt", "full_disk"],
)
def test_a_stopped_export_goes_on(shop, tmp_path, small_shards, monkeypatch, stop, told, match):
    root, keys = shop.fill(keys=keys_of("k", 41))
    calls = []

    def fill(*args, **options):
        calls.append(1)
        if len(calls) == 7:
            raise stop
        return filling.fill(*args, **options)

    monkeypatch.setattr(exporting, "fill", fill)
    with pytest.raises(told, match=match):
        export_archive(root, tmp_path / "archive", threads=1)
    assert not (tmp_path / "archive").exists()
    with pytest.raises(NotAnArchiveError):
        open_archive(tmp_path / "archive.partial")
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    with pytest.raises(ArchiveExistsError, match="codec"):
        export_archive(root, tmp_path / "archive", codec="zstd")
    report = export_archive(root, tmp_path / "archive")
    assert report.resumed_pages >= 4
    assert shop.keys_in(tmp_path / "archive") == {*keys}
    assert not (tmp_path / "archive.partial").exists()
    assert not list((tmp_path / "archive").rglob(".hct*"))


def test_prompts_of_another_tenant_are_another_export(shop, tmp_path, monkeypatch):
    ids = np.arange(64, dtype=np.uint32)
    root, _ = shop.fill(keys=page_keys(ids, 8, salt="a"), tenant="a")

    def export(tenant):
        selection = Selection(prompts=(ids,), tenants=(tenant,))
        return export_archive(root, tmp_path / "archive", selection=selection)

    with monkeypatch.context() as patched:
        patched.setattr(exporting.PartWriter, "write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            export("a")
    shop.fill(keys=page_keys(ids, 8, salt="b"), tenant="a")
    with pytest.raises(ArchiveExistsError, match="prompts"):
        export("b")
    assert export("a").pages == 8


def test_resuming_distrusts_what_was_damaged_meanwhile(shop, tmp_path, small_shards, monkeypatch):
    root, keys = shop.fill(keys=keys_of("k", 21))
    monkeypatch.setattr(exporting.PartWriter, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_archive(root, tmp_path / "archive", threads=1)
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    shards = sorted((tmp_path / "archive.partial").rglob("pages/c.*"))
    assert len(shards) == 6
    os.truncate(shards[2], 100)
    (rows,) = (tmp_path / "archive.partial").rglob("1.rows")
    rows.write_bytes(rows.read_bytes()[:-1] + b"!")
    report = export_archive(root, tmp_path / "archive")
    assert report.resumed_pages == 4
    assert shop.keys_in(tmp_path / "archive") == {*keys}


def test_a_store_that_changed_between_is_what_counts(shop, tmp_path, small_shards, monkeypatch):
    root, keys = shop.fill(keys=keys_of("k", 21))
    monkeypatch.setattr(exporting.PartWriter, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_archive(root, tmp_path / "archive", threads=1)
    monkeypatch.undo()
    monkeypatch.setattr(exporting, "shard_pages", lambda _: 4)
    _, more = shop.fill(keys=keys_of("more", 6))
    export_archive(root, tmp_path / "archive")
    assert shop.keys_in(tmp_path / "archive") == {*keys, *more}


_SCRIPT = """
import sys, time
from hicache_tier_storage.archive import exporting, filling
exporting.shard_pages = lambda _: 4
def fill(*args):
    time.sleep(0.05)
    return filling.fill(*args)
exporting.fill = fill
sys.argv[1:1] = ["export"]
from hicache_tier.cli import main
main()
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_signals(shop, tmp_path, small_shards, sign):
    root, keys = shop.fill(keys=keys_of("k", 200))
    target = tmp_path / "archive"
    child = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(root), str(target)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(6000):
        if len(list((tmp_path / "archive.partial").rglob("*.rows"))) >= 6:
            break
        time.sleep(0.01)
    child.send_signal(sign)
    _, said = child.communicate(timeout=30)
    assert child.returncode == (130 if sign == signal.SIGINT else -9)
    assert ("goes on" in said) == (sign == signal.SIGINT)
    assert "Traceback" not in said
    assert not target.exists()
    report = export_archive(root, target)
    assert report.resumed_pages >= 8
    assert shop.keys_in(target) == {*keys}


def test_two_exports_to_one_place(shop, tmp_path, small_shards, monkeypatch):
    root, _ = shop.fill()
    inside, go = threading.Event(), threading.Event()

    def fill(*args, **options):
        inside.set()
        go.wait(10)
        return filling.fill(*args, **options)

    monkeypatch.setattr(exporting, "fill", fill)
    first = threading.Thread(target=export_archive, args=(root, tmp_path / "archive"))
    first.start()
    assert inside.wait(10)
    with pytest.raises(ArchiveExistsError, match="another process"):
        export_archive(root, tmp_path / "archive")
    go.set()
    first.join(10)
    assert len(shop.archived(tmp_path / "archive")) == 20


def test_a_process_that_dies_is_told(shop, tmp_path, monkeypatch):
    root, keys = shop.fill()
    submit = exporting.Workers.submit
    monkeypatch.setattr(exporting.Workers, "submit", lambda workers, *_: submit(workers, os._exit, 9))
    with pytest.raises(ArchiveError, match=r"died.*goes on"):
        export_archive(root, tmp_path / "archive", processes=2)
    monkeypatch.undo()
    export_archive(root, tmp_path / "archive")
    assert shop.keys_in(tmp_path / "archive") == {*keys}


_PROCESSES = """
import os, sys, time
from hicache_tier_storage.archive.pool import Workers
if __name__ == "__main__":
    with Workers(2, 1, polite=False) as workers:
        for _ in range(2):
            workers.submit(os.getpid)
        found = set()
        while len(workers):
            found |= {*workers.results()}
        print(*found, flush=True)
        for _ in range(2):
            workers.submit(time.sleep, 300)
        time.sleep(300)
"""


def test_processes_of_an_export_that_is_killed_end_too(tmp_path):
    """Else they would go on to write drafts."""
    script = tmp_path / "script.py"
    script.write_text(_PROCESSES)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as child:
        workers = [int(word) for word in child.stdout.readline().split()]
        child.kill()
    assert workers
    until = time.monotonic() + 60
    while any(runs(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(runs(pid) for pid in workers)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


_STARTING = """
import os, signal
from hicache_tier_storage.archive.pool import Workers
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    with Workers(2, 1, polite=False) as workers:
        workers.submit(os.getpid)
        workers.submit(os.getpid)
        for _ in range(50):
            os.killpg(0, signal.SIGINT)
        while len(workers):
            workers.results().__next__()
"""


def test_ctrl_c_while_processes_start_is_for_the_one_in_charge(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_STARTING)
    done = subprocess.run(
        [sys.executable, str(script)], stderr=subprocess.PIPE, text=True, start_new_session=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
