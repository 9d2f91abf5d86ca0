"""What SGLang's adapter passes on: keys, permissions, owners, and where metrics are seen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.integrations.sglang import pool as pools
from hicache_tier.integrations.sglang.diagnosis import KEYS, Configuration, diagnose
from hicache_tier.integrations.sglang.options import Options
from hicache_tier.integrations.sglang.ranks import Ranks
from hicache_tier.testing.store_rig import GEOMETRY, StoreRig

SALT = "salt-that-nobody-may-read"


def test_options_of_access_reach_the_store(monkeypatch, tmp_path):
    seen = {}

    def open_store(root, geometry, layout, **options):
        seen.update(options)
        return SimpleNamespace(root=root, geometry=geometry, layout=layout)

    monkeypatch.setattr(pools, "open_store", open_store)
    given = {"encryption": "env:KEY", "access": "group", "owners": "any"}
    options = Options.parse({"root": str(tmp_path), **given})
    view = SimpleNamespace(
        name="kv", pool=None, facts={}, sharded=False, geometry=GEOMETRY, layout="page_first", marker=False
    )
    monkeypatch.setattr(pools, "_cut_by_heads", lambda view: False)
    ranks = Ranks("org/m", (0, 1), (0, 1), (0, 1), replicated=False, writer=True)
    pools.Pool(view, options, ranks, {})
    assert {name: seen[name] for name in given} == given
    plain = Options.parse({"root": "/kv"})
    assert (plain.encryption, plain.access, plain.owners) == (None, "private", "self")


def test_the_salt_of_a_tenant_is_in_no_representation():
    assert SALT not in repr(Options.parse({"root": "/kv", "tenant": SALT}))
    with pytest.raises(InvalidArgumentError, match="tenant must be text, got list") as raised:
        Options.parse({"root": "/kv", "tenant": [SALT]})
    assert SALT not in str(raised.value)


def test_the_doctor_tells_encrypted_pages_from_others(tmp_path):
    root, key = tmp_path / "root", tmp_path / "key"
    key.write_text("0f" * 32)
    key.chmod(0o600)
    rig = StoreRig(root)
    store = rig.open(encryption=str(key), key_algorithm=KEYS)
    assert rig.put(store, [b"k" * 32]) == ["stored"]
    rig.close()
    told = "encryption: stored with aes-256-gcm, this configuration has none"
    for options, why in (({}, [told]), ({"encryption": str(key)}, [])):
        configuration = Configuration(options=Options.parse({"root": str(root), "model": "m", **options}))
        (finding,) = diagnose([str(root)], configuration)
        assert finding.why == why


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("given", "address"), [({}, "127.0.0.1"), ({"metrics_address": "0.0.0.0"}, "0.0.0.0")]
)
def test_metrics_are_on_loopback_unless_another_address_is_given(monkeypatch, given, address):
    pytest.importorskip("sglang")
    from hicache_tier.integrations.sglang import storage as storages

    seen = []
    monkeypatch.setattr(storages, "Exporter", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(storages, "Tally", lambda *_: None)
    monkeypatch.setattr(storages, "Desk", lambda *_: None)
    ranks = SimpleNamespace(number=2, label="r")
    monkeypatch.setattr(storages.Ranks, "of", lambda *_: ranks)
    config = SimpleNamespace(extra_config={"root": "/kv", "metrics_port": 9400, **given})
    storages.HiCacheTierStorage(config)
    assert seen == [(9402, address)]
