from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hicache_tier.allocator import PageAllocator, page_tensor
from hicache_tier.errors import DoubleFreeError, InvalidArgumentError

PAGES = 24


class AllocatorMachine(RuleBasedStateMachine):
    """The allocator against a dictionary of page -> owner."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.owned = {}
        self.freed_by = {}

    def longest_free_run(self):
        best = run = 0
        for page in range(PAGES):
            run = 0 if page in self.owned else run + 1
            best = max(best, run)
        return best

    @rule(n=st.integers(1, PAGES + 2), owner=st.sampled_from(["a", "b", None]))
    def alloc(self, n, owner):
        longest = self.longest_free_run()
        pages = self.allocator.alloc(n, owner)
        if n > PAGES - len(self.owned):
            assert pages is None
            return
        assert pages.dtype == torch.int64
        taken = pages.tolist()
        assert len(set(taken)) == n
        assert taken == sorted(taken)
        assert not set(taken) & set(self.owned)
        if longest >= n:
            assert taken == list(range(taken[0], taken[0] + n))
        self.owned |= dict.fromkeys(taken, owner or "an unnamed owner")

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), owner=st.sampled_from(["x", "y"]))
    def free(self, data, owner):
        pages = data.draw(st.lists(st.sampled_from(sorted(self.owned)), unique=True, min_size=1))
        self.allocator.free(data.draw(st.sampled_from([pages, torch.tensor(pages)])), owner)
        for page in pages:
            del self.owned[page]
            self.freed_by[page] = owner

    @precondition(lambda self: len(self.owned) < PAGES)
    @rule(data=st.data())
    def double_free(self, data):
        free = sorted(set(range(PAGES)) - set(self.owned))
        page = data.draw(st.sampled_from(free))
        others = sorted(self.owned)[:2]
        with pytest.raises(DoubleFreeError) as caught:
            self.allocator.free([*others, page], "late")
        assert f"page {page} " in str(caught.value)
        assert "late" in str(caught.value)
        first = self.freed_by.get(page)
        assert (first or "never allocated") in str(caught.value)

    @invariant()
    def books_balance(self):
        assert self.allocator.owned_pages == len(self.owned)
        assert self.allocator.free_pages + self.allocator.owned_pages == PAGES
        free = [page for start, length in self.allocator.runs() for page in range(start, start + length)]
        assert free == sorted(set(range(PAGES)) - set(self.owned))
        starts = {start for start, _ in self.allocator.runs()}
        assert not starts & {start + length for start, length in self.allocator.runs()}
        for page in range(PAGES):
            assert self.allocator.owner(page) == self.owned.get(page)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_double_free_names_both_owners():
    allocator = PageAllocator(4)
    pages = allocator.alloc(2, "request 17")
    allocator.free(pages, "eviction")
    with pytest.raises(
        DoubleFreeError, match=r"page 0 was freed already by eviction and is freed now by abort"
    ):
        allocator.free(pages, "abort")
    with pytest.raises(DoubleFreeError, match="page 3 was never allocated"):
        allocator.free([3])


def test_a_page_twice_in_one_call():
    allocator = PageAllocator(4)
    allocator.alloc(2)
    with pytest.raises(DoubleFreeError, match=r"page 1 comes twice .* by a"):
        allocator.free([1, 0, 1], "a")
    assert allocator.owned_pages == 2


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None, "2"])
def test_wrong_counts(n):
    with pytest.raises(InvalidArgumentError, match="n must be"):
        PageAllocator(4).alloc(n)
    with pytest.raises(InvalidArgumentError, match="num_pages must be"):
        PageAllocator(n)


@pytest.mark.parametrize(
    "pages",
    [
        [4],
        [-1],
        [1.0],
        [True],
        ["1"],
        3,
        None,
        "12",
        torch.tensor([1.0]),
        torch.tensor([True]),
        torch.tensor(1),
        torch.tensor([[1]]),
        torch.tensor([1], dtype=torch.int16),
        [1 << 70],
        np.array([1.0]),
        np.array([True]),
        [None],
        [torch.tensor(1.5)],
        torch.tensor([1, 2]).to_sparse(),
        torch.tensor([1, 2], device="meta"),
    ],
)
def test_wrong_pages(pages):
    allocator = PageAllocator(4)
    allocator.alloc(4)
    with pytest.raises(InvalidArgumentError, match="pages must"):
        allocator.free(pages)
    assert allocator.owned_pages == 4


def test_page_tensor_takes_numpy_numbers_and_ranges():
    assert page_tensor("p", [np.int32(3), 1]).tolist() == [3, 1]
    assert page_tensor("p", range(3)).tolist() == [0, 1, 2]
    assert page_tensor("p", ()).dtype == torch.int64
    fixed = np.arange(3)
    fixed.flags.writeable = False
    assert page_tensor("p", fixed).tolist() == [0, 1, 2]
    assert page_tensor("p", np.arange(6, dtype=np.int32)[::2]).tolist() == [0, 2, 4]


def test_nothing_to_free_is_fine():
    PageAllocator(2).free([])


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_pages_that_are_held_are_given_to_nobody(data):
    """Any sequence of alloc, free, hold and let_go: free and owned are all, and what is held is never new."""
    allocator, owned, holds = PageAllocator(12), set(), []
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["alloc", "free", "hold", "let_go"]))
        if what == "alloc":
            pages = allocator.alloc(data.draw(st.integers(1, 4)))
            if pages is not None:
                assert not set(pages.tolist()) & {page for hold in holds for page in hold}
                owned |= set(pages.tolist())
        elif what == "free" and owned:
            some = data.draw(st.sets(st.sampled_from(sorted(owned)), min_size=1))
            allocator.free(sorted(some))
            owned -= some
            with pytest.raises(DoubleFreeError):
                allocator.free(sorted(some))
        elif what == "hold" and owned:
            holds.append(sorted(data.draw(st.sets(st.sampled_from(sorted(owned)), min_size=1))))
            allocator.hold(holds[-1])
        elif what == "let_go" and holds:
            allocator.let_go(holds.pop(data.draw(st.integers(0, len(holds) - 1))))
        held = {page for hold in holds for page in hold} - owned
        assert allocator.held_pages == len(held)
        assert allocator.owned_pages == len(owned) + len(held)
        assert sum(length for _, length in allocator.runs()) == allocator.free_pages
    for hold in holds:
        allocator.let_go(hold)
    if owned:
        allocator.free(sorted(owned))
    assert allocator.runs() == [(0, 12)]


def test_threads():
    allocator = PageAllocator(256)
    failures = []

    def work(name):
        try:
            for n in range(1, 60):
                pages = allocator.alloc(n % 7 + 1, name)
                if pages is not None:
                    assert {allocator.owner(p) for p in pages.tolist()} == {name}
                    allocator.free(pages, name)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"t{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert allocator.runs() == [(0, 256)]
