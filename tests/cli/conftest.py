from __future__ import annotations

import pytest
from click.testing import CliRunner

from hicache_tier import HostPool, KVGeometry, open_store, page_keys
from hicache_tier.cli import main


@pytest.fixture
def invoke():
    """Run the command line in this process; fails the test where a traceback would be shown."""

    def run(*arguments, **options):
        result = CliRunner().invoke(main, [str(a) for a in arguments], **options)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        return result

    return run


@pytest.fixture
def store(tmp_path):
    """A closed store with twelve pages of one prompt."""
    geometry = KVGeometry.mha(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", page_tokens=4)
    root = tmp_path / "store"
    with HostPool(geometry, "page_first", 12, pinned=False) as host:
        pages = host.alloc(12)
        host.component_tensor("k").normal_()
        host.component_tensor("v").normal_()
        with open_store(root, geometry, "page_first", model="org/model", capacity_bytes="8 MiB") as opened:
            assert all(opened.put(page_keys(range(48), 4), host, pages))
        host.free(pages)
    return root
