"""Archives that are cut, foreign or hostile: the first fault is named, and no page is believed unchecked."""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile

import google_crc32c
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_tier.errors import FormatVersionError, InvalidArgumentError, StoreError
from hicache_tier_storage.archive import (
    ArchiveError,
    Conversion,
    NotAnArchiveError,
    export_archive,
    import_archive,
    load_archive,
    open_archive,
)
from hicache_tier_storage.archive.prompts import read_prompts
from hicache_tier_storage.archive.targets import plan_targets

KEEPS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def archive(shop, tmp_path):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "archive")
    return tmp_path / "archive"


@pytest.fixture(params=["zstd", "fast", "small"])
def coded(shop, tmp_path, request):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "archive", codec=request.param)
    return tmp_path / "archive"


def one(archive, pattern):
    (path,) = archive.rglob(pattern)
    return path


def edit(archive, change):
    """Change the manifest."""
    path = archive / "zarr.json"
    document = json.loads(path.read_text())
    change(document["attributes"]["hicache_tier"])
    path.write_text(json.dumps(document))


def refused(archive, tmp_path, match, error=ArchiveError):
    before = names(tmp_path)
    with pytest.raises(error, match=match):
        import_archive(archive, tmp_path / "new")
    assert names(tmp_path) == before


def names(folder):
    """Paths, sizes and times of change; some of the files are sparse and huge."""
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


# -- the manifest ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m["parts"][0].update(namespace="../../../etc"), "which no store makes"),
        (lambda m: m["parts"][0].update(rank="../tp0of1"), "which no store makes"),
        (lambda m: m["parts"][0].update(pool="/kv"), "which no store makes"),
        (lambda m: m["parts"][0].update(pool="kv\n"), "which no store makes"),
        (lambda m: m["parts"][0].update(pages=10**15), "cannot be"),
        (lambda m: m["parts"][0].update(pages=10**9), "not what the manifest says"),
        (lambda m: m["parts"][0].update(pages=-1), "cannot be"),
        (lambda m: m["parts"][0].update(pages=True), "numbers"),
        (lambda m: m["parts"][0].update(pages="20"), "numbers"),
        (lambda m: m["parts"][0].update(pages=19), "not what the manifest says"),
        (lambda m: m["parts"][0].update(shard_pages=3), "cannot be"),
        (lambda m: m["parts"][0].update(shard_pages=1 << 60), "cannot be"),
        (lambda m: m["parts"][0].update(shard_pages=8), "not what the manifest says"),
        (lambda m: m["parts"][0].update(page_nbytes=1 << 50), "bytes by the manifest"),
        (lambda m: m["parts"][0]["geometry"].update(num_layers=1 << 40), "at most"),
        (lambda m: m["parts"][0]["geometry"].update(num_layers="2"), "num_layers"),
        (lambda m: m["parts"][0]["geometry"].update(dtype="float64"), "float64"),
        (lambda m: m["parts"][0].update(codec="gzip"), "gzip"),
        (lambda m: m["parts"][0].update(codec="fast"), "not what the manifest says"),
        (lambda m: m["parts"][0].update(axis_order="lthd"), "namespace"),
        (lambda m: m["parts"][0].update(axis_order="dhtl"), "dhtl"),
        (lambda m: m["parts"][0].update(token_ids=True), "token_ids"),
        (lambda m: m["parts"].append(m["parts"][0]), "twice"),
        (lambda m: m["parts"].append("part"), "for a part"),
        (lambda m: m.update(parts={}), "no parts"),
        (lambda m: m.update(namespaces={}), "says nothing"),
        (lambda m: next(iter(m["namespaces"].values())).update(model="another"), "is that of"),
        (lambda m: next(iter(m["namespaces"].values())).update(revision=7), "damaged"),
        (lambda m: next(iter(m["namespaces"].values())).update(pools={}), "namespace"),
        (lambda m: next(iter(m["namespaces"].values())).update(parallel={"tp": -1}), "damaged"),
        (lambda m: next(iter(m["namespaces"].values())).update(parallel=3), "damaged"),
    ],
)
def test_a_manifest_that_lies(archive, tmp_path, change, match):
    edit(archive, change)
    refused(archive, tmp_path, match)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(node, path=()):
    """Return where something could be put in a document."""
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for name, value in inner for place in places(value, (*path, name)))]


@settings(KEEPS, max_examples=100)
@given(data=st.data(), junk=JUNK)
def test_any_part_of_a_manifest_may_be_junk(archive, data, junk):
    """Whatever stands anywhere in it: an error of this package, and nothing imported under a wrong name."""
    path = archive / "zarr.json"
    good = path.read_text()
    document = json.loads(good)
    where = data.draw(st.sampled_from(places(document)[1:]))
    node = document
    for name in where[:-1]:
        node = node[name]
    node[where[-1]] = junk
    path.write_text(json.dumps(document))
    try:
        with open_archive(archive) as opened:
            plan = plan_targets(opened, Conversion.parse(tp=2, page_tokens=4))
        assert {reason.partition(":")[0] for _, reason in plan.refused} <= {"tenant", "heads"}
    except (StoreError, FormatVersionError):
        pass
    finally:
        path.write_text(good)


@pytest.mark.parametrize("created", [10**400, float("nan"), float("inf"), -1, "now", None])
def test_whenever_an_archive_says_it_was_made(archive, tmp_path, created):
    edit(archive, lambda manifest: manifest.update(created=created))
    assert import_archive(archive, tmp_path / "new").imported == 20


def test_later_versions_are_refused_by_number(archive, tmp_path):
    edit(archive, lambda manifest: manifest.update(version=2))
    refused(archive, tmp_path, "version 2.*version 1", FormatVersionError)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"null",
        b'{"attributes": {}}',
        b'{"attributes": {"hicache_tier": 3}}',
        b"\xff",
    ],
)
def test_foreign_manifests(archive, tmp_path, raw):
    (archive / "zarr.json").write_bytes(raw)
    refused(archive, tmp_path, "no archive", NotAnArchiveError)


def test_a_store_is_no_archive(shop, tmp_path):
    root, _ = shop.fill()
    refused(root, tmp_path, "no finished archive", NotAnArchiveError)
    refused(tmp_path / "nothing", tmp_path, "does not exist", NotAnArchiveError)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path, "no finished archive", NotAnArchiveError)


def test_a_manifest_too_large_is_not_read(archive, tmp_path):
    os.truncate(archive / "zarr.json", 1 << 40)
    refused(archive, tmp_path, "may have", NotAnArchiveError)


# -- documents and index -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["key", "checksum", "pages", "tokens"])
def test_missing_documents(archive, tmp_path, name):
    one(archive, f"{name}/zarr.json").unlink()
    refused(archive, tmp_path, f"{name}/zarr.json")


def test_documents_that_differ(archive, tmp_path):
    path = one(archive, "pages/zarr.json")
    document = json.loads(path.read_text())
    document["codecs"][0]["configuration"]["chunk_shape"] = [1]
    path.write_text(json.dumps(document))
    refused(archive, tmp_path, "codecs")
    path.write_text("[]")
    refused(archive, tmp_path, "pages/zarr.json")


@pytest.mark.parametrize("nbytes", [0, 1, 83, 84 + 1, 1 << 40])
def test_an_index_of_another_length(archive, tmp_path, nbytes):
    path = one(archive, "tokens/c.0")
    assert path.stat().st_size == 84
    os.truncate(path, nbytes)
    refused(archive, tmp_path, f"tokens/c.0 has {nbytes} bytes")


@pytest.mark.parametrize("name", ["key/c.0.0", "checksum/c.0", "key_nbytes/c.0"])
def test_a_damaged_index(archive, tmp_path, name):
    path = one(archive, name)
    raw = bytearray(path.read_bytes())
    raw[3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ArchiveError, match="CRC32C"):
        import_archive(archive, tmp_path / "new")


def test_keys_of_impossible_lengths(archive, tmp_path):
    path = one(archive, "key_nbytes/c.0")
    raw = bytes([33]) * 20
    path.write_bytes(raw + google_crc32c.value(raw).to_bytes(4, "little"))
    with pytest.raises(ArchiveError, match="impossible lengths"):
        import_archive(archive, tmp_path / "new")


# -- payloads ----------------------------------------------------------------------------------------------


def shard_of(archive):
    return one(archive, "pages/c.0.*")


def swap_pages(path, nbytes):
    raw = bytearray(path.read_bytes())
    raw[:nbytes], raw[nbytes : 2 * nbytes] = raw[nbytes : 2 * nbytes], raw[:nbytes]
    path.write_bytes(raw)


def test_flipped_and_swapped_pages(shop, archive, tmp_path):
    path, nbytes = shard_of(archive), shop.geometry.page_nbytes
    with path.open("r+b") as file:
        file.seek(5 * nbytes + 17)
        file.write(b"\x00\x01\x02")
    swap_pages(path, nbytes)
    report = import_archive(archive, tmp_path / "new")
    assert (report.imported, report.refused) == (17, {"checksum": 3})
    with open_archive(archive) as opened:
        keys = [row["key"].tobytes() for row in opened.parts[0].rows(np.arange(20))]
    found = shop.read(tmp_path / "new", keys)
    assert found == {
        key: data for key, data in shop.read(shop.folder / "store", keys).items() if key in found
    }
    assert set(keys) - set(found) == {keys[0], keys[1], keys[5]}
    again = import_archive(archive, tmp_path / "other", conversion=Conversion.parse(layout="page_head"))
    assert (again.imported, again.refused) == (17, {"checksum": 3})


@pytest.mark.parametrize("nbytes", [0, 10, 5000, -1])
def test_truncated_shards(archive, tmp_path, nbytes):
    path = shard_of(archive)
    os.truncate(path, nbytes % path.stat().st_size)
    report = import_archive(archive, tmp_path / "new")
    assert (report.imported, report.refused) == (0, {"damaged": 20})
    assert "c.0.0" in report.details[0]["reason"]


def test_a_missing_shard_costs_its_own_pages(shop, tmp_path, monkeypatch):
    from hicache_tier_storage.archive import exporting

    monkeypatch.setattr(exporting, "shard_pages", lambda _: 8)
    root, _ = shop.fill()
    export_archive(root, tmp_path / "archive")
    one(tmp_path / "archive", "pages/c.1.*").unlink()
    report = import_archive(tmp_path / "archive", tmp_path / "new")
    assert (report.imported, report.refused) == (12, {"damaged": 8})


@pytest.mark.parametrize(
    "pair",
    [(1 << 63, 1024), (0, 1 << 63), (0xFFFF_FFFF_FFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF), (0, 0), (1 << 40, 1024)],
)
def test_shard_indices_that_point_outside(archive, tmp_path, pair):
    path = shard_of(archive)
    raw = bytearray(path.read_bytes())
    with open_archive(archive) as opened:
        capacity = opened.parts[0].facts.shard
    start = len(raw) - 16 * capacity - 4
    raw[start : start + 16] = struct.pack("<QQ", *pair)
    raw[-4:] = google_crc32c.value(bytes(raw[start:-4])).to_bytes(4, "little")
    path.write_bytes(raw)
    report = import_archive(archive, tmp_path / "new")
    assert (report.imported, report.refused) == (0, {"damaged": 20})


def test_links_are_not_followed(shop, archive, tmp_path):
    secret = tmp_path / "secret"
    shard_of(archive).rename(secret)
    folder = one(archive, "pages")
    (folder / "c.0.0.0.0.0.0").symlink_to(secret)
    report = import_archive(archive, tmp_path / "new")
    assert (report.imported, report.refused) == (0, {"damaged": 20})
    moved = tmp_path / "moved"
    shutil.move(folder, moved)
    folder.symlink_to(moved)
    refused(archive, tmp_path, "symbolic link")


def test_a_bomb_is_not_unpacked(shop, coded, tmp_path):
    """A page whose coded form says that it holds far more than a page: nothing is allocated for it."""
    import numcodecs

    path = shard_of(coded)
    with open_archive(coded) as opened:
        part = opened.parts[0]
        capacity, codec = part.facts.shard, part.facts.codec.value
    huge = np.zeros(64 << 20, np.uint8)
    coder = numcodecs.Zstd(1) if codec == "zstd" else numcodecs.Blosc("zstd", 1)
    bomb = bytes(coder.encode(huge))
    raw = bytearray(path.read_bytes())
    start = len(raw) - 16 * capacity - 4
    _, first_nbytes = struct.unpack_from("<QQ", raw, start)
    bomb = bomb[: min(len(bomb), first_nbytes)]
    raw[: len(bomb)] = bomb
    raw[start : start + 16] = struct.pack("<QQ", 0, len(bomb))
    raw[-4:] = google_crc32c.value(bytes(raw[start:-4])).to_bytes(4, "little")
    path.write_bytes(raw)
    report = import_archive(coded, tmp_path / "new")
    assert report.refused.keys() == {"damaged"}
    assert report.imported + report.refused["damaged"] == 20


@KEEPS
@given(at=st.integers(0, 1 << 20), byte=st.integers(1, 255))
def test_one_flipped_byte_anywhere(shop, coded, at, byte):
    """Whatever byte of a coded shard is wrong, no wrong page is stored."""
    path = shard_of(coded)
    good = path.read_bytes()
    raw = bytearray(good)
    raw[at % len(raw)] ^= byte
    path.write_bytes(raw)
    try:
        with open_archive(coded) as opened:
            part = opened.parts[0]
            out = np.zeros((20, shop.geometry.page_nbytes), np.uint8)
            reasons = part.read_pages(np.arange(20), out)
            keys = [row["key"].tobytes() for row in part.rows(np.arange(20))]
    finally:
        path.write_bytes(good)
    wanted = shop.read(shop.folder / "store", keys)
    for key, reason, page in zip(keys, reasons, out, strict=True):
        assert reason or page.tobytes() == wanted[key]


# -- zip files ---------------------------------------------------------------------------------------------


@pytest.fixture
def packed(shop, tmp_path):
    root, _ = shop.fill()
    export_archive(root, tmp_path / "archive.zip")
    return tmp_path / "archive.zip"


def repack(packed, method=zipfile.ZIP_STORED, extra=()):
    with zipfile.ZipFile(packed) as old:
        members = [(name, old.read(name)) for name in old.namelist()]
    with zipfile.ZipFile(packed, "w", method) as new:
        for name, data in [*members, *extra]:
            new.writestr(name, data)


def test_compressed_members_are_refused(packed, tmp_path):
    repack(packed, zipfile.ZIP_DEFLATED)
    refused(packed, tmp_path, "compressed")


def test_names_that_leave_the_folder_are_never_used(shop, packed, tmp_path):
    repack(packed, extra=[("../evil", b"x"), ("/etc/evil", b"x")])
    assert import_archive(packed, tmp_path / "new").imported == 20
    assert not list(tmp_path.parent.glob("evil"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_that_are_there_twice(packed, tmp_path):
    repack(packed, extra=[("zarr.json", b"{}")])
    refused(packed, tmp_path, "twice")


@pytest.mark.parametrize("keep", [0, 1, 21, 22, 1000, -1, -22, -60])
def test_truncated_zip_files(packed, tmp_path, keep):
    os.truncate(packed, keep % packed.stat().st_size)
    refused(packed, tmp_path, "zip|directory|member")


@KEEPS
@given(back=st.integers(1, 3000), byte=st.integers(1, 255))
def test_one_flipped_byte_in_a_directory(shop, packed, back, byte):
    good = packed.read_bytes()
    raw = bytearray(good)
    raw[-(back % len(raw)) - 1] ^= byte
    packed.write_bytes(raw)
    try:
        with open_archive(packed) as opened:
            part = opened.parts[0]
            out = np.zeros((20, shop.geometry.page_nbytes), np.uint8)
            reasons = part.read_pages(np.arange(20), out)
            keys = [row["key"].tobytes() for row in part.rows(np.arange(20))]
    except (ArchiveError, FormatVersionError):
        return
    finally:
        packed.write_bytes(good)
    wanted = shop.read(shop.folder / "store", keys)
    assert all(
        why or page.tobytes() == wanted[key] for key, why, page in zip(keys, reasons, out, strict=True)
    )


# -- what users give ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "raw", "match"),
    [
        ("a.txt", b"1 2 x", "line 1"),
        ("a.txt", b"1 2\n[1, -2]", "line 2.*-2"),
        ("a.txt", b'{"text": 3}', "line 1"),
        ("a.txt", b"[1.5]", "1.5"),
        ("a.txt", b"[[1]]", "line 1"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.npy", b"not numpy", "cannot be read"),
        ("a.txt", b"[" * 100_000, "line 1"),
    ],
)
def test_token_files(tmp_path, name, raw, match):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(InvalidArgumentError, match=match):
        read_prompts(tmp_path / name)


def test_token_files_of_every_form(tmp_path):
    (tmp_path / "a.txt").write_text('1 2 3\n[4, 5]\n\n{"input_ids": [6]}\n7,8\n')
    np.save(tmp_path / "b.npy", np.array([[1, 2], [3, 4]]))
    assert [prompt.tolist() for prompt in read_prompts(tmp_path / "a.txt")] == [
        [1, 2, 3],
        [4, 5],
        [6],
        [7, 8],
    ]
    assert [prompt.tolist() for prompt in read_prompts(tmp_path / "b.npy")] == [[1, 2], [3, 4]]


def test_conversions_that_nobody_can_want():
    for options in [{"layout": "rows"}, {"tp": 0}, {"page_tokens": -1}, {"dtype": "int8"}, {"dtype": "x"}]:
        with pytest.raises(InvalidArgumentError):
            Conversion.parse(**options)


def test_tenants_must_be_known(shop, tmp_path):
    root, keys = shop.fill(tenant="salt")
    export_archive(root, tmp_path / "archive")
    report = import_archive(tmp_path / "archive", tmp_path / "new", tenants=("other",))
    assert (report.imported, report.refused) == (0, {"tenant": 20})
    assert not (tmp_path / "new").exists()
    assert import_archive(tmp_path / "archive", tmp_path / "new", tenants=("salt",)).imported == 20
    assert len(shop.read(tmp_path / "new", keys, tenant="salt")) == 20


def test_options_that_are_not_known_are_told_with_the_nearest(tmp_path):
    for verb, wrong, near in (
        (export_archive, "overwite", "overwrite"),
        (import_archive, "capacty_bytes", "capacity_bytes"),
        (load_archive, "max_page", "max_pages"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{wrong}' is not known. Did you mean '{near}'"):
            verb(tmp_path / "a", tmp_path / "b", **{wrong: 1})
