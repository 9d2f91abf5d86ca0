"""Interrupts and errors in the midst of pages of a device: what is under way, and where it may land.

Stand-ins as in `test_device_flow.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_tier.testing.array_pool import blank_pages, fill_pages, keys_of, pages_equal
from hicache_tier.testing.device_engines import Patient, pretend_device, short_steps
from hicache_tier.testing.device_rig import ALIGNED, BytePool
from hicache_tier_storage import open_store, staging
from hicache_tier_storage.device_moves import RingMove
from hicache_tier_storage.flights import Settled

NBYTES = ALIGNED.page_nbytes  # a multiple of 4096: slots have no gaps


@pytest.fixture(autouse=True)
def _pretended(monkeypatch):
    pretend_device(monkeypatch)


@pytest.mark.parametrize("verb", ["put", "get"])
def test_an_interrupted_call_leaves_nothing_under_way(memory_path, monkeypatch, verb):
    short_steps(monkeypatch, 4, NBYTES)
    engine, device, keys = Patient(), BytePool(ALIGNED, "page_first", 32), keys_of("interrupted", 16)
    fill_pages(device, range(16), keys, NBYTES)
    options = {"capacity_bytes": "16 MiB", "engine": engine, "deadline_s": None}
    name = "fill" if verb == "put" else "empty"
    real = getattr(RingMove, name)

    def interrupted(move, start, stop):
        if start >= 4:
            raise KeyboardInterrupt
        return real(move, start, stop)

    with open_store(memory_path, ALIGNED, "page_first", **options) as store:
        if verb == "get":
            assert all(store.put(keys, device, range(16)))
        with monkeypatch.context() as patch:
            patch.setattr(RingMove, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(store, verb)(keys, device, range(16))
        assert not engine.under_way
        assert all(store.put(keys, device, range(16)))
        assert all(store.get(keys, device, range(16, 32)))
    assert all(pages_equal(device, range(16, 32), keys, NBYTES))
    engine.close()


@pytest.mark.parametrize("verb", ["put", "get"])
@pytest.mark.parametrize("known", [True, False])
def test_a_call_that_is_interrupted_at_its_end_too(memory_path, monkeypatch, verb, known):
    """The ring is lent again where all steps are known to have ended, and nowhere else."""
    short_steps(monkeypatch, 4, NBYTES)
    engine, device, keys = Patient(), BytePool(ALIGNED, "page_first", 16), keys_of("twice", 8)
    fill_pages(device, range(8), keys, NBYTES)
    real, turns = engine.start, []

    def start(batch, *, write):
        flight = real(batch, write=write)
        result = flight.result

        def interrupted():
            if turns.append(1) or len(turns) <= 2 or not known:
                flight.done = lambda: len(turns) > 2
                raise KeyboardInterrupt
            return result()

        flight.result = interrupted
        return flight

    options = {"capacity_bytes": "16 MiB", "engine": engine, "deadline_s": None}
    with open_store(memory_path, ALIGNED, "page_first", **options) as store:
        if verb == "get":
            assert all(store.put(keys, device, range(8)))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "start", start)
            with pytest.raises(KeyboardInterrupt):
                getattr(store, verb)(keys, device, range(8))
        rings = staging._RINGS_OF_PROCESS
        assert len(rings.given_up) == (not known)
        if known:
            assert not engine.under_way
        engine.under_way.clear()
        assert all(store.put(keys, device, range(8)))
        assert all(store.get(keys, device, range(8, 16)))
    assert all(pages_equal(device, range(8, 16), keys, NBYTES))
    engine.close()


@pytest.mark.parametrize("at", ["starting", "started"])
def test_a_put_that_was_interrupted_as_a_step_began(memory_path, monkeypatch, at):
    """What was begun lands late, and in no other page's slot."""
    short_steps(monkeypatch, 4, NBYTES)
    engine, device, keys = Patient(), BytePool(ALIGNED, "page_first", 16), keys_of("begins", 16)
    fill_pages(device, range(16), keys, NBYTES)
    real, late = engine.start, []

    def start(batch, *, write):
        if at == "started" and len(late) < 2:
            late.append(batch)
            return real(batch, write=write)
        late.append(batch)
        raise KeyboardInterrupt

    options = {"capacity_bytes": "16 MiB", "engine": engine, "deadline_s": None}
    with open_store(memory_path, ALIGNED, "page_first", **options) as store:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "start", start)
            with pytest.raises(KeyboardInterrupt):
                store.put(keys[:8], device, range(8))
        assert store.stats()["stranded_slots"] == 8
        assert len(staging._RINGS_OF_PROCESS.given_up) == 1
        assert all(store.put(keys[8:], device, range(8, 16)))
        assert not any(engine.write(late[-1]))
        blank_pages(device, range(16), NBYTES)
        assert all(store.get(keys[8:], device, range(8)))
    assert all(pages_equal(device, range(8), keys[8:], NBYTES))
    engine.close()


@pytest.mark.parametrize("verb", ["put", "get"])
def test_an_error_beside_a_step_that_never_ended(memory_path, monkeypatch, verb):
    """The pages are those of a timeout, whatever else went wrong."""
    short_steps(monkeypatch, 4, NBYTES)
    engine, device, keys = Patient(), BytePool(ALIGNED, "page_first", 8), keys_of("error", 8)
    fill_pages(device, range(8), keys, NBYTES)
    name = "fill" if verb == "put" else "empty"
    real = getattr(RingMove, name)

    def failing(move, start, stop):
        if start >= (4 if verb == "put" else 0):
            raise RuntimeError("boom")
        return real(move, start, stop)

    def start(batch, *, write):
        verdict = "timeout: no end" if batch.offsets[0] == 3 * NBYTES else ""
        return SimpleNamespace(done=lambda: False, result=lambda: [verdict] * len(batch))

    with open_store(memory_path, ALIGNED, "page_first", capacity_bytes="16 MiB", engine=engine) as store:
        if verb == "get":
            assert all(store.put(keys, device, range(8)))
        with monkeypatch.context() as patch:
            patch.setattr(engine, "start", start)
            patch.setattr(RingMove, name, failing)
            found = getattr(store, verb)(keys, device, range(8))
        assert {verdict.reason for verdict in found} == {"timeout: device_error: RuntimeError: boom"}
        assert store.stats()["stranded_slots"] == (8 if verb == "put" else 0)
        assert len(staging._RINGS_OF_PROCESS.given_up) == 1
    engine.close()


@pytest.mark.parametrize("fault", ["start", "result", "brief"])
def test_an_engine_that_raises_costs_its_pages_only(memory_path, monkeypatch, fault):
    short_steps(monkeypatch, 4, NBYTES)
    engine, device, keys = Patient(), BytePool(ALIGNED, "page_first", 8), keys_of("raises", 8)
    fill_pages(device, range(8), keys, NBYTES)
    real, turns = engine.start, iter(range(8))

    def boom():
        raise RuntimeError("boom")

    def start(batch, *, write):
        if next(turns) != 3:
            return real(batch, write=write)
        if fault == "start":
            boom()
        return SimpleNamespace(done=lambda: True, result=boom) if fault == "result" else Settled([])

    with open_store(memory_path, ALIGNED, "page_first", capacity_bytes="16 MiB", engine=engine) as store:
        monkeypatch.setattr(engine, "start", start)
        found = [verdict.kind for verdict in store.put(keys, device, range(8))]
    if fault == "result":  # nobody knows whether it ended: nothing more is begun in the ring
        assert found == ["stored"] * 3 + ["timeout"] + ["stored"] * 2 + ["not_tried"] * 2
    else:
        assert found == ["stored"] * 3 + ["engine_error"] + ["stored"] * 4
    assert len(staging._RINGS_OF_PROCESS.given_up) == (fault == "result")
    engine.close()
