#!/bin/bash
# A run on a Slurm cluster: a launcher on each machine, which starts a process on each of its GPUs.
#   sbatch --export=ALL,RECIPE=my.yaml,OUT=/shared/runs/mine slurm.sh
# OUT has to be on storage that all machines share. Two minutes before the time ends, every process is told to save a
# checkpoint; the job then puts itself back into the queue, and goes on from there. So it does where it is preempted.
#SBATCH --job-name=draftsmith
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -eu

RECIPE="${RECIPE:-eagle3-8b}"
OUT="${OUT:-runs/$(basename "$RECIPE" .yaml)}"
GPUS="${SLURM_GPUS_PER_NODE:-8}"
GPUS="${GPUS##*:}"  # it may name their kind
CONFIG="$(python -c 'from importlib.resources import files; print(files("draftsmith") / "launch/configs/zero2_nodes.yaml")')"
MAIN="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export RECIPE OUT GPUS CONFIG MAIN
# torch's launcher passes on the warning too, and ends what has not saved its checkpoint so many seconds later: 30 unless
# told, and the time ends after 120
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=100

code=0
srun bash -c 'exec accelerate launch --config_file "$CONFIG" --num_machines "$SLURM_NNODES" \
  --num_processes "$((SLURM_NNODES * GPUS))" --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$MAIN" --main_process_port 29500 \
  -m draftsmith.launch.train "$RECIPE" --out "$OUT"' || code=$?

# a launcher turns every exit code into 1; the true one is in the run's folder
if [ "$code" -ne 0 ] && grep -q '"exit_code": 75' "$OUT/status.json"; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
