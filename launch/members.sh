set -euo pipefail
PYTHON="${PYTHON:-python3}" LOGS="${LOGS:-logs}"
mkdir -p "$LOGS"
case "${LAUNCHER:=torchrun}" in
  torchrun | agent) ;;
  *)
    echo "error: LAUNCHER is $LAUNCHER; it must be torchrun or agent" >&2
    exit 2
    ;;
esac
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 LAUNCHER LOGS

# The members that this script has started.
pids=() names=() front="" batches=""
# started NAME: registers the process that was just put into the background as that member.
started() {
  pids+=("$!") names+=("$1")
  if [ "$1" = coordinator ]; then front="$!"; fi
  if [ "$1" = batches ]; then batches="$!"; fi
}

# A signal drains: through the coordinator while one runs here, else each worker separately.
stop() {
  if [ -n "$batches" ]; then kill -TERM "$batches" 2>/dev/null || true; fi
  if [ -z "$front" ] || ! kill -TERM "$front" 2>/dev/null; then
    kill -TERM "${pids[@]}" 2>/dev/null || true
  fi
}

# Reports each member that fails; exits when all have ended, with the code of one that failed. Workers would redial a
# lost coordinator forever, so they get a SIGTERM: at once if it failed, after 10 s if it exited with 0 (drained them).
wait_for_all() {
  local code=0 deadline="" index pid name status
  trap stop TERM INT HUP
  while [ "${#pids[@]}" -gt 0 ]; do
    for index in "${!pids[@]}"; do
      pid=${pids[index]} name=${names[index]}
      if kill -0 "$pid" 2>/dev/null; then continue; fi
      wait "$pid" && status=0 || status=$?
      unset "pids[index]"
      if [ "$pid" = "$batches" ]; then batches=""; fi
      if [ "$status" -ne 0 ]; then
        code=$status
        echo "error: $name ended with code $status; its log is $LOGS/$name.log" >&2
      fi
      if [ "$pid" = "$front" ]; then
        front="" deadline=$((SECONDS + (status ? 0 : 10)))
      fi
    done
    if [ -n "$deadline" ] && [ "$SECONDS" -ge "$deadline" ] && [ "${#pids[@]}" -gt 0 ]; then
      deadline=""
      stop
    fi
    sleep 0.2 || true # a signal may interrupt it
  done
  exit "$code"
}
