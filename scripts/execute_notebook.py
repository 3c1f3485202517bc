#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of a notebook and keeps what they print and draw in it, without Jupyter.

    python scripts/execute_notebook.py docs/analysis.ipynb

Cells are plain Python, run in the notebook's folder. Kept are the lines that a cell prints, and its
last expression: as a picture where that has ``_repr_png_``, else as text.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any


def execute(path: Path) -> dict[str, Any]:
    """The notebook at ``path`` with new outputs; the file stays as it is."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        number = 0
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                number += 1
                cell["execution_count"] = number
                cell["outputs"] = run("".join(cell["source"]), names, number)
    finally:
        os.chdir(before)
    return notebook


def run(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The outputs of a cell."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, f"cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        data: dict[str, Any] = {"text/plain": [f"<{type(value).__name__}>"]}
        if hasattr(value, "_repr_png_"):
            data["image/png"] = base64.b64encode(value._repr_png_()).decode()
        else:
            data["text/plain"] = repr(value).splitlines(keepends=True)
        result = {"data": data, "execution_count": number, "metadata": {}}
        outputs.append(result | {"output_type": "execute_result"})
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    path = parser.parse_args().notebook
    if not path.is_file():
        parser.error(f"NOTEBOOK must be a file, got {path}")
    path.write_text(json.dumps(execute(path), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
