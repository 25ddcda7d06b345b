# find_addresses: the addresses of HOSTS, in ADDRESS.
find_addresses() {
  local host address
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

# step INDEX_OF_HOST CPUS NAME COMMAND...: one task on one host, its output in a log. Steps of a host overlap; each
# names its own GPUs in CUDA_VISIBLE_DEVICES.
step() {
  local host=${HOSTS[$1]} cpus=$2 name=$3
  shift 3
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$host" --cpus-per-task="$cpus" ${GPUS:+--gpus-per-node="$GPUS"} \
    --output="$LOGS/$name.log" --job-name="$name" "$@" &
  started "$name"
}
