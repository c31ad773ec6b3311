#!/usr/bin/env bash
# One replica for each device behind vllm-router, which sends a prompt to the replica that has most of it cached.
#     deploy/vllm-router.sh smollm2-135m "cuda:0 cuda:1" --kv-budget 60GiB      MODEL, DEVICES, options of vmmkv serve
# The router listens at $HOST:$PORT (127.0.0.1:8000), the replicas at 127.0.0.1 on the ports behind it, with their KV events, which hold the
# prompts, on any that are free.
set -euo pipefail
usage="usage: deploy/vllm-router.sh MODEL \"DEVICE ...\" [options of vmmkv serve]"
model=${1:?$usage} devices=${2:?$usage} port=${PORT:-8000} policy=${POLICY:-kv_aware}
shift 2

trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 0' INT TERM

workers=() i=0
for device in $devices; do
    i=$((i + 1))
    vmmkv serve --model "$model" --device "$device" --port $((port + i)) \
        --kv-events "tcp://127.0.0.1:*" --kv-events-replay "tcp://127.0.0.1:*" "$@" &
    workers+=("http://127.0.0.1:$((port + i))")
done

# The router starts when one replica is healthy, and sends requests to the others too: wait for all.
for url in "${workers[@]}"; do
    until curl --silent --fail --output /dev/null "$url/health"; do
        [ "$(jobs -pr | wc -l)" = "$i" ] || { echo "A replica has ended; its reason is above." >&2; exit 1; }
        sleep 1
    done
done

sources=()
if [ "$policy" = kv_aware ]; then
    for url in "${workers[@]}"; do
        found=$(curl --silent --show-error --fail "$url/kv_event_sources" | python -c 'if True:
            import json, sys
            source = json.load(sys.stdin)["0"]
            print(source["endpoint"], source["replay_endpoint"])' 2>/dev/null) || {
            echo "$url/kv_event_sources does not say where KV events are (with --api-key it refuses): set POLICY=cache_aware." >&2
            exit 1
        }
        read -r events replay <<<"$found"
        sources+=(--kv-event-source "$url=$events" --kv-event-replay-source "$url=$replay")
    done
    # A conversation that names itself in X-Session-ID stays with its replica, until it is idle for an hour.
    sources+=(--kv-event-model "${model##*/}" --kv-aware-session-affinity-ttl-secs 3600)
fi

# A replica whose health is asked for every few seconds is left out soon after it has gone.
vllm-router --host "${HOST:-127.0.0.1}" --port "$port" --prometheus-port $((port + i + 1)) \
    --policy "$policy" --worker-urls "${workers[@]}" "${sources[@]}" \
    --worker-startup-check-interval 1 --health-check-interval-secs 5 &
wait $!
