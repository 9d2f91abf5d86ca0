from __future__ import annotations

import pytest
import torch

from hicache_tier.testing.transfer import CopyEngineSuite
from hicache_tier_kernels import run_reference


class TestReference(CopyEngineSuite):
    def run(self, plan):
        run_reference(plan)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestReferenceOnCuda(CopyEngineSuite):
    device = "cuda"
    pinned = True

    def run(self, plan):
        run_reference(plan)


class TestReferenceInSmallChunks(CopyEngineSuite):
    """The staging bound must not show in the result."""

    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch):
        monkeypatch.setattr("hicache_tier_kernels.reference.STAGING_NBYTES", 1000)

    def run(self, plan):
        run_reference(plan)
