from __future__ import annotations

import json

import pytest
import torch

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier_kernels import CalibrationTable, CopyPlan, Measurement, PlanFacts, choose, table_for
from hicache_tier_kernels.choice import table_path

KIB = 1 << 10
EVERY = ("cuda", "staged", "copy_engine")
MHA = KVGeometry.mha(num_layers=4, num_kv_heads=2, head_dim=8, dtype="bfloat16", page_tokens=4)


def row(direction, fragment, window, count=1000, **ratios):
    return Measurement(direction, fragment, count, window, ratios)


TABLE = CalibrationTable(
    "Test Device",
    (
        row("load", 16 * KIB, 0, cuda=0.93, copy_engine=0.3),
        row("load", 128 * KIB, 0, cuda=0.93, copy_engine=0.98),
        row("backup", 16 * KIB, 0, cuda=0.95, copy_engine=0.94),
        row("backup", 128 * KIB, 0, cuda=0.95, copy_engine=0.94),
        row("load", 256, 512 * KIB, cuda=0.93, staged=0.97),
        row("load", 256, 16 * KIB, cuda=0.92, staged=0.5),
    ),
)


@pytest.mark.parametrize(
    ("direction", "fragment", "window", "expected"),
    [
        ("load", 16 * KIB, 0, "cuda"),
        ("load", 24 * KIB, 0, "cuda"),
        ("load", 128 * KIB, 0, "copy_engine"),
        ("load", 512 * KIB, 0, "copy_engine"),
        ("backup", 16 * KIB, 0, "cuda"),  # as good as the kernel, but not wherever a core is slow
        ("backup", 128 * KIB, 0, "copy_engine"),  # as good as the kernel, and a busy device keeps its speed
        ("load", 256, 1024 * KIB, "staged"),
        ("load", 256, 16 * KIB, "cuda"),
    ],
)
def test_the_nearest_measurement_decides(direction, fragment, window, expected):
    usable = EVERY if window else ("cuda", "copy_engine")
    choice = choose(PlanFacts(direction, fragment, 1000, window), usable, TABLE)
    assert choice.engine == expected
    assert "Test Device" in choice.reason


@pytest.mark.parametrize(
    ("facts", "usable", "expected"),
    [
        (PlanFacts("load", 64 * KIB, 10), EVERY, "copy_engine"),
        (PlanFacts("load", 2 * KIB, 10, 4096 * KIB), EVERY, "staged"),
        (PlanFacts("load", 2 * KIB, 10, 8 * KIB), EVERY, "cuda"),
        (PlanFacts("load", 2 * KIB, 10), ("copy_engine", "staged"), "copy_engine"),
        (PlanFacts("load", 2 * KIB, 10), ("staged",), "staged"),
    ],
)
def test_rules_where_nothing_like_it_was_measured(facts, usable, expected):
    choice = choose(facts, usable, CalibrationTable("none"))
    assert choice.engine == expected
    assert choice.reason


MIB = 1 << 20
SIZES = CalibrationTable(
    "Test Device",
    (
        # The staged engine costs 2 MiB more to begin with, and moves a byte for less.
        row("load", 256, 512 * KIB, 4 * MIB // 256, cuda=0.80, staged=4 / 7),
        row("load", 256, 512 * KIB, 64 * MIB // 256, cuda=0.88, staged=64 / 68),
        row("load", 256, 64 * KIB, 64 * MIB // 256, cuda=0.88),
    ),
)


@pytest.mark.parametrize(
    ("mib", "cuda", "staged"),
    [
        (4, 0.80, 4 / 7),
        (64, 0.88, 64 / 68),
        (34, 34 / ((5 + 64 / 0.88) / 2), 34 / ((7 + 68) / 2)),  # costs half way between those measured
        (1, 1 / 5, 1 / 7),  # the start is paid by the fewest bytes too
        (6400, 0.88, 64 / 68),  # no faster than what was seen
    ],
)
def test_what_is_expected_lies_on_lines_between_measurements(mib, cuda, staged):
    facts = PlanFacts("load", 256, mib * MIB // 256, 512 * KIB)
    found = SIZES.expect(facts, EVERY)
    assert found.fragment_nbytes == 256
    assert found.ratios == pytest.approx({"cuda": cuda, "staged": staged})
    assert choose(facts, ("cuda", "staged"), SIZES).engine == ("staged" if staged > cuda * 0.95 else "cuda")


def test_what_was_measured_once_is_expected_for_all_sizes():
    found = SIZES.expect(PlanFacts("load", 256, 999 * MIB // 256, 64 * KIB), ["cuda"])
    assert found.ratios == pytest.approx({"cuda": 0.88})
    assert SIZES.expect(PlanFacts("backup", 256, 1000, 64 * KIB), ["cuda"]) is None
    assert SIZES.expect(PlanFacts("load", 256, 1000, 64 * KIB), ["copy_engine"]) is None


def test_page_numbers_on_the_device_are_read_by_a_kernel():
    choice = choose(PlanFacts("load", 128 * KIB, 1000, 0, on_device=True), EVERY, TABLE)
    assert choice.engine == "cuda"
    assert "on the device" in choice.reason


def test_a_brief_transfer_is_taken_by_the_fastest():
    table = CalibrationTable(
        "Test Device", (row("load", 128 * KIB, 0, cuda=0.78, copy_engine=0.75), row("load", 128, 0, cuda=1.0))
    )
    long, brief = (PlanFacts("load", 128 * KIB, 1000, brief=brief) for brief in (False, True))
    assert choose(long, EVERY, table).engine == "copy_engine"
    found = choose(brief, EVERY, table)
    assert found.engine == "cuda"
    assert "fastest" in found.reason


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (2,)])
def test_brief_is_what_is_short_with_all_layers(monkeypatch, layers):
    with (
        HostPool(MHA, "layer_first", 8, pinned=False) as far,
        HostPool(MHA, "layer_first", 8, pinned=False) as near,
    ):
        plan = CopyPlan(near.row_map(), far.row_map(), torch.tensor([1, 3]), torch.tensor([2, 5]))
        planes = [part * 4 + layer for part in range(2) for layer in layers]
        some = tuple(side.row_map().select(planes) for side in (near, far))
        for least, brief in ((plan.nbytes, False), (plan.nbytes + 1, True)):
            monkeypatch.setattr("hicache_tier_kernels.choice.BRIEF_NBYTES", least)
            assert PlanFacts.of(plan, some).brief is brief


def test_no_engine():
    with pytest.raises(InvalidArgumentError, match="no engine"):
        choose(PlanFacts("load", 1, 1), (), TABLE)


@pytest.mark.parametrize(
    ("layout", "sources", "destinations", "fragment", "count", "window"),
    [
        ("layer_first", [0, 1, 2, 3], [4, 5, 6, 7], 4 * 128, 8, 128),  # one run of four pages a plane
        ("layer_first", [0, 2, 4, 6], [7, 5, 3, 1], 128, 32, 128),
        ("page_first", [0, 1, 2, 3], [4, 5, 6, 7], 32, 4 * 32, 512),
        ("page_first_direct", [0, 1, 2, 3], [4, 5, 6, 7], 128, 32, 512),
    ],
)
def test_the_facts_of_a_plan(layout, sources, destinations, fragment, count, window):
    with HostPool(MHA, "layer_first", 8, pinned=False) as far, HostPool(MHA, layout, 8, pinned=False) as near:
        plan = CopyPlan(near.row_map(), far.row_map(), torch.tensor(sources), torch.tensor(destinations))
        facts = PlanFacts.of(plan)
        assert (facts.fragment_nbytes, facts.count, facts.window_nbytes) == (fragment, count, window)
        assert not facts.on_device


def test_there_and_back(tmp_path, monkeypatch):
    monkeypatch.setenv("HICACHE_TIER_CACHE", str(tmp_path))
    assert CalibrationTable.from_json(TABLE.to_json()) == TABLE
    assert TABLE.store() == table_path("Test Device") == tmp_path / "calibration" / "test_device.json"
    assert table_for("Test Device") == TABLE
    assert [path.name for path in (tmp_path / "calibration").iterdir()] == ["test_device.json"]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"format": 2}', '{"format": 1, "device": "x", "measurements": [{}]}', "\0", "[" * 99999]
    + [
        json.dumps({"format": 1, "device": "x", "measurements": [{**good, **bad}]})
        for good in (
            {"direction": "load", "fragment_nbytes": 1, "count": 1, "window_nbytes": 0, "ratios": {"a": 1}},
        )
        for bad in (
            {"count": 0},
            {"count": 1 << 9999},
            {"window_nbytes": -1},
            {"ratios": {}},
            {"ratios": []},
            *({"ratios": {"a": ratio}} for ratio in (float("nan"), float("inf"), -1.0)),
            {"fragment_nbytes": "x"},
            {"fragment_nbytes": float("inf")},
        )
    ],
)
def test_a_damaged_table_is_refused_and_the_shipped_one_used(text, tmp_path, monkeypatch):
    with pytest.raises(InvalidArgumentError, match="not a calibration table"):
        CalibrationTable.from_json(text)
    monkeypatch.setenv("HICACHE_TIER_CACHE", str(tmp_path))
    entry = table_path("Damaged")
    entry.parent.mkdir()
    entry.write_text(text)
    table_for.cache_clear()
    assert table_for("Damaged") == CalibrationTable.shipped()


def test_a_table_that_is_no_text_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HICACHE_TIER_CACHE", str(tmp_path))
    entry = table_path("Damaged")
    entry.parent.mkdir()
    entry.write_bytes(b"\xff\xfe\x00")
    table_for.cache_clear()
    assert table_for("Damaged") == CalibrationTable.shipped()


def test_the_shipped_table_is_of_an_h200():
    assert "H200" in CalibrationTable.shipped().device
