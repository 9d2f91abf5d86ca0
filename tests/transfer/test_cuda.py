from __future__ import annotations

import warnings

import pytest
import torch

from hicache_tier.device_pool import DevicePool
from hicache_tier.errors import EngineUnavailableError, InvalidArgumentError
from hicache_tier.geometry import KVGeometry
from hicache_tier.host_pool import HostPool
from hicache_tier.memory import HostMemory
from hicache_tier.pinning import CudaRegistrar, chunks_of
from hicache_tier.transfer import backup, load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MLA = KVGeometry.mla(num_layers=3, latent_dim=656, dtype="uint8", page_tokens=4)


def test_pinned_in_chunks_and_given_back():
    with HostPool(MLA, "page_first", 64, chunk_nbytes=64 << 10) as pool:
        assert pool.pinned
        assert pool.component_tensor("latent").is_pinned()
        assert pool.page_views(63)["latent"].is_pinned()
    memory = HostMemory(1 << 20, pinned=True)
    whole = memory.bytes
    assert whole.is_pinned()
    memory.release()
    assert not whole.is_pinned()


def test_a_real_failure_is_rolled_back_and_its_error_cleared():
    class Taken(CudaRegistrar):
        calls = 0

        def register(self, address, nbytes):
            self.calls += 1
            if self.calls == 3:
                address -= nbytes  # registered already: CUDA itself refuses
            super().register(address, nbytes)

    chunks = chunks_of(0, 5 << 20, 1, 1 << 20)
    with pytest.raises(EngineUnavailableError, match=r"chunk 3 of 5 .* CUDA error"):
        HostMemory(5 << 20, True, Taken(), chunks)
    with pytest.warns(RuntimeWarning, match="chunk 3 of 5"):
        memory = HostMemory(5 << 20, "auto", Taken(), chunks)
    assert not memory.bytes.is_pinned()
    # A kernel launch checks the last error: it would report ours if it were still there.
    assert int(torch.ones(8, device="cuda").sum()) == 8


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_no_page_crosses_a_seam(layout):
    # CUDA refuses a copy from one registered range into the next.
    with HostPool(MLA, layout, 5000, chunk_nbytes=1 << 20) as pool:
        assert pool.pinned
        assert len(pool.chunks) > 5
        latent = pool.component_tensor("latent")
        latent.copy_(torch.randint(0, 256, latent.shape, dtype=torch.uint8))
        for page in range(0, 5000, 7):
            (view,) = pool.page_views(page).values()
            for part in view if layout == "layer_first" else [view]:
                assert torch.equal(part.to("cuda", non_blocking=True).cpu(), part)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_indices_on_either_device(where):
    device = DevicePool.empty(MLA, 8, device="cuda")
    for i, tensor in enumerate(device.layers):
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8) + i)
    kept = [tensor.cpu() for tensor in device.layers]
    pages = torch.tensor([7, 0, 3], device=where)
    with HostPool(MLA, "page_first_direct", 8) as host:
        backup(device, host, pages, pages.flip(0)).wait(10)
        for i, tensor in enumerate(kept):
            for ours, theirs in ((7, 3), (0, 0), (3, 7)):
                assert torch.equal(host.page_views(theirs)["latent"][i], tensor[4 * ours : 4 * ours + 4])
        for tensor in device.layers:
            tensor.zero_()
        load(host, device, pages.flip(0), pages).wait(10)
        for i, tensor in enumerate(device.layers):
            assert torch.equal(tensor.cpu()[28:32], kept[i][28:32])
            assert torch.equal(tensor.cpu()[12:16], kept[i][12:16])
            assert not tensor[4:12].any()


def test_layers_on_two_devices_are_refused():
    layers = [torch.zeros(8, 656, dtype=torch.uint8, device=d) for d in ("cuda", "cpu", "cuda")]
    with pytest.raises(InvalidArgumentError, match="layer 1 latent is on cpu; expected cuda:0, as layer 0"):
        DevicePool(MLA, layers)


def test_nothing_is_warned_about_where_pinning_works():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostPool(MLA, "page_first", 8).close()
