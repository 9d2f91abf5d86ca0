"""What can be asked of a demo, and what its report says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hicache_tier.cli import demo as cli
from hicache_tier.demo import models
from hicache_tier.demo.job import Job, Phase
from hicache_tier.demo.models import ModelSource, SourceKind, find_model
from hicache_tier.demo.options import DemoOptions, builtin_prompt
from hicache_tier.demo.report import DemoReport
from hicache_tier.demo.run import run_demo
from hicache_tier.demo.toy import ByteTokenizer
from hicache_tier.errors import HiCacheTierError, InvalidArgumentError

SOURCE = ModelSource(SourceKind.RANDOM, "2", "random-llama-2-layers", "seed 1", "made up")


def test_builtin_prompt_is_shipped_and_long_enough():
    assert 1200 < len(builtin_prompt().split()) < 1400


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": "page"},
        {"page_tokens": 0},
        {"max_new_tokens": -1},
        {"policy": "write_never"},
        {"prompt": " \n"},
    ],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(InvalidArgumentError):
        DemoOptions(**{"prompt": "text", **wrong})


def test_a_job_travels_as_json():
    job = Job(Phase.WARM, "root", "scratch", SOURCE, DemoOptions(prompt="text", page_tokens=8))
    assert Job.from_dict(json.loads(json.dumps(job.as_dict()))) == job


def test_find_model(tmp_path, monkeypatch):
    assert find_model("random").where == "30"
    assert find_model("random:3").where == "3"
    assert find_model("org/name").kind is SourceKind.HUB
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"one")
    first = find_model(str(gguf))
    assert (first.kind, first.name) == (SourceKind.GGUF, "some")
    gguf.write_bytes(b"two")
    assert find_model(str(gguf)).revision != first.revision, "another file is another model"
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)).kind is SourceKind.FOLDER
    monkeypatch.setattr(models, "_WHEEL", "no_such_wheel")
    fallback = find_model(None)
    assert fallback.kind is SourceKind.RANDOM
    assert "not installed" in fallback.remark


@pytest.mark.parametrize("model", ["random:x", "./absent", "/absent/model", "absent.gguf", "a/b/c"])
def test_a_model_that_is_not_there_is_refused_before_anything_runs(model):
    with pytest.raises(InvalidArgumentError):
        find_model(model)


def test_without_transformers_the_demo_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('No module named transformers')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(HiCacheTierError) as raised:
        run_demo(DemoOptions(prompt="text", model="random:2", device="cpu"))
    assert raised.value.kind == "engine_unavailable"
    assert "pip install 'hicache-tier[demo]', or in a clone pip install '.[demo]'" in str(raised.value)


def test_byte_tokenizer():
    tokenizer = ByteTokenizer(4)
    assert tokenizer.encode("häuser") == [104, 195, 164, 117]
    assert tokenizer.decode([104, 195, 164]) == "hä"
    assert tokenizer.decode([255]) == "\ufffd"


def phase(tokens, seconds, cached=0):
    return {"tokens": tokens, "cached_tokens": cached, "first_token_seconds": seconds, "decode_seconds": 0.1}


def report(warm_tokens, again_tokens=(1, 2)):
    seconds = dict.fromkeys(
        (
            "model_load_seconds",
            "backup_seconds",
            "put_seconds",
            "get_seconds",
            "load_seconds",
            "rebuild_seconds",
        ),
        0.5,
    )
    geometry = {"num_layers": 2, "dtype": "float32"}
    cold = {
        "run": phase([1, 2], 4.0),
        "pages": 9,
        "pages_full": 9,
        "pages_held": 9,
        "bytes": 9 << 20,
        "page_nbytes": 1 << 20,
        "prompt_tokens": 150,
        "text": " and so on",
        "pid": 1,
        "device": "cpu",
        "geometry": geometry,
        "fingerprint": "f",
        **seconds,
    }
    warm = {
        "run": phase(warm_tokens, 0.5, 144),
        "again": phase(list(again_tokens), 4.0),
        "fingerprint": "f",
        "pages_matched": 9,
        "pages_loaded": 9,
        "bytes_loaded": 9 << 20,
        "logits": {"max_difference": 0.25},
        "tier": {"misses": {"pages": {"absent": 9}}},
        "pid": 2,
        **seconds,
    }
    return DemoReport.of(SOURCE, DemoOptions(prompt="text"), None, cold, warm)


@pytest.fixture
def shown(monkeypatch):
    """Run the verb over a report that is given."""
    from click.testing import CliRunner

    from hicache_tier.cli import main
    from hicache_tier.demo import run

    def show(found, *arguments):
        monkeypatch.setattr(run, "run_demo", lambda *_: found)
        return CliRunner().invoke(main, ["demo", *arguments])

    return show


def test_equal_tokens_are_good(shown):
    result = shown(report([1, 2]))
    assert result.exit_code == 0, result.output
    for text in ("tokens equal", "4.000 s", "0.500 s", "8.0 times faster", "made up", "and so on", "9 MiB"):
        assert text in result.stdout
    data = json.loads(shown(report([1, 2]), "--json").stdout)
    wanted = {
        "tokens_equal": True,
        "cold_seconds": 4.0,
        "warm_seconds": 0.5,
        "pages": 9,
        "layout": "page_first",
    }
    assert wanted.items() <= data.items()


@pytest.mark.parametrize("found", [report([1, 3]), report([1, 2], [2, 2])])
def test_tokens_that_differ_are_a_finding(shown, found):
    result = shown(found)
    assert result.exit_code == 1
    assert "tokens DIFFER" in result.stdout
    assert json.loads(shown(found, "--json").stdout)["tokens_equal"] is False


def test_kv_that_differs_is_a_finding(shown):
    found = replace(report([1, 2]), kv_equal=False)
    result = shown(found)
    assert result.exit_code == 1
    assert "KV cache DIFFER" in result.stdout


def test_pages_that_did_not_come_back_are_a_finding(shown):
    found = report([1, 2])
    found = replace(
        found, warm={**found.warm, "pages_loaded": 0, "pages_matched": 0, "run": phase([1, 2], 4.0)}
    )
    result = shown(found)
    assert result.exit_code == 1
    assert "found 0 pages" in result.stdout
    assert "9 pages did NOT come from the store" in result.stdout
    assert "absent" in result.stdout


def test_two_prompts_are_too_many(shown, tmp_path):
    (tmp_path / "p").write_text("text")
    result = shown(report([1, 2]), "--prompt", "x", "--prompt-file", str(tmp_path / "p"))
    assert result.exit_code == 2
    assert cli.command.name == "demo"
