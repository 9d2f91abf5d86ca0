"""Which engine moves the pages of a CUDA device: as asked, or as it is found out when first needed."""

from __future__ import annotations

import logging
import threading
from functools import cache
from typing import TYPE_CHECKING

from hicache_tier.errors import EngineUnavailableError

from . import accelerators
from .engine import device_mode_of
from .medium import existing_parent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .engine import ByteEngine

_LOG = logging.getLogger(__name__)


class DeviceEngines:
    """The engines of one store for pages of CUDA devices.

    Parameters
    ----------
    directory : Path
    asked : str
        `auto`, `posix`, `nixl` or `kvikio`, as the store was opened; "" for an engine of the caller's own.
    engine : ByteEngine
        The store's, for pages in host memory.
    encrypted : bool
        Whether pages are encrypted, which is done in host memory: then all are staged there.
    """

    def __init__(self, directory: Path, asked: str, engine: ByteEngine, *, encrypted: bool = False) -> None:
        self._directory, self._asked, self._engine = directory, asked, engine
        self._encrypted = encrypted
        self._lock = threading.Lock()
        self._found: ByteEngine | None = None
        self._own: ByteEngine | None = None

    def get(self) -> ByteEngine:
        """Return the engine; where it does not move a device's memory pages go through host memory.

        Raises
        ------
        EngineUnavailableError
            Where the engine that was insisted on cannot move it here; the message says why.
        """
        if self._found is None:
            with self._lock:
                self._found = self._found or self._choose()
        return self._found

    @property
    def mode(self) -> str | None:
        """How pages of devices move, once some did."""
        found = self._found
        if found is None:
            return None
        how = "" if self._encrypted else device_mode_of(found)
        if how:
            return f"{found.name} {how}"
        staged = "staged and encrypted in host memory" if self._encrypted else "staged in host memory"
        return f"{staged}, {found.name} {found.mode}"

    def close(self) -> None:
        """Close an engine that was made for devices alone."""
        if self._own is not None:
            self._own.close()

    def after_fork(self) -> None:
        """Let a child of fork not wait for a lock that a thread of its parent held."""
        self._lock = threading.Lock()

    def _choose(self) -> ByteEngine:
        if self._encrypted or self._asked in {"", "posix"}:
            return self._engine
        path = existing_parent(self._directory)
        if self._asked == "auto":
            return self._automatic(path)
        direct = self._engine.mode.endswith("direct")
        found = accelerators.device_findings(path, direct=direct)
        mine = [finding for finding in found if finding.engine == self._asked]
        good = next((finding for finding in mine if finding.usable), None)
        if good is None:
            raise EngineUnavailableError(
                f"engine {self._asked!r} does not move GPU memory in {self._directory}: {_reasons(mine)}. "
                "engine='auto' does, through host memory where it must."
            )
        self._use(good.mode)
        return self._engine

    def _automatic(self, path: Path) -> ByteEngine:
        """Take kvikio where cuFile reaches the disk without the host; else stage there, and say so once."""
        found = accelerators.kvikio_gpudirect(path)
        if not found.usable:
            _say_once(f"GPU pages are staged in host memory: {found.mode}: {found.reason}.")
            return self._engine
        from .kvikio_engine import KvikioEngine

        self._own = KvikioEngine(direct=True)
        return self._own

    def _use(self, mode: str) -> None:
        """Let the store's own engine move a device's memory by the mode that was found to work."""
        if self._asked == "nixl":
            from .nixl_engine import NixlEngine

            if isinstance(self._engine, NixlEngine):
                self._engine.device_mode = mode


def _reasons(findings: Sequence[accelerators.Finding]) -> str:
    return "; ".join(f"{found.engine} {found.mode}: {found.reason}" for found in findings)


@cache
def _say_once(text: str) -> None:
    _LOG.warning("%s", text)
