from __future__ import annotations

import itertools

import pytest

from hicache_tier.errors import InvalidArgumentError, UnsupportedTransferError
from hicache_tier.geometry import PoolKind
from hicache_tier.layout import Layout
from hicache_tier.paths import (
    Capabilities,
    Offer,
    Path,
    path_rows,
    path_table_markdown,
    select_path,
)
from hicache_tier_kernels import Support

# Typed out, not derived: (io_backend, sharded) -> what layer_first, page_first, page_first_direct and
# page_head (MHA only) say.
TABLE = {
    ("kernel", False): (True, True, True, True),
    ("kernel", True): (True, True, True, False),
    ("direct", False): (True, False, True, False),
    ("direct", True): (True, False, False, False),
}
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
POOLS = ("mha", "mla", "indexer")
CELLS = [
    (pool, layout, backend, sharded, op, row[i] and (layout != "page_head" or pool == "mha"))
    for (backend, sharded), row in TABLE.items()
    for i, layout in enumerate(LAYOUTS)
    for pool in POOLS
    for op in ("backup", "load")
]


def refuse(*args, **kwargs):
    with pytest.raises(UnsupportedTransferError) as caught:
        select_path(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize(("pool", "layout", "backend", "sharded", "op", "ok"), CELLS)
def test_every_cell(pool, layout, backend, sharded, op, ok):
    if ok:
        path = select_path(pool, layout, backend, sharded=sharded, op=op)
        assert (path.pool, path.layout, path.io_backend) == (PoolKind(pool), Layout(layout), backend)
        assert (path.sharded, path.op, path.engine, path.per_layer) == (sharded, op, "reference", sharded)
        assert path.reason
        assert path is select_path(PoolKind(pool), Layout(layout), backend, sharded=sharded, op=op)
        return
    error = refuse(pool, layout, backend, sharded=sharded, op=op)
    assert isinstance(error, ValueError)
    assert (error.layout, error.io_backend, error.sharded) == (layout, backend, sharded)
    assert error.kind == "unsupported_transfer"
    assert layout in str(error)
    for text in error.alternatives:
        assert text in str(error)
    if backend == "direct" and sharded:
        what = "DSA indexer" if pool == "indexer" else "HiCache"
        assert f"Layer-sharded direct {what} {op} only supports layer_first layout, got {layout}" in str(
            error
        )


def test_the_messages_that_handlers_match_on():
    for pool in ("mha", "mla"):
        error = refuse(pool, "page_first", "direct", sharded=True, op="backup")
        wanted = "Layer-sharded direct HiCache backup only supports layer_first layout, got page_first"
        assert wanted in str(error)
    error = refuse("indexer", "page_first_direct", "direct", sharded=True, op="backup")
    wanted = "Layer-sharded direct DSA indexer backup only supports layer_first layout, got page_first_direct"
    assert wanted in str(error)
    error = refuse("mla", "layer_first", "vanilla", sharded=True, op="backup")
    assert "Layer-sharded HiCache backup does not support IO backend: vanilla" in str(error)


@pytest.mark.parametrize(
    ("backend", "near"),
    [
        ("kernel_ascend", "kernel"),
        ("vanilla", None),
        (None, None),
        ("kernal", "kernel"),
        ("Direct", "direct"),
        (7, None),
        (b"kernel", None),
        (["kernel"], None),
        ("", None),
        (True, None),
    ],
)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("op", ["backup", "load"])
def test_unknown_backends(backend, near, sharded, op):
    error = refuse("mha", "page_first", backend, sharded=sharded, op=op)
    title = "Layer-sharded HiCache" if sharded else "HiCache"
    assert f"{title} {op} does not support IO backend: {backend}" in str(error)
    assert "Allowed: auto, kernel, direct" in str(error)
    assert (f"Did you mean {near!r}?" in str(error)) == (near is not None)
    assert error.io_backend == str(backend)
    assert error.alternatives[0] == "io_backend='kernel' with layout='page_first'"


@pytest.mark.parametrize(
    "arguments",
    [
        ("mqa", "page_first", "auto"),
        (None, "page_first", "auto"),
        ("mha", "page_last", "auto"),
        ("mha", None, "auto"),
    ],
)
def test_unknown_pool_or_layout(arguments):
    with pytest.raises(InvalidArgumentError, match=r"is not known.*Allowed"):
        select_path(*arguments, sharded=False, op="backup")


def test_unknown_op_and_sharded():
    with pytest.raises(InvalidArgumentError, match=r"Did you mean 'backup'.*Allowed: backup, load"):
        select_path("mha", "page_first", "auto", sharded=False, op="backups")
    with pytest.raises(InvalidArgumentError, match="sharded"):
        select_path("mha", "page_first", "auto", sharded=1, op="backup")


def no(reason="no CUDA device"):
    return (Offer("nvrtc", Support(ok=False, reason=reason)),)


def yes(name):
    return (Offer(name, Support(ok=True)),)


@pytest.mark.parametrize(("pool", "name"), [("mla", "MLA"), ("mha", "MHA"), ("indexer", "DSA indexer")])
@pytest.mark.parametrize("op", ["backup", "load"])
def test_no_engine_for_the_one_layer_kernel(pool, name, op):
    able = Capabilities(kernel=yes("triton"), one_layer_kernel=no(), direct=yes("copies"))
    error = refuse(pool, "page_first", "kernel", sharded=True, op=op, capabilities=able)
    wanted = f"Layer-sharded {name} HiCache {op} with page_first layout requires the JIT one-layer kernel"
    assert wanted in str(error)
    assert "nvrtc: no CUDA device" in str(error)
    # Only what these capabilities can run is offered.
    assert set(error.alternatives) == {
        "io_backend='kernel' with layout='page_first_direct'",
        "io_backend='direct' with layout='layer_first'",
    }
    assert (
        select_path(pool, "page_first", "kernel", sharded=False, op=op, capabilities=able).engine == "triton"
    )


def test_no_engine_at_all_offers_nothing():
    able = Capabilities(kernel=no("no libcuda"), one_layer_kernel=(), direct=no("no libcuda"))
    error = refuse("mha", "layer_first", "auto", sharded=False, op="backup", capabilities=able)
    assert error.alternatives == ()
    assert "no libcuda" in str(error)
    error = refuse("mha", "layer_first", "kernel", sharded=True, op="backup", capabilities=able)
    assert "no engine is installed" in str(error)


def test_auto_chooses_and_says_why():
    path = select_path("mha", "page_first", "auto", sharded=False, op="load")
    assert path.io_backend == "kernel"
    assert "auto chose kernel" in path.reason
    able = Capabilities(kernel=no("driver too old"), one_layer_kernel=no(), direct=yes("copies"))
    path = select_path("mha", "layer_first", "auto", sharded=False, op="load", capabilities=able)
    assert (path.io_backend, path.engine) == ("direct", "copies")
    assert "driver too old" in path.reason
    error = refuse("mha", "page_first", "auto", sharded=False, op="load", capabilities=able)
    assert "kernel: " in str(error)
    assert "direct: " in str(error)


def test_the_first_engine_that_can_run_is_picked():
    offers = (*no(), *yes("triton"), *yes("reference"))
    able = Capabilities(kernel=offers, one_layer_kernel=offers, direct=offers)
    assert (
        select_path("mla", "page_first", "kernel", sharded=True, op="load", capabilities=able).engine
        == "triton"
    )


def test_rows_say_what_select_path_does():
    rows = path_rows()
    assert len(rows) == 3 * 4 * 2 * 2 * 2
    for row in rows:
        arguments = (row["pool"], row["layout"], row["io_backend"])
        kwargs = {"sharded": row["sharded"], "op": row["op"]}
        assert list(row) == ["pool", "layout", "io_backend", "sharded", "op", "ok", "engine", "reason"]
        if row["ok"]:
            path = select_path(*arguments, **kwargs)
            assert (row["engine"], row["reason"]) == (path.engine, path.reason)
        else:
            assert row["engine"] is None
            assert str(refuse(*arguments, **kwargs)).startswith(row["reason"])


def test_auto_takes_whatever_a_user_could_ask_for():
    for pool, layout, sharded, op in itertools.product(POOLS, LAYOUTS, (True, False), ("backup", "load")):
        explicit = [
            cell[5] for cell in CELLS if (cell[0], cell[1], cell[3], cell[4]) == (pool, layout, sharded, op)
        ]
        if any(explicit):
            assert isinstance(select_path(pool, layout, "auto", sharded=sharded, op=op), Path)
        else:
            refuse(pool, layout, "auto", sharded=sharded, op=op)


def test_markdown():
    assert path_table_markdown().splitlines() == [
        "| io_backend | layer_first | page_first | page_first_direct | page_head (MHA) |",
        "|---|---|---|---|---|",
        "| kernel | yes | yes | yes | yes |",
        "| kernel, layer-sharded | yes, one-layer kernel | yes, one-layer kernel | yes | no |",
        "| direct | yes | no: fragments of one row | yes | no |",
        "| direct, layer-sharded | yes | no | no | no |",
    ]
