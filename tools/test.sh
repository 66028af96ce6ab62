#!/usr/bin/env bash
# Set up, then lint, type check and test. Works from any directory.
#
#   bash tools/test.sh                       everything but the tests marked slow or gpu, or those that need root;
#                                            those marked triton only where it is or can be installed
#   bash tools/test.sh slow [argument ...]   the tests marked slow, and those marked gpu where CUDA is there; those
#                                            marked slurm or container need root
#   bash tools/test.sh argument ...          pytest's own arguments: a file, -k word, -x, -m marker
#
# All stages run even when one fails; the exit status is 0 only if all passed.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
export PATH=$ROOT/.venv/bin:$PATH
failed=()

stage() { # NAME COMMAND...
    local name=$1 start=$SECONDS status=0
    shift
    printf '== %s\n' "$name"
    "$@" || status=$?
    printf '== %s: %s, %d s\n' "$name" "$([ $status = 0 ] && echo passed || echo FAILED)" $((SECONDS - start))
    [ $status = 0 ] || failed+=("$name")
}

has_cuda() { python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; }

has_chromium() { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null

has_triton() { python -c 'import triton' 2>/dev/null; }

# torch's build for CUDA brings it. Its interpreter on the CPU is of use to these tests alone: it stays out of the set-up,
# and out of .venv, where it would report leaks of its own at the end of every process.
install_triton() {
    has_triton || [ -d "$ROOT/.cache/triton/triton" ] || {
        echo 'fetching triton (280 MB) for its interpreter'
        python -m pip install -q --no-deps --target "$ROOT/.cache/triton" triton==3.9.0
    }
}

triton_tests() {
    local status=0
    PYTHONPATH=$ROOT/.cache/triton${PYTHONPATH:+:$PYTHONPATH} \
        python -m pytest -m 'triton and not gpu' "$@" || status=$?
    [ $status = 5 ] || return $status # nothing was selected
}

slow_tests() {
    local markers='slow or gpu' status=0
    has_cuda || markers='slow and not gpu'
    [ "$(id -u)" = 0 ] || markers="($markers) and not slurm and not container"
    python -m pytest -p tools.pytest_report -m "$markers" "$@" || status=$?
    # pytest's 5: nothing was selected. Without further arguments that only says that no test is slow.
    if [ $status = 5 ] && [ $# = 0 ]; then status=0; fi
    return $status
}

bash "$ROOT/tools/setup.sh"
cd "$ROOT"
if [ "${1:-}" = slow ]; then
    shift
    stage 'pytest, slow' slow_tests "$@"
else
    stage 'ruff check' ruff check .
    stage 'ruff format' ruff format --check .
    stage mypy mypy
    markers='not slow and not gpu'
    # They start a Slurm of their own, with network namespaces for its nodes, and install it if it is not there.
    [ "$(id -u)" = 0 ] || markers+=' and not slurm'
    # They drive Chromium, and install it if it is not there.
    [ "$(id -u)" = 0 ] || has_chromium || markers+=' and not browser'
    stage pytest python -m pytest -p tools.pytest_report -m "$markers and not triton" "$@"
    if install_triton; then stage 'pytest, triton' triton_tests "$@"; else echo 'NOT RUN: the tests marked triton'; fi
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "$(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
    exit 1
fi
