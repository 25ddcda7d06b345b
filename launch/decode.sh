#!/usr/bin/env bash
# Starts one decode worker by hand, on any node that can reach the coordinator.
#
#   launch/decode.sh --model DIR --coordinator 10.0.0.1:8101 --worker-id decode-0 --host 10.0.0.2
#
# One worker is one job: RANKS processes on each of NNODES nodes. With several nodes, run this on each with its
# NODE_RANK, and set MASTER_ADDR and MASTER_PORT to a private address and a port of node 0.
# launch.agent accepts torchrun's flags; its store listens on MASTER_ADDR only (torchrun's on every address), and it
# exits with the worker's exit code. Plain torchrun works too: torchrun --nnodes ... -m decode "$@"
# PYTHON names the interpreter baton is installed in. Options: python -m decode --help.
set -euo pipefail
export PYTHONSAFEPATH=1
if [ -z "${PYTHON:-}" ] && ! python3 -c 'import coordinator' 2>/dev/null; then
  echo "error: Baton is not installed for python3; set PYTHON to the interpreter that has it" >&2
  exit 3
fi
exec "${PYTHON:-python3}" -m launch.agent \
  --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${RANKS:-1}" --max-restarts 0 \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-0}" \
  -m decode "$@"
