# SPDX-License-Identifier: Apache-2.0
"""What a rank can do, as plain numbers: in files and back, and what is refused."""

import json
import math

import pytest
import ringattn
from ringattn import AttentionTile, RankProfile


def test_profiles_come_back_from_a_file(tmp_path):
    path = tmp_path / "profiles.json"
    profiles = [
        RankProfile(1 / 3, 2.5),
        RankProfile(
            *(4, 5),
            max_tokens=6,
            overhead_ms=0.125,
            memory_gbps=1e3,
            link_gbps=300,
            link_latency_us=15,
            tiles=(
                AttentionTile(192, 80, rows_per_warpgroup=64, relative_cost=9),
                AttentionTile(128, 128, relative_cost=10),
            ),
        ),
    ]
    ringattn.save_profiles(path, profiles)
    assert ringattn.load_profiles(path) == profiles
    content = json.loads(path.read_text())
    path.write_text(json.dumps({"versions": {}, "profiles": content["profiles"]}))
    assert ringattn.load_profiles(str(path)) == profiles


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not", "must be JSON, got"),
        ("[1]", 'must hold an object with a list of objects named "profiles"'),
        ('{"profiles": [1]}', "must hold an object with a list of objects"),
        ('{"profiles": []}', "must hold at least one profile, got none"),
        ('{"profiles": [{"attention_tflops": 1}]}', "rank 0 .* got no 'linear_tflops'"),
        (
            '{"profiles": [{"attention_tflops": 1, "linear_tflops": 2, "colour": 3}]}',
            "got unknown 'colour'",
        ),
        (
            '{"profiles": [{"attention_tflops": -1, "linear_tflops": 2}]}',
            "rank 0 .*attention_tflops must be finite and positive, got -1",
        ),
        (
            '{"profiles": [{"attention_tflops": 1, "linear_tflops": 2, "tiles": [{"rows": 3}]}]}',
            "rank 0 .*tiles must be objects with fields of AttentionTile, got .{'rows': 3}.",
        ),
    ],
)
def test_files_that_are_no_profiles_are_refused(tmp_path, text, message):
    path = tmp_path / "profiles.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        ringattn.load_profiles(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RankProfile(0, 1), "attention_tflops must be finite and positive, got 0"),
        (lambda: RankProfile(1e-310, 1), "attention_tflops must be 1e-30 at least, got 1e-310"),
        (lambda: RankProfile(1, 1, link_gbps=5e-324), "link_gbps must be 1e-30 at least, got 5e-"),
        (lambda: RankProfile(1, -2), "linear_tflops must be finite and positive, got -2"),
        (lambda: RankProfile(math.nan, 1), "attention_tflops must be .* got nan"),
        (lambda: RankProfile(1, math.inf), "linear_tflops must be finite and positive, got inf"),
        (lambda: RankProfile("1", 1), "attention_tflops must be finite and positive, got '1'"),
        (lambda: RankProfile(None, 1), "attention_tflops must be finite and positive, got None"),
        (lambda: RankProfile(1, 1, max_tokens=-1), "max_tokens must not be negative, got -1"),
        (lambda: RankProfile(1, 1, max_tokens=1.5), "max_tokens must be an integer, got 1.5"),
        (
            lambda: RankProfile(1, 1, max_tokens=2**63),
            "max_tokens must fit into 64 bits, got 9223372036854775808",
        ),
        (lambda: RankProfile(10**400, 1), "attention_tflops must be finite and positive, got 1000"),
        (lambda: RankProfile(1, 1, overhead_ms=10**400), "overhead_ms must be finite and not neg"),
        (lambda: RankProfile(1, 1, overhead_ms=-1), "overhead_ms must be finite and not negative"),
        (lambda: RankProfile(1, 1, memory_gbps=0), "memory_gbps must be finite and positive"),
        (lambda: RankProfile(1, 1, link_gbps=math.nan), "link_gbps must be finite and positive"),
        (lambda: RankProfile(1, 1, link_latency_us=-1), "link_latency_us must be finite and not"),
        (
            lambda: RankProfile(1, 1, tiles=128),
            "tiles must be a sequence of AttentionTile, got 128",
        ),
        (lambda: RankProfile(1, 1, tiles=(128,)), "tiles must be a sequence of AttentionTile, got"),
        (
            lambda: RankProfile(1, 1, tiles=[AttentionTile(64, 64), AttentionTile(128, 128)]),
            "tiles must have the fastest kind first, got",
        ),
        (lambda: AttentionTile(0, 128), "rows must lie in 1..65536, got 0"),
        (lambda: AttentionTile(128, 1.5), "keys must be an integer, got 1.5"),
        (lambda: AttentionTile(2**17, 1), "rows must lie in 1..65536, got 131072"),
        (
            lambda: AttentionTile(1, 1, overhead_keys=-1),
            "overhead_keys must lie in 0..65536, got -1",
        ),
        (
            lambda: AttentionTile(128, 128, rows_per_warpgroup=48),
            "rows must be a multiple of rows_per_warpgroup, got 128 and 48",
        ),
    ],
)
def test_profiles_and_tiles_that_are_none_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
