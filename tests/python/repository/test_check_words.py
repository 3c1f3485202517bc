# SPDX-License-Identifier: Apache-2.0
"""The script that finds retired words."""

import subprocess
import sys
from pathlib import Path

from _scripts import ROOT


def check_words(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/check_words.py"), str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_the_tree_has_no_retired_words() -> None:
    done = check_words(ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_retired_words_are_found_in_code_comments_and_documents(tmp_path: Path) -> None:
    lists, depth, buffer = "attends_lists", "Least_Depth", "a parcel\n"  # words: ok
    texts = {
        "csrc/attention/list.h": f"int two;\nbool {lists}();\n",
        "python/ringattn/plan.py": f"# the {depth} of a plan\n",
        "docs/page.md": f"<!-- words: ok --> {buffer}",
        "docs/log/page.md": buffer,
        "benchmarks/results/run.md": buffer,
        "tests/cpp/picture.svg": buffer,
        "examples/page.md": buffer,
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = check_words(tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines() == [
        f"csrc/attention/list.h:2: retired word '{lists}', write: supports_segment_lists",
        f"python/ringattn/plan.py:1: retired word '{depth}', write: min_depth",
    ]


def test_the_root_must_be_a_folder(tmp_path: Path) -> None:
    done = check_words(tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "root must be a folder, got " in done.stderr.splitlines()[-1]
