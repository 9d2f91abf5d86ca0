"""Write the golden archives of the current version, from the golden stores.

    python tests/golden/make_archives.py [FOLDER]

Archives of released versions stay as they are for ever: make new ones in a new folder when the version of the
archive format goes up.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

from hicache_tier import HostPool, KVGeometry, open_store, page_keys
from hicache_tier.testing.array_pool import write_page
from hicache_tier_storage.archive import Selection, export_archive, open_archive
from hicache_tier_storage.archive.documents import ARCHIVE_VERSION
from hicache_tier_storage.record import keys_of

HERE = Path(__file__).parent
ARCHIVES = HERE / f"archives-v{ARCHIVE_VERSION}"
STORES = HERE / "v1"
MANIFEST = "manifest.json"
NOW_S = 1_760_000_000.0
CODECS = {
    "mha-page_first-bfloat16": "small",
    "mla-layer_first-float8_e4m3fn": "zstd",
    "wide_k-page_first-bfloat16": "none",
    "mha-page_head-float16": "fast",
    "indexer-page_first": "zstd",
}
ZIPPED = "indexer-page_first"
TOKENS = list(range(1000, 1022))
TOKEN_GEOMETRY = KVGeometry.mha(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", page_tokens=4)


def values(rank: int) -> np.ndarray:
    """K and V of a whole prompt as one of two ranks has them: `[kv, layer, token, head, dim]`."""
    count = 2 * len(TOKENS) * 8
    return (np.arange(count, dtype=np.float32) + 1000 * rank).reshape(2, 1, len(TOKENS), 1, 8)


def make_token_store(root: Path) -> None:
    """Two ranks of a prompt of 22 tokens in pages of 4; the last two tokens have no page."""
    keys = page_keys(TOKENS, 4)
    for rank in range(2):
        with (
            HostPool(TOKEN_GEOMETRY, "page_first", len(keys)) as host,
            open_store(
                root, TOKEN_GEOMETRY, "page_first", model="org/tokens", tp=(rank, 2), capacity_bytes="1 MiB"
            ) as store,
        ):
            for at in range(len(keys)):
                page = values(rank)[:, :, 4 * at : 4 * at + 4].transpose(0, 2, 1, 3, 4)
                write_page(host, at, page.tobytes())
            assert all(store.put(keys, host, range(len(keys)), parents=[None, *keys[:-1]]))


def make_all(folder: Path) -> None:
    """Write every archive, and what its pages are."""
    expected = {}
    with mock.patch("hicache_tier_storage.archive.manifest.time.time", lambda: NOW_S):
        for name, codec in CODECS.items():
            path = folder / (f"{name}.zip" if name == ZIPPED else name)
            export_archive(STORES / name, path, codec=codec)
            expected[path.name] = content(path)
        with tempfile.TemporaryDirectory() as scratch:
            make_token_store(Path(scratch) / "store")
            selection = Selection(prompts=(np.array(TOKENS, np.uint32),))
            export_archive(Path(scratch) / "store", folder / "tokens-float32", selection=selection)
        expected["tokens-float32"] = content(folder / "tokens-float32")
    text = json.dumps(expected, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n")


def content(path: Path) -> dict[str, dict[str, str]]:
    """Return part -> key (hex) -> SHA-256 of the payload."""
    found = {}
    with open_archive(path) as archive:
        for part in archive.parts:
            numbers = np.arange(part.facts.pages)
            out = np.zeros((len(numbers), part.facts.geometry.page_nbytes), np.uint8)
            assert part.read_pages(numbers, out) == [""] * len(numbers)
            keys = keys_of(part.rows(numbers))
            found[str(part.facts.name)] = {
                key.hex(): hashlib.sha256(out[at].tobytes()).hexdigest() for at, key in enumerate(keys)
            }
    return found


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ARCHIVES
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    make_all(target)
