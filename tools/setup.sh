#!/usr/bin/env bash
# Make .venv ready: the exact versions of tools/locks, DeepSpeed's CPU extension compiled, this project installed editable.
#
#   bash tools/setup.sh              from any directory; does nothing when nothing has changed
#   PYTHON=/path/to/python3.12 ...   choose the interpreter (3.11 or 3.12)
#   TORCH=system ...                 a new .venv takes the torch that the interpreter has, and never another one
#   bash tools/setup.sh packages     all but this project, whose files need not be there: a container's layer of its own
#
# Where packages come from is pip's own configuration (PIP_INDEX_URL, PIP_FIND_LINKS, pip.conf); a CPU build of torch, for
# example, is taken when pip finds one first. The log of the latest set-up is .cache/setup.log.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
STAMP=$VENV/.setup-stamp
LOG=$ROOT/.cache/setup.log
INCOMPLETE=$ROOT/.cache/setup-incomplete # exists while .venv is being filled: what an interruption leaves is rebuilt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

die() {
    printf 'error: %s\n' "$1" >&2
    exit 1
}

# stage TEXT COMMAND...: run quietly, one line with the seconds it took; on failure the end of the log.
stage() {
    local text=$1 start=$SECONDS
    shift
    printf 'set-up: %s ... ' "$text"
    printf '\n== %s\n' "$text" >>"$LOG"
    if ! "$@" >>"$LOG" 2>&1 </dev/null; then
        printf 'failed\n'
        tail -n 20 "$LOG" >&2
        die "set-up stopped at: $text (the whole log: $LOG)"
    fi
    printf '%d s\n' $((SECONDS - start))
}

supported() { # is $1 a working Python that this project runs on?
    "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

short_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# What is missing to make a virtual environment with $1 and to compile against it, one word each.
missing_parts() {
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 || echo venv
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
        echo dev
    command -v g++ >/dev/null || echo g++
}

# The first complete interpreter, else the first of a right version, else nothing.
find_python() {
    local candidate path fallback='' candidates=(python3.11 python3.12 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        path=$(command -v "$candidate") || continue
        supported "$path" || continue
        if [ -z "$(missing_parts "$path")" ]; then
            echo "$path"
            return
        fi
        fallback=${fallback:-$path}
    done
    echo "$fallback"
}

# Debian and Ubuntu's packages for what is missing, or nothing when they cannot help.
apt_packages() {
    local python=$1 part version wanted=()
    command -v apt-get >/dev/null || return 0
    if [ -z "$python" ]; then
        wanted=(python3 python3-venv python3-dev g++)
    else
        version=$(short_version "$python")
        for part in $(missing_parts "$python"); do
            case $part in
                g++) wanted+=(g++) ;;
                # Debian's venv and headers serve Debian's own interpreter only.
                *)
                    [ "$("$python" -c 'import sys; print(sys.base_prefix)')" = /usr ] || return 0
                    wanted+=("python$version-$part")
                    ;;
            esac
        done
    fi
    echo "${wanted[*]}"
}

# Print the one line that installs the missing packages; run it when root.
install_system_packages() {
    local packages=$1 line
    line="apt-get install -y --no-install-recommends $packages"
    compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null || line="apt-get update && $line"
    if [ "$(id -u)" != 0 ]; then
        die "packages of the system are missing; install them with: ${line//apt-get/sudo apt-get}"
    fi
    printf 'set-up: packages of the system are missing; running: %s\n' "$line"
    stage "$packages" env DEBIAN_FRONTEND=noninteractive sh -c "$line || (apt-get update && $line)"
}

choose_python() {
    local packages missing
    python=$(find_python)
    if [ -z "$python" ]; then
        [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not a working Python 3.11 or 3.12"
        if command -v python3 >/dev/null; then
            die "no Python 3.11 or 3.12 found ($(python3 --version 2>&1)); install one and set PYTHON=/path/to/it"
        fi
    fi
    if [ -z "$python" ] || [ -n "$(missing_parts "$python")" ]; then
        packages=$(apt_packages "$python")
        if [ -z "$packages" ]; then
            missing=$(missing_parts "$python")
            die "${python:-no Python 3.11 or 3.12} lacks ${missing//$'\n'/, } (venv: Python's modules venv and ensurepip; dev: Python.h)"
        fi
        install_system_packages "$packages"
        python=$(find_python)
        [ -n "$python" ] || die "this system's python3 is not 3.11 or 3.12; install one and set PYTHON=/path/to/it"
        missing=$(missing_parts "$python")
        [ -z "$missing" ] || die "$python still lacks ${missing//$'\n'/, }"
    fi
}

lock_file() { # of .venv's Python
    echo "$ROOT/tools/locks/py$(short_version "$VENV/bin/python" | tr -d .).txt"
}

fingerprint() { # of everything that .venv depends on; its first line is the place that it was made for
    echo "$ROOT"
    { "$VENV/bin/python" --version && cat "$(lock_file)" "$ROOT/pyproject.toml" "$ROOT/tools/setup.sh"; } | sha256sum
}

has_cpu_extension() { compgen -G "$VENV/lib/python3*/site-packages/deepspeed/ops/comm/deepspeed_shm_comm_op*.so" >/dev/null; }

wrong_interpreter() { # does PYTHON ask for another version than .venv has?
    [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" --version 2>&1)" != "$("$VENV/bin/python" --version 2>&1)" ]
}

up_to_date() {
    [ ! -e "$INCOMPLETE" ] && [ -f "$STAMP" ] && supported "$VENV/bin/python" && ! wrong_interpreter &&
        has_cpu_extension && [ "$(cat "$STAMP")" = "$(fingerprint)" ]
}

# An environment that is whole, belongs here and has the right Python is updated in place; any other one is made anew.
usable_environment() {
    [ ! -e "$INCOMPLETE" ] && supported "$VENV/bin/python" && ! wrong_interpreter &&
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1 &&
        { [ ! -f "$STAMP" ] || [ "$(head -n 1 "$STAMP")" = "$ROOT" ]; }
}

install_deepspeed() { # built here, not from pip's wheel cache, so that the extension is in it
    DS_ACCELERATOR=cpu DS_BUILD_SHM_COMM=1 DS_ENABLE_NINJA=1 PATH=$VENV/bin:$PATH "$VENV/bin/python" -m pip install \
        --no-cache-dir --force-reinstall --no-deps --no-build-isolation --use-pep517 "$1"
}

has_deepspeed() { has_cpu_extension && "$VENV/bin/python" -m pip freeze | grep -xF "$1" >/dev/null; }

uses_system_torch() { grep -q '^include-system-site-packages = true' "$VENV/pyvenv.cfg"; }

# Each package of the lock $1 is there as pinned. An image's own torch calls itself 2.13.0a0+...: its minor release counts.
# What else an image holds is its own affair, so that `pip check`, which looks at all of it, would be too much.
check_beside_system_torch() {
    "$VENV/bin/python" - "$1" <<'EOF'
import sys
from importlib.metadata import version

import torch

pins = dict(line.strip().split("==") for line in open(sys.argv[1]) if not line.startswith("#"))
found = {name: version(name).split("+")[0] for name in pins}
for versions in (pins, found):
    versions["torch"] = ".".join(versions["torch"].split(".")[:2])
wrong = [f"{name} is {found[name]}, not {pin}" for name, pin in pins.items() if found[name] != pin]
torch.zeros(1).numpy()  # fails when its numpy cannot be used
sys.exit("; ".join(wrong) or None)
EOF
}

install_packages() {
    local lock=$1 pip=("$VENV/bin/python" -m pip install) torch deepspeed
    torch=$(grep '^torch==' "$lock")
    deepspeed=$(grep '^deepspeed==' "$lock")
    if uses_system_torch; then
        stage "setuptools, ninja" "${pip[@]}" --constraint "$lock" setuptools ninja
    else
        stage "$torch (its CUDA build is some 3 GB)" "${pip[@]}" --constraint "$lock" "$torch" setuptools ninja
    fi
    stage "the other packages of ${lock#"$ROOT/"}" "${pip[@]}" --no-deps -r <(grep -vE '^(torch|deepspeed)==' "$lock")
    if ! has_deepspeed "$deepspeed"; then
        stage "$deepspeed, compiling its CPU communication extension" install_deepspeed "$deepspeed"
    fi
}

install_project() {
    stage "this project" "$VENV/bin/python" -m pip install --no-deps --no-build-isolation -e "$ROOT"
}

check_versions() {
    if uses_system_torch; then
        stage "check of the versions" check_beside_system_torch "$1"
    else
        stage "check of the versions" "$VENV/bin/python" -m pip check
    fi
}

make_environment() { # with $python
    local venv=("$python" -m venv --clear)
    if [ "${TORCH:-}" = system ]; then
        "$python" -c 'import torch' 2>/dev/null || die "TORCH=system: $python has no torch"
        venv+=(--system-site-packages)
    fi
    if [ -L "$VENV" ]; then die "$VENV is a symbolic link, and set-up would empty what it points to; remove it"; fi
    if [ -e "$VENV/bin/python" ] && [ ! -f "$STAMP" ] && [ ! -e "$INCOMPLETE" ]; then
        die "$VENV was not made by this script and does not fit; remove it"
    fi
    touch "$INCOMPLETE"
    stage ".venv with Python $(short_version "$python") ($python)" "${venv[@]}" "$VENV"
}

main() { # [packages]
    local python
    [[ $# = 0 || $* = packages ]] || die "$* is not packages; see the top of tools/setup.sh"
    if up_to_date; then
        echo "set-up: .venv is up to date"
        return
    fi
    mkdir -p "$ROOT/.cache"
    exec 9<"$ROOT" # held until the end: two set-ups at once wait for one another
    if command -v flock >/dev/null && ! flock 9; then die "cannot lock $ROOT"; fi
    if up_to_date; then return; fi
    : >"$LOG"
    if ! usable_environment; then
        choose_python
        make_environment
    elif ! has_deepspeed "$(grep '^deepspeed==' "$(lock_file)")"; then
        choose_python # for its compiler
    fi
    touch "$INCOMPLETE"
    install_packages "$(lock_file)"
    [ $# = 1 ] || install_project
    check_versions "$(lock_file)"
    [ $# = 1 ] || fingerprint >"$STAMP"
    rm "$INCOMPLETE"
}

main "$@"
