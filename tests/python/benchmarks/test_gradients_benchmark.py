# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gradients.py over ranks: our ring, those of others, packed documents, all exact."""

from pathlib import Path

from test_benchmarks import HEADS, SMALL, read, run

SCRIPT = "benchmarks/gradients.py"
PASSES = {"forward", "backward", "both"}


def test_rings_of_others_and_packed_documents_have_the_gradients_of_attention(
    tmp_path: Path,
) -> None:
    stem = tmp_path / "gradients"
    sizes = ["--seq-lens", "128", "--head-dim", "16", "--packed-lens", "96", "--median", "24"]
    run(SCRIPT, *SMALL, *HEADS, *sizes, "--out", str(stem), ranks=2)
    rows = read(stem)
    causal = {row["what"] for row in rows if row["mask"] == "causal"}
    rings = {"ring, auto", "zigzag on torch CPU", "Ulysses on PyTorch's kernel"}
    assert causal == rings | {"one device: ringattn", "one device: torch CPU"}
    packs = {"ring, packed, auto", "ring, contiguous, auto", "ring, zigzag, auto"}
    packed = {row["what"]: row for row in rows if "documents" in row["mask"]}
    assert packed.keys() == packs | {"one device: ringattn"}
    assert float(packed["ring, packed, auto"]["busiest"]) < 1.1
    assert len(rows) == len(PASSES) * (len(causal) + len(packed))
    for row in rows:
        assert (row["share of ideal"] == "") == row["what"].startswith("one device")
        assert (row["max error"] == "") == (row["pass"] != "both")
        assert row["max error"] == "" or float(row["max error"]) < 2e-5
    assert "context_parallel left out" in Path(f"{stem}.md").read_text()


def test_one_process_has_a_row_for_each_mask_kernel_and_pass(tmp_path: Path) -> None:
    stem = tmp_path / "gradients"
    sizes = ["--seq-lens", "64", "--masked-seq-lens", "96", "--windows", "8", "--head-dim", "16"]
    run(SCRIPT, *SMALL, *HEADS, *sizes, "--out", str(stem))
    rows = read(stem)
    masks = {row["mask"] for row in rows}
    assert len(masks) == 4 and masks > {"causal", "dense", "window 8"}
    assert {row["pass"] for row in rows} == PASSES
    assert {row["what"] for row in rows} >= {"ringattn", "torch CPU"}
    assert all(float(row["max error"]) < 2e-5 for row in rows if row["pass"] == "both")
