#!/usr/bin/env bash
# The whole path on this machine in a few minutes: text, tokenizer, shards, training with GeoNorm and with pre-norm.
#
#   bash tools/demo.sh [--text PATH...] [--out DIR] [section.key=value ...]
#
#   --text PATH...      your own files or folders instead of the text that every Python brings along
#   --out DIR           where data and runs go (default: runs/demo in the project)
#   section.key=value   a setting of configs/demo.yaml for both runs, for example train.steps=400
#
# Works from any directory. The newest runs are DIR/geonorm and DIR/pre_norm; each start trains from scratch and moves the
# runs before it to DIR/earlier-N. Tokenizer and shards are kept and used again while the text and the programs that make
# them stay the same.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
PYTHON_BIN=$ROOT/.venv/bin/python
VOCABULARY=2048
SEQUENCE=256
HELD_OUT=0.05 # of the documents
SCHEMES=(geonorm pre_norm)

demo=runs/demo
text=()      # from --text, absolute
overrides=() # section.key=value
layout=()    # settings that depend on this machine
processes=1
threads=1
child= # the stage's process

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$ROOT/tools/demo.sh"; }

refuse() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

read_arguments() { # fills text and overrides
    local argument in_text=false
    while [ $# -gt 0 ]; do
        argument=$1
        shift
        if [[ $argument = --text ]]; then
            [[ $# -gt 0 && $1 != -* ]] || refuse '--text needs at least one file or folder'
            in_text=true
        elif [[ $argument = --out ]]; then
            [ $# -gt 0 ] || refuse '--out needs a folder'
            demo=$(realpath -m "$1")
            in_text=false
            shift
        elif [[ $argument = --help || $argument = -h ]]; then
            usage
            exit 0
        elif [[ $argument =~ ^(run\.dir|data\.manifest|model\.residual\.scheme)= ]]; then
            refuse "${BASH_REMATCH[1]} is what the demo itself sets; for a run of your own see its last lines"
        elif [[ $argument =~ ^[a-z_0-9]+(\.[a-z_0-9]+)+= ]]; then
            overrides+=("$argument")
        elif $in_text && [[ $argument != -* ]]; then
            [ -e "$argument" ] || refuse "--text $argument does not exist"
            text+=("$(realpath "$argument")")
        else
            refuse "$argument is neither --text PATH..., --out DIR nor section.key=value"
        fi
    done
    data=$demo/data
    manifest=$data/shards/manifest.json
}

# stage NAME COMMAND...: a line before and one with the seconds after. The command runs in the background, because bash
# would otherwise handle an interrupt only after the command has ended.
stage() {
    local name=$1 start=$SECONDS status=0
    shift
    printf '\n== %s\n' "$name"
    "$@" &
    child=$!
    wait "$child" || status=$?
    child=
    [ $status = 0 ] || { printf '== %s: failed\n' "$name"; exit $status; }
    printf '== %s: %d s\n' "$name" $((SECONDS - start))
}

stop() { # STATUS
    trap '' INT TERM HUP
    if [ -n "$child" ]; then
        kill -TERM "$child" 2>/dev/null || true
        wait "$child" || true
    fi
    printf '\nstopped\n' >&2
    exit "$1"
}

choose_layout() { # fills processes, layout and threads: processes x threads = cores
    local cores gpus
    cores=$(env -u OMP_NUM_THREADS nproc) # which would answer with that variable
    gpus=$("$PYTHON_BIN" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
    processes=$((gpus > 0 ? gpus : cores))
    processes=$((processes > 2 ? 2 : processes))
    layout=(parallel.tp="$processes")
    # A CPU without bf16 instructions computes in bf16 many times slower than in fp32.
    if [ "$gpus" = 0 ] && ! grep -qwE 'avx512_bf16|amx_bf16' /proc/cpuinfo; then layout+=(train.precision=fp32); fi
    threads=${OMP_NUM_THREADS:-$((cores / processes))}
}

# Python as the stage's own process, in a session of its own: an interrupt at the terminal then reaches it through
# `stop` alone. torchrun would leave its processes behind at a second signal.
python() { exec setsid "$PYTHON_BIN" "$@"; }

corpus() { # a book is cut into documents, so that some of it can be held out
    python -m tools.corpus --out "$data" ${text[@]:+--max-document-bytes 20000 --text "${text[@]}"}
}

tokenizer() {
    python -m tools.tokenizer train --input "$data/documents.jsonl" --vocab-size $VOCABULARY \
        --out "$data/tokenizer.model"
}

shards() {
    python -m tools.shards build --force --input "$data/documents.jsonl" --tokenizer "$data/tokenizer.model" \
        --sequence-length $SEQUENCE --validation-fraction $HELD_OUT --out "$data/shards"
}

recipe() { # of the data: changes with the text and with the programs that turn it into shards
    { echo $VOCABULARY $SEQUENCE $HELD_OUT && cat "$data/documents.jsonl" tools/*.py tools/{inputs,sharding}/*.py pretrain/data/*.py; } | sha256sum
}

prepare_data() {
    stage 'corpus' corpus
    if [ -f "$manifest" ] && [ "$(cat "$data/recipe" 2>/dev/null)" = "$(recipe)" ]; then
        printf '\n== tokenizer and shards: unchanged, used again\n'
        return
    fi
    rm -f "$data/recipe"
    stage "tokenizer, vocabulary $VOCABULARY" tokenizer
    stage "shards, sequence $SEQUENCE" shards
    recipe >"$data/recipe"
}

keep_earlier_runs() { # makes room for new ones without deleting anything
    local scheme number=1 earlier
    while [ -e "$demo/earlier-$number" ]; do number=$((number + 1)); done
    earlier=$demo/earlier-$number
    for scheme in "${SCHEMES[@]}"; do
        if [ -e "$demo/$scheme" ]; then
            mkdir -p "$earlier"
            mv "$demo/$scheme" "$earlier/"
        fi
    done
    [ ! -e "$earlier" ] || printf '\n== runs of an earlier demo: moved to %s\n' "$earlier"
}

settings_of() { # SCHEME: the settings of its run, one a line
    printf '%s\n' run.dir="$demo/$1" data.manifest="$manifest" model.residual.scheme="$1" "${layout[@]}" \
        ${overrides[@]:+"${overrides[@]}"}
}

pretrain() { # SCHEME
    local settings
    mapfile -t settings < <(settings_of "$1")
    OMP_NUM_THREADS=$threads python -m torch.distributed.run --standalone --nproc_per_node "$processes" \
        -m pretrain train configs/demo.yaml "${settings[@]}"
}

check_settings() { # here, in one line, and not later, in every process
    local settings
    mapfile -t settings < <(settings_of "${SCHEMES[0]}")
    "$PYTHON_BIN" -m tools.demo_report check --processes "$processes" configs/demo.yaml "${settings[@]}"
}

main() {
    local scheme
    read_arguments "$@"
    bash "$ROOT/tools/setup.sh"
    cd "$ROOT"
    choose_layout
    check_settings
    prepare_data
    keep_earlier_runs
    for scheme in "${SCHEMES[@]}"; do
        stage "training, $scheme: $processes process(es) x $threads thread(s), ${layout[*]}" pretrain "$scheme"
    done
    "$PYTHON_BIN" -m tools.demo_report table --manifest "$manifest" "${SCHEMES[@]/#/$demo/}"
    printf '\nAll in all: %d s. Next, in %s:\n' $SECONDS "$ROOT"
    printf '  look at the curves     .venv/bin/tensorboard --logdir %s\n' "$demo"
    printf '  a run of your own      bash tools/demo.sh --text PATH...   or\n'
    printf '    .venv/bin/python -m torch.distributed.run --standalone --nproc_per_node %s -m pretrain train %s\n' \
        "$processes" "configs/demo.yaml run.dir=runs/mine data.manifest=$manifest ${layout[*]} train.steps=1000"
}

trap 'stop 130' INT
trap 'stop 143' TERM HUP
main "$@"
