# SPDX-License-Identifier: Apache-2.0
"""The simple splits give what the study they come from published, for any number of ranks."""

import math
import warnings
from pathlib import Path

import pytest
from ringattn import Partition, strategies
from ringattn.strategies import ClampWarning, LatencyRow, MatmulRow, Regression

PERCENTAGES = (90, 80, 70, 60, 50, 40, 30, 20, 10)

# Tokens of the faster of two ranks in the study's results/sweep_results.csv; the other rank runs at
# the percentages above.
PUBLISHED_UNEVEN = {
    4096: (2156, 2276, 2409, 2560, 2731, 2926, 3151, 3413, 3724),
    8192: (4312, 4551, 4819, 5120, 5461, 5851, 6302, 6827, 7447),
    16384: (8623, 9102, 9638, 10240, 10923, 11703, 12603, 13653, 14895),
    32768: (17246, 18204, 19275, 20480, 21845, 23406, 25206, 27307, 29789),
    65536: (34493, 36409, 38551, 40960, 43691, 46811, 50412, 54613, 59578),
}
PUBLISHED_FORMULA = {
    4096: (2057, 2084, 2132, 2204, 2303, 2438, 2619, 2864, 3205),
    8192: (4136, 4212, 4328, 4491, 4710, 5001, 5388, 5909, 6628),
    16384: (8324, 8533, 8831, 9237, 9778, 10497, 11463, 12787, 14674),
    32768: (16800, 17411, 18259, 19410, 20966, 23097, 26099, 30526, 32768),
    65536: (34223, 36320, 39283, 43497, 49667, 59211, 65536, 65536, 65536),
}


@pytest.mark.parametrize("seq_len", PUBLISHED_UNEVEN)
def test_uneven_gives_the_published_tokens(seq_len: int) -> None:
    for percentage, tokens in zip(PERCENTAGES, PUBLISHED_UNEVEN[seq_len], strict=True):
        partition = strategies.uneven(seq_len, [1.0, percentage / 100], layout="contiguous")
        assert partition == Partition.contiguous([tokens, seq_len - tokens])


@pytest.mark.parametrize("seq_len", PUBLISHED_FORMULA)
@pytest.mark.filterwarnings("ignore::ringattn.strategies.ClampWarning")
def test_formula_gives_the_published_tokens(seq_len: int) -> None:
    for percentage, tokens in zip(PERCENTAGES, PUBLISHED_FORMULA[seq_len], strict=True):
        partition = strategies.formula(seq_len, [100, percentage], layout="contiguous")
        assert partition == Partition.contiguous([tokens, seq_len - tokens])


def test_formula_clamps_negative_weights_and_says_so() -> None:
    # By hand, for 65536 tokens at 10 %, L = 4.81648:
    # -662.478 + 365.074 L + 1.95907 - 49.6378 L^2 + 3.37949 L - 0.710625 = -38.10.
    assert strategies.PUBLISHED(65536, 10) == pytest.approx(-38.10, abs=0.005)
    with pytest.warns(ClampWarning, match=r"at 65536 tokens: rank 1 \(-38.1\); .* taken as 0$"):
        assert strategies.formula(65536, [100, 10]).lengths == (65536, 0)
    # Nothing is positive at a million tokens: proportional to the percentages.
    with pytest.warns(ClampWarning, match=r"rank 0 .*, rank 1 .* taken as their percentages$"):
        assert strategies.formula(1 << 20, [100, 50]).lengths == (699051, 349525)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategies.formula(4096, [100, 10])


def test_a_table_of_latencies_weighs_by_their_inverse() -> None:
    rows = [LatencyRow(mps_pct=p, latency_ms=ms) for p, ms in ((100, 20.0), (50, 30.0), (10, 70.0))]
    # Weights 1/20 and 1/30: three to two.
    assert strategies.lut(1000, [100, 50], rows).lengths == (600, 400)
    # Halfway between 50 and 100 the latency is 25; below 10 it stays 70.
    assert strategies.lut(900, [100, 75], rows).lengths == (500, 400)
    assert strategies.lut(900, [100, 5], rows).lengths == (700, 200)


def matmul_rows() -> list[MatmulRow]:
    """TFLOPS at 1024 and at 4096 rows."""
    speeds = {1024: {100: 40.0, 50: 30.0, 10: 10.0}, 4096: {100: 160.0, 50: 80.0, 10: 40.0}}
    return [
        MatmulRow(mps_pct=p, size=size, tflops=tflops)
        for size, by_percentage in speeds.items()
        for p, tflops in by_percentage.items()
    ]


def test_a_table_of_matrix_products_weighs_by_tflops_at_the_nearest_size() -> None:
    rows = matmul_rows()
    assert strategies.lut(700, [100, 50], rows).lengths == (400, 300)
    assert strategies.lut(3000, [100, 50], rows).lengths == (2000, 1000)
    assert strategies.lut(65536, [100, 10], rows).lengths == (52429, 13107)
    # As near to 1024 as to 4096: the smaller.
    assert strategies.lut(2560, [100, 50], rows).lengths == (1463, 1097)
    assert strategies.lut(2561, [100, 50], rows).lengths == (1707, 854)
    assert strategies.lut(2560, [100, 50], rows[::-1]).lengths == (1463, 1097)
    # 30 % lies halfway between 10 and 50: 20 TFLOPS.
    assert strategies.lut(600, [100, 30], rows).lengths == (400, 200)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.filterwarnings("ignore::ringattn.strategies.ClampWarning")
def test_every_strategy_splits_over_any_number_of_ranks(layout: str) -> None:
    percentages = [100, 50, 25, 10, 70]
    for world_size in range(1, 6):
        of_ranks = percentages[:world_size]
        order = list(reversed(range(world_size)))
        for seq_len in (0, 1, 2, 37, 4096):
            for partition in (
                strategies.even(seq_len, world_size, layout=layout, order=order),
                strategies.uneven(seq_len, of_ranks, layout=layout, order=order),
                strategies.lut(seq_len, of_ranks, matmul_rows(), layout=layout, order=order),
                strategies.formula(seq_len, of_ranks, layout=layout, order=order),
            ):
                assert partition.layout == layout and partition.order == tuple(order)
                assert partition.world_size == world_size and partition.seq_len == seq_len
    assert strategies.even(11, 3).lengths == (4, 4, 3)
    assert strategies.uneven(100, [2, 1, 1]).lengths == (50, 25, 25)


def test_rounding_never_leaves_a_rank_below_nothing() -> None:
    # Each of the first three rounds 0.67 up to 1: the last would have to hold -1.
    assert strategies.uneven(2, [1, 1, 1, 1e-6]).lengths == (1, 1, 0, 0)


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    latencies = [LatencyRow(mps_pct=100, latency_ms=1.5), LatencyRow(mps_pct=12.5, latency_ms=9)]
    matmuls = [
        MatmulRow(mps_pct=90, size=64, dtype="float16", bg_streams=2, avg_ms=0.5, tflops=1.25)
    ]
    strategies.write_table(tmp_path / "latencies.csv", latencies)
    strategies.write_table(tmp_path / "matmuls.csv", matmuls)
    header, *_ = (tmp_path / "matmuls.csv").read_text().splitlines()
    assert header == "mps_pct,size,dtype,bg_streams,avg_ms,tflops"
    assert strategies.read_table(tmp_path / "latencies.csv") == latencies
    assert strategies.read_table(tmp_path / "matmuls.csv") == matmuls


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mps_pct,latency\n100,3\n", r"must have the columns .*, got mps_pct,latency \(missing: "),
        ("mps_pct,size,avg_ms\n9,8,7\n", r"\(missing: tflops\)$"),
        ("latency_ms\n3\n", r"\(missing: mps_pct\)$"),
        ("", r"got none \(missing: "),
        ("mps_pct,latency_ms\n", "must have at least one row, got none"),
        ("mps_pct,latency_ms\n100,3\n50,nan\n", "latency_ms in line 3 of .* must be positive, got"),
        ("mps_pct,latency_ms\n100,3\n\n\n50,x\n", "latency_ms in line 5 of .* positive, got x"),
        ("mps_pct,latency_ms\n100,-3\n", "latency_ms in line 2 of .* must be positive, got -3"),
        ("mps_pct,size,tflops\n100,64,0\n", "tflops in line 2 of .* must be positive, got 0"),
        (
            "mps_pct,size,tflops\n100,wide,1\n",
            "size in line 2 of .* positive whole number, got wide",
        ),
        ("mps_pct,size,tflops\n100,0.5,1\n", "size in line 2 of .* whole number, got 0.5"),
        ("mps_pct,latency_ms\n100,1\n50\n", "latency_ms in line 3 of .* positive, got nothing"),
        ("mps_pct,size,tflops\n100,64,\n", "tflops in line 2 of .* must be positive, got nothing"),
    ],
)
def test_a_file_that_is_no_table_says_what_is_wrong(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        strategies.read_table(tmp_path / "table.csv")


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("mps_pct,latency_ms\n100,1\n", encoding="utf-8-sig")
    assert len(strategies.read_table(tmp_path / "table.csv")) == 1


def test_products_beside_other_work_do_not_count() -> None:
    alone = [MatmulRow(mps_pct=p, size=64, tflops=p) for p in (100, 50)]
    beside = [MatmulRow(mps_pct=p, size=64, tflops=25 + p / 20, bg_streams=4) for p in (100, 50)]
    assert strategies.lut(300, [100, 50], alone + beside).lengths == (200, 100)


def test_a_formula_that_is_no_json_is_refused_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "formula.json").write_text("a x + b")
    with pytest.raises(ValueError, match=r"formula\.json must be JSON, got"):
        strategies.Regression.read(tmp_path / "formula.json")


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_speeds_and_percentages_out_of_range_are_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"speed of rank 1 must be finite and positive, got"):
        strategies.uneven(64, [1, wrong])
    with pytest.raises(ValueError, match=r"percentage of rank 1 must lie in \(0, 100\], got"):
        strategies.formula(64, [1, wrong])
    with pytest.raises(ValueError, match=r"percentage of rank 0 must lie in \(0, 100\], got"):
        strategies.lut(64, [wrong, 1], matmul_rows())


def test_arguments_that_make_no_partition_are_refused() -> None:
    with pytest.raises(ValueError, match="table must have at least one row, got none"):
        strategies.lut(64, [100], [])
    with pytest.raises(ValueError, match="seq_len must not be negative, got -1"):
        strategies.uneven(-1, [1])
    with pytest.raises(ValueError, match="lengths must name at least one rank"):
        strategies.uneven(64, [])
    with pytest.raises(ValueError, match="layout must be"):
        strategies.even(64, 2, layout="striped")


def grid(coefficients: Regression) -> list[MatmulRow]:
    """Matrix products whose speeds lie on a polynomial."""
    return [
        MatmulRow(mps_pct=p, size=2**e, tflops=coefficients(2**e, p))
        for e in range(9, 15)
        for p in (20, 40, 60, 80, 100)
    ]


def test_the_fit_finds_the_polynomial_again() -> None:
    rows = grid(strategies.PUBLISHED)
    best = max(row.tflops for row in rows)
    fitted = Regression.fit(rows)
    assert fitted.r_squared == pytest.approx(1, abs=1e-12)
    for found, given in zip(fitted.coefficients, strategies.PUBLISHED.coefficients, strict=True):
        assert found == pytest.approx(100 * given / best, rel=1e-9)


def test_the_fit_says_how_much_it_explains() -> None:
    # Halves of the rows moved up and down by 10 points: 100 of variance that no polynomial has.
    rows = [
        MatmulRow(mps_pct=p, size=2**e, tflops=t)
        for e in range(6, 10)
        for p in (25, 50, 75, 100)
        for t in (p - 10, p + 10)
    ]
    moved = 10**2
    trend = sum((p - 62.5) ** 2 for p in (25, 50, 75, 100)) / 4
    assert Regression.fit(rows).r_squared == pytest.approx(trend / (trend + moved))


def test_the_fit_needs_three_sizes_and_three_percentages() -> None:
    with pytest.raises(ValueError, match="rows must have at least three sizes, got 2"):
        Regression.fit(matmul_rows())
    rows = [MatmulRow(mps_pct=p, size=s, tflops=p) for p in (50, 100) for s in (1, 2, 3)]
    with pytest.raises(ValueError, match="rows must have at least three percentages, got 2"):
        Regression.fit(rows)


def test_a_regression_survives_its_file(tmp_path: Path) -> None:
    strategies.PUBLISHED.write(tmp_path / "regression.json")
    assert Regression.read(tmp_path / "regression.json") == strategies.PUBLISHED
    assert "R^2 = 0.922" in str(strategies.PUBLISHED)
    (tmp_path / "regression.json").write_text('{"coefficients": [1, 2]}')
    with pytest.raises(ValueError, match=r"must have six finite coefficients, got \[1, 2\]"):
        Regression.read(tmp_path / "regression.json")
    for wrong, got in (('"1"', "'1'"), ("true", "True")):
        (tmp_path / "regression.json").write_text(
            f'{{"coefficients": [1, 2, 3, 4, 5, 6], "r_squared": {wrong}}}'
        )
        with pytest.raises(ValueError, match=f"must have an r_squared that is a number, got {got}"):
            Regression.read(tmp_path / "regression.json")
    for wrong in ("true", "1" + 400 * "0"):
        (tmp_path / "regression.json").write_text(f'{{"coefficients": [1, 2, 3, 4, 5, {wrong}]}}')
        with pytest.raises(ValueError, match="must have six finite coefficients, got"):
            Regression.read(tmp_path / "regression.json")
    (tmp_path / "regression.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be JSON, got"):
        Regression.read(tmp_path / "regression.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: strategies.uneven(8, 3), "speeds must be one for each rank, got 3"),
        (lambda: strategies.uneven(8, None), "speeds must be one for each rank, got None"),
        (lambda: strategies.uneven(8, [1, 2], order=1), "order must be integers, got 1"),
        (lambda: strategies.even(8, 2, order=1.5), "order must be integers, got 1.5"),
        (lambda: strategies.formula(8, 100), "percentages must be one for each rank, got 100"),
        (lambda: strategies.formula(8, [100], "no"), "regression must be a Regression, got 'no'"),
        (lambda: strategies.lut(8, [100], 3), "table must be a list of rows, got int"),
        (
            lambda: strategies.matmul_table([100, 50], [1.0]),
            "tflops must be one for each of 2 percentages, got 1",
        ),
    ],
)
def test_arguments_of_other_types_are_refused(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- tables of one's own -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "table must have at least one row, got none"),
        ([LatencyRow(mps_pct=100, latency_ms=0)], "latency_ms in row 0 of the table .* got 0"),
        (
            [LatencyRow(mps_pct=100, latency_ms=1), LatencyRow(mps_pct=-1, latency_ms=1)],
            "mps_pct in row 1 of the table must be finite and positive, got -1",
        ),
        (
            [MatmulRow(mps_pct=100, size=1, tflops=10), MatmulRow(mps_pct=50, size=1, tflops=-3)],
            "tflops in row 1 of the table must be finite and positive, got -3",
        ),
        ([MatmulRow(mps_pct=100, size=1, tflops=math.nan)], "tflops in row 0 .* got nan"),
        ([MatmulRow(mps_pct=100, size=1, tflops=0)], "tflops in row 0 .* positive, got 0"),
        (
            [LatencyRow(mps_pct=100, latency_ms=1), MatmulRow(mps_pct=50, size=1, tflops=3)],
            "all LatencyRows or all MatmulRows, got MatmulRow as row 1",
        ),
        (
            [LatencyRow(mps_pct=50, latency_ms=9), LatencyRow(mps_pct=50, latency_ms=90)],
            r"one value for a percentage .* got 9 and 90 for 50",
        ),
        (
            [
                MatmulRow(mps_pct=p, size=8, dtype=dtype, tflops=t)
                for dtype, t in (("bfloat16", 700), ("float32", 50))
                for p in (50, 100)
            ],
            r"one value for a percentage .* got 700 and 50 for",
        ),
        ([(100, 1)], "all LatencyRows or all MatmulRows, got tuple as row 0"),
    ],
)
def test_a_table_of_ones_own_is_checked(table, message) -> None:
    with pytest.raises(ValueError, match=message):
        strategies.lut(10, [100, 50], table)


def test_rows_that_compare_percentages_are_preferred() -> None:
    def row(percentage: float, size: int, tflops: float, bg_streams: int = 0) -> MatmulRow:
        return MatmulRow(mps_pct=percentage, size=size, tflops=tflops, bg_streams=bg_streams)

    rows = [row(100, 1024, 600), row(50, 1024, 300), row(100, 4096, 700)]
    assert strategies.lut(3000, [100, 50], rows).lengths == (2000, 1000)
    rows = [row(100, 1024, 600), row(100, 1024, 60, 2), row(50, 1024, 30, 2)]
    assert strategies.lut(3000, [100, 50], rows).lengths == (2000, 1000)
    assert strategies.lut(3000, [100, 50], rows[:1]).lengths == (1500, 1500)


def test_a_formula_without_positive_weights_says_so() -> None:
    nothing = Regression((0.0,) * 6, 1.0)
    with pytest.warns(strategies.ClampWarning, match="no positive weights .* their percentages"):
        assert strategies.formula(30, [100, 50], nothing).lengths == (20, 10)


def test_a_table_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_bytes(b"mps_pct,latency_ms\n\xff\xfe,1\n")
    with pytest.raises(ValueError, match=r"table.csv must be a CSV file in UTF-8, got "):
        strategies.read_table(tmp_path / "table.csv")


def test_speeds_may_be_as_large_as_numbers_are() -> None:
    assert strategies.uneven(10, [1e308, 1e308]).lengths == (5, 5)
    assert strategies.uneven(9, [1e308, 0.5e308, 1.5e308]).lengths == (3, 2, 4)
    with pytest.raises(ValueError, match="speed of rank 1 must be finite and positive, got 1"):
        strategies.uneven(10, [1, 10**400])
    with pytest.raises(ValueError, match="speed of rank 0 must be finite and positive, got 'a'"):
        strategies.uneven(10, ["a", 1])
    with pytest.raises(ValueError, match=r"percentage of rank 0 must lie in .* got 'a'"):
        strategies.formula(10, ["a", 1])
    with pytest.raises(ValueError, match=r"seq_len must be an integer, got 10\.5"):
        strategies.uneven(10.5, [1, 1])
    with pytest.raises(ValueError, match="percentages must be one for each rank, got none"):
        strategies.formula(10, [])
    with pytest.raises(ValueError, match='layout must be "zigzag" or "contiguous", got "pieces"'):
        strategies.uneven(10, [1, 2], layout="pieces")


def test_what_cannot_be_fitted_is_refused() -> None:
    def rows(size: int, tflops: float) -> list[MatmulRow]:
        return [
            MatmulRow(mps_pct=p, size=s, tflops=tflops) for p in (1, 2, 3) for s in (size, 2, 4)
        ]

    with pytest.raises(ValueError, match="size in row 0 must be finite and positive, got 0"):
        Regression.fit(rows(0, 1.0))
    with pytest.raises(ValueError, match=r"a largest tflops that is positive, got 0\.0"):
        Regression.fit(rows(1, 0.0))
    with pytest.raises(ValueError, match="tflops in row 0 must be finite, got nan"):
        Regression.fit(rows(1, math.nan))
    with pytest.raises(ValueError, match="rows must be MatmulRows, got LatencyRow"):
        Regression.fit([LatencyRow(mps_pct=50, latency_ms=1)])
