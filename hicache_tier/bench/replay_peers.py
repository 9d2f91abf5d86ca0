"""Other stores under the same tier, host pool and trace."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hicache_tier.geometry import PoolKind

from .errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.host_pool import HostPool
    from hicache_tier.layout import Layout
    from hicache_tier.tier import StoreLike

_SGLANG = "sglang.srt.mem_cache.hicache_storage"
_SGLANG_FOLDER = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"


class Verdict(NamedTuple):
    """Verdict on one page: its truth, and why."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


_GOOD, _ABSENT, _REFUSED = Verdict(True, "ok"), Verdict(False, "absent"), Verdict(False, "refused")


class FilePages:
    """One file a page, as simple as can be: written aside and renamed, read whole, never evicted.

    Parameters
    ----------
    folder : Path
    geometry : KVGeometry
    layout : Layout
    """

    def __init__(self, folder: Path, geometry: KVGeometry, layout: Layout) -> None:
        self.geometry = geometry
        self.layout = layout
        self._folder = folder
        folder.mkdir()

    def put(
        self,
        keys: Sequence[bytes],
        host: HostPool,
        pages: torch.Tensor,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> Sequence[object]:
        """Write host pages under their keys."""
        del parents
        return [self._write(key, page) for key, page in zip(keys, flat_pages(host, pages), strict=True)]

    def get(self, keys: Sequence[bytes], host: HostPool, pages: torch.Tensor) -> Sequence[object]:
        """Read the pages of keys into host pages."""
        flats = [np.empty(self.geometry.page_nbytes, np.uint8) for _ in keys]
        verdicts = [self._read(key, flat) for key, flat in zip(keys, flats, strict=True)]
        spread_pages(host, pages, flats)
        return verdicts

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Count the consecutive keys present, from the start."""
        return next((i for i, key in enumerate(keys) if not self._path(key).exists()), len(keys))

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.bin"

    def _write(self, key: bytes, page: np.ndarray[Any, Any]) -> Verdict:
        path = self._path(key)
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            page.tofile(temporary)
            temporary.replace(path)
        return _GOOD

    def _read(self, key: bytes, page: np.ndarray[Any, Any]) -> Verdict:
        try:
            with self._path(key).open("rb", buffering=0) as file:
                return _GOOD if file.readinto(page.data) == len(page) else Verdict(False, "short")
        except FileNotFoundError:
            return _ABSENT


class SglangFiles:
    """SGLang's `HiCacheFile`, called as its cache controller does: pages flattened, then `set` or `get`.

    Parameters
    ----------
    folder : Path
    geometry : KVGeometry
    layout : Layout
    capacity_nbytes : int
        Cap on its files, which it evicts by itself.
    """

    def __init__(self, folder: Path, geometry: KVGeometry, layout: Layout, capacity_nbytes: int) -> None:
        module = import_module(_SGLANG)
        config = module.HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=geometry.kind is not PoolKind.MHA,
            enable_storage_metrics=False,
            is_page_first_layout=layout.value == "page_first",
            model_name="replay",
            extra_config={"max_size": capacity_nbytes},
        )
        self.geometry = geometry
        self.layout = layout
        self._backend = module.HiCacheFile(config, str(folder))

    def put(
        self,
        keys: Sequence[bytes],
        host: HostPool,
        pages: torch.Tensor,
        *,
        parents: Sequence[bytes | None] | None = None,
    ) -> Sequence[object]:
        """Write host pages under their keys; one that is refused ends the batch, as there."""
        del parents
        verdicts: list[Verdict] = []
        for key, page in zip(keys, flat_pages(host, pages), strict=True):
            if verdicts and not verdicts[-1]:
                verdicts.append(_REFUSED)
                continue
            verdicts.append(_GOOD if self._backend.set(key.hex(), torch.from_numpy(page)) else _REFUSED)
        return verdicts

    def get(self, keys: Sequence[bytes], host: HostPool, pages: torch.Tensor) -> Sequence[object]:
        """Read the pages of keys into host pages."""
        flats = [np.empty(self.geometry.page_nbytes, np.uint8) for _ in keys]
        names = [key.hex() for key in keys]
        found = self._backend.batch_get(names, [torch.from_numpy(flat) for flat in flats])
        spread_pages(host, pages, flats)
        return [_ABSENT if page is None else _GOOD for page in found]

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Count the consecutive keys present, from the start."""
        return int(self._backend.batch_exists([key.hex() for key in keys]))


def flat_pages(host: HostPool, pages: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    """Copy pages out of a pool, each in one piece."""
    flats = []
    for segments in host.segments(pages):
        flat = np.empty(host.page_nbytes, np.uint8)
        at = flat.ctypes.data
        for address, nbytes in segments:
            ctypes.memmove(at, address, nbytes)
            at += nbytes
        flats.append(flat)
    return flats


def spread_pages(host: HostPool, pages: torch.Tensor, flats: Sequence[np.ndarray[Any, Any]]) -> None:
    """Copy pages in one piece into a pool."""
    for segments, flat in zip(host.segments(pages), flats, strict=True):
        at = flat.ctypes.data
        for address, nbytes in segments:
            ctypes.memmove(address, at, nbytes)
            at += nbytes


@dataclass(frozen=True, slots=True)
class ReplayPeer:
    """A store by name: why it cannot be had (or ""), and what makes it in a folder that is not there yet."""

    why_not: Callable[[], str]
    make: Callable[[Path, KVGeometry, Layout, int], StoreLike]


def _why_no_sglang() -> str:
    if find_spec("sglang") is None:
        return "sglang is not installed"
    if os.environ.get(_SGLANG_FOLDER):
        return f"{_SGLANG_FOLDER} is set and would send its files elsewhere: unset it"
    try:
        import_module(_SGLANG)
    except Exception as error:  # noqa: BLE001 - its imports fail in many ways, all of them a reason
        return f"{_SGLANG} cannot be imported ({type(error).__name__}: {error})"
    return ""


PEERS = {
    "file-a-page": ReplayPeer(
        lambda: "", lambda folder, geometry, layout, _: FilePages(folder, geometry, layout)
    ),
    "sglang-file": ReplayPeer(_why_no_sglang, SglangFiles),
}


def check_peers(names: Sequence[str]) -> None:
    """Raise `BenchError` where a peer that was asked for cannot be had."""
    for name in names:
        why = PEERS[name].why_not()
        if why:
            raise BenchError(f"--peer {name}: {why}.")
