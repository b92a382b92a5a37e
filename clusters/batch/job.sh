# What slurm.sh and pbs.sh share: Ray on every node, the repository, the program, and an end that leaves nothing behind.
#
# They set NODES, how many there are, and BATCH, this folder, and define each_node, which runs a command once per node.
# Settings, from the environment:
#   TENSORVINE_VENV     environment with TensorVine, a folder that every node reaches; else that of the wheel, else the
#                       one whose `ray` and `tensorvine` the job finds
#   TENSORVINE_WHEEL    a wheel of TensorVine, constraints.txt beside it: install.sh makes an environment of it where
#                       there is none yet; it says what else may be set. Run it before where nodes reach no package index
#   TENSORVINE_EXTRAS   what is installed with the wheel and Ray, such as torch,search
#   TENSORVINE_PATH     where the history is kept; every node must reach it
#   TENSORVINE_CODEC    how tensors are stored there
#   TENSORVINE_HEAD     address of this node on the network that the nodes shall use; else its first address
#   TENSORVINE_PORT     of Ray's control service on it
#   TENSORVINE_CLIENT_PORT  of its server for Ray's client, 10001 unless set: of several jobs on a node each needs another
#   TENSORVINE_START_S  seconds that the head may take to come up

export TENSORVINE_HEAD=${TENSORVINE_HEAD:-$(hostname -I | cut -d' ' -f1)}
export TENSORVINE_PORT=${TENSORVINE_PORT:-6379}
export TENSORVINE_START_S=${TENSORVINE_START_S:-120}
export RAY_ADDRESS=$TENSORVINE_HEAD:$TENSORVINE_PORT
# A token of this job's own: other users of the machine cannot join its Ray. It is not encrypted on its way, nor is what
# is saved: TENSORVINE_PORT, 10001-19999 and the ports that the system gives (32768-60999) of the nodes must be closed to
# all but the nodes of the job, or to all outside of the cluster's own network.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

launcher= program= is_up=

fail() {
    echo "job.sh: $*" >&2
    exit 1
}

await_head() {
    local deadline=$((SECONDS + TENSORVINE_START_S))
    until (: <"/dev/tcp/$TENSORVINE_HEAD/$TENSORVINE_PORT") 2>/dev/null; do
        kill -0 "$launcher" 2>/dev/null || fail "expected Ray to stay on $NODES nodes; its launcher ended"
        [ "$SECONDS" -lt "$deadline" ] || fail "expected a head at $RAY_ADDRESS within $TENSORVINE_START_S s; found none"
        sleep 1
    done
}

# Tell a process to end, and make it end after some seconds.
finish() {
    local pid=$1 seconds=$2
    [ -n "$pid" ] && kill -TERM "$pid" 2>/dev/null || return 0
    local deadline=$((SECONDS + seconds))
    while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do sleep 0.2; done
    kill -KILL "$pid" 2>/dev/null || true
}

# Run a command for as long as Ray is there. Not in the foreground: a signal is answered while it runs.
on_ray() {
    "$@" &
    program=$!
    local status=0
    wait -n "$program" "$launcher" || status=$?
    kill -0 "$launcher" 2>/dev/null || fail "expected Ray to stay while $1 runs; its launcher ended"
    program=
    [ "$status" = 0 ] || exit "$status"
}

end() {
    local status=$?
    trap - EXIT
    trap '' INT TERM
    finish "$program" 30
    if [ -n "$is_up" ] && ! timeout 900 tensorvine down; then
        [ "$status" != 0 ] || status=1
    fi
    finish "$launcher" 60
    exit "$status"
}

# Find the environment of all nodes; that of a wheel is made where there is none. The launcher hands PATH on.
choose_environment() {
    if [ -z "${TENSORVINE_VENV:-}" ] && [ -n "${TENSORVINE_WHEEL:-}" ]; then
        local told=
        trap 'told=yes' INT TERM # until it is known what is to be ended
        exec 3< <(exec bash "$BATCH/install.sh" "$TENSORVINE_WHEEL" "ray${TENSORVINE_EXTRAS:+,$TENSORVINE_EXTRAS}")
        program=$!
        trap 'exit 130' INT
        trap 'exit 143' TERM
        [ -z "$told" ] || exit 143
        read -r TENSORVINE_VENV <&3 || fail "expected an environment of $TENSORVINE_WHEEL; install.sh made none"
        exec 3<&-
        program=
    fi
    [ -z "${TENSORVINE_VENV:-}" ] || { [ -x "$TENSORVINE_VENV/bin/ray" ] && [ -x "$TENSORVINE_VENV/bin/tensorvine" ]; } ||
        fail "expected ray and tensorvine in $TENSORVINE_VENV/bin; found not both"
    [ -z "${TENSORVINE_VENV:-}" ] || export VIRTUAL_ENV=$TENSORVINE_VENV PATH=$TENSORVINE_VENV/bin:$PATH
    command -v ray >/dev/null && command -v tensorvine >/dev/null ||
        fail "expected ray and tensorvine in PATH: set TENSORVINE_WHEEL or TENSORVINE_VENV"
}

run_job() {
    [ $# -gt 0 ] || fail "expected the program to run; found none"
    trap end EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    choose_environment
    each_node bash "$BATCH/node.sh" &
    launcher=$!
    await_head
    on_ray tensorvine up --wait-nodes "$NODES" --path "${TENSORVINE_PATH:-$HOME/tensorvine-models}" \
        --codec "${TENSORVINE_CODEC:-shuffle|zstd(3)}"
    is_up=yes
    on_ray "$@"
}
