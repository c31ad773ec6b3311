#!/usr/bin/env bash
# One replica for each device behind vllm-router, which sends a prompt to the replica that has most of it cached.
#     deploy/vllm-router.sh smollm2-135m "cuda:0 cuda:1" --kv-budget 60GiB      MODEL, DEVICES, options of vmmkv serve
# The router listens at $HOST:$PORT (127.0.0.1:8000), the replicas at 127.0.0.1 on the ports behind it. Their KV events, which hold the
# prompts, come from ports 100 and 200 further, of all networks: close these to others.
set -euo pipefail
model=$1 devices=$2 port=${PORT:-8000} policy=${POLICY:-kv_aware}
shift 2

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM

workers=() sources=() i=0
for device in $devices; do
    i=$((i + 1))
    url=http://127.0.0.1:$((port + i)) events=$((port + 100 + i)) replay=$((port + 200 + i))
    vmmkv serve --model "$model" --device "$device" --port $((port + i)) \
        --kv-events "tcp://*:$events" --kv-events-replay "tcp://*:$replay" "$@" &
    workers+=("$url")
    sources+=(--kv-event-source "$url=tcp://127.0.0.1:$events" --kv-event-replay-source "$url=tcp://127.0.0.1:$replay")
done

# A conversation that names itself in X-Session-ID stays with its replica, until it is idle for an hour.
[ "$policy" = kv_aware ] && sources+=(--kv-event-model "${model##*/}" --kv-aware-session-affinity-ttl-secs 3600) || sources=()

# The router starts when one replica is healthy, and sends requests to the others too: wait for all.
for url in "${workers[@]}"; do
    until curl --silent --fail --output /dev/null "$url/health"; do
        [ "$(jobs -pr | wc -l)" = "$i" ] || { echo "A replica has ended; its reason is above." >&2; exit 1; }
        sleep 1
    done
done

# A replica whose health is asked for every few seconds is left out soon after it has gone.
vllm-router --host "${HOST:-127.0.0.1}" --port "$port" --prometheus-port $((port + i + 1)) \
    --policy "$policy" --worker-urls "${workers[@]}" "${sources[@]}" \
    --worker-startup-check-interval 1 --health-check-interval-secs 5 &
wait $!
