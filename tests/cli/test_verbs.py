"""Verbs over real stores and this machine."""

from __future__ import annotations

import json

import pytest

from hicache_tier import KVGeometry, open_store
from hicache_tier.cli import output
from hicache_tier.machine import default_device, machine_capabilities
from hicache_tier.paths import path_rows
from hicache_tier.testing.array_pool import ArrayPool, fill_pages, keys_of

GEOMETRY = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", page_tokens=4)


def fill(root, count=3, **options):
    """Leave a closed store with some pages."""
    options = {"model": "m", "capacity_bytes": "8 MiB", "io_mode": "buffered"} | options
    keys, host = keys_of("a", count), ArrayPool(GEOMETRY, "page_first", count)
    fill_pages(host, list(range(count)), keys, GEOMETRY.page_nbytes)
    with open_store(root, GEOMETRY, "page_first", **options) as store:
        assert all(store.put(keys, host, list(range(count))))
    return root


def test_paths(invoke):
    result = invoke("paths", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert rows == path_rows(machine_capabilities(default_device()))
    assert set(rows[0]) == {"pool", "layout", "io_backend", "sharded", "op", "ok", "engine", "reason"}
    shown = invoke("paths").stdout
    assert "page_first_direct" in shown
    assert "only supports layer_first" in shown


def test_probe(invoke, tmp_path):
    result = invoke("probe", tmp_path, "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert all(set(row) >= {"engine", "mode", "usable", "reason", "chosen"} for row in rows)
    assert sum(row["chosen"] for row in rows) == 1
    assert "posix" in invoke("probe", tmp_path).stdout
    assert not list(tmp_path.iterdir()), "the probe leaves nothing behind"


def test_probe_without_a_usable_engine_is_a_finding(invoke, tmp_path, monkeypatch):
    from hicache_tier_storage import probe

    row = {"engine": "posix", "mode": "direct", "usable": False, "reason": "for the test", "chosen": False}
    monkeypatch.setattr(probe, "probe", lambda _: [row])
    assert invoke("probe", tmp_path).exit_code == 1


def test_inspect(invoke, store):
    result = invoke("inspect", store, "--json")
    assert result.exit_code == 0
    (namespace,) = json.loads(result.stdout)["namespaces"]
    assert namespace["identity"]["model"] == "org/model"
    (partition,) = namespace["partitions"]
    assert (partition["pages"], partition["pool"], partition["writer"]) == (12, "kv", 0)
    shown = invoke("inspect", store).stdout
    for text in ("org/model", "mha, 4 tokens, 2 layers, k 2 x 16, v 2 x 16, float32", "12 pages", "closed"):
        assert text in shown


def test_inspect_names_the_layout(invoke, tmp_path, store):
    shown = invoke("inspect", store).stdout
    assert "layout          page_first\n" in shown
    assert "axis" not in shown
    with open_store(tmp_path / "lthd", GEOMETRY, "layer_first", model="m", capacity_bytes="8 MiB"):
        pass
    assert "layer_first or page_first_direct" in invoke("inspect", tmp_path / "lthd").stdout
    assert "1 namespace, 1 page, " in invoke("inspect", fill(tmp_path / "one", count=1)).stdout


def test_inspect_fits_the_columns_that_there_are(invoke, store):
    wide = invoke("inspect", store, env={"COLUMNS": "200"}).stdout
    narrow = invoke("inspect", store, env={"COLUMNS": "80"}).stdout
    names = ("rank", "writer", "pool", "state", "pages", "capacity", "created", "prefixes", "orphans")
    (heads,) = [line.split() for line in wide.splitlines() if line.strip().startswith("rank")]
    assert set(names) < set(heads)
    lines = dict(line.split(maxsplit=1) for line in narrow.splitlines() if line.startswith("  "))
    assert set(names) < set(lines)
    assert (lines["pages"], lines["rank"], lines["state"]) == ("12", "tp0of1-pp0of1-cp0of1", "closed")
    assert max(map(len, narrow.splitlines()[:-1])) <= 80
    default = invoke("inspect", store, env={"COLUMNS": None}).stdout
    assert "rank" in default.split()


def test_verify_good_and_damaged(invoke, store):
    result = invoke("verify", store, "--json")
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["pages"] == 12
    assert "all good" in invoke("verify", store).stdout
    (slab,) = store.glob("*/*/kv/pages/c.0.*")
    with slab.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    result = invoke("verify", store, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["damaged"] == 1
    shown = invoke("verify", store)
    assert shown.exit_code == 1
    assert "1 damaged" in shown.stdout
    assert "checksum" in shown.stdout


def test_verify_says_good_only_of_what_it_verified(invoke, tmp_path):
    root, key = tmp_path / "other", tmp_path / "key"
    key.write_text("0f" * 32)
    key.chmod(0o600)
    fill(root, encryption=str(key))
    result = invoke("verify", root)
    assert result.exit_code == 1
    assert "all good" not in result.stdout
    assert f"0 of 3 pages of {root} verified, none damaged" in result.stdout
    assert "3 not verified: encrypted, and --key-file was not given" in result.stdout
    result = invoke("verify", root, "--json")
    assert result.exit_code == 1
    assert {"pages": 3, "damaged": 0, "unverifiable": 3}.items() <= json.loads(result.stdout).items()
    result = invoke("verify", root, "--key-file", key)
    assert (result.exit_code, "3 pages" in result.stdout, "all good" in result.stdout) == (0, True, True)
    other = tmp_path / "other key"
    other.write_text("1e" * 32)
    other.chmod(0o600)
    fill(root, model="other", encryption=str(other), count=1)
    for file, locked in ((key, 1), (other, 3)):
        result = invoke("verify", root, "--key-file", file)
        assert (result.exit_code, f"{4 - locked} of 4 pages" in result.stdout) == (0, True)
        assert f"{locked} not verified: encrypted, with another key than that of --key-file" in result.stdout
    key.write_text("2d" * 32)
    assert invoke("verify", root, "--key-file", key).exit_code == 2
    fill(root, model="plain", checksums=False)
    fill(root, model="sound", count=1)
    result = invoke("verify", root)
    assert result.exit_code == 0
    for text in (
        "1 of 8 pages",
        "4 not verified: encrypted, and",
        "3 not verified: stored without a checksum",
    ):
        assert text in result.stdout
    result = invoke("verify", fill(tmp_path / "sole", checksums=False))
    assert (result.exit_code, "0 of 3 pages" in result.stdout) == (0, True), "no key would help"
    assert "1 page of" in invoke("verify", fill(tmp_path / "one", count=1)).stdout


@pytest.mark.parametrize(("number", "noun"), [(1, "sound page"), (2, "sound pages")])
def test_verify_counts_in_words(invoke, store, monkeypatch, number, noun):
    from hicache_tier_storage import inspection

    found = {"pages": 12, "damaged": 1, "unverifiable": 0, "locked": 0, "prefix_loss": number}
    monkeypatch.setattr(inspection, "verify_root", lambda *_, **__: found)
    assert f"{number} {noun} to which" in invoke("verify", store).stdout


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_what_is_not_a_store_is_one_line(invoke, tmp_path, verb):
    (tmp_path / "letter.txt").write_text("dear")
    result = invoke(verb, tmp_path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "not a store" in result.stderr
    assert invoke(verb, tmp_path / "absent").exit_code == 2


def test_sizes_and_ages():
    assert output.size(3 << 20) == "3 MiB"
    assert [output.age(s) for s in (0, 119, 120, 7300, 3 * 86400)] == ["0 s", "119 s", "2 min", "2 h", "3 d"]


def test_progress_is_silent_without_a_terminal(capsys):
    with output.progress("x", "pages") as report:
        assert report is None
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with output.progress("verifying", "pages") as report:
        report(1, 2)
        report(2, 2)
    assert capsys.readouterr().out == ""


def test_inspect_of_a_damaged_store_is_a_finding(invoke, store):
    (group,) = store.glob("*/zarr.json")
    group.write_text("{")
    assert invoke("inspect", store).exit_code == 1
    assert invoke("inspect", store, "--json").exit_code == 1


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_errors_are_json_for_those_who_asked(invoke, tmp_path, verb):
    (tmp_path / "note").write_text("not a store")
    result = invoke(verb, tmp_path, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "not_a_store"
    assert "Name the root of a store" in error["message"]
    result = invoke(verb, tmp_path / "missing", "--json")
    assert (result.exit_code, json.loads(result.stdout)["error"]["kind"]) == (2, "usage")


def test_paths_joins_what_is_the_same_both_ways(invoke):
    shown = invoke("paths").stdout
    assert "both" in shown
    assert "backup" not in shown
