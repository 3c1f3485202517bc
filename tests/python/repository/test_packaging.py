# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: what it loads and refuses to load, what it says of itself."""

import ast
import base64
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import ringattn
import torch
from ringattn import _C, _build_info
from ringattn.__main__ import main
from ringattn._torch_releases import TESTED

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "scripts"))
import check_wheel  # noqa: E402

BUILD = _C.build_info()


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


def test_the_version_is_the_one_of_the_project():
    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert ringattn.__version__ == declared.group(1)


def test_the_package_is_typed():
    assert (Path(ringattn.__file__).parent / "py.typed").exists()


def stubbed_names(scope: ast.Module | ast.ClassDef) -> set[str]:
    return {
        node.target.id if isinstance(node, ast.AnnAssign) else node.name
        for node in scope.body
        if isinstance(node, ast.AnnAssign | ast.ClassDef | ast.FunctionDef)
    }


def test_stubs_name_what_the_compiled_module_has():
    for module in (_C, _build_info):
        name = module.__name__.rsplit(".", 1)[1]
        stub = ast.parse((Path(ringattn.__file__).parent / f"{name}.pyi").read_text())
        assert stubbed_names(stub) == {name for name in vars(module) if not name.startswith("__")}
        for node in stub.body:
            if isinstance(node, ast.ClassDef):
                assert stubbed_names(node) <= set(vars(getattr(module, node.name)))


def test_importing_is_quiet_and_loads_the_library_once():
    code = """
import ringattn, ringattn.reference, ringattn._C
maps = {line.split()[-1] for line in open("/proc/self/maps") if "libringattn.so" in line}
print(len(maps))
"""
    result = python(code)
    assert (result.stdout, result.stderr) == ("1\n", "")


def test_importing_does_without_what_takes_long_and_few_need():
    late = {"torch.distributed.tensor", "torch._dynamo", "sympy"}
    assert python(f"import sys, ringattn; print({late} & sys.modules.keys())").stdout == "set()\n"


def library_path() -> Path:
    return Path(importlib.util.find_spec("ringattn._C").origin).parent / "libringattn.so"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_library_has_no_python_in_it():
    names, _ = check_wheel.dynamic_section(library_path())
    assert names and not [name for name in names if "python" in name]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_kernels_lie_beside_what_is_built_for_torch_and_link_no_torch():
    kernels = library_path().parent.parent / "libringattn_kernels.so"
    assert kernels.exists() == _build_info.WITH_CUDA
    needed, _ = check_wheel.dynamic_section(library_path())
    assert (kernels.name in needed) == _build_info.WITH_CUDA
    if _build_info.WITH_CUDA:
        assert not check_wheel.link_faults(
            check_wheel.KERNELS, *check_wheel.dynamic_section(kernels)
        )


def test_the_library_alone_defines_the_operators():
    code = f"""
import sys, torch
torch.ops.load_library({str(library_path())!r})
print(torch.ops.ringattn.merge_states_.default, "ringattn" in sys.modules)
"""
    assert python(code).stdout == "ringattn.merge_states_.default False\n"


def test_every_operator_has_a_schema_and_a_fake():
    for name in (
        *("block_attention", "block_attention_", "merge_states_", "ring_forward", "rotate_kv"),
        *("wait_kv", "decode_attention"),
    ):
        operator = getattr(torch.ops.ringattn, name).default
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU")
        assert torch._library.simple_registry.singleton.find(
            operator.name().split(".")[0]
        ).fake_impl.kernel


def test_info_says_what_is_built(capsys):
    assert main(["info"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    facts = {name.strip(): fact.strip() for name, fact in lines.items()}
    assert facts["ringattn"] == ringattn.__version__
    oldest, newest = TESTED[0], TESTED[-1]
    assert facts["torch"].startswith(torch.__version__)
    assert facts["torch"].endswith(f", tested with {oldest} to {newest})")
    assert facts["transports"].split(", ") == _C.transports()
    assert facts["kernels"].split(", ")[0] == "cpu"
    assert facts["auto on cpu"].startswith("process_group (")
    assert ("auto on cuda" in facts) == _build_info.WITH_CUDA


def test_a_build_knows_why_it_has_no_kernels():
    assert (_build_info.NO_CUDA_BECAUSE is None) == _build_info.WITH_CUDA
    assert _build_info.NO_CUDA_BECAUSE != ""


def test_info_says_why_kernels_are_not_built(capsys, monkeypatch):
    monkeypatch.setattr(_C, "build_info", lambda: {**BUILD, "cuda": False, "kernel_families": []})
    monkeypatch.setattr(_build_info, "NO_CUDA_BECAUSE", "no nvcc was found")
    assert main(["info"]) == 0
    assert re.search(r"^CUDA +not built: no nvcc was found$", capsys.readouterr().out, re.M)


def metadata_of_a_wheel(folder: Path) -> tuple[Message, Path]:
    """What a wheel would say of itself, without a build."""
    pytest.importorskip("scikit_build_core")
    built = backend(f"prepare_metadata_for_build_wheel({str(folder)!r})")
    info = folder / built
    return Parser().parsestr((info / "METADATA").read_text()), info


def backend(call: str) -> str:
    code = f"import sys; sys.path.insert(0, 'scripts'); import build_backend as b; x = b.{call}"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; print('', x, sep='\\n')"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_a_wheel_says_what_it_is_and_accepts_every_newer_torch(tmp_path):
    metadata, info = metadata_of_a_wheel(tmp_path)
    assert (metadata["Name"], metadata["Version"]) == ("ringattn", ringattn.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    classifiers = metadata.get_all("Classifier")
    assert not [text for text in classifiers if text.startswith("License ::")]
    assert "Typing :: Typed" in classifiers
    (torch_bound,) = (
        text for text in metadata.get_all("Requires-Dist") if re.match(r"torch\b", text)
    )
    assert torch_bound == f"torch>={TESTED[0]}"
    scripts = (info / "entry_points.txt").read_text()
    assert scripts.split() == ["[console_scripts]", "ringattn", "=", "ringattn.__main__:main"]


def test_the_command_is_the_module(capsys):
    (command,) = entry_points(group="console_scripts", name="ringattn")
    assert command.load() is main


def test_the_source_archive_holds_what_a_build_needs_and_no_results(tmp_path):
    pytest.importorskip("scikit_build_core")
    with tarfile.open(tmp_path / backend(f"build_sdist({str(tmp_path)!r})")) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert names >= {
        *("CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "scripts/build_backend.py"),
        *("cmake/Targets.cmake", "csrc/ops/library.cpp", "python/ringattn/__init__.py"),
        *("python/ringattn/models/pydoc_llama/model.safetensors", "tests/python/conftest.py"),
    }
    assert not [name for name in names if name.startswith(("benchmarks/results", "build/"))]
    assert not [name for name in names if name.endswith((".png", ".svg", ".so", ".whl"))]


def test_an_isolated_build_is_refused_by_the_command_to_type(monkeypatch):
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "scripts")
    build_backend = importlib.import_module("build_backend")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for hook in ("get_requires_for_build_wheel", "get_requires_for_build_editable"):
        with pytest.raises(SystemExit, match=r"`.*pip install --no-build-isolation \.`$"):
            getattr(build_backend, hook)()


def test_a_wheel_with_a_file_missing_or_changed_is_found_out(tmp_path):
    files = {
        f"ringattn/torch-2.11/{name}": b"x" for name in ("_C.cpython-311.so", "_build_info.py")
    }
    faults = check_wheel.layout_faults(list(files))
    assert len(faults) == 1 and "got ['_C', '_build_info']" in faults[0]
    assert check_wheel.layout_faults([*files, "ringattn/torch-2.11/libringattn.so"]) == []
    assert check_wheel.layout_faults(["ringattn/__init__.py"])

    record = "ringattn-0.1.0.dist-info/RECORD"
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x").digest()).rstrip(b"=").decode()
    rows = [f"{name},sha256={digest},1" for name in files]
    for lines, number in ([*rows, f"{record},,"], 0), ([rows[0], f"{record},,"], 1):
        path = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for name, data in {**files, record: "\n".join(lines).encode()}.items():
                wheel.writestr(name, data)
        with zipfile.ZipFile(path) as wheel:
            assert len(check_wheel.record_faults(wheel)) == number
    changed = tmp_path / "changed.whl"
    with zipfile.ZipFile(changed, "w") as wheel:
        for name in files:
            wheel.writestr(name, b"y")
        wheel.writestr(record, "\n".join([*rows, f"{record},,"]))
    with zipfile.ZipFile(changed) as wheel:
        assert len(check_wheel.record_faults(wheel)) == 2


def test_kernels_that_link_torch_and_paths_of_the_build_are_found_out():
    glue = "ringattn/torch-2.11/libringattn.so"
    needed = ["libringattn_kernels.so", "libtorch_cpu.so", "libcudart.so.13", "libc.so.6"]
    assert check_wheel.link_faults(glue, needed, "$ORIGIN:$ORIGIN/..") == []
    assert len(check_wheel.link_faults(check_wheel.KERNELS, needed, "$ORIGIN")) == 2
    assert len(check_wheel.link_faults(glue, ["libpython3.11.so.1.0"], "$ORIGIN:/build")) == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("build_wheel.sh --fast", "build_wheel: options must be of these, got --fast; usage: "),
        ("build_wheel.sh --out", "build_wheel: --out must be followed by a folder, got none; "),
        (
            "build_wheel.sh --torch ten",
            "build_wheel: --torch must be followed by releases as 2.12, ",
        ),
        ("test_torch.sh", "test_torch: releases must be named, got none; usage: "),
        (
            "test_torch.sh old",
            "test_torch: release must be as 2.12, oldest, newest or all, got old",
        ),
        ("torch_venv.sh 2", "torch_venv: torch must be a release as 2.11 or a version as 2.12.1, "),
    ],
)
def test_build_scripts_refuse_what_they_do_not_know(command, message):
    name, *arguments = command.split()
    for given, status in (arguments, 2), (["--help"], 0):
        done = subprocess.run(
            ["bash", ROOT / "scripts" / name, *given], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == status
        assert message in done.stderr if status else len(done.stdout) > 50 and not done.stderr
