"""`hicache-tier export` and `import`, and the scripts that are the same from a checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hicache_tier.cli import main
from hicache_tier.keys import page_keys
from hicache_tier.testing.array_pool import keys_of

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(*arguments, code=0):
    """Run a verb in this process; return what it printed on stdout."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], standalone_mode=True)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.stdout


def told(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code))


def test_there_and_back(shop, tmp_path):
    root, keys = shop.fill()
    report = told("export", root, tmp_path / "archive", "--codec", "fast")
    assert (report["pages"], report["bytes"], report["left_out"]) == (20, 20 * 2048, {})
    assert report["stored_bytes"] > 0 and report["seconds"] > 0
    report = told("import", tmp_path / "archive", tmp_path / "new", "--capacity", "4MiB")
    assert (report["imported"], report["already_stored"], report["refused"]) == (20, 0, {})
    assert shop.read(tmp_path / "new", keys) == shop.read(root, keys)


def test_what_people_see(shop, tmp_path):
    root, _ = shop.fill()
    said = run("export", root, tmp_path / "archive", "--dry-run")
    assert "20 pages" in said and "would be written" in said
    assert not (tmp_path / "archive").exists()
    said = run("export", root, tmp_path / "archive", "--max-size", "10KB")
    assert "4 pages, 8 KiB" in said and "left out: 16 pages above the size" in said
    said = run("import", tmp_path / "archive", tmp_path / "new", "--dry-run")
    assert "4 pages would be imported" in said
    assert not (tmp_path / "new").exists()
    said = run("import", tmp_path / "archive", tmp_path / "new", "--to-host")
    assert "4 pages, 8 KiB imported" in said and "read back into memory" in said
    said = run("import", tmp_path / "archive", tmp_path / "new", "--page-tokens", "16", code=1)
    assert "4 pages refused: 4 page_tokens" in said and "token ids" in said


def test_keys_and_tokens_from_files(shop, tmp_path):
    tokens = [*range(40)]
    keys = page_keys(tokens, 8)
    root, _ = shop.fill(keys=[*keys, *keys_of("other", 3)])
    (tmp_path / "keys").write_text("\n".join(key.hex() for key in keys[:2]) + "\n")
    (tmp_path / "tokens").write_text(json.dumps(tokens[:30]))
    assert told("export", root, tmp_path / "a", "--keys", tmp_path / "keys")["pages"] == 2
    assert told("export", root, tmp_path / "b", "--tokens", tmp_path / "tokens")["pages"] == 3
    report = told("import", tmp_path / "b", tmp_path / "new", "--page-tokens", "4", "--layout", "page_head")
    assert (report["imported"], report["refused"]) == (6, {})
    (tmp_path / "keys").write_text("00\nnot hex\n")
    error = told("export", root, tmp_path / "c", "--keys", tmp_path / "keys", code=2)["error"]
    assert error["kind"] == "invalid_argument" and "line 2" in error["message"]


def test_exit_codes(shop, tmp_path):
    root, _ = shop.fill()
    run("export", root, tmp_path / "archive")
    error = told("export", root, tmp_path / "archive", code=2)["error"]
    assert error["kind"] == "archive_exists" and "--overwrite" in error["message"]
    run("export", root, tmp_path / "archive", "--overwrite")
    assert told("import", root, tmp_path / "new", code=2)["error"]["kind"] == "not_an_archive"
    assert told("import", tmp_path / "archive", tmp_path / "new", "--tp", "3", code=1)["refused"] == {
        "heads": 20
    }
    for wrong in (["--codec", "best"], ["--max-size", "much"], ["--first", "oldest"], ["--max-size", "0"]):
        run("export", root, tmp_path / "other", *wrong, code=2)
    (shard,) = root.glob("*/*/kv/pages/c.0.*")
    with shard.open("r+b") as file:
        file.write(b"\x00\x01\x02\x03")
    assert told("export", root, tmp_path / "other", code=1)["left_out"] == {"damaged": 1}


def test_salts_of_tenants_come_from_the_environment_too(shop, tmp_path, monkeypatch):
    root, _ = shop.fill(tenant="salt")
    said = run("export", root, tmp_path / "archive", "--json")
    assert "salt" not in said
    assert told("import", tmp_path / "archive", tmp_path / "new", code=1)["refused"] == {"tenant": 20}
    monkeypatch.setenv("HICACHE_TIER_TENANT", "salt")
    assert told("import", tmp_path / "archive", tmp_path / "new")["imported"] == 20
    for path in (tmp_path / "archive").rglob("zarr.json"):
        assert '"salt"' not in path.read_text()


@pytest.mark.parametrize("script", ["export_cache.py", "import_cache.py"])
def test_scripts(script):
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, "--help"], capture_output=True, text=True, check=True
    )
    assert f"Usage: hicache-tier {script.partition('_')[0]}" in done.stdout


def test_what_matches_nothing_makes_no_archive(shop, tmp_path):
    root, _ = shop.fill()
    (tmp_path / "tokens").write_text("[9, 9, 9, 9, 9, 9, 9, 9]")
    for wanted in (["--tokens", tmp_path / "tokens"], ["--max-size", "10"]):
        for dry in ([], ["--dry-run"]):
            said = run("export", root, tmp_path / "archive", *wanted, *dry, code=1)
            assert said.startswith("no page of") and "no archive is made" in said
            assert told("export", root, tmp_path / "archive", *wanted, *dry, code=1)["pages"] == 0
    assert not [*tmp_path.glob("archive*")]


def test_namespaces_that_are_not_there_are_told(shop, tmp_path):
    root, _ = shop.fill()
    (space,) = (path.name for path in root.iterdir() if path.is_dir())
    run("export", root, tmp_path / "archive")
    for verb, source, target in (("export", root, "other"), ("import", tmp_path / "archive", "new")):
        error = told(verb, source, tmp_path / target, "--namespace", "zz", code=2)["error"]
        assert error["kind"] == "invalid_argument" and space in error["message"]
        assert not [*tmp_path.glob(f"{target}*")]


def test_a_part_without_token_ids_is_refused_in_one_row(shop, tmp_path):
    root, _ = shop.fill()
    run("export", root, tmp_path / "archive")
    for dry in ([], ["--dry-run"]):
        report = told("import", tmp_path / "archive", tmp_path / "new", "--page-tokens", 32, *dry, code=1)
        assert report["refused"] == {"page_tokens": 20}
        assert [row["key"] for row in report["details"]] == ["all"]


def test_what_is_encrypted_may_be_left_out(shop, tmp_path):
    key = tmp_path / "key"
    key.write_text("5a" * 32 + "\n")
    key.chmod(0o600)
    root, _ = shop.fill()
    (plain,) = (path.name for path in root.iterdir() if path.is_dir())
    shop.fill(encryption=key, model="another")
    error = told("export", root, tmp_path / "archive", code=2)["error"]
    assert (
        error["message"].endswith(f"Or leave it out: --namespace {plain}.")
        and "--key-file" in error["message"]
    )
    assert told("export", root, tmp_path / "archive", "--namespace", plain)["pages"] == 20
    wrong = tmp_path / "wrong"
    wrong.write_text("a5" * 32 + "\n")
    wrong.chmod(0o600)
    error = told("export", root, tmp_path / "third", "--key-file", wrong, code=2)["error"]
    assert "another key" in error["message"] and error["message"].endswith(f"--namespace {plain}.")
    narrowed = ("--namespace", plain, "--key-file", wrong, "--overwrite")
    assert told("export", root, tmp_path / "archive", *narrowed)["pages"] == 20
    sealed, _ = shop.fill("sealed", encryption=key)
    error = told("export", sealed, tmp_path / "other", code=2)["error"]
    assert "leave it out" not in error["message"]
    error = told("import", tmp_path / "archive", sealed, code=2)["error"]
    assert error["kind"] == "encryption" and "--key-file" in error["message"]
