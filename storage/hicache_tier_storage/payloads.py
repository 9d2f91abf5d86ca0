"""From what a caller names to pages that can be moved: checks of pools and page numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from hicache_tier.device_paths import check_device_route
from hicache_tier.errors import InvalidArgumentError

from .leased import Leased
from .leased_device import LeasedDevice
from .payload import HostPayload

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from hicache_tier.device_pool import DevicePool
    from hicache_tier.geometry import KVGeometry
    from hicache_tier.layout import Layout

    from .device_payload import DevicePages, DevicePayload
    from .payload import HostPages, Payload, Pool

_DEVICE_PAGES: WeakKeyDictionary[DevicePool, dict[str, DevicePages]] = WeakKeyDictionary()


def payload_of(
    pool: Pool,
    pages: ArrayLike,
    count: int,
    geometry: KVGeometry,
    layout: Layout,
    *,
    unique: bool = False,
) -> Payload:
    """Check that a pool fits a store and return some of its pages.

    Parameters
    ----------
    pool : HostPool, DevicePool or LeasedDevice
    pages : int tensor or sequence, [count]
    count : int
    geometry, layout
        The store's.
    unique : bool
        Whether no page may be named twice.

    Raises
    ------
    InvalidArgumentError
    UnsupportedTransferError
        Where the path table has no device route for the pool.
    """
    if hasattr(pool, "segment_table") and hasattr(pool, "geometry"):
        return _host_payload(cast("HostPages", pool), pages, count, geometry, layout, unique=unique)
    from hicache_tier.device_pool import DevicePool  # here, because it needs torch

    device = pool.pool if isinstance(pool, LeasedDevice) else pool
    if isinstance(device, DevicePool):
        numbers = _device_numbers(device, pages, count, geometry, layout, unique=unique)
        return _device_payload(device, numbers, layout, pool if isinstance(pool, LeasedDevice) else None)
    raise InvalidArgumentError(f"a host pool or a device pool is needed, got {type(pool).__name__}.")


def _host_payload(
    host: HostPages, pages: ArrayLike, count: int, geometry: KVGeometry, layout: Layout, *, unique: bool
) -> HostPayload:
    _check_geometry("host", host.geometry, geometry)
    if host.layout.page_axes != layout.page_axes:
        raise InvalidArgumentError(
            f"the order of axes differs: the host pool is {host.layout.value}, the store {layout.value}."
        )
    numbers = page_numbers(pages, count, unique=unique)
    if count == 0:
        return HostPayload(host, np.empty((0, 1), np.uint64), np.empty(1, np.uint64))
    addresses, nbytes = host.segment_table(numbers)
    addresses, nbytes = addresses.astype(np.uint64, copy=False), nbytes.astype(np.uint64, copy=False)
    lease = getattr(host, "lease", None)
    return HostPayload(host, addresses, nbytes) if lease is None else Leased(host, addresses, nbytes, lease)


def _device_numbers(
    pool: DevicePool, pages: ArrayLike, count: int, geometry: KVGeometry, layout: Layout, *, unique: bool
) -> NDArray[np.int64]:
    """Check that a device pool fits, and return its page numbers, int64 `[count]`."""
    _check_geometry("device", pool.local_geometry, geometry)
    check_device_route(geometry.kind, layout, sharded=pool.sharded)
    numbers = page_numbers(pages, count, unique=unique).astype(np.int64)
    outside = numbers[(numbers < 0) | (numbers >= pool.num_pages)]
    if len(outside):
        raise InvalidArgumentError(f"pages must be within 0 .. {pool.num_pages - 1}, got {int(outside[0])}.")
    return numbers


def _device_payload(
    pool: DevicePool, numbers: NDArray[np.int64], layout: Layout, leased: LeasedDevice | None
) -> DevicePayload:
    from .device_payload import DevicePages, DevicePayload

    known = _DEVICE_PAGES.setdefault(pool, {})
    if layout.page_axes not in known:
        known[layout.page_axes] = DevicePages.of(pool, layout)
    device_pages = known[layout.page_axes]
    if leased is None:
        return DevicePayload.of(device_pages, numbers)
    return DevicePayload.of(device_pages, numbers, leased.lease, leased.begin)


def _check_geometry(kind: str, ours: KVGeometry, stored: KVGeometry) -> None:
    if ours != stored:
        raise InvalidArgumentError(f"the {kind} pool holds {ours.as_dict()}, the store {stored.as_dict()}.")


def page_array(pages: Any) -> NDArray[Any]:  # noqa: ANN401 - whatever was given as page numbers
    """Return page numbers as an array in the host's memory; raises `InvalidArgumentError` for none."""
    if isinstance(pages, range):  # numpy would ask it for one number after another
        return np.arange(pages.start, pages.stop, pages.step)
    try:
        return np.asarray(pages.cpu() if hasattr(pages, "cpu") else pages)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"page numbers must be one flat sequence: {error}.") from error


def page_numbers(pages: ArrayLike, count: int, *, unique: bool) -> NDArray[np.integer]:
    """Return page numbers as an array; raises `InvalidArgumentError` unless they are `count` integers."""
    numbers = page_array(pages)
    if numbers.ndim != 1 or len(numbers) != count:
        raise InvalidArgumentError(f"{count} keys need as many pages, got shape {numbers.shape}.")
    if count and numbers.dtype.kind not in "iu":
        raise InvalidArgumentError(f"page numbers must be integers, got {numbers.dtype}.")
    if unique:
        ordered = np.sort(numbers)
        if (ordered[1:] == ordered[:-1]).any():
            raise InvalidArgumentError("a page is named twice: two keys cannot be loaded into one page.")
    return numbers
