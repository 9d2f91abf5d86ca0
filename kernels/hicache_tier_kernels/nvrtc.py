"""CUDA C++ to machine code, without nvcc: NVRTC through cuda-core, with a cache on disk.

An entry's name is the SHA-256 of source, flags, architecture and compiler version; its content starts with
the SHA-256 of the code, so that a damaged entry is seen and compiled again. Entries are written aside and
renamed: ranks that race write the same bytes, and a reader sees a whole entry or none.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_tier.errors import how_to_get

from .support import Support

if TYPE_CHECKING:
    from collections.abc import Mapping

_DIGEST_NBYTES = 32


class CompileError(RuntimeError):
    """NVRTC refused the source; the message has its log."""


def cache_folder() -> Path:
    """Return where machine code and measurements are kept.

    `HICACHE_TIER_CACHE`, else `XDG_CACHE_HOME/hicache_tier`, else `~/.cache/hicache_tier`.
    """
    own = os.environ.get("HICACHE_TIER_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "hicache_tier"


@cache
def compiler() -> Support:
    """Return whether NVRTC can be used, with its version or why not."""
    try:
        major, minor = _version()
    except Exception as error:  # noqa: BLE001 - packages of CUDA raise many kinds when parts are missing
        return Support(
            ok=False,
            reason=f"NVRTC through cuda-core is not usable ({type(error).__name__}: {error}); "
            f"{how_to_get('cu13')} (or cu12)",
        )
    return Support(ok=True, reason=f"NVRTC {major}.{minor}")


def compile_cubin(name: str, macros: Mapping[str, object], arch: str, folder: Path | None = None) -> bytes:
    """Return machine code of one of the package's sources, from the cache where it is there.

    Parameters
    ----------
    name : str
        File name of the source in this package.
    macros : mapping
        Macros to define.
    arch : str
        Such as `sm_90`.
    folder : Path, optional
        The cache; `cache_folder()` where left out.

    Raises
    ------
    CompileError
    """
    source = Path(__file__).with_name(name).read_text()
    flags = tuple(f"{key}={value}" for key, value in sorted(macros.items()))
    version = ".".join(map(str, _version()))
    key = hashlib.sha256("\0".join((source, *flags, arch, version)).encode()).hexdigest()
    entry = (cache_folder() if folder is None else folder) / "cubin" / f"{key}.cubin"
    code = _read(entry)
    if code is None:
        code = _compile(name, source, flags, arch)
        _write(entry, code)
    return code


def _read(entry: Path) -> bytes | None:
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST_NBYTES], data[_DIGEST_NBYTES:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(entry: Path, code: bytes) -> None:
    """Keep an entry; a cache that cannot be written costs a compilation next time, no more."""
    with suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=entry.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(aside).replace(entry)
        except OSError:
            Path(aside).unlink(missing_ok=True)
            raise


def _version() -> tuple[int, int]:
    nvrtc = import_module("cuda.bindings.nvrtc")
    code, major, minor = nvrtc.nvrtcVersion()
    if int(code):
        raise CompileError(f"nvrtcVersion: {code}")
    _core()
    return int(major), int(minor)


def _core() -> Any:  # noqa: ANN401 - cuda-core has no stable types yet
    """Return cuda-core's module; it left `experimental` with version 1."""
    core = import_module("cuda.core")
    return core if hasattr(core, "Program") else import_module("cuda.core.experimental")


def _compile(name: str, source: str, flags: tuple[str, ...], arch: str) -> bytes:
    core = _core()
    macros = [_macro(flag) for flag in flags] or None  # an empty list is refused
    options = core.ProgramOptions(name=name, arch=arch, std="c++17", define_macro=macros)
    try:
        code = core.Program(source, code_type="c++", options=options).compile("cubin").code
    except Exception as error:
        raise CompileError(f"{name} for {arch} with {' '.join(flags)}: {error}") from error
    return bytes(code)


def _macro(flag: str) -> tuple[str, str]:
    key, _, value = flag.partition("=")
    return key, value
