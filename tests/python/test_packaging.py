# SPDX-License-Identifier: Apache-2.0
"""The package as it is installed: what it loads and refuses to load, what it says of itself."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import ringattn
import torch
from ringattn import _C, _build_info
from ringattn.__main__ import main

ROOT = Path(__file__).parents[2]
BUILD = _C.build_info()


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


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


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("torch.__version__", "2.10.0+cu130"), ("torch.version.cuda", "12.8")],
)
def test_another_torch_is_refused_in_one_sentence_before_anything_is_loaded(attribute, value):
    if "cuda" in attribute and not _build_info.WITH_CUDA:
        pytest.skip("a build without CUDA goes with any")
    code = f"""
import torch
{attribute} = {value!r}
try:
    import ringattn
except ImportError as error:
    print(error)
print("libringattn" in open("/proc/self/maps").read())
"""
    result = python(code)
    sentence, loaded = result.stdout.strip().splitlines()
    assert re.match(r"ringattn must be rebuilt for this torch .*, got a build for ", sentence)
    assert value.split("+")[0] in sentence and _build_info.TORCH_VERSION.split("+")[0] in sentence
    assert loaded == "False"


def test_importing_is_quiet_and_loads_the_library_once():
    code = """
import ringattn, ringattn.reference, ringattn._C
maps = {line.split()[-1] for line in open("/proc/self/maps") if "libringattn" in line}
print(len(maps))
"""
    result = python(code)
    assert (result.stdout, result.stderr) == ("1\n", "")


def test_importing_does_without_what_takes_long_and_few_need():
    late = {"torch.distributed.tensor", "torch._dynamo", "sympy"}
    assert python(f"import sys, ringattn; print({late} & sys.modules.keys())").stdout == "set()\n"


def test_a_local_label_of_torch_does_not_matter():
    result = python("import torch; torch.__version__ = '2.11.0+local'; import ringattn")
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_library_has_no_python_in_it():
    library = Path(importlib.util.find_spec("ringattn._C").origin).parent / "libringattn.so"
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    names = re.findall(r"NEEDED.*\[(.*)\]", needed)
    assert names and not [name for name in names if "python" in name]


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
    assert torch.__version__ in facts["torch"]
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
    assert "\nCUDA          not built: no nvcc was found\n" in capsys.readouterr().out
