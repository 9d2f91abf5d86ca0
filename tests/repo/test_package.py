"""What is installed, and what is importable: nothing of ours under the names `kernels` and `storage`."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile

import pytest

PACKAGES = {"hicache_tier", "hicache_tier_kernels", "hicache_tier_storage"}


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    """Build an sdist, and a wheel from it, without a network."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel_names(built):
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        return wheel.namelist()


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    """A folder like site-packages with nothing but our wheel in it."""
    folder = tmp_path_factory.mktemp("site")
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder)
    return folder


def python(code, cwd, *paths, isolated_from=()):
    """Run code in a new interpreter with these folders on its path; leave out path entries of ours."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)))
    drop = (
        f"import sys; sys.path[:] = [p for p in sys.path if p not in {[str(p) for p in isolated_from]!r}]\n"
    )
    return subprocess.run(
        [sys.executable, "-c", drop + code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_wheel_holds_three_packages_and_nothing_else(wheel_names):
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES


def test_wheel_carries_types_data_and_the_command(wheel_names, unpacked):
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(wheel_names)
    assert "hicache_tier/demo/prompt.txt" in wheel_names
    (entry,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "hicache-tier = hicache_tier.cli:main" in entry.read_text()
    assert list(unpacked.glob("*.dist-info/licenses/LICENSE"))


def test_wheel_carries_every_file_of_the_packages(wheel_names, checkout):
    """Kernels in CUDA, texts, tables: whatever lies beside the code."""
    roots = {"hicache_tier": checkout, "hicache_tier_kernels": checkout / "kernels"}
    roots["hicache_tier_storage"] = checkout / "storage"
    wanted = {
        path.relative_to(root).as_posix()
        for package, root in roots.items()
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= set(wheel_names)


def test_sdist_can_be_tested(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    wanted = {"scripts/check", "scripts/demo", "storage/FORMAT.md", "tests/repo/test_package.py", "LICENSE"}
    assert wanted <= names
    assert not any(name.endswith((".pyc", ".gguf")) or ".venv" in name for name in names)


def test_installed_wheel_imports_and_owns_no_foreign_name(unpacked, tmp_path, checkout):
    ours = (checkout, checkout / "kernels", checkout / "storage")
    code = """
import importlib.util, hicache_tier, hicache_tier_kernels, hicache_tier_storage
print(hicache_tier.__file__)
for name in ("kernels", "storage"):
    spec = importlib.util.find_spec(name)
    print(name, spec and spec.origin)
"""
    out = python(code, tmp_path, unpacked, isolated_from=ours)
    assert out.returncode == 0, out.stderr
    where, kernels, storage = out.stdout.splitlines()
    assert where.startswith(str(unpacked))
    assert str(checkout) not in kernels
    assert storage == "storage None"


@pytest.mark.parametrize("name", ["kernels", "storage"])
def test_a_real_package_wins_in_the_checkout(name, checkout, tmp_path):
    """SGLang depends on the package `kernels` of the registry: ours must not stand in its way."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("REAL = True\n")
    (tmp_path / name / "layer.py").write_text("HERE = True\n")
    out = python(
        f"import {name}, {name}.layer; print({name}.__file__); import hicache_tier_kernels",
        checkout,
        tmp_path,
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == str(tmp_path / name / "__init__.py")


@pytest.mark.parametrize("name", ["kernels", "storage"])
def test_without_one_there_is_no_module_of_ours(name, checkout):
    """A folder without `__init__.py` is at most an empty namespace: nothing in it runs."""
    out = python(
        f"import importlib.util as u; s = u.find_spec({name!r}); print(s and s.origin)",
        checkout,
    )
    assert out.returncode == 0, out.stderr
    assert not out.stdout.strip().startswith(str(checkout))


def test_nothing_heavy_is_imported_before_it_is_used(tmp_path):
    code = "import sys, hicache_tier.cli; print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    out = python(code, tmp_path)
    assert out.stdout.strip() == "[]", out.stderr


def test_all_public_names_resolve():
    import hicache_tier

    for name in hicache_tier.__all__:
        assert getattr(hicache_tier, name) is not None
    assert set(hicache_tier.__all__) <= set(dir(hicache_tier))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hicache_tier.nonsense
