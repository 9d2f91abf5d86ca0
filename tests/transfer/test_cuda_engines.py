"""Every engine, every cell, bit by bit, on a device."""

from __future__ import annotations

import pytest
import torch

from hicache_tier.testing.transfer import CopyEngineSuite
from hicache_tier_kernels import engine_named, run_plan
from hicache_tier_kernels.staged import ring_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class OnCuda(CopyEngineSuite):
    device = "cuda"
    pinned = True
    engine = "cuda"

    def run(self, plan):
        found = engine_named(self.engine).supports(plan)
        if not found:
            pytest.skip(found.reason)
        torch.cuda.synchronize()
        run_plan(self.engine, plan)


class TestCuda(OnCuda):
    def test_it_runs_everything(self):
        assert engine_named("cuda").available(torch.device("cuda", 0))


class TestCopyEngine(OnCuda):
    engine = "copy_engine"


class TestCopyEngineShared(OnCuda):
    """Two threads on two streams, however few ranges there are."""

    engine = "copy_engine"

    @pytest.fixture(autouse=True)
    def _all(self, monkeypatch):
        monkeypatch.setattr("hicache_tier_kernels.copy_engine.LEAST_SHARED", 1)


class TestStaged(OnCuda):
    engine = "staged"


class TestStagedInSmallSlots(OnCuda):
    """Many steps, slots that come round again."""

    engine = "staged"

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        ring_of.cache_clear()
        monkeypatch.setattr("hicache_tier_kernels.staged.SLOTS", 2)
        monkeypatch.setattr("hicache_tier_kernels.staged.SLOT_NBYTES", 1 << 20)
        monkeypatch.setattr("hicache_tier_kernels.staged.LEAST_NBYTES", 1)
        yield
        ring_of.cache_clear()
