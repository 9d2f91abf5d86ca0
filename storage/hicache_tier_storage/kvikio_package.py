"""The kvikio package: found where it is installed, imported only when it is used."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from functools import lru_cache
from typing import Any

from hicache_tier.errors import EngineUnavailableError, how_to_get

EXTRA = f"{how_to_get('cu13')} (or cu12)"


def missing_library(name: str, meaning: str) -> str:
    """Return why a shared library cannot be loaded, or ""."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return f"{name} cannot be loaded ({meaning})"
    return ""


def why_no_kvikio() -> str:
    """Return why kvikio cannot be used here, or ""; imports nothing."""
    if importlib.util.find_spec("kvikio") is None:
        return f"the kvikio package is not installed: {EXTRA}"
    why = missing_library("libcuda.so.1", "no NVIDIA driver")
    return f"{why}; kvikio needs it even for host memory" if why else ""


@lru_cache(maxsize=1)
def kvikio_module() -> Any:  # noqa: ANN401 - a package without types that may not be there
    """Import kvikio, once a process.

    Raises
    ------
    EngineUnavailableError
        Where it is not installed or does not load.
    """
    why = why_no_kvikio()
    if why:
        raise EngineUnavailableError(f"engine 'kvikio' cannot be used: {why}.")
    try:
        module = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")
    except Exception as error:
        raise EngineUnavailableError(f"engine 'kvikio' cannot be used: it does not load: {error}.") from error
    return module


def use_threads(count: int) -> None:
    """Let kvikio use so many threads at least; its default is one. `KVIKIO_NTHREADS` has the last word."""
    defaults = kvikio_module().defaults
    if "KVIKIO_NTHREADS" not in os.environ and defaults.get("num_threads") < count:
        defaults.set("num_threads", count)


def compat_mode() -> str:
    """Return kvikio's compatibility mode as it is: `ON`, `OFF`, or what `AUTO` comes to here."""
    defaults = kvikio_module().defaults
    mode = str(defaults.get("compat_mode").name)
    if mode != "AUTO":
        return mode
    return f"AUTO ({'ON' if defaults.is_compat_mode_preferred() else 'OFF'})"
