#!/usr/bin/env bash
# Train on two hosts that see the same folder (or have a copy of it each).
# Start it on both; the first host is number 0:
#
#   bash ch10_gpt2/launch/torchrun_two_hosts.sh 0    # on the first host
#   bash ch10_gpt2/launch/torchrun_two_hosts.sh 1    # on the second
#
# What to change is marked; the environment can say it too. Words after the
# number replace the training below: MODULE ARGUMENTS...
#
# torchrun's store answers whoever reaches MASTER_PORT, and so do the ranks on
# ports of their own: use a network that only your hosts are on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

MASTER_ADDR=${MASTER_ADDR:-192.168.1.10} # CHANGE: the first host's address
INTERFACE=${INTERFACE:-eth0}  # CHANGE: what has it (`ip -brief address`)
PER_HOST=${PER_HOST:-8}       # CHANGE: GPUs of each host
MASTER_PORT=${MASTER_PORT:-29500} # CHANGE if another job has it
HOSTS=${HOSTS:-2}
PYTHON=${PYTHON:-python}      # CHANGE: .venv/bin/python, or as you installed

NODE=${1:?"usage: $0 NODE [MODULE ARGUMENTS...], NODE is 0 or 1"}
shift
if [ $# -eq 0 ]; then
  # CHANGE: --data; --micro-batch to what a GPU holds; --sequences (of one
  # update, over all ranks) to a multiple of ranks * micro-batch
  set -- ch10_gpt2.train --preset gpt2 --device cuda --parallel ddp \
    --data embedded --tokens once --workers 2 --transfer prefetch \
    --attention fused --optimizer fused --precision bfloat16 \
    --micro-batch 16 --sequences 256 --steps 1000 --out runs/two-hosts
fi

export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} # CHANGE: cores / PER_HOST
exec "$PYTHON" -m torch.distributed.run \
  --nnodes="$HOSTS" --node-rank="$NODE" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
  --nproc-per-node="$PER_HOST" -m "$@"
