#!/usr/bin/env bash
# GeoNorm 125M: 12 layers x 768, sequence 1024; 1 node(s) of 8 GPUs.
#
#   sbatch slurm/geonorm_125m.sh [section.key=value ...]      from the project's folder
#
# Other numbers need no edit: sbatch --nodes=N --time=... slurm/geonorm_125m.sh. Partition and account: SBATCH_PARTITION and
# SBATCH_ACCOUNT in the environment. Container or modules or venv, data and run folders: see the top of slurm/launcher.sh.
# NOT RUN on GPUs yet.
#SBATCH --job-name=geonorm_125m
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=1-0
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%x-%j.out

CONFIG=configs/geonorm_125m.yaml
LAUNCHER=${PROJECT:-${SLURM_SUBMIT_DIR:-.}}/slurm/launcher.sh
[ -f "$LAUNCHER" ] || { echo "error: $LAUNCHER does not exist; submit from the project's folder, or set PROJECT" >&2 && exit 2; }
# shellcheck source=slurm/launcher.sh
. "$LAUNCHER"
launch "$@"
