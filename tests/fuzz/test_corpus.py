"""What fuzzing found, valid input, and a few mutants of both; `scripts/fuzz.py` goes on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_tier.testing.fuzz import Target, targets
from hicache_tier.testing.fuzz.campaign import fuzz
from hicache_tier.testing.fuzz.mutation import mutant

CORPUS = Path(__file__).parent / "corpus"
MUTANTS = {"store": 3, "encrypted-store": 3}
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("name", sorted(targets()))
def test_what_was_found_stays_mended(name, tmp_path):
    target = targets()[name]
    found = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    seeds = target.seeds(tmp_path)
    assert seeds
    rng = random.Random(name)
    mutants = [mutant(seeds + found, rng) for _ in range(MUTANTS.get(name, 60))]
    whole = seeds[:2] if name in MUTANTS else seeds
    for data in (*whole, *found, *mutants):
        target.read(data, tmp_path)


def test_every_file_of_the_corpus_belongs_to_a_target():
    assert {path.name for path in CORPUS.iterdir()} <= {*targets()}
    assert all(path.stat().st_size <= 1 << 16 for path in CORPUS.rglob("*") if path.is_file())


def test_a_reader_that_raises_is_found_and_what_it_raised_at_is_kept(tmp_path, monkeypatch):
    def read(data, folder):
        assert folder.is_dir()
        if b"\xff" in data:
            raise KeyError("a bug")

    monkeypatch.setitem(targets(), "buggy", Target("buggy", lambda folder: [b"good"], read))
    monkeypatch.setattr("resource.setrlimit", lambda *_: None)  # of the process that runs the tests
    result = fuzz("buggy", 2, 7, CORPUS, tmp_path)
    assert result["runs"] > 100
    (finding,) = result["findings"]
    assert finding.startswith("KeyError at test_corpus.py:")
    (kept,) = tmp_path.iterdir()
    assert b"\xff" in kept.read_bytes()


def test_the_script_fuzzes_and_tells(checkout, tmp_path):
    options = ["--seconds", "1", "--target", "state", "--engine", "mutation", "--json"]
    command = [sys.executable, checkout / "scripts/fuzz.py", *options, "--findings", tmp_path / "findings"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    (told,) = json.loads(result.stdout)["targets"]
    assert told["findings"] == []
    assert told["runs"] > 100
    result = subprocess.run([*command[:2], "--target", "stat"], capture_output=True, text=True, timeout=100)
    assert result.returncode == 2
    assert "'stat' is none of" in result.stderr
