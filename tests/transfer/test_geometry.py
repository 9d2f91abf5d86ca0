from __future__ import annotations

import pytest
import torch

from hicache_tier.dtypes import DType
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.geometry import KVGeometry

MHA = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 4, "dtype": "bfloat16", "page_tokens": 5}
ALL = [
    KVGeometry.mha(**MHA),
    KVGeometry.mha(**MHA | {"v_head_dim": 2}),
    KVGeometry.mla(num_layers=2, latent_dim=576, dtype="float8_e4m3fn", page_tokens=64),
    KVGeometry.indexer(num_layers=2, bytes_per_token=132, page_tokens=64),
]


def test_sizes():
    assert [g.page_nbytes for g in ALL] == [
        2 * 2 * 3 * 4 * 5 * 2,
        2 * 3 * (4 + 2) * 5 * 2,
        2 * 576 * 64,
        2 * 132 * 64,
    ]
    assert [g.uniform for g in ALL] == [True, False, True, True]
    assert ALL[3].rows == 1
    assert ALL[3].row_nbytes(ALL[3].components[0]) == 132 * 64


@pytest.mark.parametrize("geometry", ALL)
def test_plain_data_round_trip(geometry):
    assert KVGeometry.from_dict(geometry.as_dict()) == geometry
    assert geometry.with_layers(7).with_layers(2) == geometry
    for key in geometry.as_dict():
        data = geometry.as_dict()
        del data[key]
        with pytest.raises(InvalidArgumentError, match="not a KV geometry"):
            KVGeometry.from_dict(data)
    with pytest.raises(InvalidArgumentError, match="not a KV geometry"):
        KVGeometry.from_dict(geometry.as_dict() | {"kind": "mqa"})


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "page_tokens", "v_head_dim"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_wrong_sizes(name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        KVGeometry.mha(**MHA | {name: value})


@pytest.mark.parametrize("dtype", list(DType))
def test_dtypes(dtype):
    assert DType.parse(dtype.label) is DType.parse(dtype.torch) is DType.parse(dtype) is dtype
    assert dtype.torch.itemsize == dtype.itemsize == getattr(torch, dtype.storage).itemsize


@pytest.mark.parametrize("dtype", ["bfloat17", "float64", None, torch.int32])
def test_unknown_dtypes(dtype):
    with pytest.raises(InvalidArgumentError, match=r"is not known.*Allowed: float16"):
        DType.parse(dtype)
