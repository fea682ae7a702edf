"""The parts of scripts/slurm_cluster.py. Standard library only: it runs before anything is installed."""
