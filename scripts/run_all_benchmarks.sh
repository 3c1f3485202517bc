#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# scripts/run_all_benchmarks.sh [--nproc N] [--out FOLDER] [--new] [ring|regular|both] [options of benchmarks/llama.py]
#
# A LLaMA over a ring of N ranks (all GPUs unless told) beside regular attention on one (both unless told), for
# prompts of 256 to 131072 tokens: writes FOLDER/summary_<timestamp>.csv, .md and .json (build/benchmarks unless
# told), what each layer took (summary_<timestamp>_layers), and the log beside them. A run that was ended early goes
# on where it stood, with the same command; --new begins another one. On one host, or on the hosts of a Slurm job
# (scripts/run_all_benchmarks.sbatch). Needs an installed ringattn (scripts/setup.sh study).

set -euo pipefail
cd "$(dirname "$0")/.."

refuse() {
  echo "run_all_benchmarks: $1; usage: $(sed -n '4s/^# //p' "$0")" >&2
  exit 2
}

nproc='' out=build/benchmarks new='' mode=both
while [ $# -gt 0 ]; do
  case "$1" in
    --nproc | --out)
      [ -n "${2:-}" ] || refuse "$1 must be followed by a value, got none"
      if [ "$1" = --nproc ]; then nproc="$2"; else out="$2"; fi
      shift
      ;;
    --new) new=1 ;;
    ring | regular | both) mode="$1" ;;
    -h | --help) sed -n '4,10s/^# \{0,1\}//p' "$0" && exit ;;
    -*) break ;; # of benchmarks/llama.py, from here on
    *) refuse "mode must be ring, regular or both, got $1" ;;
  esac
  shift
done
[[ "$nproc" =~ ^([1-9][0-9]*)?$ ]] || refuse "--nproc must be a number from 1 on, got $nproc"

mkdir -p "$out"
unfinished="$out/unfinished_${mode}_${nproc:-all}" # holds the stem of the run that is to go on
[ -n "$new" ] && rm -f "$unfinished"
if [ ! -f "$unfinished" ]; then
  echo "summary_$(date +%Y%m%d_%H%M%S)" >"$unfinished"
fi
stem="$out/$(cat "$unfinished")"

if [ "${SLURM_NNODES:-1}" -gt 1 ]; then
  first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
  launch=(srun --ntasks-per-node=1 torchrun --nnodes "$SLURM_NNODES"
    --nproc-per-node "${nproc:-${SLURM_GPUS_ON_NODE:?a job on several hosts must have GPUs or --nproc}}"
    --rdzv-backend c10d --rdzv-endpoint "$first:29500" --rdzv-id "$SLURM_JOB_ID" benchmarks/llama.py)
else
  launch=(python3 benchmarks/llama.py ${nproc:+--world-size "$nproc"})
fi
lengths=256,512,1024,2048,4096,8192,16384,32768,65536,131072

# The progress bar is on stderr; the log gets both.
status=0
"${launch[@]}" --mode "$mode" --seq-len "$lengths" --out "$stem" --resume "$@" \
  2> >(tee -a "$stem.log" >&2) | tee -a "$stem.log" || status=$?
if [ "$status" -ne 0 ]; then
  echo "run_all_benchmarks: not complete; the same command goes on ($stem.log)" >&2
  exit "$status"
fi
rm -f "$unfinished"
echo "wrote $stem.csv"
