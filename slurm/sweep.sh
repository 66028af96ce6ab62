#!/usr/bin/env bash
# A sweep (python -m tools.sweep) as a job array: each of its tasks takes whole variants of the grid, on one GPU.
#
#   sbatch slurm/sweep.sh                                    from the project's folder
#   GRID=path/to/grid.yaml sbatch --array=0-11 slurm/sweep.sh [--jobs N ...]
#
# The number of array tasks is how many parts the grid is cut into; more than it has variants is of no use. A task that
# runs out of time starts again by itself and goes on where it was. Table and curves: python -m tools.sweep GRID --report.
# Partition, account, container, venv: see slurm/geonorm_125m.sh and the top of slurm/launcher.sh. NOT RUN on GPUs yet.
#SBATCH --job-name=sweep
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%A_%a.out

GRID=${GRID:-configs/paper/schemes_small.yaml}
LAUNCHER=${PROJECT:-${SLURM_SUBMIT_DIR:-.}}/slurm/launcher.sh
[ -f "$LAUNCHER" ] || { echo "error: $LAUNCHER does not exist; submit from the project's folder, or set PROJECT" >&2 && exit 2; }
# shellcheck source=slurm/launcher.sh
. "$LAUNCHER"
launch_sweep "$@"
