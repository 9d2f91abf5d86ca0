"""What a storage adapter tells Prometheus, and under which names."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import CollectorRegistry

_LOG = logging.getLogger(__name__)
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# name -> (kind, help, labels beside `rank`)
METRICS: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "hicache_tier_pages": ("counter", "Pages read and written, by verdict.", ("pool", "op", "reason")),
    "hicache_tier_bytes": ("counter", "Bytes of pages loaded and stored.", ("pool", "op")),
    "hicache_tier_lookup_pages": ("counter", "Pages that lookups asked for.", ("result",)),
    "hicache_tier_call_seconds": ("histogram", "Seconds that a call took.", ("op",)),
    "hicache_tier_late_calls": ("counter", "Calls that missed their deadline.", ("op",)),
    "hicache_tier_evicted_pages": ("counter", "Pages given up to make room.", ("pool",)),
    "hicache_tier_breaker_open": ("gauge", "1 while storage is not asked, because it hangs.", ("op",)),
    "hicache_tier_calls_in_flight": ("gauge", "Calls that have not returned, hung ones included.", ("op",)),
    "hicache_tier_stored_pages": ("gauge", "Pages that this process's partition holds.", ("pool",)),
    "hicache_tier_stored_bytes": ("gauge", "Bytes of these pages on disk.", ("pool",)),
    "hicache_tier_shared_pages": ("gauge", "Pages that other writers of this rank hold.", ("pool",)),
    "hicache_tier_capacity_bytes": ("gauge", "Cap on the root, for all writers together.", ()),
}
_BY_REGISTRY: WeakKeyDictionary[CollectorRegistry, Instruments] = WeakKeyDictionary()
_LOCK = threading.Lock()


class Instruments:
    """The instruments of one registry. Get one with `of`: a name can be registered only once.

    Counting raises nothing: prometheus-client may keep its values in files, which may fail.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        import prometheus_client

        makers: dict[str, Any] = {
            "counter": prometheus_client.Counter,
            "gauge": prometheus_client.Gauge,
            "histogram": prometheus_client.Histogram,
        }
        options: dict[str, dict[str, Any]] = {
            "counter": {},
            "gauge": {"multiprocess_mode": "livemostrecent"},
            "histogram": {"buckets": _SECONDS},
        }
        self._all = {
            name: makers[kind](name, text, ("rank", *labels), registry=registry, **options[kind])
            for name, (kind, text, labels) in METRICS.items()
        }
        self._failed = False

    @classmethod
    def of(cls, registry: CollectorRegistry | None = None) -> Instruments:
        """Return the instruments of a registry; of the process's own where none is given."""
        from prometheus_client import REGISTRY

        registry = registry or REGISTRY
        with _LOCK:
            found = _BY_REGISTRY.get(registry)
            if found is None:
                found = _BY_REGISTRY[registry] = cls(registry)
            return found

    def add(self, name: str, labels: Iterable[str], amount: float = 1) -> None:
        """Add to a counter."""
        self._tell("inc", name, labels, amount)

    def set(self, name: str, labels: Iterable[str], value: float) -> None:
        """Set a gauge."""
        self._tell("set", name, labels, value)

    def observe(self, name: str, labels: Iterable[str], value: float) -> None:
        """Add an observation to a histogram."""
        self._tell("observe", name, labels, value)

    def _tell(self, verb: str, name: str, labels: Iterable[str], value: float) -> None:
        instrument = self._all[name]
        try:
            getattr(instrument.labels(*labels), verb)(value)
        except Exception:  # noqa: BLE001 - whatever it is, pages matter more
            if not self._failed:
                _LOG.exception("metrics cannot be kept; this is said once")
            self._failed = True
