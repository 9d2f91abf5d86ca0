"""Golden stores, the independent reader and the maker, none of them a package."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RELEASED = sorted(path for path in HERE.glob("v*") if path.is_dir())
STORES = [path for version in RELEASED for path in sorted(version.iterdir()) if path.is_dir()]


def load(name):
    spec = importlib.util.spec_from_file_location(f"golden_{name}", HERE / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reader():
    return load("reader")


@pytest.fixture(scope="session")
def maker():
    return load("make")


@pytest.fixture(params=STORES, ids=lambda path: f"{path.parent.name}-{path.name}")
def golden(request):
    """One checked-in store."""
    return request.param


@pytest.fixture
def expected(golden):
    """Key (hex) to SHA-256 of the payload, as the manifest has it."""
    return json.loads((golden.parent / "manifest.json").read_text())[golden.name]


@pytest.fixture
def copy(golden, tmp_path):
    """A copy that may be written to."""
    return Path(shutil.copytree(golden, tmp_path / golden.name))


@pytest.fixture
def one(tmp_path, maker):
    """A copy of one store, for what needs no more than one."""
    name = "mha-page_first-bfloat16"
    return Path(shutil.copytree(maker.STORES / name, tmp_path / name))
