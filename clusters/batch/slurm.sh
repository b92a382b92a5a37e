#!/usr/bin/env bash
#SBATCH --job-name=tensorvine
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=B:TERM@300
#
# Slurm. From the folder that holds this script, job.sh and node.sh:
#   TENSORVINE_PATH=/shared/models sbatch --nodes=8 slurm.sh python my_search.py
# The program finds Ray by RAY_ADDRESS and the repository by Repository.connect(). Five minutes before the end of its
# time the job is told to end: the program gets TERM, and what is saved goes to the path.
set -euo pipefail
BATCH=${TENSORVINE_BATCH:-$SLURM_SUBMIT_DIR}
NODES=$SLURM_JOB_NUM_NODES

each_node() {
    exec srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --overlap "$@"
}

. "$BATCH/job.sh"
run_job "$@"
