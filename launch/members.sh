set -euo pipefail
PYTHON="${PYTHON:-python3}" LOGS="${LOGS:-logs}"
mkdir -p "$LOGS"
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1

# The members that this script has started, and the wait for their ends.
pids=() names=() front=""
# started NAME: the process that was just put into the background is that member.
started() {
  pids+=("$!") names+=("$1")
  if [ "$1" = coordinator ]; then front="$!"; fi
}

# A signal drains: through the coordinator while it lives here, else each worker by itself.
stop() {
  if [ -z "$front" ] || ! kill -TERM "$front" 2>/dev/null; then
    kill -TERM "${pids[@]}" 2>/dev/null || true
  fi
}

# Names whoever ends with an error. Ends when all have ended, with the code of one that failed. Workers that have lost
# their coordinator would dial it for ever: they get a SIGTERM, after 10 s if it ended well, since it has drained them.
wait_for_all() {
  local code=0 deadline="" index pid name status
  trap stop TERM INT HUP
  while [ "${#pids[@]}" -gt 0 ]; do
    for index in "${!pids[@]}"; do
      pid=${pids[index]} name=${names[index]}
      if kill -0 "$pid" 2>/dev/null; then continue; fi
      wait "$pid" && status=0 || status=$?
      unset "pids[index]"
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
    sleep 0.2 || true # a signal may end it
  done
  exit "$code"
}
