"""Geometries that a trace is replayed with, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_tier.errors import not_known
from hicache_tier.geometry import KVGeometry

from .transfer_cases import GEOMETRIES

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS: dict[str, Callable[[int], KVGeometry]] = {
    "tiny": lambda page: KVGeometry.mha(
        num_layers=4, num_kv_heads=2, head_dim=128, dtype="bfloat16", page_tokens=page
    ),
    **GEOMETRIES,
}
"""Geometry of one rank by model, given tokens a page; a page of 16 tokens of `tiny` has 64 KiB."""


def model_geometry(name: str, page_tokens: int) -> KVGeometry:
    """Return a model's geometry.

    Raises
    ------
    InvalidArgumentError
        For a name that is not in `MODELS`.
    """
    if name not in MODELS:
        raise not_known("model", name, list(MODELS))
    return MODELS[name](page_tokens)
