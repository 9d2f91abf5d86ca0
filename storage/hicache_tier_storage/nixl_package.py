"""The NIXL package: found where it is installed, imported only when it is used."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
from functools import lru_cache
from typing import Any

from hicache_tier.errors import EngineUnavailableError, how_to_get

MIN_VERSION = (1, 5, 1)
EXTRA = f"{how_to_get('cu13')} (or cu12; without CUDA: pip install --no-deps nixl-cu12)"
_NAMES = {"nixl_cu13": "nixl-cu13", "nixl_cu12": "nixl-cu12"}


def why_no_nixl() -> str:
    """Return why NIXL cannot be imported here, or ""; imports nothing."""
    module, version = _distribution()
    if not module:
        return f"the nixl package is not installed: {EXTRA}"
    if _numbers(version) < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        return f"nixl {version} is too old, {wanted} or later is needed: {EXTRA}"
    return ""


@lru_cache(maxsize=1)
def nixl_module() -> Any:  # noqa: ANN401 - a package without types that may not be there
    """Import NIXL, once a process.

    Its own log lines would go to standard output, where they would spoil JSON, and it prints an error of its
    own for every transfer that fails; verdicts say that already. `NIXL_LOG_LEVEL` gets both back.

    Raises
    ------
    EngineUnavailableError
        Where it is not installed, too old, or does not load.
    """
    why = why_no_nixl()
    if why:
        raise EngineUnavailableError(f"engine 'nixl' cannot be used: {why}.")
    module, _ = _distribution()
    raises = logging.raiseExceptions
    quiet = "NIXL_LOG_LEVEL" not in os.environ
    if quiet:
        os.environ["NIXL_LOG_LEVEL"] = "FATAL"  # read by its libraries as they load
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise EngineUnavailableError(f"engine 'nixl' cannot be used: nixl does not load: {error}.") from error
    finally:
        logging.raiseExceptions = raises  # it turns that off for everybody
        if quiet:
            del os.environ["NIXL_LOG_LEVEL"]


def _distribution() -> tuple[str, str]:
    """Return module name and version of the NIXL that is installed, or two empty texts."""
    for module, distribution in _NAMES.items():
        if importlib.util.find_spec(module) is not None:
            try:
                return module, importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
    return ("", "")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
