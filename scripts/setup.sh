#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Puts a working ringattn into the active environment: `. scripts/setup.sh [extras [thing...]]`
#   extras  as in pyproject.toml, comma-separated ("test" unless given), or "none"
#   thing   library (unless given), toolchain, catch2, clang-format, clang-tidy: what is needed beside them;
#           library-here: a library whose kernels are built only where there is a GPU
#
# An active venv or conda environment is used as it is, and its torch is never replaced; otherwise a
# `.venv` beside this checkout is made. What is missing comes from the system's package manager (as root or
# with passwordless sudo), else from the index of Python packages, else from its pinned source. A second run
# takes two seconds and no network.

ringattn_usage="usage: . scripts/setup.sh [extras [thing...]]"
case "${1:-}" in
  -h | --help)
    sed -n '4,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    # shellcheck disable=SC2317
    return 0 2>/dev/null || exit 0
    ;;
  -*)
    echo "setup: extras must be as in pyproject.toml, got $1; $ringattn_usage" >&2
    # shellcheck disable=SC2317
    return 2 2>/dev/null || exit 2
    ;;
esac
for ringattn_thing in "${@:2}"; do
  case "$ringattn_thing" in
    library | library-here | toolchain | catch2 | clang-format | clang-tidy) ;;
    *)
      echo "setup: thing must be of library, library-here, toolchain, catch2, clang-format, clang-tidy," \
        "got $ringattn_thing; $ringattn_usage" >&2
      # shellcheck disable=SC2317
      return 2 2>/dev/null || exit 2
      ;;
  esac
done

# shellcheck source=scripts/setup_tools.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup_tools.sh"

# Makes `python` and `pip` those of the environment to use.
ringattn_activate() {
  local prefix="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" interpreter inherit=()
  if [ -n "$prefix" ]; then
    python - "$prefix" <<'PYTHON' 2>/dev/null && return
import os, pip, sys
sys.exit(sys.version_info < (3, 10) or not os.path.samefile(sys.prefix, sys.argv[1]))
PYTHON
    ringattn_say "python must be the one of the active environment $prefix, 3.10 or newer and with pip," \
      "got $(command -v python || echo none); deactivate it to get a .venv"
    return 1
  fi
  # python3 may live in an environment that its variables do not name.
  if python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; then
    PATH="$(python3 -c 'import sys; print(sys.prefix)')/bin:$PATH"
    return
  fi
  if [ ! -x "$ringattn_root/.venv/bin/pip" ]; then
    ringattn_need python && interpreter="$(ringattn_find_python)" || return 1
    # A torch of the system is used, not downloaded a second time.
    "$interpreter" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' &&
      inherit=(--system-site-packages)
    ringattn_progress_or_log venv "setup: making .venv with $("$interpreter" --version)" \
      "$interpreter" -m venv ${inherit[@]+"${inherit[@]}"} "$ringattn_root/.venv" || return 1
  fi
  # shellcheck disable=SC1091
  . "$ringattn_root/.venv/bin/activate"
}

# Prints the requirements of pyproject.toml that the environment does not meet, one a line: those to run
# ringattn, to build it and of the extras.
ringattn_unmet() {
  python - "$ringattn_root/pyproject.toml" "$ringattn_extras" <<'PYTHON'
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    pyproject = tomllib.load(file)
extras = pyproject["project"]["optional-dependencies"]
wanted = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
for name in sys.argv[2].split(","):
    if name not in (*extras, "none"):
        sys.exit(f"setup: extras must be of none, {', '.join(extras)}, got {name}")
    wanted += extras.get(name, [])
for requirement in map(Requirement, wanted):
    # The first is a tool that the system may have; the second serves commits, not scripts.
    if requirement.name in ("clang-format", "pre-commit"):
        continue
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        print(requirement)
        if requirement.name == "torch" and version is not None:
            sys.exit(f"setup: torch must be {requirement.specifier}, got {version} in {sys.prefix}; "
                     f"type: pip install '{requirement}'")
PYTHON
}

ringattn_install_requirements() {
  local unmet
  unmet="$(ringattn_unmet)" || return 1
  [ -z "$unmet" ] && return
  mapfile -t unmet <<<"$unmet"
  ringattn_from_index "${unmet[@]}" && return
  tail -n 60 "$ringattn_root/build/index.log" >&2
  return 1
}

# What the installed library was built from, and with what.
ringattn_fingerprint() {
  python - "$ringattn_root" <<'PYTHON'
import hashlib, importlib.metadata, os, pathlib, shutil, sys
root = pathlib.Path(sys.argv[1])
built_from = [root / "CMakeLists.txt", root / "pyproject.toml"]
for folder in ("csrc", "cmake"):
    built_from += (root / folder).rglob("*")
chosen = (sys.argv[1:], sys.version, shutil.which("nvcc"), os.environ.get("RINGATTN_CUDA"))
digest = hashlib.sha256(repr(chosen).encode())
digest.update(importlib.metadata.version("torch").encode())
for path in sorted(path for path in built_from if path.is_file()):
    digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
# An editable install knows the modules of the package by name: only a new one needs another install.
for path in sorted((root / "python").rglob("*.py")):
    digest.update(str(path.relative_to(root)).encode())
print(digest.hexdigest())
PYTHON
}

# The CMake folder that every install (pyproject.toml names it) and the C++ tests share, so that nothing
# compiles twice.
ringattn_build_dir() {
  python -c 'import sys; print("build/cmake-" + sys.implementation.cache_tag)'
}

ringattn_stamp() { python -c 'import sys; print(sys.prefix + "/ringattn.stamp")'; }

# Whether the library of this tree is installed, built as RINGATTN_CUDA says.
ringattn_is_installed() {
  local fingerprint
  fingerprint="$(ringattn_fingerprint)" &&
    [ "$(cat "$(ringattn_stamp)" 2>/dev/null)" = "$fingerprint" ] &&
    python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("ringattn"))'
}

ringattn_install_library() {
  local fingerprint kernels=""
  ringattn_is_installed && return
  fingerprint="$(ringattn_fingerprint)" || return 1
  if [ "${RINGATTN_CUDA:-}" != OFF ] && command -v nvcc >/dev/null; then
    kernels=" with kernels for several architectures"
  fi
  # Kernels compile through a launcher that keeps what ptxas says, for scripts/check_spills.py.
  ringattn_progress_or_log ringattn "setup: building ringattn$kernels" \
    python -m pip install --verbose --no-build-isolation --no-deps \
    --config-settings=cmake.define.RINGATTN_PTXAS_VERBOSE=ON \
    --config-settings=cmake.define.CMAKE_CUDA_COMPILER_LAUNCHER="python3;$ringattn_root/scripts/record_ptxas.py" \
    --editable "$ringattn_root" || return 1
  echo "$fingerprint" >"$(ringattn_stamp)"
}

ringattn_setup() {
  local thing tools=()
  ringattn_extras="${1:-test}"
  [ $# -gt 1 ] || set -- "$ringattn_extras" library
  for thing in "${@:2}"; do
    case "$thing" in
      library | library-here | toolchain) tools=(headers compiler cmake ninja ${tools[@]+"${tools[@]}"}) ;;
      *) tools+=("$thing") ;;
    esac
  done
  ringattn_activate || return 1
  for thing in ${tools[@]+"${tools[@]}"}; do ringattn_need "$thing" || return 1; done
  # What only needs a compiler needs none of ringattn's requirements.
  if [[ "$ringattn_extras" == none && " ${*:2} " != *" library"* ]]; then return; fi
  ringattn_install_requirements || return 1
  if [[ " ${*:2} " == *" library-here "* ]]; then ringattn_leave_out_kernels; fi
  if [[ " ${*:2} " == *" library"* ]]; then
    (cd "$ringattn_root" && ringattn_install_library) || return 1
  fi
  ringattn_say "ready: $(python --version), torch $(ringattn_torch_version)"
}

if ! ringattn_setup "$@"; then
  # Sourced: the caller decides; run: the exit status says it.
  # shellcheck disable=SC2317
  return 1 2>/dev/null || exit 1
fi
