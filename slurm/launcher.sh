# shellcheck shell=bash
# What all scripts in this folder share: they set CONFIG or GRID and #SBATCH lines, source this file and call `launch`.
#
# Submit from the project's folder, which all nodes must share:
#
#   sbatch slurm/geonorm_1p3b.sh
#   sbatch --nodes=16 --time=3-0 slurm/geonorm_1p3b.sh model.residual.scheme=proj train.steps=1000
#
# What stands before the script is sbatch's and replaces its #SBATCH lines; section.key=value behind it replaces settings
# of the configuration. The settings of the site come from the environment, or better from a file slurm/site.sh, which is
# sourced if it exists; SBATCH_PARTITION and SBATCH_ACCOUNT in the environment of sbatch name partition and account.
#
#   PROJECT    the project's folder, for sbatch alone; a job keeps two small files there (default: where sbatch was called)
#   RUNS       folder of runs, shared by all nodes: run.dir=$RUNS/<name of the run>      (default: the configuration's)
#   MANIFEST   data.manifest=$MANIFEST                                                   (default: the configuration's)
#   CONTAINER  none | pyxis:IMAGE | apptainer:IMAGE, IMAGE with Python and the packages  (default: none)
#   MOUNTS     folders that the container sees, with commas, as HOST or HOST:CONTAINER   (default: the project's, $RUNS and
#              that of $MANIFEST)
#   MODULES    environment modules to load, with blanks                                  (default: none)
#   VENV       virtual environment, for CONTAINER=none                                   (default: .venv of the project)
#   PYTHON     the interpreter                                      (default: $VENV/bin/python; in a container: python)
#   PREFLIGHT  1 checks the nodes first, 0 does not                                      (default: 1)
#
# What happens: the nodes are checked (python -m pretrain preflight), then srun starts one task per GPU. Before the time
# limit (#SBATCH --signal) and at a preemption every rank is told, the run saves itself and the job requeues itself: same
# run folder, same TensorBoard run. So it does after a hang and when a node dies. A failure ends the job, at once and for
# good. `scancel JOB` ends it too; `touch RUN/stop` ends it with a checkpoint. Output: slurm-NAME-JOB.out, each line
# behind the number of its task.

SIGNAL_AGAIN_SECONDS=10 # a process that still starts may miss the first one
MOST_SWEEP_RESTARTS=20
requeue_wished=false # by a signal of the batch system
step=                # srun's process
teller=              # repeats the signal

say() { printf '%(%F %T)T %s: %s\n' -1 "$SLURM_JOB_NAME" "$*"; }

die() {
    printf '%(%F %T)T error: %s\n' -1 "$*" >&2
    exit 2
}

# --- where the ranks meet -------------------------------------------------------------------------------------------

# A host's address as this node sees it, never its loopback: other nodes could not reach that.
address_of() {
    getent ahostsv4 "$1" | awk '$1 !~ /^127\./ {print $1; exit}'
}

# MASTER_ADDR for all ranks: the first node, by its address, since a container may know no names. The port is chosen from
# the job's number (pretrain/launch.py), so that two jobs on a node do not meet.
find_rendezvous() {
    local head node_address
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    [ -n "$head" ] || die "scontrol cannot expand the list of nodes SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"
    MASTER_ADDR=$(address_of "$head")
    if [ -z "$MASTER_ADDR" ]; then
        node_address=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
        MASTER_ADDR=$(address_of "$node_address")
    fi
    if [ -z "$MASTER_ADDR" ] && [ "$SLURM_JOB_NUM_NODES" = 1 ]; then
        say "$head has no address but its loopback, which is enough for one node"
        MASTER_ADDR=127.0.0.1
    fi
    [ -n "$MASTER_ADDR" ] ||
        die "the first node, $head, has no address that the others can reach (getent ahostsv4 $head gives none, or loopback)"
    export MASTER_ADDR
}

# --- what is started ------------------------------------------------------------------------------------------------

# One task per GPU; fills `tasks` and PRETRAIN_WORLD_SIZE, against which every rank checks what srun started.
check_allocation() {
    [ -n "${SLURM_JOB_ID:-}" ] || die "submit this script with sbatch; see the top of slurm/launcher.sh"
    [ -n "${SLURM_NTASKS_PER_NODE:-}" ] || die "give sbatch --ntasks-per-node, one task per GPU"
    tasks=$((SLURM_JOB_NUM_NODES * SLURM_NTASKS_PER_NODE))
    if [ -n "${SLURM_GPUS_ON_NODE:-}" ] && [ "$SLURM_GPUS_ON_NODE" != "$SLURM_NTASKS_PER_NODE" ]; then
        die "$SLURM_NTASKS_PER_NODE task(s) per node but $SLURM_GPUS_ON_NODE GPU(s); make --ntasks-per-node and --gpus-per-node equal"
    fi
    export PRETRAIN_WORLD_SIZE=$tasks
}

# Fills `python` (the command within the tasks), `container` (arguments of srun) and `mounted`, and loads modules.
choose_software() {
    local image
    if [ -n "${MODULES:-}" ]; then
        type module >/dev/null 2>&1 || die "MODULES=$MODULES: this node has no command module"
        # shellcheck disable=SC2086 # several names
        module load $MODULES
    fi
    VENV=${VENV:-$PROJECT/.venv}
    CONTAINER=${CONTAINER:-none}
    mounted=${MOUNTS:-$(default_mounts)}
    image=${CONTAINER#*:}
    container=()
    case $CONTAINER in
        none)
            python=("${PYTHON:-$VENV/bin/python}")
            command -v "${python[0]}" >/dev/null || die "${python[0]} does not exist; run bash tools/setup.sh, or set VENV or PYTHON"
            ;;
        pyxis:?*)
            container=(--container-image="$image" --container-mounts="$(pyxis_mounts "$mounted")" --container-workdir="$PROJECT")
            # Else an image's own value of a variable comes before the host's.
            container+=("--container-env=PYTHONPATH,OMP_NUM_THREADS,PYTHONUNBUFFERED,MASTER_ADDR")
            python=("${PYTHON:-python}")
            ;;
        apptainer:?*)
            python=(apptainer exec --nv --bind "$mounted" --pwd "$PROJECT" "$image" "${PYTHON:-python}")
            ;;
        *) die "CONTAINER=$CONTAINER: use none, pyxis:IMAGE or apptainer:IMAGE" ;;
    esac
}

# The project, the runs and the shards, each where the host has it, by the name that the run will use, even if that is a
# symbolic link. Shards named by URL need no mount.
default_mounts() {
    local mounts=$PROJECT
    if [ -n "${RUNS:-}" ]; then mounts+=,$(realpath -ms "$RUNS"); fi
    if [[ -n "${MANIFEST:-}" && $MANIFEST != *://* ]]; then mounts+=,$(realpath -ms "$(dirname "$MANIFEST")"); fi
    printf '%s\n' "$mounts"
}

# What a container is to see must be there. Without one, the first run makes its folder.
check_mounts() {
    local mount mounts=()
    [ "$CONTAINER" != none ] || return 0
    if [ -z "${MOUNTS:-}" ] && [ -n "${RUNS:-}" ]; then mkdir -p "$RUNS" || die "RUNS=$RUNS cannot be made"; fi
    IFS=, read -ra mounts <<<"$mounted"
    for mount in "${mounts[@]}"; do
        [ -e "${mount%%:*}" ] || die "the container is to see ${mount%%:*}, which does not exist; see PROJECT, MANIFEST or MOUNTS"
    done
}

# HOST[:CONTAINER],... with the container's path always given.
pyxis_mounts() {
    local mount mounts=()
    IFS=, read -ra mounts <<<"$1"
    for mount in "${mounts[@]}"; do
        [[ $mount = *:* ]] || mount=$mount:$mount
        printf '%s\n' "$mount"
    done | paste -sd,
}

# srun ARGUMENTS... in the background, one task per GPU, lines labelled; the first failure ends all tasks. In its tasks
# SIGUSR1, which may come before Python has its own handler, must not kill.
start_step() {
    # shellcheck disable=SC2016 # expanded in the task
    srun --ntasks="$tasks" --ntasks-per-node="$SLURM_NTASKS_PER_NODE" --kill-on-bad-exit=1 --label \
        ${container[@]:+"${container[@]}"} bash -c 'trap "" USR1; exec "$@"' task "$@" &
    step=$!
}

# Wait for the step; its status in `status`. A trapped signal ends bash's `wait`, not the step.
wait_for_step() {
    while true; do
        status=0
        wait "$step" || status=$?
        kill -0 "$step" 2>/dev/null || break
    done
    status=0
    wait "$step" || status=$?
    step=
}

# --- signals of the batch system ------------------------------------------------------------------------------------

on_signal() { # SIGNAL for the tasks; SIGUSR1 is repeated
    $requeue_wished || say "the batch system says that this job's time here is over; telling every rank"
    requeue_wished=true
    tell_step "$1"
    if [ "$1" = USR1 ] && [ -z "$teller" ]; then
        while sleep "$SIGNAL_AGAIN_SECONDS" && kill -USR1 $$ 2>/dev/null; do :; done &
        teller=$!
    fi
}

tell_step() { [ -z "$step" ] || kill -s "$1" "$step" 2>/dev/null || true; }

# --- what comes after -----------------------------------------------------------------------------------------------

job_state() { scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*JobState=\([A-Z_]*\).*/\1/p'; }

requeue() { # REASON
    local state
    state=$(job_state)
    if [ "$state" != RUNNING ]; then
        say "not requeued, since the job is $state: $1"
        exit "$status"
    fi
    say "requeued: $1"
    scontrol requeue "$SLURM_JOB_ID" || die "scontrol requeue failed: $1"
    sleep 60 # Slurm ends this script
    exit "$status"
}

nodes_that_do_not_answer() {
    sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --states=down,no_respond,fail --format=%n | sort -u | paste -sd' '
}

# The step has ended: finished, requeue, or failed. The ranks' own verdict counts where there is one, because srun's status
# may only be that of the ranks it ended after the first, and is 0 too when Slurm ended them all.
decide() { # [told: status 0 counts only with the ranks' word]
    local verdict='' gone state
    [ -z "$teller" ] || kill "$teller" 2>/dev/null || true
    [ -f "$PRETRAIN_VERDICT" ] && verdict=$(cat "$PRETRAIN_VERDICT")
    rm -f "$PRETRAIN_VERDICT" "$PRETRAIN_JOB_SCRIPT"
    if [ "$status" = 0 ] && { [ "${1:-}" != told ] || [[ $verdict = ended:* ]]; }; then
        say "ended well"
        exit 0
    fi
    [ "$status" != 0 ] || status=1
    gone=$(nodes_that_do_not_answer)
    [ -z "$gone" ] || requeue "no answer from $gone"
    [[ $verdict != requeue:* ]] || requeue "${verdict#requeue: }"
    state=$(job_state)
    if [ -z "$verdict" ] && [ "$state" != RUNNING ]; then
        say "ended by Slurm, before the ranks could save: the job is $state"
    else
        say "failed with status $status${verdict:+; first: ${verdict#failed: }}"
    fi
    exit "$status"
}

prepare() {
    PROJECT=${PROJECT:-$SLURM_SUBMIT_DIR}
    cd "$PROJECT" || die "PROJECT=$PROJECT cannot be entered"
    PROJECT=$PWD # absolute
    [ -f pretrain/__main__.py ] || die "$PROJECT is not the project's folder; submit from there, or set PROJECT"
    # shellcheck disable=SC1091 # the site's own
    [ ! -f slurm/site.sh ] || . slurm/site.sh
    check_allocation
    choose_software
    check_mounts
    find_rendezvous
    # srun takes this from the environment no more since Slurm 22.05.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    # What this script tells its tasks reaches them also where sbatch --export names a few variables or NONE.
    export SLURM_EXPORT_ENV=ALL
    export PYTHONUNBUFFERED=1 PYTHONPATH=$PROJECT${PYTHONPATH:+:$PYTHONPATH}
    export PRETRAIN_VERDICT=$PROJECT/.verdict-$SLURM_JOB_ID PRETRAIN_JOB_SCRIPT=$PROJECT/.job-$SLURM_JOB_ID.sh
    export PRETRAIN_NODES
    PRETRAIN_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd' ')
    { rm -f "$PRETRAIN_VERDICT" && cp "$0" "$PRETRAIN_JOB_SCRIPT"; } ||
        die "PROJECT=$PROJECT cannot be written to, and a job keeps two small files there"
    say "job $SLURM_JOB_ID, restart ${SLURM_RESTART_COUNT:-0}: $tasks tasks on $PRETRAIN_NODES, meeting at $MASTER_ADDR"
}

# launch [section.key=value ...]: train CONFIG.
launch() {
    local settings=()
    trap 'on_signal USR1' USR1
    trap 'tell_step TERM' TERM
    prepare
    [ -z "${RUNS:-}" ] || settings+=("run.dir=$RUNS/$(basename "$CONFIG" .yaml)")
    [ -z "${MANIFEST:-}" ] || settings+=("data.manifest=$MANIFEST")
    settings+=("$@")
    if [ "${PREFLIGHT:-1}" = 1 ]; then
        start_step "${python[@]}" -m pretrain preflight "$CONFIG" ${settings[@]:+"${settings[@]}"}
        wait_for_step
        [ "$status" = 0 ] || decide
    fi
    start_step "${python[@]}" -m pretrain train "$CONFIG" ${settings[@]:+"${settings[@]}"}
    ! $requeue_wished || tell_step USR1
    wait_for_step
    decide told
}

# launch_sweep [argument of tools.sweep ...]: this array task's part of GRID. A sweep goes on where it was, run by run.
launch_sweep() {
    trap 'on_signal TERM' USR1
    trap 'tell_step TERM' TERM
    prepare
    start_step "${python[@]}" -m tools.sweep "$GRID" --index "$SLURM_ARRAY_TASK_ID" --of "$SLURM_ARRAY_TASK_COUNT" "$@"
    wait_for_step
    if $requeue_wished && [ "$status" != 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt $MOST_SWEEP_RESTARTS ]; then
        requeue "time is over, the sweep goes on where it was"
    fi
    decide
}
