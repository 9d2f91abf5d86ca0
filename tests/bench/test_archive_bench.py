"""`bench archive` at a size that says nothing of speed: it measures what it says, and checks bytes first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hicache_tier.bench import archive_rig
from hicache_tier.bench.archive_rig import ArchiveRig
from hicache_tier.bench.errors import BenchError
from hicache_tier_storage.archive import Conversion, export_archive


@pytest.fixture
def tmp_path(tmp_path):
    """A folder in memory where there is one: what is timed here means nothing anyway."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="hct-test-", dir=shm) as path:
        yield Path(path)


def test_figures(tmp_path):
    command = [
        "bench",
        "archive",
        "--root",
        tmp_path,
        "--size",
        "1MiB",
        "--page",
        "64KiB",
        "--repeats",
        "3",
        "--json",
    ]
    only = ["--only", "exports", "--only", "imports", "--only", "memory"]
    done = subprocess.run(
        [sys.executable, "-m", "hicache_tier", *command, *only], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    rows = [*found["exports"], *found["imports"]]
    assert [row["what"].split()[0].rstrip(",") for row in rows] == ["export"] * 2 + ["import"] * 5
    assert all(row["gb_s"] > 0 and row["against_gb_s"] > 0 and row["ratio"] > 0 for row in rows)
    assert 1 << 20 < found["memory"]["export_bytes"] < 1 << 30
    assert not list(tmp_path.iterdir())


def test_wrong_bytes_are_noticed(tmp_path, monkeypatch):
    rig = ArchiveRig(tmp_path, 1 << 20, 64 << 10)
    export_archive(rig.fill("store", 1), rig.path("archive"))
    there, back = Conversion.parse(layout="layer_first"), Conversion.parse(layout="page_first")
    rig.check("archive", there, back)
    with pytest.raises(BenchError, match="other bytes"):
        rig.check("archive", there, Conversion.parse(layout="page_head"))
    monkeypatch.setattr(archive_rig, "_LAYER_NBYTES", 3)
    with pytest.raises(BenchError, match="multiple"):
        ArchiveRig(tmp_path, 1 << 20, 64 << 10)
    rig.close()
    assert not list(tmp_path.iterdir())


def test_sizes_of_too_few_pages_are_refused_before_anything_is_made(tmp_path):
    with pytest.raises(BenchError, match="at least 16"):
        ArchiveRig(tmp_path, 1024, 64 << 10)
    assert not [*tmp_path.iterdir()]
