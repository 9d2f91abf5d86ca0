"""Tests of the SGLang adapter; those marked `sglang` need the real package (scripts/check-sglang)."""

from __future__ import annotations

import pytest

from hicache_tier.testing.desk_rig import Moody, Rig
from hicache_tier.testing.sglang_cpu import available


def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="sglang is not installed here; scripts/check-sglang runs these")
    for item in items:
        if item.get_closest_marker("sglang") and not available():
            item.add_marker(missing)


@pytest.fixture
def context(tmp_path):
    """Make a server's context with arguments; it ends with the test."""
    from hicache_tier.testing.sglang_cpu import ServerContext

    made = []

    def make(layout="page_first", **arguments):
        defaults = {
            "enable_hierarchical_cache": True,
            "hicache_mem_layout": layout,
            "hicache_io_backend": "kernel",
            "hicache_ratio": 2.0,
            "hicache_size": 0,
            "hicache_write_policy": "write_through",
            "page_size": 16,
            "served_model_name": "org/model",
        }
        context = ServerContext(f"file://{tmp_path}/meet", **defaults | arguments)
        made.append(context)
        return context

    yield make
    for context in reversed(made):
        context.close()


@pytest.fixture
def engine():
    """Storage that does as it is told."""
    engine = Moody()
    yield engine
    engine.free.set()
    engine.end.set()
    engine.close()


@pytest.fixture
def rig(tmp_path, engine):
    """A desk over it, with a pool that is full of bytes."""
    rig = Rig(tmp_path / "root", engine)
    rig.fill()
    yield rig
    engine.free.set()
    engine.delay_s = dict.fromkeys(engine.delay_s, 0.0)
    rig.desk.close()
