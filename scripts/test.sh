#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/test.sh [part...]: builds what changed and runs every test, or only the parts named.
#   lint    clang-format, ruff, mypy, and the rule who includes what
#   cpp     the C++ tests (Catch2), CUDA kernels compiled where nvcc is
#   spills  registers and spills of every CUDA kernel
#   docs    the documentation as HTML; a warning is an error
#   python  pytest; what follows `--` goes to it: scripts/test.sh python -- -k partition
#   tidy    clang-tidy (minutes; only when named)
#   transformers  models of Hugging Face transformers with its oldest version (only when named)
#   oldest  a build for the oldest supported torch, in an environment apart, and those Python tests on which a release
#           of torch has a say, on two ranks (only when named): operators, compile and autograd, our models,
#           transports, one file for each library of models. Not run with it: benchmarks, cli, planner, profiling,
#           repository, refusals and agreement of integrations, rings of one, three and four ranks
#   torches all Python tests with every supported torch (an hour; only when named)
# Parts run beside pytest, and their output is printed in order; the end of what failed comes once more,
# last. JUnit files go to build/test-results.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

all=(lint cpp spills docs tidy oldest torches transformers python) # the order of their output; pytest's summary comes last
named=()
while [ $# -gt 0 ]; do
  case "$1" in
    lint | cpp | spills | docs | tidy | python | oldest | torches | transformers) named+=("$1") ;;
    --) shift && break ;;
    -h | --help) sed -n '4,18s/^# \{0,1\}//p' "$0" && exit ;;
    *)
      printf -v known '%s, ' "${all[@]}"
      echo "test: part must be of ${known%, }, got $1; usage: scripts/test.sh [part...]" >&2
      exit 2
      ;;
  esac
  shift
done
[ ${#named[@]} -eq 0 ] && named=(lint cpp spills docs python)
pytest_arguments=("$@")

parts=() extras="" things=()
for part in "${all[@]}"; do
  [[ " ${named[*]} " == *" $part "* ]] || continue
  parts+=("$part")
  case "$part" in
    lint) extras+=,lint things+=(clang-format) ;;
    cpp) things+=(library catch2) ;;
    spills) things+=(library) ;;
    docs) extras+=,docs things+=(library) ;;
    tidy) things+=(library clang-tidy) ;;
    oldest | torches) things+=(toolchain) ;;
    python | transformers) extras+=,test things+=(library) ;;
  esac
done
extras="${extras#,}"
# shellcheck source=scripts/setup.sh
. scripts/setup.sh "${extras:-none}" "${things[@]}" || exit 1
build="$(ringattn_build_dir)"
results="$PWD/build/test-results"
rm -rf "$results"
mkdir -p "$results"

run_lint() { scripts/lint.sh; }

run_cpp() { ctest --test-dir "$build" --output-on-failure --output-junit "$results/cpp.xml"; }

run_spills() { python scripts/check_spills.py "$build"; }

run_docs() { scripts/build_docs.sh; }

run_tidy() { scripts/lint.sh clang-tidy; }

# What a release of torch has a say on. The torches part runs all tests with each of them. The models of protocols
# in transport/ know no torch.
of_torch=(-k "not cpu-1 and not cpu-3 and not cpu-4" tests/python/{models,ops,partition}
  tests/python/transport/test_{errors,groups,lost_peers,store_connections,threads,waits}.py
  tests/python/integrations/test_{diffusers,fms,transformers}.py)

run_oldest() {
  scripts/test_torch.sh oldest -- "${of_torch[@]}" ${pytest_arguments[@]+"${pytest_arguments[@]}"}
}

run_torches() { scripts/test_torch.sh all -- ${pytest_arguments[@]+"${pytest_arguments[@]}"}; }

# The newest version is the environment's own: the python part tests it.
run_transformers() {
  scripts/test_transformers.sh 4.57.6 -- ${pytest_arguments[@]+"${pytest_arguments[@]}"}
}

# Tests that mostly wait run beside the others: tests/python/conftest.py chooses the number of workers.
run_python() {
  python -u -m pytest --numprocesses auto --junit-xml="$results/python.xml" \
    ${pytest_arguments[@]+"${pytest_arguments[@]}"}
}

build_cpp() { cmake -S . -B "$build" -DRINGATTN_BUILD_TESTS=ON && cmake --build "$build"; }

# Runs parts one after the other, each with its output in a file. A second file says how the part ended.
run_parts() {  # run_parts PART...
  local part outcome start
  for part in "$@"; do
    outcome=ok start=$SECONDS
    "run_$part" >"$results/$part.log" 2>&1 || outcome=FAILED
    echo "$outcome, $((SECONDS - start)) s" >"$results/$part.outcome"
  done
}

# Prints the output of all parts in order, each as it grows, to its end also after an interrupt.
print_parts() {
  local part outcome failed=
  trap '' INT
  for part in "${parts[@]}"; do
    echo "== $part"
    outcome="$results/$part.outcome"
    {
      until [ -e "$outcome" ]; do cat && sleep 0.3; done
      cat
    } <"$results/$part.log"
    grep -q ok "$outcome" || failed=1
    # pytest ends with its own line of results and time: nothing is printed after it when all is well.
    [ "$part" = python ] && [ -z "$failed" ] || echo "== $part: $(cat "$outcome")"
  done
}

# Compiling takes every core and comes before the tests, some of which measure time.
if [[ " ${parts[*]} " == *" cpp "* ]]; then
  ringattn_progress_or_log cpp "test: building the C++ tests" build_cpp || run_cpp() { return 1; }
fi

# About how long each takes on two idle cores, without what is compiled for the environment's torch.
declare -A minutes=([lint]=1 [cpp]=1 [spills]=1 [docs]=2 [tidy]=10 [oldest]=12 [torches]=60
  [transformers]=5 [python]=16)

aside=() front=() beside_front=0 about=0
for part in "${parts[@]}"; do
  : >"$results/$part.log"
  case "$part" in
    lint | cpp | spills | docs) aside+=("$part") && beside_front=$((beside_front + minutes[$part])) ;;
    *) front+=("$part") && about=$((about + minutes[$part])) ;;
  esac
done
[ "$beside_front" -gt "$about" ] && about="$beside_front"
selected="${pytest_arguments[*]}"
echo "test: ${parts[*]}: about $about min on two idle cores${selected:+, less with $selected}"
set -m # a process group of its own, which ends with this script
run_parts ${aside[@]+"${aside[@]}"} </dev/null &
beside=$!
set +m
trap 'kill -- "-$beside" 2>/dev/null' EXIT
trap 'interrupt' INT
interrupt() {
  kill -- "-$beside" 2>/dev/null
  for part in "${parts[@]}"; do
    [ -e "$results/$part.outcome" ] || echo "FAILED, interrupted" >"$results/$part.outcome"
  done
}
print_parts &
printer=$!
run_parts ${front[@]+"${front[@]}"}
wait "$beside" "$printer"

mapfile -t failed < <(grep -L ok "$results"/*.outcome | sed 's#.*/##; s#\.outcome$##')
if [ ${#failed[@]} -gt 0 ]; then
  for part in "${failed[@]}"; do
    # pytest ends with its failures, and it came last.
    [ "$part" = python ] || { echo "== $part, once more" && tail -n 60 "$results/$part.log"; }
  done
  echo "test: failed: ${failed[*]}" >&2
  exit 1
fi
