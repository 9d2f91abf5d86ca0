"""The cache of machine code; the compiler itself is a stand-in, so that no NVRTC is needed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from pathlib import Path

import pytest

from hicache_tier_kernels import nvrtc

CODE = b"machine code " * 1000


@pytest.fixture
def compiled(monkeypatch):
    calls = []

    def stand_in(name, source, flags, arch):
        calls.append((name, flags, arch))
        return CODE + arch.encode() + repr(flags).encode()

    monkeypatch.setattr(nvrtc, "_version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "_compile", stand_in)
    return calls


def entries(folder):
    return sorted((folder / "cubin").iterdir())


def test_compiled_once_and_kept(compiled, tmp_path):
    first = nvrtc.compile_cubin("copy_pages.cu", {"WORD": 16}, "sm_90", tmp_path)
    assert nvrtc.compile_cubin("copy_pages.cu", {"WORD": 16}, "sm_90", tmp_path) == first
    assert len(compiled) == 1
    assert [entry.suffix for entry in entries(tmp_path)] == [".cubin"]


def test_whatever_matters_is_in_the_key(compiled, tmp_path, monkeypatch):
    for name, macros, arch in (
        ("copy_pages.cu", {"WORD": 16}, "sm_90"),
        ("copy_pages.cu", {"WORD": 8}, "sm_90"),
        ("copy_pages.cu", {"WORD": 16, "ROWS": 1}, "sm_90"),
        ("copy_pages.cu", {"WORD": 16}, "sm_100"),
        ("check_pages.cu", {"WORD": 16}, "sm_90"),
    ):
        nvrtc.compile_cubin(name, macros, arch, tmp_path)
    monkeypatch.setattr(nvrtc, "_version", lambda: (12, 9))
    nvrtc.compile_cubin("copy_pages.cu", {"WORD": 16}, "sm_90", tmp_path)
    assert len(compiled) == len(entries(tmp_path)) == 6


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-1], lambda data: b"", lambda data: b"\xff" + data[1:], lambda data: data[:32]],
)
def test_a_damaged_entry_is_compiled_again(compiled, tmp_path, damage):
    good = nvrtc.compile_cubin("copy_pages.cu", {}, "sm_90", tmp_path)
    (entry,) = entries(tmp_path)
    entry.write_bytes(damage(entry.read_bytes()))
    assert nvrtc.compile_cubin("copy_pages.cu", {}, "sm_90", tmp_path) == good
    assert len(compiled) == 2
    data = entry.read_bytes()
    assert data == hashlib.sha256(good).digest() + good


def test_a_cache_that_cannot_be_written_costs_only_time(compiled, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for _ in range(2):
        assert nvrtc.compile_cubin("copy_pages.cu", {}, "sm_90", blocked)
    assert len(compiled) == 2


def race(folder, start, results):
    nvrtc._version = lambda: (13, 0)
    nvrtc._compile = lambda *_: CODE + str(os.getpid() * 0).encode()
    start.wait()
    results.put(
        {nvrtc.compile_cubin("copy_pages.cu", {"N": n % 3}, "sm_90", Path(folder)) for n in range(60)}
    )


def test_processes_that_race_see_whole_entries(tmp_path):
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    ranks = [context.Process(target=race, args=(str(tmp_path), start, results)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    start.set()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(10)
    assert found == [{CODE + b"0"}] * 3
    assert [entry.suffix for entry in entries(tmp_path)] == [".cubin"] * 3


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HICACHE_TIER_CACHE", str(tmp_path / "own"))
    assert nvrtc.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("HICACHE_TIER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert nvrtc.cache_folder() == tmp_path / "hicache_tier"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert nvrtc.cache_folder() == tmp_path / ".cache" / "hicache_tier"


def test_a_missing_compiler_is_a_reason(monkeypatch):
    def missing():
        raise ModuleNotFoundError("No module named 'cuda'")

    monkeypatch.setattr(nvrtc, "_version", missing)
    nvrtc.compiler.cache_clear()
    found = nvrtc.compiler()
    nvrtc.compiler.cache_clear()
    assert not found
    assert "No module named 'cuda'" in found.reason
    assert "pip install '.[cu13]'" in found.reason
