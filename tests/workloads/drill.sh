#!/usr/bin/env bash
# Record drill sessions on a host with two GPUs: one known cause each, planted in a small server or beside it.
# As root; needs torch with CUDA, triton, aiohttp, prometheus-client.
#   tests/workloads/drill.sh OUT_FOLDER CAUSE...     causes: see the case below
set -euo pipefail
out="$1" here="$(dirname "$0")" work="$(mktemp -d)"
shift
taskset -c 2,3 python3 "$here/small_server.py" --port 8000 > "$out/server.log" 2>&1 &
python3 "$here/drill_load.py" relay 8001 8000 --slow-file "$work/slow" > /dev/null 2>&1 &
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
until curl -s -m 2 http://127.0.0.1:8000/metrics > /dev/null; do sleep 0.5; done
load() { python3 "$here/drill_load.py" "$@"; }
plant() { curl -s -d "{\"cause\": \"$1\", \"seconds\": $2, \"gib\": ${3:-0}}" http://127.0.0.1:8000/plant; echo " $1"; }
# name, seconds before the cause, seconds with it, options of the requests
session() {
  name="$1" before="$2" with="$3"
  shift 3
  python3 -m opusmon record -o "$out/$name.opusmon" --no-discover --engine http://127.0.0.1:8000 \
    --proxy http://127.0.0.1:8001 --duration "$((before + with + 4))s" > "$out/$name.log" 2>&1 &
  recorder=$!
  until (exec 3<> /dev/tcp/127.0.0.1/8788) 2> /dev/null; do sleep 0.2; done
  load requests http://127.0.0.1:8788 --seconds "$((before + with))" "$@" > "$out/$name.jsonl" &
  sleep "$before"
}
finish() { wait "$recorder" || true; sleep 1; }
for cause in "$@"; do
  case "$cause" in
    quiet) session quiet 30 20 ;;
    bandwidth_hog) session "$cause" 16 28; load copy --seconds 26 >> "$out/$cause.jsonl" & ;;
    peer_traffic) session "$cause" 16 28; load peer --seconds 26 >> "$out/$cause.jsonl" & ;;
    busy_loop_beside) session "$cause" 16 28; load spin --cpus 2,3 --count 4 --seconds 26 >> "$out/$cause.jsonl" & ;;
    sync_stall) session "$cause" 16 28; plant sync_stall 26 >> "$out/$cause.jsonl" ;;
    capture_broken_by_a_thread) session "$cause" 25 20; plant capture_abort 18 >> "$out/$cause.jsonl" ;;
    compiling_while_serving) session "$cause" 25 25; plant jit 23 >> "$out/$cause.jsonl" ;;
    memory_grows) plant fill 5 108; sleep 2; session "$cause" 4 124; plant memory_growth 140 >> "$out/$cause.jsonl" ;;
    long_inputs) session "$cause" 48 40 --long-after 48 ;;
    slow_network) session "$cause" 12 62; touch "$work/slow" ;;
    *) echo "unknown cause $cause" >&2; exit 2 ;;
  esac
  finish
  rm -f "$work/slow"
done
