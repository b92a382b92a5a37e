#!/usr/bin/env bash
# Started once on each node of a job: rank 0 is the head, the others join it. Ends with its Ray when it gets TERM.
set -euo pipefail
rank=${SLURM_PROCID:-${PALS_RANKID:-${PMI_RANK:-${PMIX_RANK:-${OMPI_COMM_WORLD_RANK:-}}}}}
if [ -z "$rank" ]; then
    echo "node.sh on $(hostname): expected a rank from srun or mpiexec; found none" >&2
    exit 2
fi
if [ -z "${RAY_AUTH_TOKEN:-}" ]; then
    echo "node.sh on $(hostname): expected the job's RAY_AUTH_TOKEN; found none: the launcher must pass the environment on" >&2
    exit 2
fi
export RAY_AUTH_MODE=token
unset RAY_ADDRESS # it is for the programs of the job
ulimit -n "$(ulimit -H -n)"
export RAY_memory_monitor_refresh_ms=0 # it would end shards before tasks
# Ray sees the memory of the machine or of a container, and not what a job has of a node.
sizes=$(tensorvine ray-sizes) # two options, or an error: then no Ray is started

if [ "$rank" = 0 ]; then
    exec ray start --head --block $sizes --node-ip-address="$TENSORVINE_HEAD" --port="$TENSORVINE_PORT" \
        --ray-client-server-port="${TENSORVINE_CLIENT_PORT:-10001}" --include-dashboard=false --disable-usage-stats
fi
deadline=$((SECONDS + TENSORVINE_START_S))
until (: <"/dev/tcp/$TENSORVINE_HEAD/$TENSORVINE_PORT") 2>/dev/null; do
    if [ "$SECONDS" -ge "$deadline" ]; then
        echo "node.sh on $(hostname): expected the head at $TENSORVINE_HEAD:$TENSORVINE_PORT within" \
            "$TENSORVINE_START_S s; nobody answers there" >&2
        exit 1
    fi
    sleep 1
done
exec ray start --block $sizes --address="$TENSORVINE_HEAD:$TENSORVINE_PORT"
