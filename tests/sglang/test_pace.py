"""Batches that are cut as fine as storage is slow, without SGLang."""

from __future__ import annotations

from hicache_tier.integrations.sglang.pace import Pace
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.desk_rig import NAMES, Rig, same


def test_what_was_done_in_time_counts(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine, deadline_s=2.0)
    rig.fill()
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    rig.pool.paces["get"].pages = 1
    engine.delay_s["read"] = 0.3
    wanted = rig.content(range(16))
    rig.fill(2)
    reasons = rig.get(NAMES, range(16))
    loaded = reasons.count("loaded")
    assert reasons == ["loaded"] * loaded + ["late"] * (16 - loaded)
    assert 1 <= loaded <= 8
    assert same(rig.content(range(loaded)), wanted[:loaded])
    rig.desk.close()


def test_a_batch_is_cut_as_fine_as_storage_is_slow():
    pace = Pace(1 << 20, 3.0)
    assert pace.pages == 64
    pace.learn(0, 1.0)
    assert pace.pages == 64
    for _ in range(8):
        pace.learn(128, 0.1)
    assert pace.pages > 900
    for _ in range(12):
        pace.learn(1, 1.0)
    assert pace.pages == 1


def test_a_batch_in_parts_is_counted_as_one(rig):
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    for pages in (3, 100):
        rig.pool.paces["get"].pages = pages
        rig.tally.reasons.clear()
        reasons = rig.get([*NAMES, *keys_of("absent", 2)], range(18))
        assert reasons == ["loaded"] * 16 + ["absent"] * 2
        assert rig.tally.reasons == {("get", "loaded"): 16, ("get", "absent"): 2}
