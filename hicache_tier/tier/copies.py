"""Copies between device pools and the host tier."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hicache_tier.allocator import page_tensor
from hicache_tier.errors import ClosedError, InvalidArgumentError, UnsupportedTransferError
from hicache_tier.transfer import backup, load

from .core import as_tensor
from .index import State
from .names import distinct_keys
from .store import error_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from hicache_tier.device_pool import DevicePool
    from hicache_tier.transfer import Completion

    from .core import Core
    from .index import Entry
    from .reader import Reader
    from .room import Room
    from .writer import Writer

_MISTAKES = (InvalidArgumentError, UnsupportedTransferError, ClosedError)


class Copies:
    """Brings device pages into the host tier and back; runs in the engine's thread."""

    def __init__(self, core: Core, room: Room, reader: Reader, writer: Writer) -> None:
        self._core = core
        self._room = room
        self._reader = reader
        self._writer = writer

    def insert(
        self,
        keys: Iterable[bytes | str],
        device: DevicePool,
        device_pages: object,
        parent: bytes | str | None,
    ) -> int:
        """See `Tier.insert`."""
        names, numbers = _paired(keys, device_pages)
        first_parent = None if parent is None else distinct_keys([parent])[0]
        if first_parent is not None and first_parent in names:
            raise InvalidArgumentError(
                f"parent {first_parent.hex()} is one of the keys themselves; name the page before the first, "
                "or none where that is the first of the prompt."
            )
        with self._core.section():
            chain, fresh, positions = self._claim(names, first_parent)
        error = None
        if fresh:
            source, target = numbers[as_tensor(positions)], as_tensor([entry.page for entry in fresh])
            backend = self._core.settings.io_backend
            error = self._copy(
                "backup", lambda: backup(device, self._core.host, source, target, backend), fresh
            )
        with self._core.held():
            for entry in fresh:
                if error is None and entry.state is State.FILLING:
                    self._core.index.make_ready(entry)
                else:
                    self._core.index.discard(entry)
            if not isinstance(error, TimeoutError):  # a copy that still runs keeps its pages
                self._core.index.unpin(fresh)
            held = self._account(chain)
        _raise_mistake(error)
        return held

    def load(
        self, keys: Iterable[bytes | str], device: DevicePool, device_pages: object, layer: int | None
    ) -> int:
        """See `Tier.load`."""
        names, numbers = _paired(keys, device_pages)
        with self._core.section():
            chain = self._core.index.ready_prefix(names)
            self._core.index.pin(chain)
            self._core.index.touch(chain)
        if not chain:
            return 0
        source, target = as_tensor([entry.page for entry in chain]), numbers[: len(chain)]
        backend = self._core.settings.io_backend
        error = self._copy(
            "load", lambda: load(self._core.host, device, source, target, backend, layer), chain
        )
        with self._core.held():
            if not isinstance(error, TimeoutError):
                self._core.index.unpin(chain)
            if error is None and layer in {None, device.owned_layers[0]}:
                self._hit(chain)
        _raise_mistake(error)
        return 0 if error else len(chain)

    def _claim(
        self, names: Sequence[bytes], parent: bytes | None
    ) -> tuple[list[Entry], list[Entry], list[int]]:
        """Pin the pages at hand and get host pages for the others: all, those to fill, their positions."""
        index, counters = self._core.index, self._core.counters
        present = [entry for name in names if (entry := index.get(name)) is not None]
        index.pin(present)
        pages = self._room.take(len(names) - len(present))
        chain: list[Entry] = []
        fresh: list[Entry] = []
        positions: list[int] = []
        for position, name in enumerate(names):
            entry = index.get(name)
            if entry is None:
                if len(fresh) == len(pages):
                    counters.add("inserts.skipped_pages.host_full", len(names) - position)
                    break
                entry = index.add(name, names[position - 1] if position else parent, pages[len(fresh)])
                fresh.append(entry)
                positions.append(position)
            elif entry.state is State.FILLING:
                counters.add("inserts.skipped_pages.arriving_already")
            chain.append(entry)
            index.pin([entry])
        index.unpin(present)
        return chain, fresh, positions

    def _account(self, chain: list[Entry]) -> int:
        """Count the leading pages now held, count their hits, and queue what the policy wants stored."""
        index = self._core.index
        held = next((i for i, entry in enumerate(chain) if entry.state is not State.READY), len(chain))
        live = [entry for entry in chain if entry.state is not State.GONE]
        index.touch(live)
        index.unpin(chain)
        self._hit([entry for entry in live if entry.state is State.READY])
        self._room.keep_reserve()
        self._reader.advance()
        return held

    def _hit(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.hits += 1
        self._writer.hit(entries)

    def _copy(
        self, op: str, start: Callable[[], Completion], entries: Sequence[Entry]
    ) -> BaseException | None:
        """Run a copy to its end; return what it raised, count what it moved."""
        started_s = time.perf_counter()
        error: BaseException | None = None
        nbytes = 0
        try:
            completion = start()
            completion.wait(self._core.settings.deadline_s)
            nbytes = completion.nbytes
        except BaseException as caught:  # noqa: BLE001 - sorted out once the pages are seen to
            error = caught
        with self._core.held():
            counters = self._core.counters
            counters.add(f"{op}.seconds", time.perf_counter() - started_s)
            if error is None:
                counters.add(f"{op}.pages", len(entries))
                counters.add(f"{op}.bytes", nbytes)
            else:
                counters.add(f"{op}.failed_pages.{error_kind(error)}", len(entries))
        return error


def _paired(keys: Iterable[bytes | str], device_pages: object) -> tuple[list[bytes], torch.Tensor]:
    names, numbers = distinct_keys(keys), page_tensor("device_pages", device_pages).cpu()
    if len(names) != len(numbers):
        raise InvalidArgumentError(
            f"keys and device_pages must be one to one, got {len(names)} keys and {len(numbers)} pages."
        )
    return names, numbers


def _raise_mistake(error: BaseException | None) -> None:
    """Raise what the caller must mend; a fault of the machine stays a counted miss."""
    if isinstance(error, _MISTAKES) or (error is not None and not isinstance(error, Exception)):
        raise error
