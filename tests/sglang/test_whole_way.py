"""The whole way with SGLang's own tree and controllers: device, host, storage, and back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
CASES = [
    ("mha", "layer_first"),
    ("mha", "page_first"),
    ("mha", "page_first_direct"),
    ("mha", "page_head"),
    ("wide_k", "page_first"),
    ("wide_k", "page_first_direct"),
    ("mla", "layer_first"),
    ("mla", "page_first"),
    ("mla", "page_first_direct"),
]


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("kind, layout", CASES)
def test_from_device_to_storage_and_back(tmp_path, context, kind, layout, copying):
    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    if copying and kind == "wide_k":
        pytest.skip("SGLang has no flat pages for K wider than V")
    caches = Caches(context(layout), layout, kind)
    config = extra_config(tmp_path / "root", interface_v1=0 if copying else 1)
    assert caches.attach(config) == (True, "Attached HiCache storage backend successfully.")
    first, second = prompt(1, 9), prompt(1, 4) + prompt(2, 5)
    caches.compute(first)
    caches.compute(second)
    assert caches.storage.tally.reasons["set", "stored"] >= 14
    for tokens in (first, second):
        caches.forget()
        assert caches.prefetch(tokens) == len(tokens)
        assert caches.load_back(tokens) == len(tokens)
        assert caches.right(tokens)
    caches.forget()
    assert caches.prefetch(prompt(3, 4)) == 0
    assert caches.detach()[0]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


WRITER = """
import sys
from hicache_tier.testing.sglang_cpu import ServerContext
from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt
root, meet, layout, model = sys.argv[1:]
context = ServerContext(
    f"file://{meet}", enable_hierarchical_cache=True, hicache_mem_layout=layout, hicache_io_backend="kernel",
    hicache_ratio=2.0, hicache_size=0, hicache_write_policy="write_through", page_size=16,
    served_model_name="org/model")
caches = Caches(context, layout)
assert caches.attach(extra_config(root, model=model))[0]
caches.compute(prompt(1, 9))
print(dict(caches.storage.tally.reasons))
caches.close()
context.close()
"""


def test_a_second_process_hits_what_the_first_wrote(tmp_path, context):
    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    root = tmp_path / "root"
    run = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            WRITER,
            root,
            tmp_path / "other",
            "page_first_direct",
            "org/m",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    # layer_first and page_first_direct hold a page's bytes in the same order.
    caches = Caches(context("layer_first"), "layer_first")
    assert caches.attach(extra_config(root, model="org/m"))[0]
    tokens = prompt(1, 9)
    assert caches.prefetch(tokens) == len(tokens)
    assert caches.load_back(tokens) == len(tokens)
    assert caches.right(tokens)
    assert caches.detach()[0]
    for other in ({"model": "org/n"}, {"model_revision": "2"}, {"tenant": "t"}, {"weight_version": "7"}):
        caches.forget()
        assert caches.attach(extra_config(root, **{"model": "org/m"} | other))[0]
        assert caches.prefetch(tokens) == 0
        assert caches.detach()[0]


def test_pages_of_another_layout_or_size_are_misses(tmp_path, context):
    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    root, tokens = tmp_path / "root", prompt(1, 6)
    for number, (kind, layout) in enumerate(CASES):
        caches = Caches(context(layout), layout, kind)
        assert caches.attach(extra_config(root))[0]
        same = (kind, layout) in {("mha", "page_first_direct"), ("wide_k", ""), ("mla", "page_first_direct")}
        assert caches.prefetch(tokens) == (len(tokens) if same else 0), (number, kind, layout)
        if same:
            assert caches.load_back(tokens) == len(tokens)
            assert caches.right(tokens)
        caches.forget()
        caches.compute(tokens)
        assert caches.detach()[0]


def test_attach_and_detach_fifty_times(tmp_path, context):
    import threading

    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    caches = Caches(context(), "page_first")
    tokens = prompt(1, 5)
    descriptors = threads = 0
    for turn in range(50):
        assert caches.attach(extra_config(tmp_path / "root"))[0], turn
        if turn == 0:
            caches.compute(tokens)
        else:
            caches.forget()
            assert caches.prefetch(tokens) == len(tokens), turn
            assert caches.load_back(tokens) == len(tokens)
            assert caches.right(tokens), turn
        assert caches.detach()[0], turn
        if turn == 4:
            descriptors, threads = open_files(), threading.active_count()
    assert open_files() <= descriptors + 2
    assert threading.active_count() <= threads + 2
    partitions = {path.parent.name for path in (tmp_path / "root").glob("*/*/kv")}
    assert partitions == {"tp0of1-pp0of1-cp0of1-w0"}


def test_a_wrong_option_refuses_the_attach_with_one_line(tmp_path, context):
    from hicache_tier.testing.sglang_rig import Caches, extra_config

    caches = Caches(context(), "page_first")
    for options, said in [
        ({"capcity_bytes": 1}, "option 'capcity_bytes' is not known. Did you mean 'capacity_bytes'?"),
        ({"engine": "posx"}, "Did you mean 'posix'?"),
        ({"deadline_s": 60}, "deadline_s must be seconds above 0, at most 4, got 60."),
        ({"capacity_bytes": "many"}, "many"),
    ]:
        ok, message = caches.attach(extra_config(tmp_path / "root", **options))
        assert not ok
        assert said in message
        assert "\n" not in message
    assert not (tmp_path / "root").exists()
    assert caches.attach(extra_config(tmp_path / "root"))[0]  # a refusal leaves nothing in the way
    assert caches.detach()[0]


def test_clear_empties_the_store(tmp_path, context):
    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    caches = Caches(context(), "page_first")
    assert caches.attach(extra_config(tmp_path / "root"))[0]
    tokens = prompt(1, 5)
    caches.compute(tokens)
    assert caches.cache.clear_storage_backend()
    caches.forget()
    assert caches.prefetch(tokens) == 0
    caches.compute(tokens)
    caches.forget()
    assert caches.prefetch(tokens) == len(tokens)
    assert caches.detach()[0]


def test_several_drives_make_one_store(tmp_path, context):
    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    roots = [str(tmp_path / name) for name in ("one", "two", "three")]
    caches = Caches(context(), "page_first")
    config = extra_config("", roots=roots)
    del config["root"]
    assert caches.attach(config)[0]
    tokens = prompt(1, 24)
    caches.compute(tokens)
    caches.forget()
    assert caches.prefetch(tokens) == len(tokens)
    assert caches.load_back(tokens) == len(tokens)
    assert caches.right(tokens)
    stats = caches.storage.desk.pools["kv"].store.stats()
    assert sum(root["pages"] for root in stats["roots"]) == 24
    assert all(root["pages"] for root in stats["roots"])
    assert caches.detach()[0]


def test_prefix_keys_chain_pages_over_batches(tmp_path, context):
    """Pages of a chain are evicted from its end, whichever batches they were stored in."""
    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    caches = Caches(context(), "page_first")
    assert caches.attach(extra_config(tmp_path / "root", hicache_storage_pass_prefix_keys=True))[0]
    tokens = prompt(1, 6)
    caches.compute(tokens[: 3 * 16])
    caches.compute(tokens)
    from hicache_tier_storage.inspection import inspect_root

    caches.detach()
    (space,) = inspect_root(tmp_path / "root")["namespaces"]
    (partition,) = space["partitions"]
    assert partition["chains"] == {"roots": 1, "leaves": 1, "longest": 6, "orphans": 0}


def test_one_flag_at_start(tmp_path, context):
    """The flags of the command line, and no call of ours."""
    import json

    from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt

    flags = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra_config(tmp_path / "root")),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    server = context(**flags)
    caches = Caches(server, "page_first")
    tokens = prompt(1, 9)
    caches.compute(tokens)
    caches.forget()
    assert caches.prefetch(tokens) == len(tokens)
    assert caches.load_back(tokens) == len(tokens)
    assert caches.right(tokens)
    caches.close()
    server.close()
    wrong = json.dumps(extra_config(tmp_path / "root", verfy="always"))
    with pytest.raises(ValueError, match=r"Did you mean 'verify'\?"):
        Caches(context(**flags | {"hicache_storage_backend_extra_config": wrong}), "page_first")
