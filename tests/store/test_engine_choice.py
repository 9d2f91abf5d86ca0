"""Engines that are insisted on work or say why not, at once; `auto` never needs them."""

from __future__ import annotations

import importlib.util
import time

import pytest

from hicache_tier.errors import EngineUnavailableError, InvalidArgumentError
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig
from hicache_tier_storage import accelerators, nixl_package, trials
from hicache_tier_storage.kvikio_package import missing_library
from hicache_tier_storage.nixl_package import why_no_nixl
from hicache_tier_storage.probe import probe_engines
from hicache_tier_storage.trials import Trial, try_all

needs_nixl = [pytest.mark.nixl, pytest.mark.skipif(bool(why_no_nixl()), reason=why_no_nixl())]


@pytest.fixture
def untried():
    trials.forget()
    yield
    trials.forget()


def why_no_driver():
    return missing_library("libcuda.so.1", "no NVIDIA driver")


def missing(monkeypatch, *names):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in names else real(name, *rest)
    )


def rows_of(directory, engine):
    return {row.mode: row for row in probe_engines(directory) if row.engine == engine}


@pytest.mark.parametrize("engine", ["nixl", "kvikio"])
def test_not_installed(tmp_path, monkeypatch, engine):
    missing(monkeypatch, "nixl_cu12", "nixl_cu13", "kvikio")
    rig = StoreRig(tmp_path / "root")
    with pytest.raises(
        EngineUnavailableError, match=rf"{engine}.*not installed: pip install.*cu13"
    ) as caught:
        rig.open(engine=engine)
    assert caught.value.kind == "engine_unavailable"
    assert "auto" in str(caught.value)
    assert not (tmp_path / "root").exists()
    assert all("not installed" in row.reason for row in rows_of(tmp_path, engine).values())
    store = rig.open(engine="auto")
    assert store.stats()["engine"] == "posix"
    assert rig.put(store, keys_of("auto", 2)) == ["stored"] * 2
    rig.close()


def test_too_old(monkeypatch):
    monkeypatch.setattr(nixl_package, "_distribution", lambda: ("nixl_cu12", "1.4.9"))
    assert "1.4.9 is too old, 1.5.1 or later" in why_no_nixl()


def test_an_unknown_engine_names_those_there_are(tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"Did you mean 'nixl'.*posix, nixl, kvikio"):
        StoreRig(tmp_path).open(engine="nixel")


class TestNixl:
    pytestmark = needs_nixl

    @pytest.mark.parametrize("io_mode", ["auto", "buffered"])
    def test_insisted_on(self, tmp_path, io_mode):
        rig = StoreRig(tmp_path / "root")
        store = rig.open(engine="nixl", io_mode=io_mode)
        stats = store.stats()
        assert stats["engine"] == "nixl"
        assert stats["mode"].startswith("POSIX ")
        assert stats["mode"].endswith("buffered" if io_mode == "buffered" else ("direct", "buffered"))
        keys = keys_of("insist", 20)
        assert rig.put(store, keys) == ["stored"] * 20
        assert rig.get(store, keys) == ["loaded"] * 20
        rig.close()

    def test_insisted_on_by_a_reader(self, tmp_path):
        rig = StoreRig(tmp_path / "root")
        rig.put(rig.open(), keys_of("reader", 20))
        reader = rig.open(engine="nixl", read_only=True)
        assert reader.stats()["engine"] == "nixl"
        assert rig.get(reader, keys_of("reader", 20)) == ["loaded"] * 20
        rig.close()

    def test_what_one_engine_wrote_the_other_reads(self, tmp_path):
        keys = keys_of("both", 20)
        for writer, reader in (("nixl", "posix"), ("posix", "nixl")):
            rig = StoreRig(tmp_path / writer)
            rig.put(rig.open(engine=writer), keys)
            rig.close()
            rig = StoreRig(tmp_path / writer)
            assert rig.get(rig.open(engine=reader), keys) == ["loaded"] * 20
            rig.close()

    def test_probe_names_every_way(self, tmp_path):
        rows = rows_of(tmp_path, "nixl")
        assert list(rows) == ["POSIX aio", "POSIX io_uring", "GDS_MT", "GDS"]
        assert rows["POSIX aio"].usable or "aio-nr" in rows["POSIX aio"].reason
        for plugin in ("GDS_MT", "GDS"):
            assert rows[plugin].reason
            assert not rows[plugin].usable or why_no_driver() == ""
        assert list(tmp_path.iterdir()) == []

    def test_the_second_queue_where_the_first_is_refused(self, tmp_path, monkeypatch):
        if not rows_of(tmp_path, "nixl")["POSIX io_uring"].usable:
            pytest.skip("io_uring does not work here")

        def verdicts(wanted, *_):
            return ["refused" if trial.options["queue"] == "aio" else "" for trial in wanted]

        monkeypatch.setattr(accelerators, "try_all", verdicts)
        rig = StoreRig(tmp_path / "root")
        assert rig.open(engine="nixl").stats()["mode"].startswith("POSIX io_uring")
        rig.close()

    def test_no_queue_works(self, tmp_path, monkeypatch):
        monkeypatch.setattr(accelerators, "try_all", lambda wanted, *_: ["it hung"] * len(wanted))
        with pytest.raises(EngineUnavailableError, match=r"POSIX aio: it hung.*POSIX io_uring: it hung"):
            StoreRig(tmp_path / "root").open(engine="nixl")
        assert not (tmp_path / "root").exists()


class TestTrials:
    pytestmark = pytest.mark.usefixtures("untried")

    def test_a_plug_in_that_hangs_as_it_is_made(self, tmp_path, monkeypatch):
        monkeypatch.setattr(trials, "_CODE", "while True: pass")
        start = time.monotonic()
        (verdict,) = try_all([Trial("any", tmp_path)], deadline_s=0.3)
        assert verdict == "did not answer within 0 s"
        assert time.monotonic() - start < 5
        monkeypatch.setattr(trials, "_CODE", "raise SystemExit('never asked again')")
        assert try_all([Trial("any", tmp_path)]) == [verdict]

    @pytest.mark.parametrize(
        ("code", "verdict"),
        [
            ("import os; os.kill(os.getpid(), 11)", "the trial ended with signal 11"),
            ("raise RuntimeError('no such thing')", "exit code 1: RuntimeError: no such thing"),
            ("print('noise'); print('{}')", "the trial ended with exit code 0"),
            ("print('noise'); print('{\"why\": \"because\"}'); print('more')", "because"),
        ],
    )
    def test_a_trial_that_ends_badly(self, tmp_path, monkeypatch, code, verdict):
        monkeypatch.setattr(trials, "_CODE", code)
        assert verdict in try_all([Trial("any", tmp_path)])[0]

    def test_side_by_side_and_once(self, tmp_path, monkeypatch):
        code = 'import time; time.sleep(0.5); print(\'{"why": ""}\')'
        monkeypatch.setattr(trials, "_CODE", code)
        wanted = [Trial("any", tmp_path, {"number": number}) for number in range(4)]
        start = time.monotonic()
        assert try_all([*wanted, wanted[0]]) == [""] * 5
        first = time.monotonic() - start
        start = time.monotonic()
        assert try_all(wanted) == [""] * 4
        assert time.monotonic() - start < 0.2 < first
