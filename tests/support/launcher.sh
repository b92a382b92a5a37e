#!/usr/bin/env bash
# Stands in for srun and mpiexec in tests: runs a command so many times on this machine, each with its rank, passes
# TERM on to all, ends all when one fails, and ends when all have. Options are the ones that the job scripts give.
set -u
count=1
while [ $# -gt 0 ]; do
    case $1 in
    --ntasks=*) count=${1#*=} ;;
    -n) count=$2 && shift ;;
    --ppn) shift ;;
    -*) ;;
    *) break ;;
    esac
    shift
done
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
for ((rank = 0; rank < count; rank++)); do
    case ${0##*/} in
    srun) SLURM_PROCID=$rank "$@" & ;;
    mpiexec) PALS_RANKID=$rank "$@" & ;;
    esac
    pids+=($!)
done
status=0
for _ in "${pids[@]}"; do
    wait -n "${pids[@]}" || status=$?
    [ "$status" = 0 ] || kill -TERM "${pids[@]}" 2>/dev/null
done
while [ -n "$(jobs -rp)" ]; do wait; done
exit "$status"
