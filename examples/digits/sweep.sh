#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --array=0-7
#SBATCH --output=digits_%A_%a.out
#SBATCH --time=10
#SBATCH --cpus-per-task=1
#JAP --stages=2
# Four learning rates x two dropout rates. Submit it from this folder: jap-submit sweep.sh
# Arguments after the script's name go to train.py, e.g. jap-submit sweep.sh --epochs 2

LEARNING_RATES=(0.005 0.02 0.05 0.1)
DROPOUT_RATES=(0.0 0.5)
LR=${LEARNING_RATES[SLURM_ARRAY_TASK_ID / 2]}
DROPOUT=${DROPOUT_RATES[SLURM_ARRAY_TASK_ID % 2]}

# Sums over one and over two threads differ in their last bits: train with the same number everywhere.
export OMP_NUM_THREADS=1

python train.py --lr "$LR" --dropout "$DROPOUT" --save "digits_$SLURM_ARRAY_TASK_ID.pt" "$@"
