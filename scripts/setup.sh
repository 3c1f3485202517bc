#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Puts a working ringattn into the active environment: `. scripts/setup.sh [extras]`, extras as in
# pyproject.toml ("test" unless told, "test,lint" adds the lint tools).
#
# An active venv or conda environment is used as it is; otherwise a `.venv` beside this checkout is made.
# A second run costs two seconds, and no network is touched when everything is there already.

case "${1:-}" in
  -h | --help)
    sed -n '4,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    # shellcheck disable=SC2317
    return 0 2>/dev/null || exit 0
    ;;
  -*)
    echo "setup: extras must be as in pyproject.toml, got $1; usage: . scripts/setup.sh [extras]" >&2
    # shellcheck disable=SC2317
    return 2 2>/dev/null || exit 2
    ;;
esac

ringattn_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ringattn_extras="${1:-test}"

ringattn_say() { printf 'setup: %s\n' "$*" >&2; }

# Runs a command quietly; on failure shows what it said.
ringattn_quietly() {
  local log="$ringattn_root/build/setup.log"
  mkdir -p "$ringattn_root/build"
  if ! "$@" >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    ringattn_say "failed: $* (whole log: build/setup.log)"
    return 1
  fi
}

# A Python >= 3.10 that can build extensions: it has its headers and can make environments.
ringattn_find_python() {
  local candidate
  for candidate in python3 /usr/bin/python3 python3.12 python3.11 python3.10; do
    if "$candidate" - 2>/dev/null <<'PYTHON'
import ensurepip, os, sys, sysconfig, venv
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
sys.exit(not (sys.version_info >= (3, 10) and os.path.exists(header)))
PYTHON
    then
      echo "$candidate"
      return
    fi
  done
  ringattn_say "no python3 >= 3.10 with headers and venv (Debian, Ubuntu: apt install python3-dev python3-venv)"
  return 1
}

# An environment in which `python` and `pip` are the ones to use.
ringattn_activate() {
  [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && return
  # python3 may live in an environment that nobody activated by name.
  if python3 -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; then
    PATH="$(python3 -c 'import sys; print(sys.prefix)')/bin:$PATH"
    return
  fi
  if [ ! -x "$ringattn_root/.venv/bin/pip" ]; then
    local interpreter inherit=()
    interpreter="$(ringattn_find_python)" || return 1
    # A torch that the system brings is used, not downloaded a second time.
    "$interpreter" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' &&
      inherit=(--system-site-packages)
    ringattn_say "making .venv with $("$interpreter" --version)"
    ringattn_quietly "$interpreter" -m venv ${inherit[@]+"${inherit[@]}"} "$ringattn_root/.venv" ||
      return 1
  fi
  # shellcheck disable=SC1091
  . "$ringattn_root/.venv/bin/activate"
}

# Installs requirements unless all of them are met: `ringattn_require 'torch>=2.11,<2.12' ninja`.
ringattn_require() {
  python - "$@" 2>/dev/null <<'PYTHON' && return
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for requirement in map(Requirement, sys.argv[1:]):
    version = importlib.metadata.version(requirement.name)
    if not requirement.specifier.contains(version, prereleases=True):
        sys.exit(1)
PYTHON
  ringattn_say "installing $*"
  ringattn_quietly python -m pip install "$@"
}

# Version 4 refuses the older projects that CMake may have to fetch.
ringattn_require_cmake() {
  local version
  version="$(cmake --version 2>/dev/null | awk 'NR == 1 {print $3}')"
  printf '3.25\n%s\n' "$version" | sort --check=quiet --version-sort ||
    ringattn_require 'cmake>=3.25,<4'
}

# Installs what the chosen extras ask for and is not there.
ringattn_install_extras() {
  local unmet
  mapfile -t unmet < <(
    python - "$ringattn_extras" <<'PYTHON'
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for requirement in map(Requirement, importlib.metadata.requires("ringattn") or ()):
    if not any(requirement.marker is None or requirement.marker.evaluate({"extra": extra})
               for extra in sys.argv[1].split(",")):
        continue
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        print(f"{requirement.name}{requirement.specifier}")
PYTHON
  )
  [ ${#unmet[@]} -eq 0 ] || ringattn_require "${unmet[@]}"
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

ringattn_install() {
  local stamp fingerprint minutes="minutes"
  stamp="$(python -c 'import sys; print(sys.prefix)')/ringattn.stamp"
  fingerprint="$(ringattn_fingerprint)" || return 1
  if [ "$(cat "$stamp" 2>/dev/null)" = "$fingerprint" ] &&
    python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("ringattn"))'; then
    return
  fi
  if [ "${RINGATTN_CUDA:-}" != OFF ] && command -v nvcc >/dev/null; then
    minutes+=": kernels for several architectures"
  fi
  ringattn_say "building ringattn (the first time takes $minutes)"
  # Kernels compile through a launcher that keeps what ptxas says, for scripts/check_spills.py.
  ringattn_quietly python -m pip install --no-build-isolation \
    --config-settings=cmake.define.RINGATTN_PTXAS_VERBOSE=ON \
    --config-settings=cmake.define.CMAKE_CUDA_COMPILER_LAUNCHER="python3;$ringattn_root/scripts/record_ptxas.py" \
    --editable "${ringattn_root}[${ringattn_extras}]" || return 1
  echo "$fingerprint" >"$stamp"
}

ringattn_setup() {
  ringattn_activate &&
    ringattn_require 'torch>=2.11,<2.12' &&
    ringattn_require 'scikit-build-core>=0.10' ninja &&
    ringattn_require_cmake &&
    (cd "$ringattn_root" && ringattn_install) &&
    ringattn_install_extras &&
    ringattn_say "ready: $(python --version), torch $(python -c \
      'import importlib.metadata as m; print(m.version("torch"))')"
}

if ! ringattn_setup; then
  # Sourced: the caller decides; run: the exit status says it.
  # shellcheck disable=SC2317
  return 1 2>/dev/null || exit 1
fi
