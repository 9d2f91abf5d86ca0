"""`bench storage --engine all`: every engine that works is measured, the others say why not."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from hicache_tier.cli import main
from hicache_tier_storage.nixl_package import why_no_nixl

SMALL = ("--case", "4x64KiB", "--mode", "buffered", "--repeats", "3", "--slots", "100", "--threads", "2")


def run(root, *arguments):
    result = CliRunner().invoke(main, ["bench", "storage", "--root", str(root), *SMALL, *arguments])
    assert result.exit_code == 0, result.output
    assert list(root.iterdir()) == []
    return result.stdout


@pytest.mark.nixl
@pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl())
def test_all_engines(tmp_path):
    found = json.loads(run(tmp_path, "--engine", "all", "--json"))
    rows = {(row["engine"], row["direction"], row["checksums"]): row for row in found["rows"]}
    assert {engine for engine, _, _ in rows} >= {"posix", "nixl"}
    for (engine, direction, sums), row in rows.items():
        base = rows["posix", direction, sums]
        assert row["ratio_to_posix"] == pytest.approx(row["ratio_to_bare"] / base["ratio_to_bare"])
        assert engine != "posix" or row["ratio_to_posix"] == 1
        assert row["cpu_us_per_page"] > 0
    assert {row["mode"] for row in found["left_out"]} >= {"GDS_MT", "GDS"}
    assert all(row["reason"] for row in found["left_out"])


def test_one_engine_as_a_table(tmp_path):
    text = run(tmp_path)
    assert "of posix" in text
    assert "nixl" not in text
