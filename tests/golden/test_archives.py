"""Golden archives: read by a reader of their own, by other Zarr readers, and by this version."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from hicache_tier.errors import FormatVersionError
from hicache_tier.keys import page_keys
from hicache_tier_storage.archive import Conversion, export_archive, import_archive, open_archive
from hicache_tier_storage.inspection import inspect_root, verify_root

HERE = Path(__file__).parent
VERSIONS = sorted(HERE.glob("archives-v*"))
ARCHIVES = [
    path for version in VERSIONS for path in sorted(version.iterdir()) if path.name != "manifest.json"
]
FOLDERS = [path for path in ARCHIVES if path.is_dir()]
SALTS = ("salt",)


def load(name):
    spec = importlib.util.spec_from_file_location(f"golden_{name}", HERE / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def archive_reader():
    return load("archive_reader")


@pytest.fixture(scope="session")
def archive_maker():
    return load("make_archives")


@pytest.fixture(params=ARCHIVES, ids=lambda path: f"{path.parent.name}-{path.name}")
def golden(request):
    return request.param


@pytest.fixture
def expected(golden):
    return json.loads((golden.parent / "manifest.json").read_text())[golden.name]


def digests(pages):
    return {key.hex(): hashlib.sha256(payload).hexdigest() for key, payload in pages.items()}


def test_the_readers_import_nothing_of_the_project():
    text = (HERE / "archive_reader.py").read_text()
    assert "hicache_tier" not in text.replace('hicache_tier"]', "")


def test_a_reader_of_its_own(golden, expected, archive_reader):
    found = archive_reader.read_archive(golden)
    assert {name: digests(part.pages) for name, part in found.items()} == expected


def test_this_version(golden, expected, tmp_path):
    with open_archive(golden) as archive:
        for part in archive.parts:
            out = np.zeros((part.facts.pages, part.facts.geometry.page_nbytes), np.uint8)
            assert part.read_pages(np.arange(part.facts.pages), out) == [""] * part.facts.pages
    report = import_archive(golden, tmp_path / "new", tenants=SALTS, capacity_bytes="4 MiB")
    assert report.refused == {}
    assert report.imported == sum(map(len, expected.values()))
    found = verify_root(tmp_path / "new")
    assert (found["pages"], found["damaged"]) == (report.imported, 0)
    spaces = {space["namespace"] for space in inspect_root(tmp_path / "new")["namespaces"]}
    assert spaces == {name.partition("/")[0] for name in expected}


def test_archives_come_back_as_they_are(golden, expected, tmp_path, archive_reader):
    import_archive(golden, tmp_path / "new", tenants=SALTS, capacity_bytes="4 MiB")
    export_archive(tmp_path / "new", tmp_path / "again")
    found = archive_reader.read_archive(tmp_path / "again")
    assert {name: digests(part.pages) for name, part in found.items()} == expected


def test_archives_made_now_are_the_golden_ones(archive_maker, archive_reader, tmp_path):
    """Coded bytes may differ between versions of the coders; what they hold may not."""
    archive_maker.make_all(tmp_path)
    old = json.loads((archive_maker.ARCHIVES / "manifest.json").read_text())
    assert json.loads((tmp_path / "manifest.json").read_text()) == old
    for name in old:
        new_parts, old_parts = (
            archive_reader.read_archive(folder / name) for folder in (tmp_path, archive_maker.ARCHIVES)
        )
        for part, other in zip(new_parts.values(), old_parts.values(), strict=True):
            same = other.entry | {"stored_bytes": part.entry["stored_bytes"]}
            assert same.items() <= part.entry.items()


def test_token_ids(archive_reader, archive_maker):
    parts = archive_reader.read_archive(archive_maker.ARCHIVES / "tokens-float32")
    assert [name.split("/")[1] for name in parts] == ["tp0of2-pp0of1-cp0of1", "tp1of2-pp0of1-cp0of1"]
    tokens = archive_maker.TOKENS
    for part in parts.values():
        assert archive_reader.tokens_of(part, page_keys(tokens, 4)[-1]) == tokens[:20]


def test_a_conversion_of_all_at_once(archive_reader, archive_maker, tmp_path):
    """Two ranks become one, pages of 4 tokens pages of 2, page_first page_head, float32 bfloat16."""
    conversion = Conversion.parse(tp=1, page_tokens=2, layout="page_head", dtype="bfloat16", allow_lossy=True)
    report = import_archive(
        archive_maker.ARCHIVES / "tokens-float32",
        tmp_path / "new",
        conversion=conversion,
        capacity_bytes="1 MiB",
    )
    assert (report.imported, report.refused) == (10, {})
    export_archive(tmp_path / "new", tmp_path / "again")
    (part,) = archive_reader.read_archive(tmp_path / "again").values()
    whole = np.concatenate([archive_maker.values(rank) for rank in range(2)], axis=3)
    for at, key in enumerate(page_keys(archive_maker.TOKENS, 2)[:10]):
        wanted = whole[:, :, 2 * at : 2 * at + 2].transpose(0, 3, 2, 1, 4)
        bits = np.ascontiguousarray(wanted).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        assert part.pages[key] == rounded.astype(np.uint16).tobytes()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_later_versions_are_refused(folder, tmp_path, archive_reader):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    document = json.loads((copy / "zarr.json").read_text())
    document["attributes"]["hicache_tier"]["version"] = 2
    (copy / "zarr.json").write_text(json.dumps(document))
    with pytest.raises(archive_reader.FormatError, match="version 2"):
        archive_reader.read_archive(copy)
    with pytest.raises(FormatVersionError, match="version 2"):
        open_archive(copy)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_other_readers(folder):
    tensorstore = pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    xarray = pytest.importorskip("xarray", reason="xarray is not installed")
    import zarr

    for path in folder.rglob("pages"):
        array = zarr.open_array(path, mode="r")[:]
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
        assert tensorstore.open(spec).result().read().result().tobytes() == array.tobytes()
        with xarray.open_dataset(path.parent, engine="zarr") as dataset:
            assert dataset["pages"].dims[0] == dataset["key"].dims[0] == "page"
            assert dataset["pages"].values.tobytes() == array.tobytes()
            assert "token" not in dataset.sizes or dataset.sizes["token"] > 1


def test_golden_archives_are_small():
    sizes = [path.stat().st_size for version in VERSIONS for path in version.rglob("*") if path.is_file()]
    assert sum(sizes) < 200_000
