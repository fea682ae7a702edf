#!/bin/bash
#SBATCH --job-name=charlm
#SBATCH --array=0-7
#SBATCH --output=charlm_%A_%a.out
#SBATCH --time=10
#SBATCH --cpus-per-task=1
#JAP --stages=2
# Two learning rates x two weight decays x two dropout rates. Submit it from this folder: jap-submit sweep.sh
# Arguments after the script's name go to train.py, e.g. jap-submit sweep.sh --steps 20

LEARNING_RATES=(0.001 0.003)
WEIGHT_DECAYS=(0.0 0.1)
DROPOUT_RATES=(0.0 0.1)
LR=${LEARNING_RATES[SLURM_ARRAY_TASK_ID / 4]}
WEIGHT_DECAY=${WEIGHT_DECAYS[SLURM_ARRAY_TASK_ID / 2 % 2]}
DROPOUT=${DROPOUT_RATES[SLURM_ARRAY_TASK_ID % 2]}

# Sums over one and over two threads differ in their last bits: train with the same number everywhere.
export OMP_NUM_THREADS=1

python train.py --lr "$LR" --weight-decay "$WEIGHT_DECAY" --dropout "$DROPOUT" --save "charlm_$SLURM_ARRAY_TASK_ID.pt" "$@"
