#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Measures a machine with GPUs: `scripts/gpu_results.sh OUT [stage...]`, in an environment that has
# ringattn with its kernels. OUT/*.md and OUT/*.csv go to benchmarks/results. Stages (default: all):
#
#   tests      every test that needs a GPU, in groups by the number of GPUs, as many at once as there are
#              GPUs for (OUT/tests_*.xml, JUnit). Each is a stage as well, which ends within ten minutes:
#              tests_2a, tests_2b, tests_1, tests_sm80, tests_3a, tests_3b, tests_4a, tests_4b. Ranks
#              share GPUs where there are fewer; tests that need NCCL are skipped then.
#   attention  one GPU beside PyTorch's kernels; shapes of a ring, folding, short sequences
#   ring       all GPUs beside one GPU and other rings: causal, dense, no groups of heads, uneven; a
#              timeline; fewer GPUs
#   long       128K tokens
#   transport  one hop
#   decode     an 8B-shaped model, on one GPU and on all
#   models     the same model of Hugging Face transformers and of FMS, unmodified and through the ring;
#              a transformer of diffusers (needs the three packages)
#   llama      an 8B-shaped model beside itself with regular attention, 8K to 128K tokens
#   turns      calls after a cache, a prompt in chunks, of the 8B-shaped model
#   scaling    attention on 1, 2, 4, 8 GPUs, and its roofline
#   training   gradients on one GPU and on all, packed documents; a training step, on unequal GPUs too,
#              and packed documents there
#
# A stage that fails does not keep the others from running; the exit status says whether one did.

set -uo pipefail
cd "$(dirname "$0")/.." || exit
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" # multicast needs rights that not every machine gives
export PYTHONUNBUFFERED=1

case "${1:-}" in
  -h | --help) sed -n '4,25s/^# \{0,1\}//p' "$0" && exit ;;
  '' | -*)
    echo "usage: scripts/gpu_results.sh OUT [stage...]" >&2
    exit 2
    ;;
esac
out="$(realpath -m "$1")"
shift
stages=("$@")
[ ${#stages[@]} -eq 0 ] && stages=(tests attention ring long transport decode models llama turns scaling training)
mkdir -p "$out"

num_gpus="$(nvidia-smi --list-gpus | wc -l)"
model="$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1 | awk '{print tolower($NF)}')"
month="$(date +%Y%m)"
failed=0

name() { echo "$out/$1_$2x${model}_$month"; } # name WHAT NUM_GPUS

# run SECONDS LOG command...: what it prints is kept, its failure remembered.
run() {
  local seconds=$1 log="$out/$2.log" begin=$SECONDS
  shift 2
  if timeout -k 10 "$seconds" "$@" >"$log" 2>&1; then
    echo "ok      $((SECONDS - begin)) s  $(basename "$log")"
  else
    echo "FAILED  $((SECONDS - begin)) s  $(basename "$log")"
    tail -n 30 "$log"
    return 1
  fi
}

# ranks NUM_GPUS SECONDS LOG script arguments...
ranks() {
  local num=$1 seconds=$2 log=$3
  shift 3
  run "$seconds" "$log" torchrun --standalone --nproc-per-node "$num" "$@" || failed=1
}

# Groups of tests: those of --gpu-group (tests/python/_gpus.py), and that of one GPU once more with the
# portable kernels.
groups=(2a 2b 1 3a sm80 3b 4a 4b) # on four GPUs 2a and 2b, 1 and 3a, sm80 and 3b run at one time

# pytest_on FIRST NUM GROUP SIZE: a group of tests that need SIZE GPUs, on NUM GPUs, in the background.
pytest_on() {
  local family="" group=$3
  [ "$group" = sm80 ] && family=sm80 group=1
  RINGATTN_KERNEL_FAMILY=$family RINGATTN_RANKS_PER_GPU=$((($4 + $2 - 1) / $2)) \
    CUDA_VISIBLE_DEVICES=$(seq -s , "$1" $(($1 + $2 - 1))) \
    run 570 "tests_$3" python3 -m pytest -q -p no:cacheprovider --gpu-group "$group" \
    --junitxml "$out/tests_$3_${num_gpus}x${model}_$month.xml" tests/python &
  pids+=($!)
}

wait_for_all() {
  local pid
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  pids=()
}

# test_groups GROUP...: in this order, as many at once as there are GPUs for.
test_groups() {
  local group size num first=0 pids=()
  for group in "$@"; do
    size="${group%[ab]}"
    [ "$group" = sm80 ] && size=1
    num=$((size < num_gpus ? size : num_gpus))
    [ $((first + num)) -gt "$num_gpus" ] && wait_for_all && first=0
    pytest_on "$first" "$num" "$group" "$size"
    first=$((first + num))
  done
  wait_for_all
  sed -i "s|$PWD/||g" "$out"/tests_*.xml # a skipped test names its file
}

stage_attention() {
  run 300 attention python3 benchmarks/attention.py --full --out "$(name attention 1)" || failed=1
  run 300 attention_shapes python3 benchmarks/attention_shapes.py \
    --out "$(name attention_shapes 1)" || failed=1
}

stage_ring() {
  local ring="benchmarks/ring.py --layouts zigzag" lengths=8192,16384,32768,65536
  # shellcheck disable=SC2086
  {
    ranks "$num_gpus" 400 ring $ring --transports symmetric,nccl --launches \
      --seq-lens $lengths --rounds 50 --out "$(name ring "$num_gpus")"
    ranks "$num_gpus" 200 ring_dense $ring --transports symmetric --dense --launches \
      --seq-lens 8192,16384,32768 --rounds 50 --out "$(name ring_dense "$num_gpus")"
    ranks "$num_gpus" 200 ring_mha $ring --transports symmetric --kv-heads 32 --launches \
      --seq-lens 16384,32768 --rounds 50 --out "$(name ring_mha "$num_gpus")"
    if [ "$num_gpus" -eq 4 ]; then
      ranks 4 200 ring_uneven $ring --transports symmetric --shares 3:1:2:2 \
        --seq-lens 16384,32768 --rounds 50 --out "$(name ring_uneven 4)"
    fi
    ranks "$num_gpus" 60 timeline benchmarks/timeline.py --out "$(name timeline "$num_gpus")"
    local num
    for ((num = num_gpus - 1; num >= 2; num--)); do
      ranks "$num" 200 "ring_$num" $ring --transports symmetric --launches \
        --seq-lens 8192,16384,32768 --rounds 50 --out "$(name ring "$num")"
    done
  }
}

stage_long() {
  ranks "$num_gpus" 300 ring_long benchmarks/ring.py --layouts zigzag --transports symmetric \
    --seq-lens 131072 --rounds 50 --out "$(name ring_long "$num_gpus")"
}

stage_transport() {
  ranks "$num_gpus" 120 transport benchmarks/transport.py \
    --transports process_group,nccl,symmetric --out "$(name transport "$num_gpus")"
}

stage_decode() {
  local decode="benchmarks/decode.py --contexts 65536 --eager --bandwidth 4200"
  # shellcheck disable=SC2086
  {
    run 120 decode_1 python3 $decode --shapes 8b,demo --out "$(name decode 1)" || failed=1
    [ "$num_gpus" -gt 1 ] || return
    ranks "$num_gpus" 120 decode $decode --shapes 8b --out "$(name decode "$num_gpus")"
  }
}

stage_models() {
  local drop_in="benchmarks/drop_in.py --rounds 3 --warmup 0" # 80 GB do not hold all three at 64K
  # shellcheck disable=SC2086
  {
    ranks "$num_gpus" 300 drop_in $drop_in --libraries own,transformers \
      --out "$(name drop_in "$num_gpus")"
    ranks "$num_gpus" 200 drop_in_fms $drop_in --libraries fms --out "$(name drop_in_fms "$num_gpus")"
  }
  ranks "$num_gpus" 120 diffusers benchmarks/diffusers_ring.py --heads 40 \
    --grids 32x32x32,21x45x80 --rounds 5 --out "$(name diffusers "$num_gpus")"
}

stage_llama() {
  ranks "$num_gpus" 400 llama benchmarks/llama.py --out "$(name llama "$num_gpus")"
}

stage_turns() {
  ranks "$num_gpus" 300 next_turn benchmarks/next_turn.py --rounds 5 --out "$(name next_turn "$num_gpus")"
  ranks "$num_gpus" 200 chunked_prefill benchmarks/chunked_prefill.py --rounds 3 \
    --out "$(name chunked_prefill "$num_gpus")"
}

stage_scaling() {
  ranks "$num_gpus" 200 scaling benchmarks/scaling.py --out "$(name scaling "$num_gpus")"
}

stage_training() {
  run 300 gradients python3 benchmarks/gradients.py --out "$(name gradients 1)" || failed=1
  ranks "$num_gpus" 400 gradients_ring benchmarks/gradients.py --transports symmetric,nccl \
    --packed-lens 131072 --rounds 7 --out "$(name gradients "$num_gpus")"
  local step="benchmarks/training_step.py --layers 8" # 80 GB hold them at 256K on two
  # shellcheck disable=SC2086
  {
    ranks "$num_gpus" 500 training_step $step --out "$(name training_step "$num_gpus")"
    if [ "$num_gpus" -eq 2 ]; then
      run 200 training_step_uneven python3 $step --seq-lens 65536 --ways ring --percentages 100,50 \
        --partitions even,auto --out "$(name training_step_uneven 2)" || failed=1
      run 200 masks_uneven python3 benchmarks/masks.py --percentages 100,50 --seq-lens 65536 \
        --out "$(name masks_uneven 2)" || failed=1
    fi
  }
}

chosen=()
for stage in "${stages[@]}"; do
  if [ "$stage" = tests ]; then
    chosen+=("${groups[@]}")
  elif [[ " ${groups[*]/#/tests_} " == *" $stage "* ]]; then
    chosen+=("${stage#tests_}")
  elif ! declare -F "stage_$stage" >/dev/null; then
    echo "gpu_results: stage must be tests, ${groups[*]/#/tests_}, attention, ring, long, transport," \
      "decode, models, llama, turns, scaling or training, got $stage" >&2
    exit 2
  fi
done
[ ${#chosen[@]} -gt 0 ] && test_groups "${chosen[@]}"
for stage in "${stages[@]}"; do
  [[ "$stage" == tests* ]] || "stage_$stage"
done
exit $failed
