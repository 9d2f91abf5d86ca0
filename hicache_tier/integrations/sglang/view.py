"""One of SGLang's host pools, as pages that the store can read and write where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from hicache_tier.errors import InvalidArgumentError

from .kinds import Kind, blocks, pool_facts, recognise

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

_MARKER_NBYTES = 64
_INT64: Final = np.dtype(np.int64)
_ONE: Final = np.int64(1).tobytes()
_WHOLE = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


class PoolView:
    """Where the pages of a host pool lie.

    SGLang tells the pieces of a page in Python lists, one call at a time. Here they are asked for once, for
    some pages; where the others lie follows, and is checked against the pool's tensors.

    Parameters
    ----------
    pool
        One of SGLang's host pools.
    name : str
    kv_dtype : str, optional
        The server's `--kv-cache-dtype`.

    Attributes
    ----------
    pool, name
        As given.
    geometry : KVGeometry
    layout : Layout
    sharded : bool
        Whether tensor-parallel ranks hold different bytes, as far as the pool itself tells.
    facts : dict
        What SGLang says of the pool, for the identity.
    page_tokens, num_pages : int
        Slots a page, and pages.
    nbytes : int64 [F]
        Lengths of a page's segments.
    keep : object
        What keeps the memory mapped.
    marker : bool
        Whether the pool has no memory: what is stored says only that a page was there.
    copied : bool
        Whether SGLang does not tell where pages lie: they are copied by the pool's own methods.

    Raises
    ------
    InvalidArgumentError
        Where pages of the pool cannot be stored; the message says why.
    """

    def __init__(self, pool: Any, name: str, kv_dtype: str | None = None) -> None:  # noqa: ANN401
        pool = getattr(getattr(pool, "anchor_entry", None), "host_pool", pool)
        refuse(pool, name)
        self.pool, self.name = pool, name
        self.page_tokens = int(pool.page_size)
        self.num_pages = int(pool.size) // self.page_tokens
        self.marker = self.copied = False
        self.keep: object = None
        self._first = self._steps = self.nbytes = np.zeros(1, np.int64)
        pieces = None if getattr(pool, "kv_buffer", self) is None else self._pieces()
        if pieces is not None:
            self._take(pieces, kv_dtype)
        elif getattr(pool, "kv_buffer", self) is None and not getattr(pool, "size_per_token", 0):
            self.marker = True
            self._set(blocks(_MARKER_NBYTES, self.page_tokens))
        else:
            self.copied = True
            self._set(blocks(self._flat_nbytes(), self.page_tokens))

    def _set(self, kind: Kind) -> None:
        self.geometry: KVGeometry = kind.geometry
        self.layout: Layout = kind.layout
        self.sharded = kind.sharded
        self.facts = pool_facts(self.pool, recognised=kind.recognised)

    # -- pages of a call -------------------------------------------------------------------------------------

    def pages(self, indices: torch.Tensor, count: int, *, unique: bool) -> NDArray[np.int64]:
        """Return page numbers for slots, one page after the other; `unique` where none may be named twice.

        Raises
        ------
        InvalidArgumentError
            Where they are not `count` whole pages of this pool.
        """
        return pages_named(self, indices, count, unique=unique)

    def addresses(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the address of each page's segments, int64 `[n, F]`, in stored order."""
        return pages[:, None] * self._steps + self._first

    def flat(self, page: int) -> torch.Tensor:
        """Return a copy of a page, as the pool itself flattens it."""
        data: torch.Tensor = self.pool.get_data_page(page * self.page_tokens, flat=True)
        return data.contiguous()

    def blank(self) -> torch.Tensor:
        """Return memory for a flat page."""
        data: torch.Tensor = self.pool.get_dummy_flat_data_page()
        return data.contiguous()

    def put_back(self, page: int, data: torch.Tensor) -> None:
        """Copy a flat page to the pool."""
        self.pool.set_from_flat_data_page(page * self.page_tokens, data)

    # -- at registration -------------------------------------------------------------------------------------

    def _pieces(self) -> tuple[NDArray[np.int64], list[int], NDArray[np.int64]] | None:
        """Return the pieces of page 0, their lengths, and the steps to the next page; None where not told."""
        try:
            first, sizes = self._meta(0)
            second, _ = self._meta(min(1, self.num_pages - 1))
        except (NotImplementedError, ValueError, AttributeError):
            return None
        steps = second - first
        for page in {self.num_pages - 1, self.num_pages // 2, self.num_pages // 3}:
            addresses, lengths = self._meta(page)
            if lengths != sizes or (addresses != first + page * steps).any():
                raise InvalidArgumentError(
                    f"pool {self.name} ({type(self.pool).__name__}): pages do not lie at regular distances."
                )
        return first, sizes, steps

    def _meta(self, page: int) -> tuple[NDArray[np.int64], list[int]]:
        slots = torch.arange(page * self.page_tokens, (page + 1) * self.page_tokens, dtype=torch.int64)
        pointers, sizes = self.pool.get_page_buffer_meta(slots)
        return np.array(pointers, np.int64), [int(size) for size in sizes]

    def _take(
        self, pieces: tuple[NDArray[np.int64], list[int], NDArray[np.int64]], kv_dtype: str | None
    ) -> None:
        first, sizes, steps = pieces
        tensors = _tensors(self.pool)
        last = first + (self.num_pages - 1) * steps
        for start, size in [
            *zip(first.tolist(), sizes, strict=True),
            *zip(last.tolist(), sizes, strict=True),
        ]:
            if not any(_holds(tensor, start, size) for tensor in tensors):
                raise InvalidArgumentError(
                    f"pool {self.name} ({type(self.pool).__name__}): a page lies outside of its buffers."
                )
        kind = recognise(self.pool, sizes, self.num_pages, kv_dtype)
        order = list(kind.order)
        self._set(kind)
        self._first, self._steps = first[order], steps[order]
        self.nbytes = np.array(sizes, np.int64)[order]
        self.keep = tensors
        if not kind.recognised:
            self.facts["pieces"] = sizes

    def _flat_nbytes(self) -> int:
        try:
            sizes = {data.numel() * data.element_size() for data in (self.flat(0), self.blank())}
        except (NotImplementedError, ValueError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(
                f"pool {self.name} ({type(self.pool).__name__}, {self.pool.layout}) cannot be stored: {error}"
            ) from error
        (nbytes,) = sizes if len(sizes) == 1 else (0,)
        if not nbytes:
            raise InvalidArgumentError(f"pool {self.name}: its flat pages have no one size: {sorted(sizes)}.")
        return nbytes


class Paged(Protocol):
    """A pool of pages of so many slots."""

    @property
    def name(self) -> str:
        """Of the pool, for errors."""

    @property
    def page_tokens(self) -> int:
        """Slots a page."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""


def pages_named(pool: Paged, indices: torch.Tensor, count: int, *, unique: bool) -> NDArray[np.int64]:
    """Return page numbers for slots; see `PoolView.pages`."""
    slots = _slots(pool, indices)
    if slots.size != count * pool.page_tokens:
        raise InvalidArgumentError(
            f"{pool.name}: {count} pages of {pool.page_tokens} slots were named by {slots.size} indices."
        )
    firsts = slots[:: pool.page_tokens]
    numbers: NDArray[np.int64] = firsts // pool.page_tokens
    listed = numbers.tolist()
    whole = _in_order(slots, pool.page_tokens) and _same(numbers * pool.page_tokens, firsts)
    if count and (not whole or min(listed) < 0 or max(listed) >= pool.num_pages):
        raise InvalidArgumentError(f"{pool.name}: the indices are not pages of this pool.")
    if unique and len(set(listed)) != count:
        raise InvalidArgumentError(f"{pool.name}: a page is named twice.")
    return numbers


def _in_order(slots: NDArray[np.int64], page_tokens: int) -> bool:
    """Tell whether the slots of each page follow one another."""
    steps = slots[1:] - slots[:-1]
    steps[page_tokens - 1 :: page_tokens] = 1  # from page to page they need not
    return steps.tobytes() == _ONE * len(steps)


def _same(ours: NDArray[np.int64], others: NDArray[np.int64]) -> bool:
    """Tell whether arrays are equal; by their bytes, for which NumPy has the least to set up."""
    return ours.tobytes() == others.tobytes()


def _slots(pool: Paged, indices: torch.Tensor) -> NDArray[np.int64]:
    """Return slots, int64 `[n]`; mostly by one call of torch, of which each costs microseconds."""
    if isinstance(indices, torch.Tensor):
        try:
            slots = indices.numpy()
        except (TypeError, RuntimeError):  # on a device, or of a dtype that NumPy does not have
            slots = None
        if slots is not None and slots.dtype == _INT64:
            return slots.reshape(-1)
        if indices.dtype in _WHOLE:
            return indices.to("cpu", torch.int64).numpy().reshape(-1)
    said = getattr(indices, "dtype", type(indices).__name__)
    raise InvalidArgumentError(f"{pool.name}: indices must be a tensor of whole numbers, got {said}.")


def refuse(pool: Any, name: str) -> None:  # noqa: ANN401 - one of SGLang's host pools
    """Raise `InvalidArgumentError` for a pool whose pages move about, or are not all there."""
    said = f"pool {name} ({type(pool).__name__})"
    for attribute in ("page_size", "size", "layout"):
        if not hasattr(pool, attribute):
            raise InvalidArgumentError(f"{said} is no host pool: it has no {attribute}.")
    if getattr(pool, "shared_allocation_domain", None) is not None:
        raise InvalidArgumentError(f"{said} moves its pages about in a shared arena; that cannot be stored.")
    if hasattr(pool, "placement"):
        raise InvalidArgumentError(
            f"{said} deals pages out to the ranks (logical-page KV sharding); that cannot be stored yet."
        )
    if int(getattr(pool, "dcp_size", 1)) != 1:
        raise InvalidArgumentError(
            f"{said} is sharded for decode context parallelism; that cannot be stored."
        )


def _tensors(pool: Any) -> list[torch.Tensor]:  # noqa: ANN401 - one of SGLang's host pools
    """Return the tensors that a pool's pages lie in."""
    found: list[Any] = []
    if hasattr(pool, "get_hybrid_pool_buffer"):
        found += pool.get_hybrid_pool_buffer()
    buffer = getattr(pool, "kv_buffer", None)
    found += buffer if isinstance(buffer, list | tuple) else [buffer]
    return [one for one in found if isinstance(one, torch.Tensor) and one.numel()]


def _holds(tensor: torch.Tensor, address: int, nbytes: int) -> bool:
    start = tensor.data_ptr()
    return start <= address and address + nbytes <= start + tensor.numel() * tensor.element_size()
