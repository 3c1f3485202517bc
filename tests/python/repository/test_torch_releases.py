# SPDX-License-Identifier: Apache-2.0
"""The package beside other releases of torch than the one it was built for."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from ringattn import _build_info, _torch_releases
from ringattn._torch_releases import (
    TESTED,
    check_build,
    check_not_older,
    library_folder,
    rebuild_hint,
    release,
    untested_warning,
)

ROOT = Path(__file__).parents[3]
HERE = release(torch.__version__)


def imported(before: str) -> list[str]:
    """What the import says after the code `before` it, and whether the library was loaded."""
    code = f"""
import torch
{before}
try:
    import ringattn
except ImportError as error:
    print(error)
print("libringattn" in open("/proc/self/maps").read())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600
    )
    return [*result.stderr.splitlines(), *result.stdout.splitlines()]


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_torch_releases", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_another_release_is_refused_by_the_command_that_rebuilds_before_anything_is_loaded():
    sentence, loaded = imported("torch.__version__ = '2.99.0+cu130'")
    refusal, built_for = sentence.removesuffix(f": {rebuild_hint()}").split(", got a build for ")
    assert refusal == "ringattn must be rebuilt for this torch 2.99.0"
    assert HERE in built_for.split(", ")  # a wheel has several
    assert loaded == "False"


def test_an_older_torch_is_refused_by_the_command_that_updates_it():
    sentence, loaded = imported("torch.__version__ = '2.10.0+cu130'")
    assert sentence == (
        "torch must be 2.11 or newer for ringattn, got 2.10.0+cu130: type "
        f"`{sys.executable} -m pip install 'torch>=2.11'`"
    )
    assert loaded == "False"


def test_another_cuda_is_refused_before_anything_is_loaded():
    if not _build_info.WITH_CUDA:
        pytest.skip("a build without CUDA goes with any")
    sentence, loaded = imported("torch.version.cuda = '99.0'")
    assert re.match(r"ringattn must be rebuilt for this torch .* \(CUDA 99\.0\), got ", sentence)
    assert loaded == "False"


@pytest.mark.parametrize("version", [f"{HERE}.0+local", f"{HERE}.1", f"{HERE}.7+cu130"])
def test_a_patch_version_and_a_local_label_of_torch_do_not_matter(version):
    if not re.fullmatch(r"[\d.]+", _build_info.TORCH_VERSION.split("+")[0]):
        pytest.skip("a development version of torch goes with itself alone")
    assert imported(f"torch.__version__ = {version!r}") == ["True"]


def test_a_newer_torch_than_the_tested_ones_is_warned_of_once():
    older = f"""
import importlib.util, sys
path = {str(Path(_torch_releases.__file__))!r}
spec = importlib.util.spec_from_file_location("ringattn._torch_releases", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.TESTED = ("2.0", "2.1")
sys.modules[spec.name] = module
"""
    lines = imported(older)
    sentence = f"UserWarning: ringattn is tested with torch 2.0 to 2.1, got {torch.__version__}: "
    assert len([line for line in lines if sentence in line]) == 1
    assert lines[-1] == "True"


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.11.0+cu130", "2.11"), ("2.12.1", "2.12"), ("2.16.0.dev20270101+cpu", "2.16")],
)
def test_the_release_of_a_version_is_its_first_two_numbers(version, expected):
    assert release(version) == expected


def test_releases_are_compared_as_numbers():
    for version in (*TESTED, "2.100.0"):
        check_not_older(version)
    with pytest.raises(ImportError, match=r"^torch must be 2\.11 or newer for ringattn, got 2\.9"):
        check_not_older("2.9.1")
    assert untested_warning("2.9.1") is None
    assert "got 2.100.0" in untested_warning("2.100.0")
    assert [untested_warning(f"{version}.9+cu130") for version in TESTED] == [None] * len(TESTED)


def test_the_folder_of_the_installed_torch_is_picked_from_several(tmp_path):
    for name in ("torch-2.11", "torch-2.12", "models"):
        (tmp_path / name).mkdir()
    assert library_folder(tmp_path, "2.11.0+cu130") == tmp_path / "torch-2.11"
    assert library_folder(tmp_path, "2.12.1") == tmp_path / "torch-2.12"
    with pytest.raises(ImportError, match=r"this torch 2\.13\.0, got a build for 2\.11, 2\.12: "):
        library_folder(tmp_path, "2.13.0+cu132")
    with pytest.raises(ImportError, match=r"^ringattn must be built before it is imported, got no"):
        library_folder(tmp_path / "models", "2.11.0")
    with pytest.raises(ImportError, match=r"got no build: type"):
        library_folder(None, "2.11.0")


def test_a_build_goes_with_its_release_and_the_major_version_of_its_cuda():
    check_build("2.12.0+cu130", None, "2.12.1+cu126", "12.6")
    check_build("2.12.0+cu130", "13.0", "2.12.1+cu132", "13.2")
    for cuda in ("12.8", None):
        with pytest.raises(
            ImportError, match=rf"2\.12\.1 \(CUDA {cuda}\), got a build for 2\.12\.0"
        ):
            check_build("2.12.0", "13.0", "2.12.1", cuda)
    check_build("2.13.0.dev2+cu130", None, "2.13.0.dev2+cpu", None)
    with pytest.raises(ImportError, match=r"this torch 2\.13\.0, got a build for 2\.13\.0\.dev2: "):
        check_build("2.13.0.dev2", None, "2.13.0", None)


def test_the_command_that_rebuilds_names_the_checkout_where_there_is_one(tmp_path):
    source = ROOT / "python/ringattn/_torch_releases.py"
    assert module_at(source).rebuild_hint().endswith(f"install --no-build-isolation -e {ROOT}`")
    installed = tmp_path / "site-packages" / "ringattn" / source.name
    installed.parent.mkdir(parents=True)
    installed.write_text(source.read_text())
    hint = module_at(installed).rebuild_hint()
    assert hint.startswith("type, in a checkout of ringattn, `")
    assert hint.endswith("-m pip install --no-build-isolation .`")
