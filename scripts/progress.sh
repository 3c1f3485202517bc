# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
#
# Sourced by scripts that run long commands.

ringattn_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ringattn_log_every=20 # seconds between two lines where standard error is not a terminal

# Prints "LABEL, 45 s (37 of 98 steps)" until PROCESS ends; ninja writes its steps to LOG. On a terminal
# each line replaces the last one.
ringattn_ticker() {  # ringattn_ticker LABEL LOG PROCESS
  local line seconds steps start=$SECONDS next=$ringattn_log_every
  while sleep 1 >/dev/null 2>&1 && kill -0 "$3" 2>/dev/null; do
    seconds=$((SECONDS - start))
    steps="$(grep -o '\[[0-9]*/[0-9]*\] ' "$2" | tail -n 1 | tr -d '[] ')"
    line="$1, $seconds s${steps:+ (${steps%/*} of ${steps#*/} steps)}"
    if [ -t 2 ]; then
      printf '\r\033[K%s' "$line" >&2
    elif [ "$seconds" -ge "$next" ]; then
      printf '%s\n' "$line" >&2
      next=$((seconds + ringattn_log_every))
    fi
  done
}

# Runs a command with its output in build/NAME.log. Prints on standard error that the command runs, since
# when, and how it ended.
ringattn_progress() {  # ringattn_progress NAME LABEL COMMAND...
  local label="$2" log="build/$1.log"
  shift 2
  mkdir -p "$ringattn_root/build"
  # In a subshell an interactive shell does not announce the ticker as a job.
  (
    status=0 start=$SECONDS
    : >"$ringattn_root/$log"
    if [ -t 2 ]; then printf '%s' "$label" >&2; else printf '%s\n' "$label" >&2; fi
    ringattn_ticker "$label" "$ringattn_root/$log" "$BASHPID" &
    ticker=$!
    trap 'kill "$ticker" 2>/dev/null' EXIT
    "$@" >"$ringattn_root/$log" 2>&1 || status=$?
    trap - EXIT
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    [ -t 2 ] && printf '\r\033[K' >&2
    if [ "$status" -eq 0 ]; then
      printf '%s: done in %s s\n' "$label" "$((SECONDS - start))" >&2
    else
      printf '%s: failed after %s s (%s)\n' "$label" "$((SECONDS - start))" "$log" >&2
    fi
    exit "$status"
  )
}

# As ringattn_progress; a failure shows the end of the log.
ringattn_progress_or_log() {
  ringattn_progress "$@" && return
  tail -n 60 "$ringattn_root/build/$1.log" >&2
  return 1
}
