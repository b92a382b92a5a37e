#!/usr/bin/env bash
#SBATCH --job-name=tensorvine
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --signal=B:TERM@300
#
# Slurm. From the folder that holds this script, install.sh, job.sh and node.sh, with a wheel of scripts/wheel:
#   export TENSORVINE_WHEEL=/shared/dist/tensorvine-0.1.0-py3-none-any.whl
#   TENSORVINE_PATH=/shared/models sbatch --nodes=8 slurm.sh python my_search.py
# The first job makes an environment of the wheel, in your home. Without a wheel the job runs with the environment from
# which it is submitted.
# The program finds Ray by RAY_ADDRESS and the repository by Repository.connect(). Five minutes before the end of its
# time the job is told to end: the program gets TERM, and what is saved goes to the path.
set -euo pipefail
BATCH=${TENSORVINE_BATCH:-$SLURM_SUBMIT_DIR}
NODES=$SLURM_JOB_NUM_NODES

# What this job takes unless the environment says otherwise; job.sh says more.
export TENSORVINE_WHEEL="${TENSORVINE_WHEEL:-}"
export TENSORVINE_EXTRAS="${TENSORVINE_EXTRAS-tensorflow,torch,search}"
export TENSORVINE_PATH="${TENSORVINE_PATH:-$HOME/tensorvine-models}"
export TENSORVINE_CODEC="${TENSORVINE_CODEC:-shuffle|zstd(3)}"

each_node() {
    exec srun --nodes="$NODES" --ntasks="$NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --overlap "$@"
}

. "$BATCH/job.sh"
run_job "$@"
