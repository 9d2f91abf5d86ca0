from __future__ import annotations

import pytest
import torch

from hicache_tier.errors import InvalidArgumentError
from hicache_tier_kernels import CopyPlan, RowMap, Support, byte_plane, run_reference


def plane(pages=4, rows=2, pieces=1, piece=8, gap=0):
    stride = pieces * piece + gap
    return byte_plane(
        torch.zeros(pages * rows * stride, dtype=torch.uint8),
        0,
        (pages, rows, pieces, piece),
        (rows * stride, stride, piece),
    )


def index(*pages, dtype=torch.int64):
    return torch.tensor(pages, dtype=dtype)


def test_the_address_rule():
    view = plane(pieces=3, piece=5, gap=2)
    rows = RowMap((view,))
    for page in range(4):
        for row in range(2):
            for piece in range(3):
                assert rows.address(0, page, row, piece) == view[page, row, piece].data_ptr()
                assert rows.address(0, page, row, piece) == (
                    rows.ptrs[0]
                    + page * rows.page_strides[0]
                    + row * rows.row_strides[0]
                    + piece * rows.piece_strides[0]
                )
    assert (rows.num_pages, rows.rows, rows.page_nbytes) == (4, 2, 30)
    assert (rows.pieces, rows.piece_nbytes, rows.row_nbytes) == ((3,), (5,), (15,))
    assert rows.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("planes", "message"),
    [
        ((), "at least one plane"),
        ((plane(), plane(pages=5)), "plane 1 has"),
        ((plane(), plane(rows=1)), "plane 1 has"),
        ((plane().view(torch.int8),), "plane 0 must be a uint8 view"),
        ((plane()[0],), "plane 0 must be a uint8 view"),
        ((plane()[..., ::2],), "plane 0 must be a uint8 view"),
    ],
)
def test_wrong_maps(planes, message):
    with pytest.raises(InvalidArgumentError, match=message):
        RowMap(planes)


@pytest.mark.parametrize(
    ("source", "destination", "message"),
    [
        ((plane(), plane()), (plane(),), "as many planes, got 2 and 1"),
        ((plane(rows=2),), (plane(rows=3),), "as many rows a page, got 2 and 3"),
        ((plane(), plane(piece=8)), (plane(), plane(piece=9)), "plane 1: rows must have as many bytes"),
        ((plane(pieces=2, piece=6),), (plane(pieces=3, piece=4),), "split into 2 and 3 pieces"),
    ],
)
def test_maps_that_do_not_match(source, destination, message):
    with pytest.raises(InvalidArgumentError, match=message):
        CopyPlan(RowMap(source), RowMap(destination), index(0), index(0))


@pytest.mark.parametrize(
    ("source_pages", "destination_pages", "message"),
    [
        (index(0, 1), index(0), "one to one, got 2 and 1"),
        (index(4), index(0), r"source_pages must be within 0 \.\. 3, got 4"),
        (index(0), index(-1), r"destination_pages must be within 0 \.\. 3, got -1"),
        (index(1 << 40), index(0), "source_pages must be within"),
        (index(0, 1), index(2, 2), "destination_pages must not repeat, got page 2"),
        (index(0, 1, 2), index(2, 1, 2, dtype=torch.int32), "must not repeat"),
        (torch.tensor([0.0]), index(0), "source_pages must be int32 or int64"),
        (index(0), torch.tensor([True]), "destination_pages must be int32 or int64"),
        (torch.tensor(0), index(0), "source_pages must be int32 or int64"),
        (index(0), torch.zeros((1, 1), dtype=torch.int64), "destination_pages must be int32 or int64"),
        (index(0).to("meta"), index(0), "source_pages is on meta, allowed: cpu"),
    ],
)
def test_wrong_indices_touch_nothing(source_pages, destination_pages, message):
    with pytest.raises(InvalidArgumentError, match=message):
        CopyPlan(RowMap((plane(),)), RowMap((plane(),)), source_pages, destination_pages)


def test_pieces_on_either_side():
    whole, split = plane(piece=12), plane(pieces=3, piece=4)
    whole.copy_(torch.arange(whole.numel(), dtype=torch.uint8).view(whole.shape))
    plan = CopyPlan(RowMap((whole,)), RowMap((split,)), index(3, 3), index(0, 2))
    assert plan.nbytes == 48
    run_reference(plan)
    assert split[0].flatten().tolist() == split[2].flatten().tolist() == whole[3].flatten().tolist()
    assert not split[1].any()
    assert not split[3].any()
    back = plane(piece=12)
    run_reference(CopyPlan(RowMap((split,)), RowMap((back,)), index(0), index(1)))
    assert torch.equal(back[1], whole[3])


def test_support_is_true_where_ok():
    assert Support(ok=True)
    assert not Support(ok=False, reason="no")
    with pytest.raises(AttributeError):
        Support(ok=True).ok = False
