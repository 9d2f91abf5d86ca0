"""What the README says is so."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from hicache_tier.cli import main
from hicache_tier.paths import path_table_markdown

BEGIN = "<!-- path table: begin (from hicache_tier.paths.path_table_markdown) -->\n"
END = "<!-- path table: end -->\n"


@pytest.fixture(scope="module")
def readme(checkout):
    return (checkout / "README.md").read_text(encoding="utf-8")


def test_path_table_is_the_real_one(readme):
    shown = readme.split(BEGIN)[1].split(END)[0]
    assert shown.strip() == path_table_markdown().strip(), (
        "the README's path table is out of date; put the output of path_table_markdown() between the markers"
    )


def test_examples_run(readme, tmp_path):
    ours, readers = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    ours += "\nassert hit == 8 and all(ok for ok in store_verdicts)\n"
    ours = ours.replace("    store.get(", "    store_verdicts = store.get(")
    for code in (ours, readers):
        out = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert out.returncode == 0, out.stderr
    assert ", 2, 16, 4, 2, 64)" in out.stdout
    assert (tmp_path / "kv-store").is_dir()


def test_files_it_links_to_are_there(readme, checkout):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", readme):
        assert (checkout / target).exists(), target


def test_every_verb_is_in_the_overview(readme):
    for verb in main.list_commands(None):
        assert f"`hicache-tier {verb}" in readme, verb


def test_every_folder_it_names_is_there(readme, checkout):
    for folder in re.findall(r"^\| `([\w/]+/)`", readme, re.MULTILINE):
        assert (checkout / folder).is_dir(), folder
