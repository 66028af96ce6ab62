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

ran=$(mktemp)
selected() { # COMMAND ... of pytest, whose 5 says that nothing was selected; it is of no harm where others selected some
    local status=0
    "$@" || status=$?
    [ $status = 5 ] || { echo "$@" >>"$ran" && return $status; }
}

triton_tests() {
    PYTHONPATH=$ROOT/.cache/triton${PYTHONPATH:+:$PYTHONPATH} selected python -m pytest -m 'triton and not gpu' "$@"
}

# Tests of one process leave a core free, and Slurm's, which start a Slurm of their own and install it if it is not there,
# wait for its timers most of the time: so three kinds run at once. In process groups of their own: else Ctrl-C would not
# reach them.
declare -A beside=() said=()
trap 'exit 130' INT # pytest ends in order, after which bash would go on to the next stage
trap 'kill -INT -- "${beside[@]/#/-}" 2>/dev/null || true; rm -f "$ran" "${said[@]}"' EXIT
begin() { # NAME MARKERS [ARGUMENT ...]
    local name=$1 markers=$2
    shift 2
    said[$name]=$(mktemp)
    set -m
    selected python -m pytest -p tools.pytest_report -m "$markers" "$@" >"${said[$name]}" 2>&1 &
    beside[$name]=$!
    set +m
}

end() { # NAME
    local status=0
    wait "${beside[$1]}" || status=$?
    cat "${said[$1]}"
    unset "beside[$1]"
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
            [ "$(id -u)" != 0 ] || begin slurm 'slurm and not slow' "$@"
            begin dist "$markers and dist" "$@"
            stage 'pytest, one process' selected python -m pytest -p tools.pytest_report -m "$markers and not dist" "$@"
            if install_triton; then stage 'pytest, triton' triton_tests "$@"; else echo 'NOT RUN: the tests marked triton'; fi
            stage 'pytest, several processes, begun beside' end dist
            if [ "$(id -u)" = 0 ]; then stage 'pytest, slurm, begun beside' end slurm
            else echo 'NOT RUN: the tests marked slurm, which need root'; fi
            [ -s "$ran" ] || failed+=('no test was selected')
            ;;
    esac
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "$(printf '%s, ' "${failed[@]}" | sed 's/, $//')"
    exit 1
fi
