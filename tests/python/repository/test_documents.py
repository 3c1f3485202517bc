# SPDX-License-Identifier: Apache-2.0
"""The README and docs/ state what holds: figures are those of the results, links lead somewhere,
tables are complete, and history stays in docs/log and the results index."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import plot_ring
import pytest
import ringattn
import torch
from _documents import HISTORY, PAGES, ROOT, anchors, blocks, links, text_of

sys.path.insert(0, str(ROOT / "scripts"))
import write_api

RESULTS = ROOT / "benchmarks/results"
LENGTHS = {"8K": 8192, "16K": 16384, "32K": 32768, "64K": 65536, "128K": 131072}


def table(page: str, first: str) -> list[dict[str, str]]:
    """The table of a page whose header begins with `first`; columns of one name keep the last."""
    lines = iter(text_of(page).splitlines())
    header = next(line for line in lines if line.startswith(f"| {first} |"))
    next(lines)  # the rule
    rows = []
    for line in lines:
        if not line.startswith("|"):
            return rows
        rows.append(dict(zip(cells(header), cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip().strip("*`") for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_no_history(page: str) -> None:
    text = text_of(page)
    hashes = [
        word
        for word in re.findall(r"\b[0-9a-f]{7,40}\b", text)
        if re.search(r"\d", word) and re.search("[a-f]", word)
    ]
    history = re.findall(r"aimed at|earlier (?:commit|version)|by commit|of commit", text, re.I)
    assert (hashes, history) == ([], [])


def test_the_readme_is_read_in_minutes() -> None:
    text = text_of("README.md")
    assert len(text.splitlines()) <= 150
    assert len(text.split()) <= 1250  # tables and code included


def test_the_times_of_the_readme_are_those_of_the_results() -> None:
    tables = [RESULTS / "ring_4xh200_202611.csv"]
    shown = {
        "one GPU, ringattn": "one GPU, ringattn",
        "zigzag ring on FlashAttention-2": "zigzag on FlashAttention-2",
        "context_parallel on cuDNN": "context_parallel`, cuDNN",
        "ringattn": "ringattn",
    }
    (header, _, *lines) = [x for x in text_of("README.md").splitlines() if x.startswith("|")][:6]
    columns = cells(header)[1:5]
    rows = {cells(line)[0]: dict(zip(columns, cells(line)[1:5], strict=True)) for line in lines}
    for _, _, label, names in plot_ring.LINES:
        measured = plot_ring.fastest(tables, names)
        assert rows[shown[label]] == {
            column: f"{measured[LENGTHS[column]]:.3g}" for column in columns
        }


def test_the_ratios_of_the_readme_are_those_of_its_tables() -> None:
    tables = [RESULTS / "ring_4xh200_202611.csv"]
    ours = plot_ring.fastest(tables, plot_ring.LINES[3][3])
    claim = " ".join(text_of("README.md").split())
    for names in (plot_ring.LINES[2][3], plot_ring.LINES[1][3]):
        ratios = [ms / ours[length] for length, ms in plot_ring.fastest(tables, names).items()]
        assert f"{min(ratios):.1f} to {max(ratios):.1f} times" in claim
    with (RESULTS / "gradients_1xh200_202611.csv").open() as file:
        rows = [x for x in csv.DictReader(file) if (x["D"], x["mask"]) == ("128", "causal")]
    speed = {(x["what"], x["pass"], int(x["S"])): float(x["TFLOP/s"]) for x in rows}
    lengths = {length for _, _, length in speed}

    def over(peer: str, which: str, least: int) -> list[float]:
        of_peer = [
            (speed["ringattn", which, s], speed[peer, which, s]) for s in lengths if s >= least
        ]
        return sorted(ours / theirs for ours, theirs in of_peer)

    (slowest, *_, fastest) = over("flash-attn-4", "forward", 4096)
    assert f"{slowest:.1f}" == f"{fastest:.1f}"
    assert f"forward is {slowest:.1f} times as fast as flash-attn-4's" in claim
    (slowest, *_, fastest) = over("flash-attn-4", "backward", 2048)
    assert f"backward {slowest:.2f} to {fastest:.2f} times," in claim
    (slowest, *_, fastest) = over("torch cuDNN", "backward", 2048)
    assert f"{slowest:.2f} to {fastest:.2f} times as cuDNN's" in claim
    for name in ("ringattn", "flash-attn-4", "torch cuDNN"):
        shown = {f"{speed[name, 'forward', length]:.0f}" for length in (8192, 16384, 32768)}
        assert shown <= set(re.findall(r"\b\d{3}\b", claim))


def test_the_plot_of_the_readme_can_be_drawn_again(tmp_path: Path) -> None:
    tables = [RESULTS / "ring_4xh200_202611.csv"]
    plot_ring.draw(tables, "times", tmp_path / "times.svg")
    drawn = (tmp_path / "times.svg").read_text()
    assert all(label in drawn for _, _, label, _ in plot_ring.LINES)
    with pytest.raises(ValueError, match="tables must have a row 'nothing', got none"):
        plot_ring.fastest(tables, ["nothing"])


@pytest.mark.parametrize("page", [*PAGES, *HISTORY])
def test_links_lead_somewhere(page: str) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        assert there.exists(), f"{page} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(str(there.relative_to(ROOT))), f"{page} links to {target}"


def test_what_is_to_be_installed_can_be_installed() -> None:
    """No release is on an index, and the build needs the torch that is installed."""
    texts = [text_of(page) for page in PAGES]
    texts += [path.read_text() for path in (ROOT / "python").rglob("*.py")]
    commands = re.findall(r"pip install ([^`\n]*)", "\n".join(texts))
    assert len(commands) > 5
    for command in commands:
        assert not re.search(r"(?:^|['\" ])ringattn\b", command), command
        of_the_tree = re.search(r"(?:^|['\" ])\.", command)
        assert "--no-build-isolation" in command or not of_the_tree, command


def test_the_index_of_the_docs_names_every_page() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert pages - {"README.md"} <= set(links("docs/README.md"))


def test_the_index_of_results_names_every_table() -> None:
    tables = {path.name for path in RESULTS.glob("*.md")} - {"README.md"}
    assert tables == {x for x in links("benchmarks/results/README.md") if "/" not in x}
    assert {path.stem for path in RESULTS.glob("*.csv")} == {name[:-3] for name in tables}


def test_results_are_markdown_and_csv() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "benchmarks/results"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("needs the history of the repository")
    assert {Path(name).suffix for name in listed.stdout.split()} == {".md", ".csv"}


#: Where variables of the environment are read: in code as text, in scripts as they are.
_IN_CODE = re.compile(r"""["'](RINGATTN_[A-Z_]+)["']""")
_IN_SCRIPTS = re.compile(r"\$\{(RINGATTN_[A-Z_]+)")
_READERS = ("csrc", "python", "benchmarks", "tests/python", "scripts", "tools", "pyproject.toml")


def variables() -> set[str]:
    names: set[str] = set()
    for reader in _READERS:
        path = ROOT / reader
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.suffix in (".py", ".cpp", ".cu", ".h", ".cuh", ".toml"):
                names |= set(_IN_CODE.findall(file.read_text()))
            elif file.suffix == ".sh":
                names |= set(_IN_SCRIPTS.findall(file.read_text()))
    return names


def test_every_environment_variable_is_in_the_table() -> None:
    shown = {row["variable"] for row in table("docs/environment.md", "variable")}
    assert variables() <= shown


def test_the_api_reference_has_every_public_name() -> None:
    public = {f"ringattn.{name}" for name in ringattn.__all__}
    public |= {f"ringattn.models.{name}" for name in ringattn.models.__all__} - {"ringattn.models"}
    listed = {name for _, name, _ in write_api.names()}
    assert public - {"ringattn.models"} <= listed


def test_the_api_reference_is_what_the_docstrings_say() -> None:
    text = text_of("docs/api.md")
    assert text == write_api.page(write_api.operators_of(text)), "python scripts/write_api.py"


def test_the_api_reference_is_markdown_with_working_links() -> None:
    text = text_of("docs/api.md")
    assert ":func:" not in text and "``" not in text.replace("```", "") and "eval-rst" not in text
    assert "### `ringattn.plan`\n\n```py\nplan(seq_len: int, " in text
    assert "\n**Args**\n\n* `seq_len`: " in text


def test_the_api_reference_of_sphinx_has_the_same_names() -> None:
    made = write_api.directives(text_of("docs/api.md"))
    entries = re.findall(r"^\.\. auto(\w+):: (\S+)$", made, re.M)
    assert [name for _, name in entries] == [name for _, name, _ in write_api.names()]
    assert ("class", "ringattn.Partition") in entries and "## Operators\n" in made


def test_the_api_reference_shows_the_schemas_of_the_operators() -> None:
    (shown,) = (x.text for x in blocks("docs/api.md") if x.section == "Operators")
    schemas = {
        str(getattr(torch.ops.ringattn, line.split("(")[0]).default._schema)
        for line in shown.splitlines()
    }
    assert {f"ringattn::{line}" for line in shown.splitlines()} == schemas
    operators = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("ringattn::")
    }
    assert operators == {line.split("(")[0] for line in shown.splitlines()}


def test_building_the_docs_says_how_it_is_used() -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        command = ["bash", str(ROOT / "scripts/build_docs.sh"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout, done.stderr

    status, out, error = run("--help")
    assert (status, error) == (0, "") and out.startswith("scripts/build_docs.sh [--out DIR]")
    status, out, error = run("--fast")
    assert (status, out) == (2, "") and error.count("\n") == 1
    assert error.startswith("build_docs: options must be of these, got --fast; usage: ")
