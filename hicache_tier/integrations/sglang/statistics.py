"""Figures in the class that SGLang's scheduler collects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def storage_metrics(batches: Mapping[str, Sequence[tuple[int, float]]]) -> Any:  # noqa: ANN401
    """Return pages and GB/s of each batch as SGLang's `StorageMetrics`; None where there was none."""
    if not any(batches.values()):
        return None
    from sglang.srt.observability.metrics_collector import StorageMetrics  # heavy, and SGLang has it by now

    return StorageMetrics(
        prefetch_pgs=[pages for pages, _ in batches["get"]],
        backup_pgs=[pages for pages, _ in batches["set"]],
        prefetch_bandwidth=[rate for _, rate in batches["get"]],
        backup_bandwidth=[rate for _, rate in batches["set"]],
    )
