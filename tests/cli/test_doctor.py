"""The doctor over a store made from Python, and what it refuses."""

from __future__ import annotations

import json
import sys

import pytest

from hicache_tier import KVGeometry, open_store


def test_a_store_made_from_python_is_no_finding_until_there_is_a_server_to_compare_with(invoke, store):
    shown = invoke("doctor", store)
    assert shown.exit_code == 0
    assert "keys: made from Python (" in shown.stdout
    assert "not by SGLang" in shown.stdout
    assert "No option was given and no server has the store open" in shown.stdout
    result = invoke("doctor", store, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["configuration"], told["stored"], told["readable"]) == (0, "none", 12, 0)
    result = invoke("doctor", store, "--model", "org/model", "--json")
    assert (result.exit_code, json.loads(result.stdout)["configuration"]) == (1, "said")
    assert "No option was given" not in invoke("doctor", store, "--model", "org/model").stdout


def test_a_store_that_is_open_is_compared_with_itself(invoke, store):
    geometry = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", page_tokens=4)
    with open_store(store, geometry, "page_first", model="org/model", capacity_bytes="8 MiB"):
        told = json.loads(invoke("doctor", store, "--json").stdout)
    assert (told["configuration"], told["readable"]) == ("open", 12)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--tp", 0, "x>=1"),
        ("--page-size", -3, "x>=1"),
        ("--dtype", "bf16", "Did you mean 'bfloat16'?"),
        ("--extra-config", "{", "cannot be read"),
        ("--extra-config", "[]", "must be an object"),
        ("--extra-config", '{"tenant": "\\ud800"}', "tenant is not valid Unicode"),
        ("--extra-config", "[" * 100_000, "cannot be read"),
    ],
)
def test_what_no_server_can_have_is_refused(invoke, store, option, value, said):
    result = invoke("doctor", store, option, value)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"model": "org/model"}'),
        ("a.toml", 'model = "org/model"'),
        ("a.yaml", "model: org/model"),
        ("a.YML", "model: org/model"),
    ],
)
def test_the_extra_config_may_be_any_file_that_sglang_reads(invoke, store, tmp_path, name, content):
    if name.lower() in {"a.yaml", "a.yml"}:
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(content)
    (one,) = json.loads(invoke("doctor", store, "--extra-config", f"@{path}", "--json").stdout)["namespaces"]
    assert [line.partition(":")[0] for line in one["why"]] == ["keys"]
    path.write_text(content.replace("org/model", "org/other"))
    (one,) = json.loads(invoke("doctor", store, "--extra-config", f"@{path}", "--json").stdout)["namespaces"]
    assert "model" in [line.partition(":")[0] for line in one["why"]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a.json", "cannot be read"),
        ("a.toml", "cannot be read"),
        ("a.yaml", "cannot be read"),
        ("a.ini", ".json, .toml, .yaml or .yml"),
    ],
)
def test_a_file_that_is_something_else_is_one_line(invoke, store, tmp_path, name, said):
    if name == "a.yaml":
        pytest.importorskip("yaml")
    (tmp_path / name).write_text("{: [")
    result = invoke("doctor", store, "--extra-config", f"@{tmp_path / name}")
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_yaml_without_its_package_is_refused(invoke, store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("model: m")
    result = invoke("doctor", store, "--extra-config", f"@{tmp_path / 'a.yaml'}")
    assert (result.exit_code, "needs PyYAML" in result.stderr) == (2, True)
