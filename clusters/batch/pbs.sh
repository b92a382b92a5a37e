#!/usr/bin/env bash
#PBS -N tensorvine
#PBS -l select=4
#PBS -l place=scatter:excl
#PBS -l walltime=02:00:00
#PBS -j oe
#
# PBS, as on Polaris (there also: -q prod -A PROJECT -l filesystems=home:eagle). From the folder that holds this script,
# install.sh, job.sh and node.sh, with a wheel of scripts/wheel:
#   wheel=/eagle/dist/tensorvine-0.1.0-py3-none-any.whl
#   qsub -v PROGRAM='python my_search.py',TENSORVINE_WHEEL=$wheel,TENSORVINE_PATH=/eagle/models -l select=8 pbs.sh
# The first job makes an environment of the wheel, in your home. Without a wheel name one by TENSORVINE_VENV.
# The program finds Ray by RAY_ADDRESS and the repository by Repository.connect(). When PBS ends the job, it and the
# program get TERM, and what is saved goes to the path as far as PBS gives it the time.
set -euo pipefail
BATCH=${TENSORVINE_BATCH:-$PBS_O_WORKDIR}
NODES=$(sort -u "$PBS_NODEFILE" | wc -l)

# What this job takes unless the environment says otherwise; job.sh says more.
export TENSORVINE_WHEEL="${TENSORVINE_WHEEL:-}"
export TENSORVINE_EXTRAS="${TENSORVINE_EXTRAS-tensorflow,torch,search}"
export TENSORVINE_PATH="${TENSORVINE_PATH:-$HOME/tensorvine-models}"
export TENSORVINE_CODEC="${TENSORVINE_CODEC:-shuffle|zstd(3)}"

each_node() {
    exec mpiexec -n "$NODES" --ppn 1 "$@"
}

. "$BATCH/job.sh"
cd "$PBS_O_WORKDIR"
run_job bash -c "exec ${PROGRAM:?expected -v PROGRAM=COMMAND}"
