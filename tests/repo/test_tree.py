"""The repository holds what it should, where it should, and nothing of one developer's machine."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

TOP = {
    "pyproject.toml",
    "hicache_tier",
    "kernels",
    "storage",
    "tests",
    "scripts",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
}
# Written so that this file does not match itself.
PRIVATE = re.compile(r"/(?:work|root|home)/[a-z]|py" + r"pi\.org|python" + r"hosted|/tmp" + r"/bash_jobs")


@pytest.fixture(scope="module")
def tracked(checkout):
    if shutil.which("git") is None or not (checkout / ".git").exists():
        pytest.skip("not a git checkout")
    out = subprocess.run(["git", "ls-files", "-z"], cwd=checkout, capture_output=True, text=True, check=True)
    return [name for name in out.stdout.split("\0") if name and (checkout / name).exists()]


def test_top_level_is_the_agreed_one(tracked):
    names = {name.split("/")[0] for name in tracked}
    assert {name for name in names if not name.startswith(".")} == TOP


def test_source_roots_are_not_packages(tracked):
    for root in ("kernels", "storage", "scripts", "tests"):
        assert f"{root}/__init__.py" not in tracked


def test_no_file_names_a_machine_or_a_registry(checkout, tracked):
    found = []
    for name in tracked:
        try:
            text = (checkout / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match[0]}" for match in PRIVATE.finditer(text)]
    assert not found


def test_scripts_are_executable_and_parse(checkout):
    for name in ("scripts/demo", "scripts/check", ".ci/run"):
        path = checkout / name
        assert path.stat().st_mode & 0o100, name
        assert subprocess.run(["bash", "-n", str(path)], capture_output=True).returncode == 0, name


def test_scripts_check_refuses_what_it_does_not_know(checkout):
    out = subprocess.run([checkout / "scripts/check", "--fats"], capture_output=True, text=True)
    assert out.returncode == 2
    assert "unknown argument: --fats" in out.stderr
