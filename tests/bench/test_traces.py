"""Traces: read as they are or refused with the line, generated like the real ones, measured right."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from hicache_tier.bench.trace_generator import generate
from hicache_tier.bench.trace_statistics import describe, ideal_hit_rate, ideal_hits
from hicache_tier.bench.traces import Request, TraceError, read_trace, write_trace
from hicache_tier.errors import InvalidArgumentError

GOOD = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}


def lines(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def request(*blocks, at=0):
    return Request(at, 512 * len(blocks), 1, blocks)


def test_round_trip(tmp_path):
    requests = generate(50, seed=3)
    write_trace(tmp_path / "t", requests)
    assert read_trace(tmp_path / "t") == requests
    assert read_trace(tmp_path / "t", 7) == requests[:7]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "no JSON"),
        ("[1]", "not an object"),
        (GOOD | {"hash_ids": []}, "at least one block"),
        (GOOD | {"hash_ids": [0, "1"]}, "whole numbers"),
        (GOOD | {"hash_ids": [0, True]}, "whole numbers"),
        (GOOD | {"hash_ids": [0]}, "600 tokens need 2 hash_ids, got 1"),
        (GOOD | {"hash_ids": [0, 0]}, "twice"),
        (GOOD | {"hash_ids": [1, 0]}, "block 1 follows None here and 0 before"),
        (GOOD | {"timestamp": 4}, "goes back"),
        (GOOD | {"output_length": -1}, "from 0 to"),
        (GOOD | {"output_length": 10**400}, "from 0 to"),
        (GOOD | {"timestamp": 10**400}, "from 0 to"),
        ({"timestamp": 5}, "hash_ids"),
        (GOOD | {"input_length": 1e3}, "whole numbers"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, fault):
    with pytest.raises(TraceError, match=r"line 3: .*" + fault):
        read_trace(lines(tmp_path / "t", GOOD, "", line))


def test_an_empty_trace(tmp_path):
    with pytest.raises(TraceError, match="no request"):
        read_trace(lines(tmp_path / "t", ""))


def test_ideal_hits_are_leading_blocks_seen_before():
    requests = [request(0, 1, 2), request(0, 1, 3), request(4), request(0, 1, 3, 5), request(0, 1, 2)]
    assert ideal_hits(requests) == [0, 2, 0, 3, 3]
    assert ideal_hit_rate(requests) == pytest.approx(8 / 14)
    facts = describe(requests)
    assert (facts["blocks"], facts["distinct_blocks"], facts["returning"]) == (14, 6, 0.6)


def test_generated_requests_are_a_trace(tmp_path):
    requests = generate(400, seed=1)
    write_trace(tmp_path / "t", requests)
    assert len(read_trace(tmp_path / "t")) == 400  # every rule of the format holds
    assert generate(100, seed=1) == requests[:100]
    assert generate(100, seed=2) != requests[:100]
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(requests))
    with pytest.raises(InvalidArgumentError):
        generate(0)


@pytest.mark.parametrize("count", [1000, 12031])
def test_generated_requests_are_like_the_real_ones(conversation, count):
    real, ours = describe(read_trace(conversation, count)), describe(generate(count, seed=1))
    assert ours["ideal_hit_rate"] == pytest.approx(real["ideal_hit_rate"], abs=0.03)
    assert ours["returning"] == pytest.approx(real["returning"], abs=0.08)
    assert ours["blocks"] == pytest.approx(real["blocks"], rel=0.25)
    assert ours["seconds"] == pytest.approx(real["seconds"], rel=0.15)
    for name in ("input_tokens", "output_tokens"):
        for level, value in real[name].items():
            assert ours[name][level] == pytest.approx(value, rel=0.45), (name, level)
