"""zarr-python, with its own codecs and with those of zarrs, on a store in use."""

from __future__ import annotations

import numpy as np
import pytest
import zarr

PIPELINES = {
    "zarr": "zarr.core.codec_pipeline.BatchedCodecPipeline",
    "zarrs": "zarrs.ZarrsCodecPipeline",
}


@pytest.fixture(params=PIPELINES)
def pipeline(request):
    pytest.importorskip(request.param)
    with zarr.config.set({"codec_pipeline.path": PIPELINES[request.param]}):
        yield request.param


def test_partition_opens_as_a_group(live):
    group = zarr.open_group(str(live.partition), mode="r")
    assert set(dict(group.members())) == {"pages", "slots", "state"}
    attributes = group.attrs["hicache_tier"]
    assert attributes["format"] == "hct"
    assert attributes["logical_dtype"] == live.geometry.dtype.label


def test_namespace_walks_down_to_every_array(live):
    space = live.partition.parent.parent
    group = zarr.open_group(str(space), mode="r")
    inside = str(live.partition.relative_to(space))
    names = {name for name, _ in group.members(max_depth=None)}
    assert names == {
        live.partition.parent.name,
        inside,
        f"{inside}/pages",
        f"{inside}/slots",
        f"{inside}/state",
    }
    assert group.attrs["hicache_tier"]["model"] == "org/model"
    assert (
        group[inside]["pages"].shape[1:] == zarr.open_array(str(live.partition / "pages"), mode="r").shape[1:]
    )


def test_every_page_reads_as_it_was_put(live, pipeline):
    group = zarr.open_group(str(live.partition), mode="r")
    pages, table = group["pages"], group["slots"][:]
    assert type(pages.async_array.codec_pipeline).__name__ == PIPELINES[pipeline].rpartition(".")[2]
    assert pages.metadata.dimension_names[0] == "slot"
    for key, slot in live.slots(table).items():
        page = pages[slot]
        assert page.dtype == pages.dtype
        assert page.tobytes() == live.expected(key)


def test_a_range_of_slots_reads_in_one_call(live, pipeline):
    group = zarr.open_group(str(live.partition), mode="r")
    slots = live.slots(group["slots"][:])
    first, last = min(slots.values()), max(slots.values())
    batch = group["pages"][first : last + 1]
    for key, slot in slots.items():
        assert batch[slot - first].tobytes() == live.expected(key)


def test_state_and_slots_are_plain_bytes(live, pipeline):
    group = zarr.open_group(str(live.partition), mode="r")
    state, table = group["state"][:], group["slots"][:]
    assert state.dtype == table.dtype == np.uint8
    assert state[:8].tobytes() == b"HCTSTATE"
    assert state.tobytes() == (live.partition / "state" / "c.0").read_bytes()
    assert table.shape == (group["pages"].shape[0], 128)


def test_dimension_names_match_the_layout(live):
    names = zarr.open_array(str(live.partition / "pages"), mode="r").metadata.dimension_names
    order = {
        "page_first": ("token", "layer", "head", "dim"),
        "layer_first": ("layer", "token", "head", "dim"),
        "page_first_direct": ("layer", "token", "head", "dim"),
        "page_head": ("head", "token", "layer", "dim"),
    }[live.layout]
    absent = {"mha": (), "mla": ("head",), "indexer": ("token", "head")}[live.geometry.kind.value]
    wanted = tuple(name for name in order if name not in absent)
    if not live.geometry.uniform:
        wanted = ("byte",)
    elif len(live.geometry.components) == 2:
        wanted = ("kv", *wanted)
    assert names == ("slot", *wanted)


def test_slots_without_a_slab_read_as_zeros(live, pipeline):
    pages = zarr.open_array(str(live.partition / "pages"), mode="r")
    shards = pages.shape[0] // pages.shards[0]
    present = {int(path.name.split(".")[1]) for path in (live.partition / "slots").glob("c.*.0")}
    for shard in sorted(set(range(shards)) - present)[:1]:
        assert not np.any(pages[shard * pages.shards[0]])
