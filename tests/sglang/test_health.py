"""The breakers for reads and writes, without SGLang: storage that is slow, and comes back."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_tier.integrations.sglang.health import Health
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.desk_rig import NAMES, Rig, until


def test_slow_storage_opens_a_breaker_that_closes_by_itself(rig, engine):
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    engine.delay_s["read"] = engine.delay_s["write"] = 2.0
    rig.desk.deadline_s = 0.3
    assert rig.get(NAMES[:4], range(4)) == ["late"] * 4
    assert rig.look(NAMES) == 0
    started_s = time.monotonic()
    assert rig.get(NAMES, range(16)) == ["breaker_open"] * 16
    assert rig.put(keys_of("more", 3), range(3)) == ["breaker_open"] * 3
    assert time.monotonic() - started_s < 1.0
    assert rig.tally.reasons["set", "breaker_open"] == 3
    rig.desk.deadline_s = 4
    engine.delay_s = dict.fromkeys(engine.delay_s, 0.0)
    assert until(lambda: rig.look(NAMES) == 16)  # with no call of ours but lookups
    assert rig.get(NAMES, range(16)) == ["loaded"] * 16
    assert until(lambda: rig.put(keys_of("more", 3), range(3)) == ["stored"] * 3)
    assert not rig.desk.health.writes_open


def test_a_breaker_closes_although_the_calls_that_opened_it_never_return(tmp_path, engine):
    rig = Rig(tmp_path / "root", engine, probe_interval_s=0.02)
    rig.fill()
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    rig.desk.deadline_s = 0.1
    engine.swallows = True
    assert rig.get(NAMES[:2], range(2)) == ["late"] * 2
    assert until(lambda: engine.calls.count("read") > 6, 30.0)  # the read, and tries of storage
    rig.desk.deadline_s = 4
    engine.swallows = False
    assert until(lambda: rig.look(NAMES) == 16, 30.0)
    assert rig.get(NAMES[:2], range(2)) == ["loaded"] * 2
    engine.end.set()
    rig.desk.close()


class Pauses(threading.Event):
    """Notes how long it is waited for."""

    def __init__(self):
        super().__init__()
        self.asked_s = []

    def wait(self, timeout=None):
        self.asked_s.append(timeout)
        return super().wait(0.01)


@pytest.mark.parametrize(("interval_s", "pause_s"), [(1e-9, 0.01), (0.1, 0.025), (60, 0.05)])
def test_the_watch_pauses_however_short_the_interval_is(tmp_path, engine, interval_s, pause_s):
    rig = Rig(tmp_path / "root", engine, probe_interval_s=interval_s)
    rig.desk._try_reads = lambda: False
    closing = rig.desk._closing = Pauses()
    rig.desk.health.late()
    assert until(lambda: len(closing.asked_s) > 3, 30.0)
    assert set(closing.asked_s) == {pause_s}
    rig.desk.close()


def test_writes_that_are_late_do_not_close_off_reads_that_are_not(rig, engine):
    assert rig.put(NAMES, range(16)) == ["stored"] * 16
    engine.delay_s["write"] = 2.0
    rig.desk.health = Health(3600)
    rig.desk.deadline_s = 0.3
    assert rig.put(keys_of("more", 3), range(3)) == ["late"] * 3
    rig.desk.deadline_s = 4
    assert rig.desk.health.writes_open
    assert until(lambda: rig.look(NAMES) == 16)
    assert rig.get(NAMES, range(16)) == ["loaded"] * 16
    assert rig.put(keys_of("more", 3), range(3)) == ["breaker_open"] * 3
