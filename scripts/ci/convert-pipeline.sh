#!/usr/bin/env bash
# A checkpoint pipeline: plan, fit, convert, verify, publish. Copy it into your repository; it needs bash 4.4 and quantkit.
#
#   convert-pipeline.sh SOURCE OUTPUT
#
# SOURCE is a directory, a recipe name or a hub id (org/name[@revision]); OUTPUT a directory to create on a disk that
# outlives the job. Where a try left off, a retry with the same two arguments goes on: finished shards lie in
# OUTPUT.partial, and an OUTPUT that is complete is verified (and published) again, not made again.
#
# Environment, all optional:
#   QUANTKIT_TP            GPUs that share every layer of the server          [memory-plan's default: 8]
#   QUANTKIT_GPU           their name: h100, h200, b200, mi355x, ...          [h200]
#   QUANTKIT_ENGINE        sglang or vllm                                     [sglang]
#   QUANTKIT_CONTEXT       tokens of a request, which must fit                [the model's, 32768 at most]
#   QUANTKIT_CONCURRENCY   requests of that length at once, which must fit    [1]
#   QUANTKIT_JOBS          worker threads                                     [the cores available]
#   QUANTKIT_DEVICE        what quantizes: cpu, cuda, cuda:0,cuda:1, cuda:all [cpu]
#   QUANTKIT_SPOOL_GIB     disk for shards that come from the hub             [40]
#   QUANTKIT_SUMMARY       Markdown file that every step appends to           [$GITHUB_STEP_SUMMARY, where it is set]
#   QUANTKIT_SMOKE_SHARDS  smoke run: this many shards only; such an output is marked and never published
#   QUANTKIT_PUSH_TO       hub repository (org/name) that a verified output is uploaded to
#
# Every step says one line on stderr when it begins. The exit code is that of the step that failed: 2 usage, 3 source,
# 4 verification, 5 no room on the disk, in memory or on the GPUs; 130 and 143 when stopped by a signal.
set -euo pipefail

say() { printf 'pipeline: %s\n' "$*" >&2; }

refuse() {
  say "$*"
  exit 2
}

# Signals of the CI system go on to the step, which keeps what it has finished; bash alone would wait for its end.
child='' signalled=''
on_signal() {
  signalled=$2
  if [ -n "$child" ]; then kill -s "$1" "$child" 2>/dev/null || true; fi
}
trap 'on_signal TERM 143' TERM
trap 'on_signal INT 130' INT

step() {
  local title=$1 code=0 again=0
  shift
  if [ -n "$signalled" ]; then exit "$signalled"; fi
  say "$title"
  "$@" &
  child=$!
  wait "$child" || code=$?
  while [ -n "$signalled" ] && kill -0 "$child" 2>/dev/null; do
    again=0
    wait "$child" || again=$?
    code=$again
  done
  child=''
  if [ "$code" -ne 0 ]; then
    say "failed with exit code $code: $title"
    exit "$code"
  fi
  if [ -n "$signalled" ]; then exit "$signalled"; fi
}

[ $# -eq 2 ] || refuse 'usage: convert-pipeline.sh SOURCE OUTPUT'
source=$1 output=${2%/}
[ -n "$source" ] && [ -n "$output" ] || refuse 'SOURCE and OUTPUT must not be empty'
case $source in -*) refuse "SOURCE $source reads like an option: write ./$source" ;; esac
case $output in -*) output=./$output ;; esac
smoke=${QUANTKIT_SMOKE_SHARDS:-} push_to=${QUANTKIT_PUSH_TO:-} summary=${QUANTKIT_SUMMARY:-${GITHUB_STEP_SUMMARY:-}}
if [ -n "$smoke" ] && ! [[ $smoke =~ ^[1-9][0-9]*$ ]]; then
  refuse "QUANTKIT_SMOKE_SHARDS is $smoke: give a number of shards, from 1"
fi
if [ -n "$smoke" ] && [ -n "$push_to" ]; then
  refuse 'a smoke run is never published: leave QUANTKIT_PUSH_TO or QUANTKIT_SMOKE_SHARDS out'
fi

common=() jobs=() limits=() serving=() spool=() device=()
if [ -n "$summary" ]; then common+=(--summary "$summary"); fi
if [ -n "${QUANTKIT_JOBS:-}" ]; then jobs+=(--jobs "$QUANTKIT_JOBS"); fi
if [ -n "${QUANTKIT_DEVICE:-}" ]; then device+=(--device "$QUANTKIT_DEVICE"); fi
if [ -n "${QUANTKIT_SPOOL_GIB:-}" ]; then spool+=(--spool-gib "$QUANTKIT_SPOOL_GIB"); fi
if [ -n "$smoke" ]; then limits+=(--limit-shards "$smoke"); fi
if [ -n "${QUANTKIT_TP:-}" ]; then serving+=(--tp "$QUANTKIT_TP"); fi
if [ -n "${QUANTKIT_GPU:-}" ]; then serving+=(--gpu "$QUANTKIT_GPU"); fi
if [ -n "${QUANTKIT_ENGINE:-}" ]; then serving+=(--engine "$QUANTKIT_ENGINE"); fi
if [ -n "${QUANTKIT_CONTEXT:-}" ]; then
  serving+=(--context "$QUANTKIT_CONTEXT")
else
  serving+=(--context-at-most 32768) # a model made for a million tokens is rarely served with them
fi
if [ -n "${QUANTKIT_CONCURRENCY:-}" ]; then serving+=(--concurrency "$QUANTKIT_CONCURRENCY"); fi

# Of the whole checkpoint, by its headers alone. A smoke run needs less disk than that: convert itself looks there.
room=(-o "$output")
if [ -n "$smoke" ]; then room=(); fi
step "plan $source" quantkit plan "$source" --to int4 "${room[@]}" "${spool[@]}" "${jobs[@]}" "${common[@]}"

# Who asks, and whether they may write: better now than when all is made.
if [ -n "$push_to" ]; then
  step "ask the hub about $push_to" quantkit convert "$source" --to int4 --dry-run --push-to "$push_to" --json >/dev/null
fi

step "memory-plan of $source as INT4" quantkit memory-plan "$source" --to int4 "${serving[@]}" "${common[@]}"

# An output of this very command is left as it is; one of another source, recipe or smoke run is refused.
step "convert $source to $output" \
  quantkit convert "$source" --to int4 -o "$output" --accept-complete "${jobs[@]}" "${device[@]}" "${spool[@]}" \
  "${limits[@]}" "${common[@]}"

# Every value is compared where the source is a directory. A source on the hub would be downloaded once more for that:
# convert has checked every shard of it as it came, so here the output's hashes, tensors and config are looked at.
against=()
if [ -d "$source" ]; then against=(--source "$source"); fi
step "verify $output" quantkit verify "$output" "${against[@]}" "${jobs[@]}" "${common[@]}"

# The target engine: splits that it refuses, and what fits, from the headers of what was made.
if [ -z "$smoke" ]; then
  step "memory-plan of $output" quantkit memory-plan "$output" "${serving[@]}" "${common[@]}"
fi

# Given an output that is complete, convert only uploads.
if [ -n "$push_to" ]; then
  step "publish $output to $push_to" \
    quantkit convert "$source" --to int4 -o "$output" --push-to "$push_to" "${jobs[@]}" "${common[@]}"
fi
say "done: $output"
