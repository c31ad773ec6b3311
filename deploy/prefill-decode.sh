#!/usr/bin/env bash
# Prefill and decode apart, on one host: a server that computes prompts, and servers that answer over its rows, behind vllm-router.
#     deploy/prefill-decode.sh ./model cuda:0 30GiB "cuda:0 cuda:1" 20GiB --max-tokens 32768
# MODEL, DEVICE and memory of the prefill server, DEVICES and memory of each decode server, options of vmmkv serve for all of them.
# The router listens at $HOST:$PORT (127.0.0.1:8000), the servers at 127.0.0.1 on the ports behind it.
set -euo pipefail
usage="usage: deploy/prefill-decode.sh MODEL DEVICE BUDGET DEVICE BUDGET: of prefill, then of decode"
model=${1:?$usage} prefill=${2:?$usage} prefill_budget=${3:?$usage} decode=${4:?$usage} decode_budget=${5:?$usage} port=${PORT:-8000}
shift 5

folder=$(mktemp -d) holder='' servers=()
end() { # the holder last, which a terminal's Ctrl-C does not reach
    kill "${servers[@]}" 2>/dev/null || true
    for server in "${servers[@]}"; do wait "$server" || true; done
    kill $holder 2>/dev/null || true
    wait
    rm -r "$folder"
}
trap end EXIT
trap 'exit 0' INT TERM

setsid vmmkv hold --socket "$folder/kv.sock" --budget "$prefill_budget" --device "$prefill" &
holder=$!
until [ -S "$folder/kv.sock" ]; do kill -0 $holder; sleep 0.1; done

vmmkv serve --model "$model" --device "$prefill" --port $((port + 1)) --kv-holder "$folder/kv.sock" "$@" &
servers+=($!)
workers=(--prefill "http://127.0.0.1:$((port + 1))") i=1
for device in $decode; do
    i=$((i + 1))
    vmmkv serve --model "$model" --device "$device" --port $((port + i)) \
        --kv-lender "$folder/kv.sock" --kv-budget "$decode_budget" "$@" &
    servers+=($!)
    workers+=(--decode "http://127.0.0.1:$((port + i))")
done

# The router sends requests to servers that still load too: wait for all.
for each in $(seq $((port + 1)) $((port + i))); do
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$each/health"; do
        [ "$(jobs -pr | wc -l)" = $((i + 1)) ] || { echo "A server has ended; its reason is above." >&2; exit 1; }
        sleep 1
    done
done

vllm-router --host "${HOST:-127.0.0.1}" --port "$port" --prometheus-port $((port + i + 1)) \
    --vllm-pd-disaggregation --policy "${POLICY:-round_robin}" "${workers[@]}" \
    --worker-startup-check-interval 1 --health-check-interval-secs 5 &
servers+=($!)
wait $!
