#!/bin/sh
# Build or complete the virtual environment that `make` works in; does nothing when it is ready.
#
#   requirements/install.sh VENV
#
# The stamp VENV/ready holds a hash of everything the environment was made from. VENV/building
# exists only while packages are being installed: finding it means that a run was interrupted,
# and such an environment is built again from nothing.
set -eu
cd "$(dirname "$0")/.."
venv=$1
sglang=0.5.17

fail() {
    echo "setup: $1" >&2
    exit 1
}

find_python() {
    for name in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
            2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 or 3.12 is needed and was not found; install it, or name it with make PYTHON=/path/to/python."
}

retry() {
    for attempt in 1 2 3; do
        "$@" && return 0
        [ "$attempt" = 3 ] || { echo "setup: attempt $attempt failed, trying again" >&2; sleep 5; }
    done
    return 1
}

python=$(find_python)
wanted=$(cat requirements/cpu.txt requirements/test.txt pyproject.toml "$0" | cksum)-$("$python" -V)
[ "$(cat "$venv/ready" 2>/dev/null)" = "$wanted" ] && exit 0

if [ -e "$venv" ] && { [ -e "$venv/building" ] || ! "$venv/bin/python" -m pip -V >/dev/null 2>&1; }; then
    echo "setup: $venv is half-built, building it again"
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    echo "setup: creating $venv with $python"
    "$python" -m venv "$venv" ||
        { rm -rf "$venv"; fail "$python cannot create virtual environments; on Debian install python3-venv."; }
fi

pip="$venv/bin/python -m pip --disable-pip-version-check install -qq --retries 5"
offline="the package index cannot be reached or lacks a pinned package (see above); check the network, then run make again."
touch "$venv/building"
echo "setup: installing pinned packages (about 2 GB, several minutes the first time)"
# Two packages come without their dependencies. SGLang's own pins ask for CUDA-only wheels; and a
# CUDA build of torch, where pip finds no CPU one, asks for another Triton than the kernels use.
apart="triton==[0-9.]*"
grep -v "^$apart" requirements/cpu.txt >"$venv/together.txt"
# shellcheck disable=SC2086
retry $pip -r "$venv/together.txt" -r requirements/test.txt || fail "$offline"
# shellcheck disable=SC2046
retry $pip --no-deps "sglang==$sglang" $(grep -o "^$apart" requirements/cpu.txt) || fail "$offline"
$pip --no-deps --no-build-isolation --editable . || fail "this package could not be installed (see above)."
rm "$venv/building"
printf '%s' "$wanted" >"$venv/ready"
echo "setup: done"
