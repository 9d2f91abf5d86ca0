"""Conformance suite for page stores: subclass `PageStoreSuite` and say how to open one.

Pytest does the rest::

    class TestMine(PageStoreSuite):
        geometry = KVGeometry.mha(...)
        layout = Layout.PAGE_FIRST

        def open_store(self, root):
            return my_store(root, self.geometry, self.layout)

A store has the methods of `hicache_tier_storage.PageStore` and room for 64 pages. `durable = False` leaves
out what only a store on disk can do.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pytest

from hicache_tier.errors import ClosedError, InvalidArgumentError
from hicache_tier.geometry import KVGeometry
from hicache_tier.layout import Layout

from .array_pool import ArrayPool, blank_pages, fill_pages, keys_of, pages_equal, read_page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_TIMEOUT_S = 60.0
_PAGES = 48


class Store(Protocol):
    """What a store does."""

    def put(self, keys: Sequence[Any], host: Any, pages: Any, *, parents: Any = None) -> Sequence[Any]:  # noqa: ANN401
        """Store pages; a truthy verdict for each that is stored."""

    def get(self, keys: Sequence[Any], host: Any, pages: Any) -> Sequence[Any]:  # noqa: ANN401
        """Load pages; a truthy verdict for each that was loaded."""

    def match_prefix(self, keys: Sequence[Any]) -> int:
        """Count the pages that are there, consecutively, from the first key on."""

    def delete(self, keys: Sequence[Any]) -> Sequence[Any]:
        """Remove pages; a truthy verdict for each that was there."""

    def clear(self) -> int:
        """Remove every page; return how many there were."""

    def stats(self) -> dict[str, Any]:
        """Return counters and gauges."""

    def close(self) -> None:
        """Let go of everything."""


class PageStoreSuite:
    """What every store must do, byte by byte and verdict by verdict.

    Attributes
    ----------
    geometry : KVGeometry
    layout : Layout
    durable : bool
        Whether pages outlive the store object.
    """

    geometry: ClassVar[KVGeometry] = KVGeometry.mha(
        num_layers=2, num_kv_heads=2, head_dim=16, dtype="bfloat16", page_tokens=4
    )
    layout: ClassVar[Layout] = Layout.PAGE_FIRST
    durable: ClassVar[bool] = True

    def open_store(self, root: Path) -> Store:
        """Open a store of `geometry` and `layout` under `root`, which may hold one already."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """Open the store, and close it at the end."""
        store = self.open_store(tmp_path / "root")
        yield store
        store.close()

    @contextmanager
    def opened(self, root: Path) -> Iterator[Store]:
        """Open a store for a block."""
        store = self.open_store(root)
        try:
            yield store
        finally:
            store.close()

    def pool(self) -> Any:  # noqa: ANN401 - of a kind that the store takes
        """Return pages for a test: an `ArrayPool` in host memory, unless a subclass has another."""
        return ArrayPool(self.geometry, self.layout, _PAGES)

    def put(self, store: Store, keys: Sequence[bytes], **options: object) -> list[bool]:
        """Store the pages of keys."""
        host = self.pool()
        pages = list(range(len(keys)))
        fill_pages(host, pages, keys, self.geometry.page_nbytes)
        return [bool(verdict) for verdict in store.put(keys, host, pages, **options)]

    def get(self, store: Store, keys: Sequence[bytes]) -> list[bool]:
        """Load the pages of keys; a page that is said to be loaded holds the bytes of its key."""
        host = self.pool()
        pages = list(range(len(keys)))
        blank_pages(host, pages, self.geometry.page_nbytes)
        verdicts = [bool(verdict) for verdict in store.get(keys, host, pages)]
        equal = pages_equal(host, pages, keys, self.geometry.page_nbytes)
        assert all(same for same, verdict in zip(equal, verdicts, strict=True) if verdict), "wrong bytes"
        return verdicts

    def test_round_trip(self, store: Store) -> None:
        keys = keys_of("round", 20)
        assert all(self.put(store, keys))
        assert all(self.get(store, keys))
        assert store.match_prefix(keys) == 20

    def test_pages_of_any_numbers_in_any_order(self, store: Store) -> None:
        keys = keys_of("order", 12)
        host, nbytes = self.pool(), self.geometry.page_nbytes
        order = np.random.default_rng(1).permutation(_PAGES)
        fill_pages(host, order[:12].tolist(), keys, nbytes)
        assert all(store.put(keys, host, order[:12].astype(np.int32)))
        blank_pages(host, range(_PAGES), nbytes)
        targets = order[20:32]
        assert all(store.get(keys[::-1], host, targets))
        assert all(pages_equal(host, targets.tolist(), keys[::-1], nbytes))
        blank = b"\xa5" * nbytes
        assert all(read_page(host, page) == blank for page in set(range(_PAGES)) - {*targets.tolist()})

    def test_absent_is_a_miss_and_zero_is_a_hit(self, store: Store) -> None:
        host, nbytes = self.pool(), self.geometry.page_nbytes
        zero, absent = keys_of("zero", 2)
        assert all(store.put([zero], host, [0]))
        blank_pages(host, [1, 2], nbytes)
        verdicts = store.get([zero, absent], host, [1, 2])
        assert [bool(verdict) for verdict in verdicts] == [True, False]
        assert read_page(host, 1) == bytes(nbytes)

    def test_a_prefix_ends_at_the_first_hole(self, store: Store) -> None:
        keys = keys_of("hole", 10)
        self.put(store, keys[:4] + keys[5:])
        assert store.match_prefix(keys) == 4
        assert store.match_prefix(keys[4:]) == 0
        assert store.match_prefix(keys[5:]) == 5
        assert self.get(store, keys) == [True] * 4 + [False] + [True] * 5

    def test_nothing_is_nothing(self, store: Store) -> None:
        host = self.pool()
        assert list(store.put([], host, [])) == []
        assert list(store.get([], host, [])) == []
        assert list(store.delete([])) == []
        assert store.match_prefix([]) == 0

    def test_a_key_stored_twice_keeps_its_page(self, store: Store) -> None:
        keys = keys_of("twice", 6)
        assert all(self.put(store, keys))
        assert all(self.put(store, keys))
        assert all(self.put(store, keys + keys))
        assert all(self.get(store, keys))

    def test_one_key_twice_in_one_batch(self, store: Store) -> None:
        keys = keys_of("batch", 4)
        assert all(self.put(store, [keys[0], keys[1], keys[0], keys[2], keys[1]]))
        assert self.get(store, [keys[0], keys[0], keys[1], keys[2], keys[3]]) == [True] * 4 + [False]

    def test_keys_of_every_length(self, store: Store) -> None:
        keys = [b"\0", b"\0\0", b"a", b"a\0", b"ab" * 16, b"ab" * 16 + b"c", bytes(32), bytes(31), b"x" * 500]
        assert all(self.put(store, keys))
        assert all(self.get(store, keys))
        assert store.match_prefix(keys) == len(keys)
        assert not any(self.get(store, [b"a\0\0", b"\0\0\0", b"x" * 499]))

    def test_hex_text_names_the_same_page(self, store: Store) -> None:
        keys = keys_of("hex", 3)
        self.put(store, keys)
        names = [key.hex() for key in keys]
        assert store.match_prefix(names) == 3
        assert all(store.get(names, self.pool(), [0, 1, 2]))
        assert all(store.delete([names[2].upper()]))
        assert store.match_prefix(keys) == 2

    def test_delete(self, store: Store) -> None:
        keys = keys_of("delete", 8)
        self.put(store, keys)
        assert [bool(v) for v in store.delete([keys[3], b"never", keys[7], keys[3]])] == [
            True,
            False,
            True,
            False,
        ]
        assert self.get(store, keys) == [True] * 3 + [False] + [True] * 3 + [False]
        assert all(self.put(store, keys))
        assert all(self.get(store, keys))

    def test_clear(self, store: Store) -> None:
        keys = keys_of("clear", 8)
        self.put(store, keys)
        assert store.clear() == 8
        assert store.clear() == 0
        assert not any(self.get(store, keys))
        assert store.match_prefix(keys) == 0
        assert all(self.put(store, keys))
        assert all(self.get(store, keys))

    def test_parents_are_taken(self, store: Store) -> None:
        keys = keys_of("chain", 8)
        assert all(self.put(store, keys, parents=[None, *keys[:-1]]))
        assert store.match_prefix(keys) == 8

    def test_stats_count_verdicts(self, store: Store) -> None:
        keys = keys_of("stats", 5)
        self.put(store, keys)
        self.put(store, keys[:2])
        self.get(store, [*keys, b"absent"])
        stats = store.stats()
        assert stats["pages"] == 5
        assert sum(stats["put"].values()) == 7
        assert sum(stats["get"].values()) == 6

    @pytest.mark.parametrize("keys", [[1], [None], [b""], [""], ["xyz"], ["abc"], [["00"]]], ids=repr)
    def test_a_wrong_key_is_refused_before_anything_happens(self, store: Store, keys: list[object]) -> None:
        good = keys_of("good", 1)
        host = self.pool()
        for verb in (store.put, store.get):
            with pytest.raises(InvalidArgumentError):
                verb([*good, *keys], host, [0, 1])
        with pytest.raises(InvalidArgumentError):
            store.delete([*good, *keys])
        assert store.match_prefix(good) == 0

    @pytest.mark.parametrize(
        "pages", [[0], [0, 1, 2], [0, -1], [0, _PAGES], [0.0, 1.0], [[0, 1]], None, ["0", "1"]], ids=repr
    )
    def test_wrong_page_numbers_are_refused_before_anything_happens(
        self, store: Store, pages: object
    ) -> None:
        keys = keys_of("pages", 2)
        host = self.pool()
        with pytest.raises(InvalidArgumentError):
            store.put(keys, host, pages)
        assert store.match_prefix(keys) == 0
        self.put(store, keys)
        blank_pages(host, range(_PAGES), self.geometry.page_nbytes)
        with pytest.raises(InvalidArgumentError):
            store.get(keys, host, pages)
        blank = b"\xa5" * self.geometry.page_nbytes
        assert all(read_page(host, page) == blank for page in range(_PAGES))

    def test_two_keys_are_not_loaded_into_one_page(self, store: Store) -> None:
        keys = keys_of("same", 2)
        self.put(store, keys)
        with pytest.raises(InvalidArgumentError):
            store.get(keys, self.pool(), [3, 3])

    def test_a_pool_of_another_geometry_is_refused(self, store: Store) -> None:
        other = ArrayPool(self.geometry.with_layers(self.geometry.num_layers + 1), self.layout, 2)
        with pytest.raises(InvalidArgumentError):
            store.put([b"key"], other, [0])
        with pytest.raises(InvalidArgumentError):
            store.get([b"key"], other, [0])

    def test_threads(self, store: Store) -> None:
        def work(number: int) -> bool:
            keys = keys_of(f"thread{number % 3}", 8)  # several threads store the same pages
            good = True
            for _ in range(4):
                good &= all(self.put(store, keys))
                good &= all(self.get(store, keys))
                good &= store.match_prefix(keys) == 8
            return good

        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(work, number) for number in range(6)]
            assert all(future.result(_TIMEOUT_S) for future in futures)

    def test_pages_outlive_the_store(self, tmp_path: Path) -> None:
        if not self.durable:
            pytest.skip("this store keeps nothing once it is closed")
        keys = keys_of("restart", 12)
        with self.opened(tmp_path / "root") as store:
            assert all(self.put(store, keys))
            assert all(store.delete(keys[8:]))
        with self.opened(tmp_path / "root") as store:
            assert store.match_prefix(keys) == 8
            assert self.get(store, keys) == [True] * 8 + [False] * 4
            assert store.stats()["pages"] == 8

    def test_closed_is_closed(self, tmp_path: Path) -> None:
        store = self.open_store(tmp_path / "root")
        store.close()
        store.close()
        host = self.pool()
        for call in (
            lambda: store.put([b"key"], host, [0]),
            lambda: store.get([b"key"], host, [0]),
            lambda: store.match_prefix([b"key"]),
            lambda: store.delete([b"key"]),
            store.clear,
        ):
            with pytest.raises(ClosedError):
                call()
