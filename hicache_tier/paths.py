"""The path table: which IO backend moves which pool between which layouts, and why not.

The table is data (`_CELLS`); `select_path` is the one place that decides. Everything here is pure: nothing
looks at the machine, what it can do comes in as `Capabilities`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any

from hicache_tier_kernels.support import Support

from .errors import InvalidArgumentError, UnsupportedTransferError
from .geometry import PoolKind
from .layout import Layout


class Need(StrEnum):
    """What a path needs an engine for."""

    KERNEL = "kernel"
    ONE_LAYER_KERNEL = "one_layer_kernel"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Offer:
    """One engine and whether it can run here; the reason says why not."""

    engine: str
    support: Support


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which engines can run for each need, best first.

    Attributes
    ----------
    kernel, one_layer_kernel, direct : tuple[Offer, ...]
        Engines for copies of all layers at once by a kernel, of one layer, and by the copy engines.
    """

    kernel: tuple[Offer, ...]
    one_layer_kernel: tuple[Offer, ...]
    direct: tuple[Offer, ...]

    @classmethod
    def reference(cls) -> Capabilities:
        """Return those of the torch engine, which runs everywhere and for every need."""
        offers = (Offer("reference", Support(ok=True, reason="torch, any device")),)
        return cls(offers, offers, offers)

    def offers(self, need: Need) -> tuple[Offer, ...]:
        """Return all engines known for `need`, usable or not, best first."""
        return {
            Need.KERNEL: self.kernel,
            Need.ONE_LAYER_KERNEL: self.one_layer_kernel,
            Need.DIRECT: self.direct,
        }[need]

    def pick(self, need: Need) -> str | None:
        """Return the first engine that can run, or None."""
        return next((offer.engine for offer in self.offers(need) if offer.support), None)

    def why_not(self, need: Need) -> str:
        """Return why no engine can run, engine by engine."""
        reasons = [f"{offer.engine}: {offer.support.reason}" for offer in self.offers(need)]
        return "; ".join(reasons) or "no engine is installed"


@dataclass(frozen=True, slots=True)
class Path:
    """The way a transfer takes.

    Attributes
    ----------
    pool : PoolKind
    layout : Layout
    io_backend : str
        `kernel` or `direct`; what `auto` chose where it was asked to.
    sharded : bool
        Whether the device pool holds only some layers.
    op : str
        `backup` or `load`.
    engine : str
        Name of the engine that runs it.
    per_layer : bool
        Whether layers are copied one by one.
    reason : str
        Why this backend and this engine.
    """

    pool: PoolKind
    layout: Layout
    io_backend: str
    sharded: bool
    op: str
    engine: str
    per_layer: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Cell:
    """One cell of the table: the need where it works, or the reason where it does not."""

    need: Need | None
    why: str = ""

    @property
    def text(self) -> str:
        if self.need is None:
            return f"no: {self.why}" if self.why else "no"
        return "yes, one-layer kernel" if self.need is Need.ONE_LAYER_KERNEL else "yes"


OPS = ("backup", "load")
AUTO = "auto"
AUTO_ORDER = ("kernel", "direct")
IO_BACKENDS = (AUTO, *AUTO_ORDER)

_NO = _Cell(None)
_ONE_LAYER = _Cell(Need.ONE_LAYER_KERNEL)
_KERNEL = _Cell(Need.KERNEL)
_DIRECT = _Cell(Need.DIRECT)
_CELLS: dict[tuple[str, bool], dict[Layout, _Cell]] = {
    ("kernel", False): {
        Layout.LAYER_FIRST: _KERNEL,
        Layout.PAGE_FIRST: _KERNEL,
        Layout.PAGE_FIRST_DIRECT: _KERNEL,
        Layout.PAGE_HEAD: _KERNEL,
    },
    ("kernel", True): {
        Layout.LAYER_FIRST: _ONE_LAYER,
        Layout.PAGE_FIRST: _ONE_LAYER,
        Layout.PAGE_FIRST_DIRECT: _KERNEL,
        Layout.PAGE_HEAD: _NO,
    },
    ("direct", False): {
        Layout.LAYER_FIRST: _DIRECT,
        Layout.PAGE_FIRST: _Cell(None, "fragments of one row"),
        Layout.PAGE_FIRST_DIRECT: _DIRECT,
        Layout.PAGE_HEAD: _NO,
    },
    ("direct", True): {
        Layout.LAYER_FIRST: _DIRECT,
        Layout.PAGE_FIRST: _NO,
        Layout.PAGE_FIRST_DIRECT: _NO,
        Layout.PAGE_HEAD: _NO,
    },
}
_POOL_NAMES = {PoolKind.MHA: "MHA", PoolKind.MLA: "MLA", PoolKind.INDEXER: "DSA indexer"}


def select_path(
    pool: object,
    layout: object,
    io_backend: object,
    *,
    sharded: bool,
    op: str,
    capabilities: Capabilities | None = None,
) -> Path:
    """Decide how a transfer goes, or refuse it.

    Parameters
    ----------
    pool : PoolKind or str
        `mha`, `mla` or `indexer`.
    layout : Layout or str
        The host pool's.
    io_backend : str
        `auto`, `kernel` or `direct`. `auto` takes the first of `AUTO_ORDER` that works.
    sharded : bool
        Whether the device pool holds only some layers.
    op : str
        `backup` (device to host) or `load`.
    capabilities : Capabilities, optional
        What can run here; the reference engine where left out.

    Returns
    -------
    Path

    Raises
    ------
    UnsupportedTransferError
        Where the table or the capabilities refuse it, or the backend is not known. It lists what works.
    InvalidArgumentError
        For an unknown pool, layout or op.
    """
    kind, order = _parse_pool(pool), Layout.parse(layout)
    if op not in OPS:
        raise InvalidArgumentError(f"op {op!r} is not known.{_near(op, OPS)} Allowed: {', '.join(OPS)}.")
    if not isinstance(sharded, bool):
        raise InvalidArgumentError(f"sharded must be True or False, got {sharded!r}.")
    able = Capabilities.reference() if capabilities is None else capabilities
    if not isinstance(io_backend, str) or io_backend not in IO_BACKENDS:
        title = "Layer-sharded HiCache" if sharded else "HiCache"
        near = _near(io_backend, IO_BACKENDS).strip()
        hint = " ".join(filter(None, (near, f"Allowed: {', '.join(IO_BACKENDS)}")))
        message = f"{title} {op} does not support IO backend: {io_backend} ({hint})"
        raise _refusal(message, kind, order, str(io_backend), sharded, op, able)
    found = _decide(kind, order, io_backend, sharded, op, able)
    if isinstance(found, Path):
        return found
    raise _refusal(found, kind, order, io_backend, sharded, op, able)


@lru_cache(maxsize=1024)
def _decide(  # noqa: PLR0917 - internal, one argument for each axis of the table
    pool: PoolKind, layout: Layout, io_backend: str, sharded: bool, op: str, able: Capabilities
) -> Path | str:
    """Return the path, or the message of the refusal."""
    if io_backend == AUTO:
        refusals: list[str] = []
        for name in AUTO_ORDER:
            found = _decide(pool, layout, name, sharded, op, able)
            if isinstance(found, Path):
                skipped = f"; {'; '.join(refusals)}" if refusals else f", first of {', '.join(AUTO_ORDER)}"
                reason = f"auto chose {name}{skipped}; {found.reason}"
                return Path(pool, layout, name, sharded, op, found.engine, found.per_layer, reason)
            refusals.append(f"{name}: {found}")
        return f"No IO backend can {op} here ({'; '.join(refusals)})"
    cell = _CELLS[io_backend, sharded][layout]
    if cell.need is None or layout.why_not(pool):
        return _table_refusal(pool, layout, io_backend, sharded, op)
    engine = able.pick(cell.need)
    if engine is None:
        return _engine_refusal(pool, layout, cell.need, sharded, op, able)
    reason = f"{engine} runs {cell.need.value.replace('_', ' ')}"
    return Path(pool, layout, io_backend, sharded, op, engine, sharded, reason)


def engine_paths(path: Path, io_backend: str, capabilities: Capabilities) -> dict[str, Path]:
    """Return, by engine, all paths that `io_backend` allows for the transfer that `path` describes.

    Parameters
    ----------
    path : Path
        What `select_path` decided for the same backend and capabilities.
    io_backend : str
        As asked for; `auto` allows the engines of all backends that the table allows.
    capabilities : Capabilities
    """
    found: dict[str, Path] = {}
    for name in AUTO_ORDER if io_backend == AUTO else (path.io_backend,):
        need = _CELLS[name, path.sharded][path.layout].need
        if need is None or path.layout.why_not(path.pool):
            continue
        for offer in capabilities.offers(need):
            if offer.support:
                found.setdefault(offer.engine, replace(path, io_backend=name, engine=offer.engine))
    return found


def _table_refusal(pool: PoolKind, layout: Layout, io_backend: str, sharded: bool, op: str) -> str:
    got = layout.value
    if sharded and io_backend == "direct":
        what = "DSA indexer" if pool is PoolKind.INDEXER else "HiCache"
        return f"Layer-sharded direct {what} {op} only supports layer_first layout, got {got}"
    title = f"{'Layer-sharded ' if sharded else ''}{io_backend} {_POOL_NAMES[pool]}"
    why = layout.why_not(pool) or _CELLS[io_backend, sharded][layout].why or "rows are split by head"
    return f"{title[0].upper()}{title[1:]} HiCache {op} does not support {got} layout: {why}"


def _engine_refusal(  # noqa: PLR0917 - internal, one argument for each axis of the table
    pool: PoolKind, layout: Layout, need: Need, sharded: bool, op: str, able: Capabilities
) -> str:
    title = f"{'Layer-sharded ' if sharded else ''}{_POOL_NAMES[pool]} HiCache {op}"
    what = {
        Need.ONE_LAYER_KERNEL: "the JIT one-layer kernel",
        Need.KERNEL: "a copy kernel",
        Need.DIRECT: "an engine for direct copies",
    }[need]
    return f"{title} with {layout.value} layout requires {what} ({able.why_not(need)})"


def _refusal(  # noqa: PLR0917 - internal, one argument for each axis of the table
    message: str,
    pool: PoolKind,
    layout: Layout,
    io_backend: str,
    sharded: bool,
    op: str,
    able: Capabilities,
) -> UnsupportedTransferError:
    """Build the error: what works with the layout asked for comes first, then with the backend asked for."""
    works = [
        (order, name)
        for order in Layout
        for name in AUTO_ORDER
        if isinstance(_decide(pool, order, name, sharded, op, able), Path)
    ]
    works.sort(key=lambda pair: (pair[0] is not layout, pair[1] != io_backend))
    alternatives = tuple(f"io_backend='{name}' with layout='{order.value}'" for order, name in works)
    return UnsupportedTransferError(
        message, layout=layout.value, io_backend=io_backend, sharded=sharded, alternatives=alternatives
    )


def path_rows(capabilities: Capabilities | None = None) -> list[dict[str, Any]]:
    """Return the table as plain rows, one for each pool, layout, backend (without `auto`), sharding and op.

    Keys: `pool`, `layout`, `io_backend`, `sharded`, `op`, `ok`, `engine` (None where not ok), `reason`.
    """
    able = Capabilities.reference() if capabilities is None else capabilities
    rows = []
    for pool in PoolKind:
        for layout in Layout:
            for io_backend, sharded in _CELLS:
                for op in OPS:
                    found = _decide(pool, layout, io_backend, sharded, op, able)
                    ok = isinstance(found, Path)
                    rows.append(
                        {
                            "pool": pool.value,
                            "layout": layout.value,
                            "io_backend": io_backend,
                            "sharded": sharded,
                            "op": op,
                            "ok": ok,
                            "engine": found.engine if isinstance(found, Path) else None,
                            "reason": found.reason if isinstance(found, Path) else found,
                        }
                    )
    return rows


def path_table_markdown() -> str:
    """Return the table that the README shows."""
    only = {order: [_POOL_NAMES[kind] for kind in PoolKind if not order.why_not(kind)] for order in Layout}
    heads = [
        order.value if len(names) == len(PoolKind) else f"{order.value} ({', '.join(names)})"
        for order, names in only.items()
    ]
    lines = [f"| io_backend | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for (name, sharded), cells in _CELLS.items():
        title = f"{name}, layer-sharded" if sharded else name
        lines.append(f"| {title} | {' | '.join(cells[order].text for order in Layout)} |")
    return "\n".join(lines) + "\n"


def _parse_pool(value: object) -> PoolKind:
    allowed = [kind.value for kind in PoolKind]
    if isinstance(value, str) and value in allowed:
        return PoolKind(value)
    raise InvalidArgumentError(
        f"pool {value!r} is not known.{_near(value, allowed)} Allowed: {', '.join(allowed)}."
    )


def _near(value: object, allowed: tuple[str, ...] | list[str]) -> str:
    close = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""
