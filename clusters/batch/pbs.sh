#!/usr/bin/env bash
#PBS -N tensorvine
#PBS -l select=4
#PBS -l place=scatter:excl
#PBS -l walltime=02:00:00
#PBS -j oe
#
# PBS, as on Polaris (there also: -q prod -A PROJECT -l filesystems=home:eagle). From the folder that holds this script,
# job.sh and node.sh:
#   qsub -v PROGRAM='python my_search.py',TENSORVINE_PATH=/eagle/models -l select=8 pbs.sh
# The program finds Ray by RAY_ADDRESS and the repository by Repository.connect(). When PBS ends the job, it and the
# program get TERM, and what is saved goes to the path as far as PBS gives it the time.
set -euo pipefail
BATCH=${TENSORVINE_BATCH:-$PBS_O_WORKDIR}
NODES=$(sort -u "$PBS_NODEFILE" | wc -l)

each_node() {
    exec mpiexec -n "$NODES" --ppn 1 "$@"
}

. "$BATCH/job.sh"
cd "$PBS_O_WORKDIR"
run_job bash -c "exec ${PROGRAM:?expected -v PROGRAM=COMMAND}"
