#!/usr/bin/env bash
# Installs a wheel of TensorVine into an environment of its own, and prints the environment's folder:
#   bash install.sh WHEEL [EXTRAS]      such as: bash install.sh dist/tensorvine-0.1.0-py3-none-any.whl torch,search
#
# - Versions are those of constraints.txt beside the wheel; scripts/wheel makes both.
# - What goes in names the folder: the wheel, the constraints, the extras and Python. One that is there is taken as it
#   is and never changed, for programs run with it. Those of older wheels are yours to remove.
# - Of several that want it at once, on one machine or on a file system with locks, one makes it and the others wait.
# - What somebody who was killed has left of one is made anew.
# Settings, from the environment:
#   TENSORVINE_PYTHON     a Python, 3.11 or newer, with venv; else the first of python3.11, 3.12, 3.13 and python3
#   TENSORVINE_VENVS      folder of the environments, else ~/.tensorvine; every node of a batch job must reach it
#   TENSORVINE_INSTALL_S  seconds that another's installation may take, 1800 unless set
set -euo pipefail
unset PYTHONPATH PYTHONHOME # pip would take what lies there for installed

fail() {
    echo "install.sh on $(hostname): $*" >&2
    exit 1
}

# Run a command that ends with this script.
run() {
    "$@" >&2 &
    trap 'kill "$!" 2>/dev/null; exit 143' INT TERM
    wait "$!"
}

new_enough() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

wheel=${1:-} extras=${2:-}
[ -f "$wheel" ] || fail "expected a wheel of TensorVine; found ${wheel:-none}: scripts/wheel makes it"
wheel=$(cd "$(dirname "$wheel")" && pwd)/$(basename "$wheel")
constraints=$(dirname "$wheel")/constraints.txt
[ -f "$constraints" ] || fail "expected constraints.txt beside $wheel; found none: scripts/wheel makes both"
candidates=(python3.11 python3.12 python3.13 python3)
[ -z "${TENSORVINE_PYTHON:-}" ] || candidates=("$TENSORVINE_PYTHON")
for python in "${candidates[@]}"; do
    if new_enough "$python"; then break; fi
    python=
done
[ -n "$python" ] || fail "expected Python 3.11 or newer; found none in ${candidates[*]}: set TENSORVINE_PYTHON"

python=$("$python" -c 'import sys; print(sys.executable)')
version=$("$python" -c 'import platform, sys; print(platform.machine(), sys.version)')
key=$(cat "$wheel" "$constraints" - <<<"$extras $python $version" | sha256sum | cut -c1-12)
folder=${TENSORVINE_VENVS:-$HOME/.tensorvine}
mkdir -p "$folder"
venv=$(cd "$folder" && pwd)/$(basename "$wheel" | cut -d- -f1,2)-$key
stamp=$venv/.installed

if [ ! -f "$stamp" ]; then
    limit=${TENSORVINE_INSTALL_S:-1800}
    exec 9>"$venv.lock"
    flock --wait "$limit" 9 ||
        fail "expected the lock $venv.lock within $limit s; another has it, or its file system has no locks"
    if [ ! -f "$stamp" ]; then # another has made it meanwhile
        echo "install.sh on $(hostname): making $venv" >&2
        rm -rf "$venv"
        run "$python" -m venv "$venv"
        run "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" \
            "$wheel${extras:+[$extras]}"
        touch "$stamp"
    fi
fi
echo "$venv"
