"""Who may use what a store makes, whose files it takes, and what it never writes down."""

from __future__ import annotations

import ast
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner

import hicache_tier
import hicache_tier_kernels
import hicache_tier_storage
from hicache_tier.cli import main
from hicache_tier.errors import InvalidArgumentError, StoreError
from hicache_tier.layout import Layout
from hicache_tier.metrics.exporter import Exporter
from hicache_tier.testing.store_rig import GEOMETRY, StoreRig, paths_of, tree
from hicache_tier_storage.identity import Identity

MODES = {"private": (0o600, 0o700), "group_read": (0o640, 0o750), "group": (0o660, 0o2770)}
SALT = "salt-that-nobody-may-read"


@pytest.mark.parametrize("access", MODES)
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_files_and_folders_have_the_permissions_asked_for(shop, keys, access, umask):
    before = os.umask(umask)
    try:
        store = shop.open(access=access)
        assert set(shop.put(store, keys[:40])) == {"stored"}
        other = shop.open(access=access, model="other")
        shop.put(other, keys, pin=True)
        store.close()
        other.close()
    finally:
        os.umask(before)
    of_file, of_folder = MODES[access]
    paths = [shop.root, *shop.root.rglob("*")]
    assert len(paths) > 20
    for path in paths:
        wanted = of_folder if path.is_dir() else of_file
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_root_that_is_there_keeps_its_permissions(shop, keys):
    shop.root.mkdir(mode=0o755)
    shop.root.chmod(0o755)
    shop.put(shop.open(), keys[:3])
    assert stat.S_IMODE(shop.root.stat().st_mode) == 0o755


def test_an_export_is_private_too(shop, keys, tmp_path):
    store = shop.open()
    shop.put(store, keys[:8])
    store.close()
    before = os.umask(0)
    try:
        result = CliRunner().invoke(main, ["export", str(shop.root), str(tmp_path / "archive")])
    finally:
        os.umask(before)
    assert not result.exit_code, result.output
    for path in [tmp_path / "archive", *(tmp_path / "archive").rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.parametrize(("option", "value"), [("access", "grop"), ("owners", "sef"), ("access", 7)])
def test_an_unknown_access_or_owner_is_refused_before_anything_is_made(shop, option, value):
    with pytest.raises(InvalidArgumentError, match=f"{option} .* is not known"):
        shop.open(**{option: value})
    assert not shop.root.exists()


# -- owners --------------------------------------------------------------------------------------------------


@pytest.fixture
def stranger(monkeypatch):
    """Make a folder, with everything in it, another user's than this process's."""

    def give(folder):
        mine = os.geteuid()
        if mine:
            monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
            return
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 12345, 12345)

    return give


@pytest.mark.parametrize("read_only", [False, True])
def test_a_root_of_another_user_is_refused_unless_allowed(shop, keys, stranger, read_only):
    store = shop.open()
    shop.put(store, keys[:4])
    store.close()
    stranger(shop.root)
    before = tree(shop.root)
    with pytest.raises(StoreError, match=r"belongs to user \d+, and this process is user \d+.*owners='any'"):
        shop.open(read_only=read_only)
    assert tree(shop.root) == before
    assert shop.open(read_only=read_only, owners="any").match_prefix(keys) == 4


def test_a_new_root_is_nobody_elses_and_one_that_root_made_is_taken(shop, keys, monkeypatch):
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)  # as in a volume that is mounted for a service
        shop.root.mkdir()
    assert shop.put(shop.open(), keys[:2]) == ["stored", "stored"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_namespace_is_refused_and_another_users_partition_is_passed_over(shop, keys):
    writer = shop.open()
    shop.put(writer, keys[:4])
    partition = paths_of(writer).root
    os.chown(partition, 12345, 12345)
    reader = shop.open(read_only=True)
    assert reader.match_prefix(keys) == 0
    assert shop.open(read_only=True, owners="any").match_prefix(keys) == 4
    os.chown(partition.parent.parent, 12345, 12345)
    with pytest.raises(StoreError, match="belongs to user 12345"):
        shop.open(read_only=True)


_AS_ANOTHER = """
import os, sys
from pathlib import Path
from hicache_tier.testing.array_pool import keys_of
from hicache_tier.testing.store_rig import StoreRig
warm = StoreRig(Path(sys.argv[1] + "-warm"))
store = warm.open()  # imports what is imported late, while it can be read
assert warm.put(store, keys_of("warm", 2)) and warm.get(store, keys_of("warm", 2))
store.close()
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(12345)
rig = StoreRig(Path(sys.argv[1]))
keys = keys_of("security", 64)
store = rig.open(access="group", owners="any")
print(rig.get(store, keys[:4]), rig.put(store, keys[4:40]), store.stats()["partition"])
store.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_users_of_one_group_share_a_root(keys):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        root = Path(folder, "root")
        root.mkdir()
        os.chown(root, 0, 54321)
        root.chmod(0o2770)
        shop = StoreRig(root)
        first = shop.open(access="group", owners="any")
        assert set(shop.put(first, keys[:4])) == {"stored"}
        assert _as_another(root) == "-w1/kv"
        assert set(shop.get(first, keys[4:40])) == {"loaded"}
        first.close()
        assert _as_another(root) == "-w0/kv"  # takes over what the first user has left


def _as_another(root):
    """Let another user of the group open the store; return the end of its partition's name."""
    command = [sys.executable, "-c", _AS_ANOTHER, str(root), "54321"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "['loaded', 'loaded', 'loaded', 'loaded']" in found.stdout
    return found.stdout.split()[-1].removeprefix("tp0of1-pp0of1-cp0of1")


# -- what is never written, and never run --------------------------------------------------------------------


def test_a_tenants_salt_isolates_and_is_written_nowhere(shop, keys, tmp_path, caplog):
    caplog.set_level("DEBUG")
    store = shop.open(tenant=SALT)
    assert set(shop.put(store, keys[:8])) == {"stored"}
    for tenant in (None, "", SALT[:-1], SALT + "x"):
        assert shop.open(tenant=tenant).match_prefix(keys) == 0
    said = [repr(store), repr(store.identity), json.dumps(store.stats(), default=str)]
    store.close()
    runner = CliRunner()
    commands = (
        ["inspect", str(shop.root), "--json"],
        ["verify", str(shop.root), "--json"],
        ["export", str(shop.root), str(tmp_path / "archive"), "--tenant", SALT, "--json"],
        ["import", str(tmp_path / "archive"), str(tmp_path / "copy"), "--tenant", SALT, "--json"],
    )
    for command in commands:
        result = runner.invoke(main, command)
        assert not result.exit_code, result.output
        said.append(result.output)
    for path in tmp_path.rglob("*"):
        assert SALT not in path.name
        if path.is_file():
            assert SALT.encode() not in path.read_bytes(), path
    assert not any(SALT in text for text in [*said, caplog.text])


def test_a_salt_that_cannot_be_is_not_shown_either():
    fields = dict.fromkeys(("model", "revision", "adapter"))
    axes = dict.fromkeys(("tp", "pp", "cp"), (0, 1))
    for tenant in (SALT.encode(), SALT + "\ud800"):
        with pytest.raises(InvalidArgumentError, match="tenant") as raised:
            Identity.build(GEOMETRY, Layout.PAGE_FIRST, pool="kv", tenant=tenant, **fields, **axes)
        assert "nobody" not in str(raised.value)


def test_nothing_unpickles_or_evaluates_what_it_reads():
    seen = 0
    for package in (hicache_tier, hicache_tier_storage, hicache_tier_kernels):
        for path in Path(package.__file__).parent.rglob("*.py"):
            seen += 1
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                where = f"{path}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                    assert not {"pickle", "marshal", "shelve", "dill"} & {*names}, where
                if isinstance(node, ast.Call):
                    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                    plain = isinstance(node.func, ast.Name)
                    assert not (plain and name in {"eval", "exec"}), where
                    options = {option.arg: option.value for option in node.keywords}
                    allowed = options.get("allow_pickle")
                    assert allowed is None or (isinstance(allowed, ast.Constant) and not allowed.value), where
    assert seen > 200


def test_the_metrics_port_is_reached_from_this_host_alone():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    exporter = Exporter(port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.2:{port}/metrics", timeout=5)
    finally:
        exporter.close()
