"""xarray by itself, and `open_dataset`, on a store in use."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hicache_tier import open_store
from hicache_tier.errors import InvalidArgumentError, NotAStoreError
from hicache_tier_storage.dataset import open_dataset

xr = pytest.importorskip("xarray")
ml_dtypes = pytest.importorskip("ml_dtypes")


@pytest.fixture
def dataset(live):
    return open_dataset(live.root, pool=live.pool)


def dtype_of(live):
    label = live.geometry.dtype.label
    return np.dtype(getattr(ml_dtypes, label, label))


def test_xarray_opens_the_group_by_itself(live):
    plain = xr.open_zarr(str(live.partition), consolidated=False, chunks=None)
    slots = live.slots(plain["slots"].values)
    for key in live.keys[:4]:
        assert np.ascontiguousarray(plain["pages"][slots[key]].values).tobytes() == live.expected(key)


def test_pages_are_found_by_key_in_their_own_dtype(live, dataset):
    names = ["pages"] if live.geometry.uniform else ["k", "v"]
    assert list(dataset.data_vars) == names
    at = {key: slot for slot, key in enumerate(dataset["key"].values.tolist()) if key}
    for key in live.keys:
        slot = at[key.hex()]
        assert bool(dataset["valid"][slot])
        parts = [dataset[name][slot].values for name in names]
        assert all(part.dtype == dtype_of(live) for part in parts)
        assert b"".join(np.ascontiguousarray(part).tobytes() for part in parts) == live.expected(key)


def test_invalid_slots_have_no_key(dataset):
    valid = dataset["valid"].values
    assert 0 < valid.sum() < len(valid) or valid.all()
    assert ((dataset["key"].values != "") == valid).all()


def test_every_way_of_indexing_agrees_with_numpy(live, dataset):
    slots = dataset["valid"].values.nonzero()[0][:6]
    stable = [slot for slot in slots.tolist() if dataset["key"].values[slot] in {k.hex() for k in live.keys}]
    for name in dataset.data_vars:
        lazy = dataset[name]
        whole = lazy[stable].values.view(f"u{lazy.dtype.itemsize}")

        def same(picked, wanted, lazy=lazy):
            assert picked.values.view(f"u{lazy.dtype.itemsize}").tolist() == wanted.tolist()

        same(lazy[stable[0]], whole[0])
        same(lazy[stable[::-1]], whole[::-1])
        same(lazy[stable, ..., ::-1], whole[..., ::-1])
        same(lazy[stable, 1], whole[:, 1])
        same(lazy[stable, ..., 3], whole[..., 3])
        same(lazy[stable, [1, 0]], whole[:, [1, 0]])
        span = lazy[stable[0] : stable[-1] + 1]
        assert np.ascontiguousarray(span[0].values).tobytes() == whole[0].tobytes()


def test_attributes_tell_the_identity(live, dataset):
    assert dataset.attrs["namespace"] == live.partition.parent.parent.name
    assert dataset.attrs["identity"]["model"] == "org/model"
    assert dataset.attrs["partition"]["page_nbytes"] == live.geometry.page_nbytes


def test_dims_carry_the_names_of_the_axes(live, dataset):
    if live.geometry.uniform:
        assert {"slot", "layer"} < set(dataset["pages"].dims)
    else:
        assert "k_dim" in dataset["k"].dims
        assert "v_dim" in dataset["v"].dims


def test_several_partitions_are_listed(tmp_path, small):
    root = tmp_path / "store"
    with (
        open_store(root, small, "page_first", model="a", capacity_bytes="1 MiB"),
        open_store(root, small, "page_first", model="a", capacity_bytes="1 MiB"),
        open_store(root, small, "page_first", model="b", capacity_bytes="1 MiB") as other,
    ):
        namespace = other.identity.namespace
        with pytest.raises(InvalidArgumentError, match="3 partitions") as caught:
            open_dataset(root)
        assert str(caught.value).count("tp0of1-pp0of1-cp0of1") == 3
        assert f"namespace='{namespace}'" in str(caught.value)
        assert open_dataset(root, namespace=namespace).attrs["identity"]["model"] == "b"
        with pytest.raises(InvalidArgumentError, match="2 partitions"):
            open_dataset(root, writer=0)
        with pytest.raises(InvalidArgumentError, match=r"no partition .* matches .*pool='draft'"):
            open_dataset(root, pool="draft")


def test_no_store(tmp_path):
    with pytest.raises(NotAStoreError):
        open_dataset(tmp_path / "nothing")


def test_missing_extra_is_named(tmp_path):
    code = (
        "import sys; sys.modules['xarray'] = None\n"
        "from hicache_tier.errors import EngineUnavailableError\n"
        "from hicache_tier_storage.dataset import open_dataset\n"
        "try: open_dataset('.')\n"
        "except EngineUnavailableError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        "needs xarray: pip install 'hicache-tier[xarray]', or in a clone pip install '.[xarray]'"
        in ran.stdout
    )
