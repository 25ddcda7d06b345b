#!/usr/bin/env bash
# Starts the coordinator by hand. Off loopback, set the addresses: HTTP for clients, control for workers.
#
#   launch/coordinator.sh --model DIR --host 0.0.0.0 --control-host 10.0.0.1
#
# PYTHON names the interpreter baton is installed in. Options: python -m coordinator --help.
set -euo pipefail
export PYTHONSAFEPATH=1
if [ -z "${PYTHON:-}" ] && ! python3 -c 'import coordinator' 2>/dev/null; then
  echo "error: Baton is not installed for python3; set PYTHON to the interpreter that has it" >&2
  exit 3
fi
exec "${PYTHON:-python3}" -m coordinator "$@"
