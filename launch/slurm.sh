# find_hosts COUNT WHAT: sets HOSTS to the hosts of the allocation (WHAT needs COUNT), ADDRESS to their addresses.
find_hosts() {
  local host address
  mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  if [ "${#HOSTS[@]}" -ne "$1" ]; then
    echo "error: $2 need --nodes=$1, not ${#HOSTS[@]}" >&2
    exit 3
  fi
  ADDRESS=()
  for host in "${HOSTS[@]}"; do
    address=$(getent ahostsv4 "$host" | awk 'NR == 1 { print $1 }') || address=""
    if [ -z "$address" ]; then
      echo "error: host $host of this allocation has no IPv4 address (getent ahostsv4 $host)" >&2
      exit 3
    fi
    ADDRESS+=("$address")
  done
}

# step INDEX_OF_HOST CPUS NAME COMMAND...: runs one task on one host, with its output in a log. Steps on a host overlap;
# each sets its own GPUs in CUDA_VISIBLE_DEVICES.
step() {
  local host=${HOSTS[$1]} cpus=$2 name=$3
  shift 3
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" --cpus-per-task="$cpus" ${GPUS:+--gpus-per-node="$GPUS"} \
    --output="$LOGS/$name.log" --job-name="$name" "$@" &
  started "$name"
}
