"""`bench transfer` on a CPU: what it measures, how it checks, what it says."""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from hicache_tier.bench import transfer_sglang
from hicache_tier.bench.errors import BenchError
from hicache_tier.bench.transfer_cases import GEOMETRIES, Direction, Selection, TransferCase, grouped
from hicache_tier.bench.transfer_peers import fragments_of
from hicache_tier.bench.transfer_plot import plot_ratios
from hicache_tier.bench.transfer_rig import Rig
from hicache_tier.bench.transfer_targets import TARGETS, target_cases, target_rows
from hicache_tier.cli import main
from hicache_tier.errors import InvalidArgumentError
from hicache_tier.host_pool import HostPool
from hicache_tier.transfer import backup, load

CPU = torch.device("cpu")
ROWS = {
    "llama-3.1-8b": (2, 2048, 32),
    "llama-70b-tp8": (2, 256, 80),
    "qwen3-30b": (2, 1024, 48),
    "qwen3-30b-tp4": (2, 256, 48),
    "mla-bf16": (1, 1152, 61),
    "mla-fp8": (1, 576, 61),
    "dsa-fp8": (1, 656, 61),
}
TINY = ("--device", "cpu", "--page", 4, "--tokens", 16, "--buffer-mib", 1, "--repeats", 1)


def invoke(*arguments):
    return CliRunner().invoke(main, ["bench", "transfer", *map(str, arguments)])


def case(geometry="mla-fp8", page=4, layout="page_first", direction=Direction.BOTH, tokens=16, **more):
    return TransferCase(geometry, page, layout, "auto", direction, tokens, **more)


def run_moves(rig, moves):
    for move in moves:
        if move.op == "backup":
            backup(rig.device, rig.host, move.device_pages, move.host_pages)
        else:
            load(rig.host, rig.device, move.host_pages, move.device_pages)


def test_rows_of_the_models():
    for name, (parts, row_nbytes, layers) in ROWS.items():
        geometry = GEOMETRIES[name](16)
        assert [geometry.row_nbytes(part) for part in geometry.components] == [row_nbytes] * parts
        assert geometry.num_layers == layers
    assert GEOMETRIES["indexer"](16).page_nbytes == 16 * 132 * 61
    assert set(GEOMETRIES) == {*ROWS, "indexer"}


def test_json_has_what_others_rely_on():
    result = invoke(
        *TINY, "--geometry", "indexer", "--layout", "page_first", "--direction", "both",
        "--direction", "load_layer", "--peer", "sglang", "--peer", "memcpy-loop", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["c"]) == {"h2d", "d2h"}
    assert "no GPU" in found["c_is"]
    assert [row["direction"] for row in found["rows"]] == ["both", "load_layer"]
    for row in found["rows"]:
        assert (row["geometry"], row["page_tokens"], row["layout"]) == ("indexer", 4, "page_first")
        assert (row["io_backend"], row["engine"], row["tokens"]) == ("auto", "reference", 16)
        assert row["verified"] is True
        assert min(row["gb_s"], row["ratio_to_c"], row["submit_us"]) > 0
    assert [note.split(" was")[0] for note in found["notes"]] == ["Peer sglang", "Peer memcpy-loop"]


def test_text_and_what_is_skipped():
    result = invoke(*TINY, "--geometry", "mla-fp8", "--layout", "page_first", "--io-backend", "direct",
                    "--io-backend", "kernel", "--direction", "backup")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "no GPU" in result.stdout
    assert "reference" in result.stdout
    assert "Skipped 1: Direct MLA HiCache backup does not support page_first" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--busy",), "--busy needs a CUDA device"),
        (("--calibrate",), "--calibrate needs a CUDA device"),
        (("--targets",), "--targets needs a CUDA device"),
        (("--device", "cuda:77"), "is not there"),
        (("--device", "xpu"), "cannot be measured"),
        (("--device", "nonsense"), "is not known"),
        (("--targets", "--page", "16"), "--targets has cells of its own"),
        (("--tokens", "many"), "not a count of tokens"),
        (("--page", "7", "--tokens", "16"), "tokens must be a multiple of page_tokens"),
    ],
)
def test_wrong_calls_are_one_line(arguments, text):
    given = arguments if "--device" in arguments else ("--device", "cpu", *arguments)
    result = invoke(*given)
    assert result.exit_code == 2, result.output
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_an_engine_that_does_not_run_is_skipped_with_the_reason():
    result = invoke(
        *TINY, "--geometry", "mla-fp8", "--layout", "page_first", "--engine", "nonsense", "--json"
    )
    found = json.loads(result.stdout)
    assert not found["rows"]
    assert all("nonsense" in row["reason"] for row in found["skipped"])


def test_wrong_bytes_are_a_finding_and_not_timed(monkeypatch):
    monkeypatch.setattr(Rig, "check", lambda *_: False)
    result = invoke(*TINY, "--geometry", "mla-fp8", "--layout", "page_first", "--json")
    assert result.exit_code == 1
    assert all(row["verified"] is False and row["gb_s"] is None for row in json.loads(result.stdout)["rows"])


def test_interrupt_gives_the_pools_back(monkeypatch):
    closed = []
    monkeypatch.setattr(HostPool, "close", lambda self, _=0: closed.append(self))

    turns = iter([True])

    def interrupt(*_):
        for turn in turns:
            return turn
        raise KeyboardInterrupt

    monkeypatch.setattr(Rig, "check", interrupt)
    result = invoke(*TINY, "--geometry", "mla-fp8", "--layout", "page_first", "--json")
    assert result.exit_code == 130
    assert len(closed) == 1
    found = json.loads(result.stdout)
    assert found["interrupted"]
    assert len(found["rows"]) == 1, "what was measured by then is shown"


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("direction", list(Direction))
def test_check_accepts_what_is_right(layout, direction):
    one = case("qwen3-30b-tp4", layout=layout, direction=direction)
    with Rig.for_cases([one], CPU, 1) as rig:
        for moves in rig.moves(one):
            assert rig.check(moves, lambda: run_moves(rig, moves))  # noqa: B023 - called at once


@pytest.mark.parametrize("direction", [Direction.BACKUP, Direction.LOAD])
def test_check_finds_what_is_wrong(direction):
    one = case(direction=direction)
    with Rig.for_cases([one], CPU, 1) as rig:
        ((move, *_), *_) = rig.moves(one)
        assert not rig.check([move], lambda: None), "nothing moved"

        def too_much():
            run_moves(rig, [move])
            rig.host.component_tensor("latent").view(torch.uint8).view(-1)[5] ^= 1

        assert not rig.check([move], too_much), "a byte that was not asked for"

        def source():
            run_moves(rig, [move])
            rig.device.layers[60].view(torch.uint8).view(-1)[-1] ^= 1

        assert not rig.check([move], source), "a byte of the other side"


def test_pages_of_different_sets_do_not_overlap():
    one = case(tokens=32)
    with Rig.for_cases([one], CPU, 16 << 20) as rig:
        sets = rig.moves(one)
        assert len(sets) >= 6
        for side in ("device_pages", "host_pages"):
            pages = torch.cat([getattr(move, side) for moves in sets for move in moves])
            assert len(pages.unique()) == len(pages) < rig.host.num_pages


@pytest.mark.parametrize("order", ["random", "runs"])
@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.BOTH])
def test_the_same_pages_are_not_asked_for_twice_in_a_row(order, direction):
    one = case(tokens=256, order=order, direction=direction)
    with Rig.for_cases([one], CPU, 1) as rig:
        sets = rig.moves(one)
        assert len(sets) >= 6
        run = 8 if order == "runs" else 1
        for moves, others in itertools.pairwise(sets):
            for move, other in zip(moves, others, strict=True):
                assert not torch.equal(move.host_pages, other.host_pages)
                assert not torch.equal(move.device_pages, other.device_pages)
        for moves in sets:
            for side in ("device_pages", "host_pages"):
                pages = torch.cat([getattr(move, side) for move in moves])
                assert len(pages.unique()) == len(pages), "no page is written by two moves"
                runs = pages.view(-1, run)
                assert torch.equal(runs - runs[:, :1], torch.arange(run).expand_as(runs))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("order", ["random", "runs"])
def test_fragments_are_the_whole_move(layout, order):
    one = case("qwen3-30b-tp4", layout=layout, tokens=64, order=order)
    with Rig.for_cases([one], CPU, 1) as rig:
        (moves, *_) = rig.moves(one)
        found = [fragments_of(rig, move) for move in moves]
        for _, _, nbytes in found:
            assert nbytes.sum() == one.pages * rig.geometry.page_nbytes
            assert nbytes.min() >= rig.fragment_nbytes()
            longest = 8 if (layout, order) == ("layer_first", "runs") else 1
            assert nbytes.max() >= longest * rig.fragment_nbytes()

        def copy():
            for fragments in found:
                for source, destination, nbytes in zip(*(part.tolist() for part in fragments), strict=True):
                    ctypes.memmove(destination, source, nbytes)

        assert rig.check(moves, copy)


def test_fragments_end_at_seams():
    one = case("mla-fp8", 4, "layer_first", Direction.BACKUP, 64, order="runs")
    with Rig.for_cases([one], CPU, 1) as rig:
        rig.host.close()
        rig.host = HostPool(rig.geometry, "layer_first", rig.host.num_pages, chunk_nbytes=36864)
        seams = [rig.host.address + offset for offset, _ in rig.host.chunks][1:]
        assert seams
        _, destinations, nbytes = fragments_of(rig, rig.moves(one)[0][0])
        for start, end in zip(destinations, destinations + nbytes, strict=True):
            assert not any(start < seam < end for seam in seams)


class FakeKernels:
    """SGLang's calls by torch, to test which rows they are given."""

    def transfer_hicache_one_layer_mla(self, *, cache_dst, cache_src, indices_dst, indices_src, page_size):
        assert page_size == 4
        cache_dst[indices_dst] = cache_src[indices_src]

    def transfer_hicache_one_layer(self, *, k_cache_dst, k_cache_src, v_cache_dst, v_cache_src, **indices):
        for dst, src in ((k_cache_dst, k_cache_src), (v_cache_dst, v_cache_src)):
            self.transfer_hicache_one_layer_mla(cache_dst=dst, cache_src=src, **indices)

    def transfer_hicache_all_layer(self, *, k_ptr_dst, v_ptr_dst, k_ptr_src, v_ptr_src, **common):
        steps = {
            "cache_src_stride_bytes": common.pop("kv_cache_src_stride_bytes"),
            "cache_dst_stride_bytes": common.pop("kv_cache_dst_stride_bytes"),
        }
        for dst, src in ((k_ptr_dst, k_ptr_src), (v_ptr_dst, v_ptr_src)):
            self.transfer_hicache_all_layer_mla(ptr_dst=dst, ptr_src=src, **steps, **common)

    def transfer_hicache_all_layer_mla(
        self, *, ptr_dst, ptr_src, cache_src_stride_bytes, cache_dst_stride_bytes, element_size, **common
    ):
        for dst, src in zip(ptr_dst.tolist(), ptr_src.tolist(), strict=True):
            pairs = zip(common["indices_dst"].tolist(), common["indices_src"].tolist(), strict=True)
            for to, of in pairs:
                ctypes.memmove(
                    dst + to * cache_dst_stride_bytes, src + of * cache_src_stride_bytes, element_size
                )

    def transfer_hicache_all_layer_mla_staged_lf_pf(
        self, *, ptr_src, staging, dst, src_indices, dst_indices, page_size
    ):
        assert staging.shape[0] % page_size == 0
        size = dst[0, 0].numel() * dst.element_size()
        for layer, src in enumerate(ptr_src.tolist()):
            for to, of in zip(dst_indices.tolist(), src_indices.tolist(), strict=True):
                ctypes.memmove(dst[to, layer].data_ptr(), src + of * size, size)

    def transfer_hicache_all_layer_staged_lf_pf(
        self, *, k_ptr_src, v_ptr_src, staging_k, staging_v, dst_k, dst_v, **common
    ):
        for src, staging, dst in ((k_ptr_src, staging_k, dst_k), (v_ptr_src, staging_v, dst_v)):
            self.transfer_hicache_all_layer_mla_staged_lf_pf(ptr_src=src, staging=staging, dst=dst, **common)

    def can_use_hicache_jit_kernel(self, *, element_size, page_size):
        return element_size != 576

    def can_use_write_back_jit_kernel(self, *, element_size):
        return True


@pytest.mark.parametrize("geometry", ["qwen3-30b-tp4", "mla-bf16"])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("direction", [Direction.BACKUP, Direction.LOAD_LAYER])
def test_sglang_is_given_the_right_rows(monkeypatch, geometry, layout, direction):
    monkeypatch.setattr(transfer_sglang, "import_module", lambda _: FakeKernels())
    peer = transfer_sglang.SglangKernels()
    one = case(geometry, layout=layout, direction=direction)
    with Rig.for_cases([one], CPU, 1) as rig:
        sets = rig.moves(one)
        assert peer.supports(rig, one)
        submit = peer.prepare(rig, one, sets)
        assert rig.check(sets[0], lambda: submit(0))


def test_sglang_says_what_it_does_not_do(monkeypatch):
    monkeypatch.setattr(transfer_sglang, "import_module", lambda _: FakeKernels())
    peer = transfer_sglang.SglangKernels()
    for one, text in (
        (case(), "both directions"),
        (case("indexer", direction=Direction.LOAD), "no JIT kernel for indexer"),
        (case(direction=Direction.LOAD), "refuses rows of 576 bytes in pages of 4"),
    ):
        with Rig.for_cases([one], CPU, 1) as rig:
            assert text in peer.supports(rig, one).reason


def test_targets_are_cells_of_the_matrix():
    everything = set(Selection.full().cases())
    for target in TARGETS:
        cases = target.cases()
        assert cases
        assert set(cases) <= everything, target.name
    assert len(set(target_cases(busy=False))) == len(target_cases(busy=False))
    # one pool at a time: cases of the same pools are neighbours once grouped
    assert sum(map(len, grouped(target_cases(busy=False)))) == len(target_cases(busy=False))


def test_targets_are_compared():
    def row(one, ratio, **more):
        facts = dict(zip(("geometry", "page_tokens", "layout"), one.pools, strict=True))
        facts |= {"io_backend": one.io_backend, "direction": one.direction.value, "tokens": one.tokens}
        return {**facts, "order": one.order, "ratio_to_c": ratio, "submit_us": 31.0, **more}

    idle = [row(one, 0.97) for one in target_cases(busy=False)]
    busy = [row(one, 0.96, gemm_slowdown_over_bare=0.05) for one in target_cases(busy=True)]
    lines = {(line["target"], line["direction"]): line for line in target_rows(idle, busy)}
    assert lines["busy GPU, direct", "backup"]["met"] is False, "slowed by more than 4 %"
    assert lines["busy GPU, page_first, auto", "backup"]["met"] is True
    assert lines["submitting one layer", "load_layer"]["met"] is False
    assert lines["both directions at once, over 2 C", "both"]["worst"] == 0.97
    assert all(line["met"] is None for line in target_rows([], []))
    peers = [{**one, "peer": "memcpy-loop", "ours_over_peer": 0.9} for one in idle]
    assert target_rows(idle, busy, peers)[-1]["met"] is False


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    result = invoke(*TINY, "--geometry", "mla-fp8", "--layout", "page_first", "--plot", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plot_ratios([], "nothing", tmp_path / "b.png")


def test_plot_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match=r"hicache-tier\[plot\]"):
        plot_ratios([], "nothing", tmp_path / "a.png")
    assert invoke("--device", "cpu", "--plot", tmp_path / "a.png").exit_code == 2


def test_cases_check_themselves():
    for wrong in ({"geometry": "gpt"}, {"order": "sorted"}, {"page": 0}, {"tokens": 15}, {"layout": "flat"}):
        with pytest.raises(InvalidArgumentError):
            case(**wrong)


def test_defaults_are_small():
    assert len(Selection.default(cuda=False).cases()) <= 30
    assert len(Selection.default(cuda=True).cases()) <= 90
    both = Selection.full().but(geometries=("indexer",), pages=(1,)).cases()
    assert {one.layout for one in both} == {"layer_first", "page_first", "page_first_direct"}


def test_busy_leaves_out_both_directions(monkeypatch):
    from hicache_tier.bench import transfer_session

    monkeypatch.setattr(transfer_session, "find_device", lambda _: SimpleNamespace(type="cuda"))
    session = transfer_session.Session(transfer_session.Wish({"directions": tuple(Direction)}, busy=True))
    assert len(session) == len(
        Selection.default(cuda=True).cases()
    )  # both instead of one of four, and left out


def test_a_peer_that_fails_is_a_row(monkeypatch):
    class Failing(FakeKernels):
        def transfer_hicache_one_layer_mla(self, **_):
            raise RuntimeError("no such device")

    from hicache_tier.bench import transfer_session

    monkeypatch.setattr(transfer_sglang, "import_module", lambda _: Failing())
    monkeypatch.setattr(transfer_session, "missing", lambda: None)
    result = invoke(*TINY, "--geometry", "mla-bf16", "--layout", "page_first", "--direction", "load",
                    "--peer", "sglang", "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["peers"]
    assert (row["verified"], row["reason"]) == (None, "RuntimeError: no such device")
    assert "no such device" in invoke(*TINY, "--geometry", "mla-bf16", "--layout", "page_first",
                                      "--direction", "load", "--peer", "sglang").stdout  # fmt: skip


def test_calibration_samples_are_few_and_make_pools():
    from hicache_tier.bench.transfer_calibration import samples

    found = samples()
    assert 10 < len(found) < 40
    assert {sample.geometry.page_nbytes for sample in found if sample.page_tokens == 1} == {
        64 * 256, 64 * 576, 64 * 2048
    }  # fmt: skip
