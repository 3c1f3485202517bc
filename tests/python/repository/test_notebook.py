# SPDX-License-Identifier: Apache-2.0
"""docs/analysis.ipynb runs, and shows what its cells print and draw of the committed tables."""

import itertools
import json
from pathlib import Path
from typing import Any

import plot_llama
import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "docs/analysis.ipynb"


@pytest.fixture
def execute(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import execute_notebook

    return execute_notebook.execute


def outputs(notebook: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The kind of each output, and its lines where it has any."""
    return [
        (",".join(sorted(output.get("data", {}))), output.get("text", []))
        for cell in notebook["cells"]
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
    ]


def test_the_notebook_runs_and_shows_what_it_holds(execute: Any) -> None:
    drawn = outputs(execute(NOTEBOOK))
    assert [kind for kind, _ in drawn].count("image/png,text/plain") == 3
    assert drawn == outputs(json.loads(NOTEBOOK.read_text())), (
        "run python scripts/execute_notebook.py docs/analysis.ipynb"
    )


def test_what_a_cell_prints_and_returns_is_kept(execute: Any, tmp_path: Path) -> None:
    cells = ["x = 3\nprint(x)", "x + 1", "class P:\n    _repr_png_ = lambda self: b'png'\nP()"]
    notebook = {"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]}
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    done = execute(tmp_path / "a.ipynb")
    printed, value, picture = (cell["outputs"][0] for cell in done["cells"])
    assert printed["text"] == ["3\n"] and value["data"] == {"text/plain": ["4"]}
    assert picture["data"]["image/png"] == "cG5n"
    assert [cell["execution_count"] for cell in done["cells"]] == [1, 2, 3]


def test_bars_of_requests_stand_side_by_side_and_labels_have_room() -> None:
    rows = [
        {"partition": name, "p50_ttft_ms": p50, "p95_ttft_ms": p95}
        for name, p50, p95 in (("even", 127, 660), ("planned", 97, 486), ("rebalanced", 105, 596))
    ]
    figure = plot_llama.draw_requests({"2xh100_202611": rows, "cpu2core_202611": rows})
    figure.canvas.draw()
    for ax in figure.axes:
        spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in ax.patches)
        assert len(spans) == 6
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
        texts = [*ax.texts, *ax.get_xticklabels(), ax.title]
        boxes = [text.get_window_extent() for text in texts]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    plot_llama.plt.close(figure)


def row(strategy: str, tokens: float, x_regular: float | None, status: str = "ok") -> dict:
    numbers = ("ttft_ms", "mfu", "avg_decode_ms", "comm_time_ms", "wait_ms", "peak_gib")
    given = {"strategy": strategy, "prompt_tokens": tokens, "status": status}
    value = tokens if status == "ok" else None
    return given | dict.fromkeys(numbers, value) | {"x_regular": x_regular}


def test_the_ring_pays_where_it_is_faster_from_there_on() -> None:
    ring = [row("ring", *given) for given in ((256.0, 1.1), (512.0, 0.9), (1024.0, 1.2))]
    assert plot_llama.pays_from(ring) == 1024
    assert plot_llama.pays_from([*ring, row("ring", 2048.0, None)]) == 1024  # the only one
    assert plot_llama.pays_from([*ring, row("ring", 2048.0, None, "out of memory")]) is None
    figure = plot_llama.draw([row("regular", 256.0, 1.0), *ring], "title")
    assert len(figure.axes) == 6
    assert [len(ax.lines) for ax in figure.axes] == [2, 2, 2, 2, 4, 2]
    plot_llama.plt.close(figure)
