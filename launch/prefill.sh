#!/usr/bin/env bash
# Starts one prefill worker by hand with torchrun, on any node that can reach the coordinator.
#
#   launch/prefill.sh --model DIR --coordinator 10.0.0.1:8101 --worker-id prefill-0 --host 10.0.0.2
#
# One worker is one job: RANKS processes on each of NNODES nodes. With several nodes, run this on each with its
# NODE_RANK, and set MASTER_ADDR and MASTER_PORT to a private address and a port of node 0.
# launch.torchrun runs torchrun with these flags; a signal drains the worker, and the exit code is then 0.
# LAUNCHER=agent replaces torchrun by launch/agent.py; docs/launch.md compares them.
# LOGS is the directory of torchrun's logs by rank (logs), PYTHON the interpreter baton is installed in.
# Options: python -m prefill --help.
set -euo pipefail
export PYTHONSAFEPATH=1
if [ -z "${PYTHON:-}" ] && ! python3 -c 'import coordinator' 2>/dev/null; then
  echo "error: Baton is not installed for python3; set PYTHON to the interpreter that has it" >&2
  exit 3
fi
case "${LAUNCHER:=torchrun}" in
  torchrun | agent) ;;
  *)
    echo "error: LAUNCHER is $LAUNCHER; it must be torchrun or agent" >&2
    exit 2
    ;;
esac
exec "${PYTHON:-python3}" -m "launch.$LAUNCHER" \
  --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${RANKS:-1}" --max-restarts 0 \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-0}" \
  -m prefill "$@"
