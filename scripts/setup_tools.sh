# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Sourced by scripts/setup.sh: obtains the tools that a build, a test or the lint needs.

# shellcheck source=scripts/progress.sh
. "$(dirname "${BASH_SOURCE[0]}")/progress.sh"

ringattn_say() { printf 'setup: %s\n' "$*" >&2; }

# Obtains a tool. Each line: what it is, the check that it is present, packages of apt and dnf, what
# the index of Python packages calls it, a command that downloads its pinned source.
ringattn_need() {  # ringattn_need TOOL
  case "$1" in
    python) ringattn_obtain "Python >= 3.10 with venv" ringattn_find_python \
      "python3 python3-venv" python3 "" "" ;;
    headers) ringattn_obtain "the headers of Python" ringattn_has_headers \
      "python$(ringattn_python_version)-dev" python3-devel "" "" ;;
    compiler) ringattn_obtain "a C++20 compiler" ringattn_has_compiler g++ gcc-c++ "" "" ;;
    cmake) ringattn_obtain "CMake >= 3.25" ringattn_has_cmake cmake cmake 'cmake>=3.25' "" ;;
    ninja) ringattn_obtain ninja ringattn_has_ninja ninja-build ninja-build ninja "" ;;
    clang-format) ringattn_obtain "clang-format 14" ringattn_find_clang_format \
      clang-format-14 "" clang-format==14.0.6 "" ;;
    clang-tidy) ringattn_obtain clang-tidy ringattn_has_clang_tidy \
      clang-tidy clang-tools-extra clang-tidy "" ;;
    catch2) ringattn_obtain Catch2 ringattn_has_catch2 catch2 catch2-devel "" ringattn_download_catch2 ;;
  esac
}

# Present: used; else the system's packages; else the index of Python packages; else the pinned source;
# else one sentence that names what to install.
ringattn_obtain() {  # ringattn_obtain WHAT CHECK APT DNF INDEX SOURCE
  "$2" >/dev/null && return
  ringattn_from_system "$3" "$4" && "$2" >/dev/null && return
  [ -n "$5" ] && ringattn_from_index "$5" && "$2" >/dev/null && return
  [ -n "$6" ] && "$6" && return
  ringattn_say "$1 must be installed, got none; type one of:" \
    "apt install $3${4:+, dnf install $4}${5:+, pip install \"$5\"}"
  return 1
}

ringattn_from_system() {  # ringattn_from_system APT DNF
  local as_root=() packages
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || return 1
    as_root=(sudo -n)
  fi
  if command -v apt-get >/dev/null && [ -n "$1" ]; then
    read -ra packages <<<"$1"
    ringattn_progress system "setup: installing $1 (apt-get)" \
      ringattn_apt_get ${as_root[@]+"${as_root[@]}"} -- "${packages[@]}"
  elif command -v dnf >/dev/null && [ -n "$2" ]; then
    ringattn_progress system "setup: installing $2 (dnf)" \
      ${as_root[@]+"${as_root[@]}"} dnf install -y "$2"
  else
    return 1
  fi
}

# The lists of packages may be missing or old: they are updated where the first try fails.
ringattn_apt_get() {  # ringattn_apt_get [sudo -n] -- PACKAGE...
  local command=()
  while [ "$1" != -- ]; do command+=("$1") && shift; done
  shift
  command+=(env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=120)
  "${command[@]}" install --no-install-recommends "$@" ||
    { "${command[@]}" update && "${command[@]}" install --no-install-recommends "$@"; }
}

# A torch that is there already is never replaced.
ringattn_from_index() {  # ringattn_from_index REQUIREMENT...
  local constraints="$ringattn_root/build/constraints.txt" torch
  mkdir -p "$ringattn_root/build"
  torch="$(ringattn_torch_version)"
  echo "${torch:+torch==$torch}" >"$constraints"
  ringattn_progress index "setup: installing $* (pip)" \
    python -m pip install --constraint "$constraints" "$@" && hash -r
}

ringattn_download_catch2() {
  ringattn_progress catch2 "setup: downloading the source of Catch2" \
    cmake -P "$ringattn_root/tests/cpp/catch2_source.cmake"
}

# Prints a python3 >= 3.10 that can make environments.
ringattn_find_python() {
  local candidate
  for candidate in python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
    then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# Prints the name of a clang-format of version 14, which formats this tree: others differ in details.
ringattn_find_clang_format() {
  local candidate
  for candidate in clang-format-14 clang-format; do
    if "$candidate" --version 2>/dev/null | grep -q 'version 14\.'; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

ringattn_python_version() { python -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

ringattn_torch_version() {
  python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null
}

ringattn_has_headers() {
  [ -e "$(python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ]
}

ringattn_has_compiler() {
  "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - <<<'#include <concepts>' 2>/dev/null
}

ringattn_has_cmake() {
  printf '3.25\n%s\n' "$(cmake --version 2>/dev/null | awk 'NR == 1 {print $3}')" |
    sort --check=quiet --version-sort
}

ringattn_has_ninja() { ninja --version 2>/dev/null; }

ringattn_has_clang_tidy() { clang-tidy --version 2>/dev/null; }

# CMake looks in the folders of the compiler and in those beside the commands of an environment; the source
# that was downloaded serves every build.
ringattn_has_catch2() {
  compgen -G "$ringattn_root/build/catch2-*.tar.gz" ||
    "${CXX:-c++}" -I"${CONDA_PREFIX:-/usr}/include" -fsyntax-only -x c++ - 2>/dev/null <<'CPP'
#if !__has_include(<catch2/catch_all.hpp>) && !__has_include(<catch2/catch.hpp>)
#error
#endif
CPP
}

ringattn_has_gpu() { compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi -L 2>/dev/null | grep -q GPU; }

# Kernels take minutes to compile. Without a GPU they are left out, unless they are there or RINGATTN_CUDA
# says otherwise.
ringattn_leave_out_kernels() {
  if [ -n "${RINGATTN_CUDA:-}" ] || ! command -v nvcc >/dev/null || ringattn_has_gpu; then return; fi
  ringattn_is_installed && return
  ringattn_say "no GPU here: without kernels (RINGATTN_CUDA=ON builds them)"
  export RINGATTN_CUDA=OFF
}
