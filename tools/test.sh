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

selected() { # COMMAND ... of pytest, whose 5 says that nothing was selected
    local status=0
    "$@" || status=$?
    [ $status = 5 ] || return $status
}

triton_tests() {
    PYTHONPATH=$ROOT/.cache/triton${PYTHONPATH:+:$PYTHONPATH} selected python -m pytest -m 'triton and not gpu' "$@"
}

# Slurm's tests start one of their own, with network namespaces for its nodes, and install it if it is not there. They
# wait for its timers most of the time, so they run beside the others. In a process group of its own: else Ctrl-C would
# not reach it.
begin_slurm_tests() {
    slurm_said=$(mktemp)
    set -m
    selected python -m pytest -m 'slurm and not slow' "$@" >"$slurm_said" 2>&1 &
    slurm=$!
    set +m
    trap 'kill -INT -- -$slurm 2>/dev/null || true' EXIT
}

end_slurm_tests() {
    local status=0
    wait "$slurm" || status=$?
    cat "$slurm_said"
    rm "$slurm_said"
    return $status
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
    markers='not slow and not gpu and not slurm and not triton'
    # They drive Chromium, and install it if it is not there.
    [ "$(id -u)" = 0 ] || has_chromium || markers+=' and not browser'
    case " $* " in
        *' -m'*) stage pytest python -m pytest -p tools.pytest_report "$@" ;;
        *)
            [ "$(id -u)" != 0 ] || begin_slurm_tests "$@"
            stage pytest python -m pytest -p tools.pytest_report -m "$markers" "$@"
            if install_triton; then stage 'pytest, triton' triton_tests "$@"; else echo 'NOT RUN: the tests marked triton'; fi
            if [ "$(id -u)" = 0 ]; then stage 'pytest, slurm, begun beside the others' end_slurm_tests
            else echo 'NOT RUN: the tests marked slurm, which need root'; fi
            ;;
    esac
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "$(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
    exit 1
fi
