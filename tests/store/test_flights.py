"""Work in parts, one after the other, each begun and asked now and then how it gets on."""

from __future__ import annotations

import time

import pytest

from hicache_tier_storage.flights import PartByPart


def test_each_part_begins_when_the_one_before_has_ended():
    log, gates = [], [False, False]

    def work():
        for number in range(2):
            log.append(number)
            yield lambda number=number: gates[number]
        verdicts[0] = "late"

    verdicts = [""]
    flight = PartByPart(verdicts, work())
    assert (flight.done(), log) == (False, [0])
    gates[1] = True
    assert (flight.done(), log) == (False, [0])
    gates[0] = True
    assert (flight.done(), log) == (True, [0, 1])
    assert flight.result() == ["late"]


def test_work_that_raises_may_still_be_under_way():
    def work():
        yield lambda: True
        verdicts[0] = "access_denied"
        raise RuntimeError("boom")

    verdicts = ["", ""]
    assert PartByPart(verdicts, work()).result() == ["access_denied", "timeout: RuntimeError: boom"]


def test_work_that_raises_before_it_has_begun():
    def work():
        raise RuntimeError("boom")
        yield

    with pytest.raises(RuntimeError, match="boom"):
        PartByPart([""], work())


def test_work_is_told_that_nobody_can_say_how_it_goes():
    def work():
        try:
            yield lambda: 1 / 0
        except ZeroDivisionError as error:
            told.append(error)
            raise

    told = []
    assert PartByPart([""], work()).result() == ["timeout: ZeroDivisionError: division by zero"]
    assert len(told) == 1


def test_work_that_was_interrupted_may_still_be_under_way():
    def work():
        yield lambda: time.monotonic() > 0
        raise KeyboardInterrupt

    flight = PartByPart(["", ""], work())
    with pytest.raises(KeyboardInterrupt):
        flight.result()
    assert flight.result() == ["timeout: interrupted"] * 2


@pytest.mark.parametrize("ends", [False, True])
def test_a_wait_that_was_interrupted(ends):
    """One that may be asked again goes on; where nobody does the work is told, and begins nothing more."""

    def asked():
        asks.append(1)
        if len(asks) == 2:
            raise KeyboardInterrupt
        return len(asks) > 3

    def work():
        try:
            yield asked
        except KeyboardInterrupt:
            log.append("told")
            raise
        log.append("went on")

    asks, log = [], []
    flight = PartByPart([""], work())
    with pytest.raises(KeyboardInterrupt):
        flight.run() if ends else flight.result()
    assert flight.result() == (["timeout: interrupted"] if ends else [""])
    assert log == (["told"] if ends else ["went on"])
