"""The contract of byte engines: move pages between memory segments and slots of files.

An engine moves bytes and knows nothing of keys, records or policies. It is given a `PageBatch` and answers
with one verdict a page; it never raises for a fault of the medium. `hicache_tier.testing.engine` holds the
suite that every engine passes.

An engine that gives up waiting, or cannot tell whether bytes are still under way, says `timeout: ...`. The
slot of such a page is never given out again by this process, and its memory is not to be reused: the batch is
kept for good, unless the engine has `holds_batches = True`, which says that it refers to a batch itself for
as long as bytes of it may be under way.

An exception out of `write`, `read` or `start` says that nothing is under way; one out of a flight says
nothing of it. An interrupt (KeyboardInterrupt) leaves an engine once what is under way has ended, or has had
its time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from .flights import Settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    from numpy.typing import NDArray

    from .flights import Flight
    from .slab import StoreFile

_LOG = logging.getLogger(__name__)
STILL_UNDER_WAY = "Bytes of this call may still be under way: its memory is not to be reused."
"""Note on an interrupt that left something so."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a CUDA device.

    Attributes
    ----------
    device : int
        Number of the device.
    regions : tuple of (address, nbytes)
        What the addresses of a batch lie in.
    owner : object
        The same from batch to batch, and alive as long as the memory is; engines that register memory do so
        once an owner, and undo it when the owner goes.
    staging : bool
        Whether it was made for transfers and for this engine alone, so that it is worth registering.
    """

    device: int
    regions: tuple[tuple[int, int], ...]
    owner: object
    staging: bool = False


@dataclass(slots=True)
class PageBatch:
    """Pages to move, in the order of their file positions.

    Attributes
    ----------
    files : list of StoreFile, one a page
    offsets : int64 [n]
        Byte offset of each page in its file; multiples of 4096.
    addresses : uint64 [n, F]
        Memory address of each of a page's F segments, in stored order.
    nbytes : uint64 [F]
        Lengths of a page's segments, the same for every page; they sum to `page_nbytes`.
    page_nbytes, stride : int
        Bytes of a page, and bytes reserved for it in the file.
    hook : callable (first, last), optional
        Called by the engine on the thread that moves pages `first..last-1`: before a write, after a read that
        succeeded. May compute checksums; must not raise.
    memory : DeviceMemory, optional
        Where the addresses are of a CUDA device; only a `DeviceEngine` is given such batches.
    """

    files: list[StoreFile]
    offsets: NDArray[np.int64]
    addresses: NDArray[np.uint64]
    nbytes: NDArray[np.uint64]
    page_nbytes: int
    stride: int
    hook: Callable[[int, int], None] | None = None
    memory: DeviceMemory | None = None

    def __len__(self) -> int:
        return len(self.files)


_LEFT: list[PageBatch] = []  # whose bytes may still be under way: what memory they hold is kept for good


@runtime_checkable
class ByteEngine(Protocol):
    """What moves bytes."""

    @property
    def name(self) -> str:
        """Short name, as in `open_store(engine=...)`."""

    @property
    def mode(self) -> str:
        """How it moves bytes now (`direct`, `buffered`, ...); may change when the medium refuses a mode."""

    def write(self, batch: PageBatch) -> list[str]:
        """Write every page; return "" for each page written and a reason for each that was not."""

    def read(self, batch: PageBatch) -> list[str]:
        """Read every page; return "" for each page read in full and a reason for each that was not."""

    def close(self) -> None:
        """Stop threads and give back what the engine holds."""


@runtime_checkable
class DeviceEngine(ByteEngine, Protocol):
    """A byte engine that also moves memory of CUDA devices."""

    @property
    def device_mode(self) -> str:
        """How it moves such memory, or "" where it does not."""


@runtime_checkable
class StartingEngine(DeviceEngine, Protocol):
    """A device engine that can have many batches under way for one thread."""

    def start(self, batch: PageBatch, *, write: bool) -> Flight:
        """Begin to write or read every page of a batch in device memory, and return at once."""


def device_mode_of(engine: ByteEngine) -> str:
    """Return how an engine moves memory of CUDA devices, or "" where it does not."""
    return getattr(engine, "device_mode", None) or ""


def as_starting(engine: ByteEngine) -> StartingEngine | None:
    """Return an engine that can have many batches under way for one thread; None where it cannot."""
    # Asked for each call; `isinstance` of a protocol takes as long as 100 pages.
    return cast("StartingEngine", engine) if hasattr(engine, "start") else None


def moved(engine: ByteEngine, batch: PageBatch, *, write: bool) -> list[str]:
    """Let an engine move a batch; whatever it raises, or answers too briefly, becomes every page's reason."""
    try:
        reasons = engine.write(batch) if write else engine.read(batch)
        return _complete(engine, reasons, batch)
    except Exception as error:  # noqa: BLE001 - the engine may be anybody's
        return _failed(engine, error, len(batch))
    except BaseException:
        _LEFT.append(batch)
        raise


def started(engine: StartingEngine, batch: PageBatch, *, write: bool) -> Flight:
    """Let an engine begin with a batch; the verdicts are as those of `moved`."""
    try:
        return _Started(engine, engine.start(batch, write=write), batch)
    except Exception as error:  # noqa: BLE001 - the engine may be anybody's
        return Settled(_failed(engine, error, len(batch)))
    except BaseException:
        _LEFT.append(batch)
        raise


class _Started:
    def __init__(self, engine: ByteEngine, flight: Flight, batch: PageBatch) -> None:
        self._engine, self._flight, self._batch = engine, flight, batch

    def done(self) -> bool:
        try:
            return self._flight.done()
        except Exception:  # noqa: BLE001 - `result` waits, or raises as well
            return True

    def result(self) -> list[str]:
        try:
            reasons = self._flight.result()
        except Exception as error:  # noqa: BLE001 - the engine may be anybody's
            _LOG.error("engine %s lost what it had under way", self._engine.name, exc_info=error)
            reasons = [f"timeout: {type(error).__name__}: {error}"] * len(self._batch)
        return _complete(self._engine, reasons, self._batch)


def _complete(engine: ByteEngine, given: Iterable[str], batch: PageBatch) -> list[str]:
    reasons = list(given)
    if len(reasons) != len(batch):
        _LOG.error("engine %s gave %d verdicts on %d pages", engine.name, len(reasons), len(batch))
        return ["engine_error: a verdict is missing"] * len(batch)
    late = any(reasons) and any(reason.startswith("timeout") for reason in reasons)
    if late and not getattr(engine, "holds_batches", False):
        _LEFT.append(batch)
    return reasons


def _failed(engine: ByteEngine, error: Exception, count: int) -> list[str]:
    _LOG.error("engine %s failed", engine.name, exc_info=error)
    return [f"engine_error: {type(error).__name__}: {error}"] * count
