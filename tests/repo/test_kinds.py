"""The table of fault kinds in the tests' README names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROWS = re.findall(r"^\| (\d+) \|(.*)\|$", (TESTS / "README.md").read_text(), re.MULTILINE)
NAMED = re.compile(r"`([a-z]+/test_\w+\.py)::(\w+)`")


def test_there_is_a_row_a_kind():
    assert [int(number) for number, _ in ROWS] == list(range(1, 31))


def test_each_names_tests_that_are_there():
    for number, row in ROWS:
        what, asserted, tests = row.split(" | ")
        assert what.strip()
        assert len(asserted) > 40, number
        named = NAMED.findall(tests)
        assert named, number
        for path, name in named:
            source = (TESTS / path).read_text()
            assert re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE) or re.search(
                rf"^{name} = ", source, re.MULTILINE
            ), f"kind {number}: {path} has no {name}"


def test_what_needs_a_gpu_says_so():
    for number, row in ROWS:
        for path, _ in NAMED.findall(row):
            needs = "pytest.mark.gpu" in (TESTS / path).read_text().partition("\ndef ")[0]
            assert not needs or "(gpu)" in row, f"kind {number}: {path}"
