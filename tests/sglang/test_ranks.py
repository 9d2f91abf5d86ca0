"""Tensor parallel servers as processes of their own, in step over gloo."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
RANK = """
import json, sys
from hicache_tier.testing.sglang_cpu import ServerContext
from hicache_tier.testing.sglang_rig import Caches, extra_config, prompt
root, meet, rank, size = sys.argv[1:]
context = ServerContext(
    f"file://{meet}", int(rank), int(size), enable_hierarchical_cache=True,
    hicache_mem_layout="page_first_direct", hicache_io_backend="direct", hicache_ratio=2.0, hicache_size=0,
    hicache_write_policy="write_through", page_size=16, served_model_name="org/model")
tokens, answer = prompt(1, 7), {}
for kind in ("mha", "mla"):
    caches = Caches(context, "page_first_direct", kind)
    assert caches.attach(extra_config(root))[0]
    caches.compute(tokens)
    for _ in range(2):
        caches.forget()
        assert caches.prefetch(tokens) == len(tokens), "prefetch"
        assert caches.load_back(tokens) == len(tokens), "load back"
        assert caches.right(tokens), "bytes"
    stored = caches.storage.desk.pools["kv"].store.stats()["pages"]
    answer[kind] = {"stored": stored, "writes": caches.storage.tally.reasons["set", "stored"]}
    caches.close()
context.close()
print(json.dumps(answer))
"""


def run_ranks(tmp_path, size):
    command = [sys.executable, "-c", RANK, tmp_path / "root", tmp_path / "meet"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        told = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for process, (_, err) in zip(ranks, told, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


@pytest.mark.parametrize("size", [2, 4])
def test_heads_are_each_ranks_own_and_latents_are_written_by_one(tmp_path, size):
    answers = run_ranks(tmp_path, size)
    assert [answer["mha"]["stored"] for answer in answers] == [7] * size
    assert [answer["mla"]["writes"] for answer in answers] == [7] + [0] * (size - 1)
    assert sorted(answer["mla"]["stored"] for answer in answers) == [0] * (size - 1) + [7]
    ranks = {path.parent.name for path in (tmp_path / "root").glob("*/tp*/kv")}
    assert ranks == {f"tp{rank}of{size}-pp0of1-cp0of1-w0" for rank in range(size)}
