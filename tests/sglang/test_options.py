"""What an operator may write, and what of it ends up in the identity."""

from __future__ import annotations

import pytest

from hicache_tier.errors import InvalidArgumentError
from hicache_tier.integrations.sglang.facts import kv_cache_dtype, labelled, server_facts
from hicache_tier.integrations.sglang.options import Options
from hicache_tier.integrations.sglang.ranks import Ranks

SGLANG = {"backend_name": "x", "module_path": "y", "class_name": "z", "interface_v1": 1}


def test_defaults_and_what_sglang_reads_itself():
    options = Options.parse(SGLANG | {"root": "/kv", "prefetch_threshold": 3, "allocator": "shm"})
    assert options == Options(root="/kv")
    assert (options.deadline_s, options.verify, options.engine) == (3.0, "suspect", "auto")
    assert Options.parse({"roots": ["/a", "/b"]}).root == Options.parse({"root": ["/a", "/b"]}).root


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({}, "neither is given"),
        ({"root": "/a", "roots": ["/b"]}, "both are given"),
        ({"root": ""}, "root must be a path"),
        ({"root": 3}, "root must be a path"),
        ({"roots": "/a"}, "roots a list of paths"),
        ({"root": []}, "root must be a path"),
        ({"root": "/a", "enigne": "posix"}, "Did you mean 'engine'"),
        ({"root": "/a", "capacity": 1}, "Did you mean 'capacity_bytes'"),
        ({"root": "/a", "checksums": "yes"}, "checksums must be true or false, got 'yes'"),
        ({"root": "/a", "capacity_bytes": True}, "capacity_bytes must be bytes"),
        ({"root": "/a", "deadline_s": 0}, "deadline_s must be seconds above 0, at most 4"),
        ({"root": "/a", "deadline_s": "3"}, "deadline_s must be seconds"),
        ({"root": "/a", "deadline_s": True}, "deadline_s must be seconds"),
        ({"root": "/a", "threads": 0}, "threads must be a whole number from 1 to 1024"),
        ({"root": "/a", "metrics_port": 70000}, "metrics_port must be a whole number from 1 to 65535"),
        ({"root": "/a", "model": 7}, "model must be text"),
        ({"root": "/a", "tenant": "\ud800"}, "tenant is not valid Unicode"),
    ],
)
def test_wrong_options_are_told_in_one_line(wrong, said):
    with pytest.raises(InvalidArgumentError, match=said) as error:
        Options.parse(wrong)
    assert "\n" not in str(error.value)


def test_revisions_of_the_model_and_of_its_weights_are_told_apart():
    given_as = [
        {},
        {"model_revision": "a"},
        {"weight_version": "a"},
        {"model_revision": "a", "weight_version": "a"},
    ]
    assert len({Options(root="/a", **one).revision for one in given_as}) == 4


class Config:
    """A storage configuration as SGLang makes it."""

    tp_rank, tp_size, pp_rank, pp_size, attn_cp_rank, attn_cp_size = 1, 2, 0, 1, 0, 1
    is_mla_model, model_name, dcp_size, should_split_heads, is_storage_writer = False, "org/m", 1, False, True


def test_ranks_and_what_cannot_be_stored():
    assert Ranks.of(Config(), None) == Ranks("org/m", (1, 2), (0, 1), (0, 1), replicated=False, writer=True)
    assert Ranks.of(Config(), "other").model == "other"
    for name, value, said in [
        ("dcp_size", 2, "dcp-size"),
        ("should_split_heads", True, "tp_lcm_size"),
        ("model_name", None, "has no name"),
    ]:
        config = Config()
        setattr(config, name, value)
        with pytest.raises(InvalidArgumentError, match=said):
            Ranks.of(config, None)


def test_every_process_of_a_server_has_a_number_of_its_own():
    """Ranks of attention groups are counted within each, and so are those of replicas."""
    numbers, labels = set(), set()
    for dp in range(2):
        for tp in range(3):
            config = Config()
            config.tp_rank, config.tp_size, config.dp_rank = tp, 3, dp
            ranks = Ranks.of(config, None)
            numbers.add(ranks.number)
            labels.add(ranks.label)
    assert numbers == set(range(6))
    assert len(labels) == 6


def test_arguments_that_change_the_kv_are_part_of_the_model():
    plain = {"quantization": None, "revision": None, "weight_version": "default", "kv_cache_dtype": "auto"}
    assert server_facts(plain, one_byte=False, draft=False) == {}
    for changed in ({"quantization": "fp8"}, {"revision": "abc"}, {"weight_version": "2"}):
        assert server_facts(plain | changed, one_byte=False, draft=False) == changed
    draft = plain | {"speculative_draft_model_path": "org/draft"}
    assert server_facts(draft, one_byte=False, draft=False) == {}
    assert server_facts(draft, one_byte=False, draft=True) == {"speculative_draft_model_path": "org/draft"}
    assert server_facts(plain, one_byte=True, draft=False) == {"kv_cache_dtype": "auto"}
    dummy = {"load_format": "dummy"}
    assert server_facts(plain | dummy, one_byte=False, draft=False) == dummy
    assert server_facts(plain | {"load_format": "safetensors"}, one_byte=False, draft=False) == {}
    own = {"speculative_draft_kv_cache_dtype": "fp8_e5m2"}
    assert server_facts(plain | own, one_byte=True, draft=True) == {"kv_cache_dtype": "auto"} | own
    assert kv_cache_dtype(plain | own, draft=True) == "fp8_e5m2"
    assert kv_cache_dtype(plain | own) == kv_cache_dtype(plain, draft=True) == "auto"
    assert labelled("m", {}) == "m"
    assert labelled("m", {"b": 1, "a": [2]}) == 'm #{"a":[2],"b":1}'
