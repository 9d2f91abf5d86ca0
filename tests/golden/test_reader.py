"""What the document says is what the stores are: a reader made from FORMAT.md alone."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_serves_exactly_the_expected_pages(golden, expected, reader, maker):
    (found,) = reader.read_store(golden, key=maker.GOLDEN[golden.name].key)
    assert {key.hex(): hashlib.sha256(page).hexdigest() for key, page in found.pages.items()} == expected
    assert found.unfinished == 1


def test_namespace_is_the_digest_of_the_identity(golden, reader, maker):
    (space,) = (path for path in golden.iterdir() if path.is_dir())
    tenant = maker.GOLDEN[golden.name].options.get("tenant")
    assert space.name == reader.namespace_of(reader.group(space), tenant)


def test_follows_chains(golden, reader, maker):
    (found,) = reader.read_store(golden, key=maker.GOLDEN[golden.name].key)
    keys = maker.keys_of(golden.name)
    assert reader.chain(found, keys[1]) == keys[:2]
    assert found.records[keys[0]].flags & 1, "the root of the chain is pinned"
    assert found.records[maker.stored_key(maker.LONG_KEY)].parent == 0


def test_refuses_another_key_and_none(maker, reader):
    (root,) = (path for path in (maker.HERE / "v2").iterdir() if path.is_dir())
    for key in (None, bytes(32)):
        with pytest.raises(reader.FormatError, match="key"):
            reader.read_store(root, key=key)


def test_drops_a_suspect_page_that_changed(maker, reader):
    name = "mha-page_head-float16"
    (found,) = reader.read_store(maker.STORES / name)
    assert not found.clean
    assert found.damaged == [maker.keys_of(name)[2]]


@pytest.mark.parametrize(
    ("data", "crc"),
    [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)],
)
def test_crc32c_known_answers(reader, data, crc):
    assert reader.crc32c(data) == crc


def test_imports_nothing_of_ours():
    text = (HERE / "reader.py").read_text()
    assert not re.search(r"import .*hicache|from .*hicache", text)
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import reader; "
        "print([n for n in sys.modules if 'hicache' in n])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "at", "what"),
    [
        ("state/c.0", 60, "state block"),
        ("slots/c.0.0", 70, "CRC"),
        ("pages/c.0.0*", -2, "CRC of the index"),
        ("pages/c.0.0*", 3, "checksum"),
    ],
)
def test_notices_one_flipped_bit(one, reader, name, at, what):
    (path,) = one.glob(f"*/*/*/{name}")
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)
    with pytest.raises(reader.FormatError, match=what):
        reader.read_store(one)
