"""Which ways of moving bytes work is found out by trying; what is refused later costs nothing but speed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hicache_tier.errors import EngineUnavailableError, StoreError
from hicache_tier.testing.store_rig import StoreRig
from hicache_tier_storage import posix, probe, vectors
from hicache_tier_storage.kvikio_package import missing_library
from hicache_tier_storage.probe import filesystem, probe_engines


def by_mode(directory):
    return {row.mode: row for row in probe_engines(directory)}


def test_tmpfs_is_buffered_and_says_why():
    shm = Path("/dev/shm")
    if filesystem(shm) != "tmpfs" or not os.access(shm, os.W_OK):
        pytest.skip("/dev/shm is no tmpfs that can be written")
    rows = by_mode(shm)
    assert not rows["direct"].usable
    assert "memory" in rows["direct"].reason
    assert rows["buffered"].usable
    assert rows["buffered"].chosen


def test_a_directory_is_left_as_it_was(tmp_path):
    before = tmp_path.stat().st_mtime_ns
    rows = by_mode(tmp_path)
    assert rows["buffered"].usable
    assert sum(row.chosen for row in rows.values()) == 1
    assert list(tmp_path.iterdir()) == []
    if missing_library("libcuda.so.1", ""):  # cuFile takes no nameless file
        assert tmp_path.stat().st_mtime_ns == before


def test_where_it_would_be_created(tmp_path):
    assert by_mode(tmp_path / "a" / "b")["buffered"].usable
    assert not (tmp_path / "a").exists()


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="not a directory"):
        probe_engines(tmp_path / "file")


@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch, error):
    real = os.open

    def denied(path, flags, *arguments, **options):
        if flags & os.O_ACCMODE:
            raise OSError(error, os.strerror(error))
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", denied)
    rows = by_mode(tmp_path)
    assert not rows["buffered"].usable
    assert "cannot be written" in rows["buffered"].reason
    with pytest.raises(StoreError, match="cannot be written"):
        StoreRig(tmp_path / "root").open()
    with pytest.raises(EngineUnavailableError, match="cannot be written"):
        StoreRig(tmp_path / "root").open(engine="posix")
    assert not (tmp_path / "root").exists()


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    assert by_mode(tmp_path)["buffered"].usable
    assert list(tmp_path.iterdir()) == []


def test_o_direct_refused_when_probed(tmp_path, monkeypatch, keys):
    real = os.pwritev

    def refuse(fd, *arguments):
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, *arguments)

    monkeypatch.setattr(os, "pwritev", refuse)
    rig = StoreRig(tmp_path / "root")
    store = rig.open(io_mode="auto")
    assert store.stats()["mode"] == "buffered"
    assert rig.put(store, keys[:4]) == ["stored"] * 4
    rig.close()
    with pytest.raises(EngineUnavailableError, match="direct"):
        rig.open(io_mode="direct")


def test_o_direct_accepted_at_open_and_refused_at_write(tmp_path, monkeypatch, caplog, keys):
    monkeypatch.setattr(probe, "_try", lambda *_: "")
    monkeypatch.setattr(probe, "filesystem", lambda _: "ext4")
    rig = StoreRig(tmp_path / "root")
    import ctypes
    import fcntl

    def refusing(call):
        def move(fd, *arguments):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                ctypes.set_errno(errno.EINVAL)
                return -1
            return call(fd, *arguments)

        return move

    for module in (posix, vectors):
        monkeypatch.setattr(module, "PWRITEV", refusing(vectors.PWRITEV))
        monkeypatch.setattr(module, "PREADV", refusing(vectors.PREADV))
    store = rig.open(io_mode="auto")
    if not os.access(tmp_path, os.W_OK) or filesystem(tmp_path) == "tmpfs":
        pytest.skip("a tmpfs may refuse O_DIRECT at open already")
    assert store.stats()["mode"] == "direct"
    for turn in range(4):
        part = keys[20 * turn : 20 * turn + 20]
        assert rig.put(store, part) == ["stored"] * 20
        assert rig.get(store, part) == ["loaded"] * 20
    assert store.stats()["mode"] == "buffered"
    assert caplog.text.count("O_DIRECT was refused") == 1
    rig.close()
