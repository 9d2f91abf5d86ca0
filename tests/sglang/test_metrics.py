"""What Prometheus is told, the dashboard over it, and the doctor."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from hicache_tier.cli import main
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry
from hicache_tier.integrations.sglang.health import Health
from hicache_tier.integrations.sglang.options import Options
from hicache_tier.integrations.sglang.pool import Pool
from hicache_tier.integrations.sglang.ranks import Ranks
from hicache_tier.integrations.sglang.tally import Tally
from hicache_tier.integrations.sglang.verdicts import kinds_of
from hicache_tier.metrics import Exporter, Instruments, dashboard_text
from hicache_tier.metrics.instruments import METRICS
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of
from hicache_tier_storage.status import failed

GEOMETRY = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float16", page_tokens=4)


class View:
    """A registered pool's view, over memory of ours."""

    name, marker, copied, sharded, facts = "kv", False, False, True, {}

    def __init__(self, layout="page_first", pages=16, **facts):
        self.pool = ArrayPool(GEOMETRY, layout, pages)
        self.geometry, self.layout, self.facts = GEOMETRY, self.pool.layout, facts

    def addresses(self, pages):
        return self.pool.segment_table(pages)[0]

    @property
    def nbytes(self):
        return self.pool.segment_table([0])[1]

    keep = None


def pool_at(root, view=None, tp=(0, 1), **options):
    options = Options(root=str(root), capacity_bytes="16 MiB", **options)
    return Pool(
        view or View(), options, Ranks("org/m", tp, (0, 1), (0, 1), replicated=False, writer=True), {}
    )


def stored(pool, count, salt="m"):
    keys = keys_of(salt, count)
    fill_pages(pool.view.pool, range(count), keys, GEOMETRY.page_nbytes)
    pages = pool.in_place(keys, np.arange(count))
    pages.put()
    return pages


def test_calls_are_counted_by_reason(tmp_path):
    registry = CollectorRegistry()
    tally = Tally("tp0-pp0-cp0", Instruments.of(registry))
    pool = pool_at(tmp_path / "root")
    tally.call("set", [stored(pool, 6)], 0.02, late=False)
    pages = pool.in_place([*keys_of("m", 6), *keys_of("other", 2)], np.arange(8))
    pages.get()
    tally.call("get", [pages], 0.01, late=True)
    tally.refused("set", "kv", "breaker_open", 5)
    tally.lookup(10, 7)
    tally.sample([pool], Health(1.0), {"get": 1, "set": 0})

    def value(name, **labels):
        return registry.get_sample_value(name, {"rank": "tp0-pp0-cp0", **labels})

    assert value("hicache_tier_pages_total", pool="kv", op="set", reason="stored") == 6
    assert value("hicache_tier_pages_total", pool="kv", op="get", reason="loaded") == 6
    assert value("hicache_tier_pages_total", pool="kv", op="get", reason="absent") == 2
    assert value("hicache_tier_pages_total", pool="kv", op="set", reason="breaker_open") == 5
    assert value("hicache_tier_bytes_total", pool="kv", op="get") == 6 * GEOMETRY.page_nbytes
    assert value("hicache_tier_lookup_pages_total", result="hit") == 7
    assert value("hicache_tier_lookup_pages_total", result="miss") == 3
    assert value("hicache_tier_late_calls_total", op="get") == 1
    assert value("hicache_tier_call_seconds_count", op="set") == 1
    assert value("hicache_tier_stored_pages", pool="kv") == 6
    assert value("hicache_tier_calls_in_flight", op="get") == 1
    assert value("hicache_tier_breaker_open", op="get") == 0
    assert value("hicache_tier_capacity_bytes") == 16 << 20
    drained = tally.drain()
    assert [pages for pages, _ in drained["set"] + drained["get"]] == [6, 6]
    health = Health(1.0)
    health.late()
    tally.sample([pool], health, {"get": 1, "set": 0})
    assert value("hicache_tier_breaker_open", op="get") == 1
    tally.end()  # what is gone has no breaker that is open, and no pages
    assert (
        value("hicache_tier_breaker_open", op="get") == value("hicache_tier_calls_in_flight", op="get") == 0
    )
    assert value("hicache_tier_stored_pages", pool="kv") == 0
    assert value("hicache_tier_pages_total", pool="kv", op="set", reason="stored") == 6
    assert not any(tally.drain().values())
    pool.store.close()


def test_a_port_of_its_own_serves_them_and_is_given_back():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        exporter = Exporter(port)
        exporter.instruments.add("hicache_tier_lookup_pages", ("r", "hit"), 3)
        with pytest.raises(InvalidArgumentError, match=f"metrics_port {port} cannot be had"):
            Exporter(port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert 'hicache_tier_lookup_pages_total{rank="r",result="hit"} 3.0' in answer.read().decode()
        exporter.close()


@pytest.mark.parametrize("port, address", [(65536, "127.0.0.1"), (9400, "no such host"), (9400, "a" * 300)])
def test_a_port_or_address_that_is_none_is_one_line(port, address):
    with pytest.raises(InvalidArgumentError, match=f"metrics_port {port} cannot be had at") as error:
        Exporter(port, address)
    assert "\n" not in str(error.value)


def test_metrics_that_cannot_be_kept_harm_nobody(caplog):
    instruments = Instruments.of(CollectorRegistry())

    def full(*_):
        raise OSError(28, "No space left on device")

    for instrument in instruments._all.values():
        instrument.labels = full
    tally = Tally("r", instruments)
    tally.lookup(3, 2)
    tally.refused("get", "kv", "absent", 1)
    instruments.set("hicache_tier_breaker_open", ("r", "get"), 1)
    instruments.observe("hicache_tier_call_seconds", ("r", "get"), 1)
    assert tally.reasons["exists", "hit"] == 2
    assert [record.message for record in caplog.records] == ["metrics cannot be kept; this is said once"]


def test_verdicts_may_come_in_while_they_are_counted():
    class Growing(list):
        def __iter__(self):
            yield from list.__iter__(self)
            self.append(failed("another"))

    assert sum(kinds_of(Growing([failed("one"), failed("two")])).values()) == 2


def test_without_a_port_they_are_in_the_processs_registry():
    first, second = Exporter(), Exporter()
    assert first.instruments is second.instruments
    first.close()


def test_the_dashboard_shows_every_metric_and_no_other():
    dashboard = json.loads(dashboard_text())
    shown = set(re.findall(r"hicache_tier_[a-z_]+", json.dumps(dashboard["panels"])))
    suffixes = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    assert shown == {name + suffixes[kind] for name, (kind, _, _) in METRICS.items()}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    result = CliRunner().invoke(main, ["dashboard"])
    assert json.loads(result.output) == dashboard
    assert Path(dashboard_text.__globals__["__file__"]).with_name("dashboard.json").is_file()


def doctor(*arguments):
    result = CliRunner().invoke(main, ["doctor", *map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.output)


def test_the_doctor_tells_what_is_readable_and_why_not_the_rest(tmp_path):
    root = tmp_path / "root"
    for pool, count in [
        (pool_at(root), 5),
        (pool_at(root, View("page_head")), 4),
        (pool_at(root, tp=(1, 2)), 3),
        (pool_at(root, weight_version="9"), 2),
        (pool_at(root, tenant="salt"), 1),
    ]:
        stored(pool, count)
        pool.store.close()
    code, said = doctor(root)
    assert (code, said["stored"], said["readable"]) == (0, 15, 15)  # nothing is known that could differ
    config = json.dumps({"root": str(root), "interface_v1": 1})
    code, said = doctor(
        root, "--model", "org/m", "--layout", "page_first", "--tp", 1, "--dtype", "float16",
        "--page-size", 4, "--layers", 2, "--heads", 2, "--extra-config", config,
    )  # fmt: skip
    assert (code, said["stored"], said["readable"]) == (0, 15, 5)
    why = {one["pages"]: " ".join(one["why"]) for one in said["namespaces"]}
    assert why[5] == ""
    assert "axis order: stored with htld (page_head), this configuration has tlhd (page_first)" in why[4]
    assert "tp size: stored with 2, this configuration has 1" in why[3]
    assert "revision: stored with weights 9, this configuration has none" in why[2]
    assert "tenant: stored with" in why[1]
    assert "salt" not in json.dumps(said)
    code, said = doctor(root, "--model", "org/other")
    assert (code, said["readable"]) == (1, 0)
    shown = CliRunner().invoke(main, ["doctor", str(root), "--model", "org/other"])
    assert "stored 15 pages, readable by this configuration 0" in shown.output
    wrong = CliRunner().invoke(main, ["doctor", str(root), "--extra-config", '{"roof": 1}'])
    assert wrong.exit_code == 2


def test_the_doctor_takes_a_running_servers_configuration(tmp_path):
    root = tmp_path / "root"
    old = pool_at(root, model_revision="1", view=View(quantization="fp8"))
    stored(old, 4)
    old.store.close()
    now = pool_at(root, model_revision="2")
    stored(now, 3)
    code, said = doctor(root)
    assert (code, said["stored"], said["readable"]) == (0, 7, 3)
    why = {one["pages"]: one["why"] for one in said["namespaces"]}
    assert why[3] == []
    assert why[4] == [
        'facts: stored with {"quantization": "fp8"}, this configuration has {}',
        "revision: stored with 1, this configuration has 2",
    ]
    now.store.close()


MULTIPROCESS = """
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from hicache_tier.metrics import Instruments
instruments = Instruments.of()
instruments.add("hicache_tier_lookup_pages", ("r", "hit"), 3)
instruments.set("hicache_tier_breaker_open", ("r", "get"), 1)
instruments.observe("hicache_tier_call_seconds", ("r", "get"), 0.002)
registry = CollectorRegistry()
MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_sglangs_multiprocess_mode_gathers_them(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", MULTIPROCESS],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    assert 'hicache_tier_lookup_pages_total{rank="r",result="hit"} 3.0' in run.stdout
    assert 'hicache_tier_breaker_open{op="get",rank="r"} 1.0' in run.stdout
    assert 'hicache_tier_call_seconds_count{op="get",rank="r"} 1.0' in run.stdout
