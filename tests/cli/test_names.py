"""Names of files and models may hold anything: it is shown as it is, and gives a terminal no orders."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from hicache_tier.cli.output import print_json, show

ODD = {
    "markup": "[red]x",
    "closing": "[bold",
    "emoji": ":smile:",
    "not text": os.fsdecode(b"bad\xff"),
    "spaces": "ü ñ 日本",
    "escape": "\x1b[31mred",
    "direction": "a\u202eb",
}


@pytest.fixture(params=ODD.values(), ids=ODD.keys())
def folder(request, tmp_path):
    made = tmp_path / request.param
    made.mkdir()
    return made


def shown(path):
    return str(path).replace("\x1b", "\\x1b").replace("\u202e", "\\u202e").replace("\udcff", "\\udcff")


def test_every_verb_names_odd_folders(invoke, store, folder):
    root = folder / "store"
    shutil.copytree(store, root)
    wide = {"COLUMNS": "400"}
    result = invoke("verify", root, env=wide)
    assert (result.exit_code, result.stdout) == (0, f"12 pages of {shown(root)} checked: all good\n")
    result = invoke("export", root, folder / "archive", env=wide)
    assert result.exit_code == 0
    assert f"of {shown(root)} written to {shown(folder / 'archive')}: " in result.stdout
    result = invoke("import", folder / "archive", folder / "new", "--json")
    assert json.loads(result.stdout)["root"] == str(folder / "new")
    result = invoke("import", folder / "none", folder / "new")
    assert result.stderr == f"hicache-tier: {shown(folder / 'none')} does not exist.\n"


def test_markup_in_names_is_no_markup(invoke, store):
    (store / "[bold]x").mkdir()
    assert "not the store's: [bold]x" in invoke("inspect", store).stdout


def test_what_a_store_says_gives_a_terminal_no_orders(capsys):
    show("model \x1b]0;title \x9b2J\u202e")
    assert capsys.readouterr().out == "model \\x1b]0;title \\x9b2J\\u202e\n"


def test_json_has_no_numbers_that_json_has_not(capsys):
    print_json({"a": [float("nan"), {"b": float("-inf")}], "c": 1.5})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [None, {"b": None}],
        "c": 1.5,
    }


@pytest.mark.parametrize("width", [40, 200])
def test_names_are_whole_on_terminals_of_any_width(invoke, store, tmp_path, width):
    env = {"COLUMNS": str(width)}
    (space,) = (path.name for path in store.iterdir() if path.is_dir())
    assert space in invoke("export", store, tmp_path / "archive", env=env).stdout
    assert space in invoke("import", tmp_path / "archive", tmp_path / "new", env=env).stdout
    said = invoke("import", tmp_path / "archive", tmp_path / "none", "--tp", "7", env=env).stdout
    assert "there already; " in " ".join(said.split()) and "namespace" not in said
