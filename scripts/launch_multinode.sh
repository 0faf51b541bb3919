#!/usr/bin/env bash
# Start a training on several nodes. Run it once on every node, or once as a SLURM job step (then every setting comes
# from SLURM).
#
#   scripts/launch_multinode.sh torchrun [OPTION...]    scripts/train_torchrun.py with these options
#   scripts/launch_multinode.sh ray [OVERRIDE...]       a Ray cluster of the nodes, and `psrl train` on the first
#
# Settings:
#   NNODES          nodes (default: SLURM_NNODES, else 1)
#   NODE_RANK       this node, 0 the first (default: SLURM_NODEID, else 0)
#   NPROC           torchrun: processes of this node (default: its GPUs, else 1)
#   MASTER_ADDR     address of the first node (default: the first of SLURM_JOB_NODELIST; needed for more than one node)
#   MASTER_PORT     torchrun: port of the rendezvous there (default: 29500); ray: port of the cluster (default: 6379)
#   RAY_ARGS        ray: further arguments of `ray start`, for example --num-gpus=2
#   RAY_AUTH_MODE   ray: token or disabled (default: token on a node that has one, which must then be the same on all)
#   TIMEOUT         ray: seconds to wait for the nodes (default: 600)
#   PSRL_VENV       environment (default: .venv in the repository)
#
# SLURM, 4 nodes of 8 GPUs:
#   srun --nodes 4 --ntasks-per-node 1 --gpus-per-node 8 --exclusive scripts/launch_multinode.sh \
#       torchrun traces.jsonl.gz --model /models/qwen2.5-1.5b --tp 2 --checkpoints /shared/checkpoints --save-every 50
#   srun --nodes 4 --ntasks-per-node 1 --gpus-per-node 8 --exclusive scripts/launch_multinode.sh \
#       ray --config-name multi_node_qwen3_moe_235b trainer.nnodes=4
set -euo pipefail

die() {
    printf 'launch_multinode: %s\n' "$*" >&2
    exit 2
}

mode="${1:-}"
[[ "$mode" == torchrun || "$mode" == ray ]] || die "usage: scripts/launch_multinode.sh torchrun|ray [ARGUMENT...]"
shift

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
bin="${PSRL_VENV:-$repo/.venv}/bin"
[[ -x "$bin/python" ]] || die "no environment in ${bin%/bin}: run scripts/setup.sh there, or set PSRL_VENV"

nnodes="${NNODES:-${SLURM_NNODES:-1}}"
node_rank="${NODE_RANK:-${SLURM_NODEID:-0}}"
[[ "$nnodes" =~ ^[1-9][0-9]*$ ]] || die "NNODES must be a positive integer, got '$nnodes'"
[[ "$node_rank" =~ ^[0-9]+$ && "$node_rank" -lt "$nnodes" ]] ||
    die "NODE_RANK must be in 0 .. $((nnodes - 1)), got '$node_rank'"

master="${MASTER_ADDR:-}"
if [[ -z "$master" && -n "${SLURM_JOB_NODELIST:-}" ]]; then
    master="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
fi
if [[ -z "$master" ]]; then
    [[ "$nnodes" == 1 ]] || die "MASTER_ADDR is not set: name the first of the $nnodes nodes"
    master=127.0.0.1
fi

num_gpus() {
    if command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus | wc -l; else echo 0; fi
}

run_torchrun() {
    local nproc="${NPROC:-$(num_gpus)}"
    [[ "$nproc" != 0 ]] || nproc=1
    exec "$bin/torchrun" --nnodes "$nnodes" --node-rank "$node_rank" --nproc-per-node "$nproc" \
        --master-addr "$master" --master-port "${MASTER_PORT:-29500}" "$repo/scripts/train_torchrun.py" "$@"
}

# Nodes of the cluster that are alive.
alive_nodes() {
    "$bin/python" - "$1" <<'PYTHON'
import sys

import ray

ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
print(sum(node["Alive"] for node in ray.nodes()))
PYTHON
}

reachable() {
    (exec 3<>"/dev/tcp/${1%:*}/${1##*:}") 2>/dev/null
}

# Ray's first node asks for authentication where it finds a token, which every earlier cluster of `ray.init` leaves in
# the home folder; those that join do not send theirs unless they are told to.
set_authentication() {
    if [[ -n "${RAY_AUTH_MODE:-}" ]]; then return; fi
    if [[ -n "${RAY_AUTH_TOKEN:-}" || -e "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]]; then
        export RAY_AUTH_MODE=token
    fi
}

started=()
# Ends this script's processes; others of Ray on the machine live on (`ray stop` would end those too).
end_started() {
    local pid
    for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done
    for pid in "${started[@]}"; do wait "$pid" 2>/dev/null || true; done
}

# In the background, so that a signal reaches this script at once.
start() {
    "$@" &
    started+=($!)
}

join_cluster() {
    local address="$1" code=0 missed=0
    shift
    until reachable "$address"; do
        ((SECONDS < timeout)) || die "node $node_rank: no Ray cluster at $address within $timeout s"
        sleep 2
    done
    start "$bin/ray" start --address "$address" --disable-usage-stats --block "$@"
    until [[ "$missed" == 3 ]]; do
        if ! kill -0 "${started[0]}" 2>/dev/null; then break; fi
        if reachable "$address"; then missed=0; else missed=$((missed + 1)); fi
        sleep 2
    done
    if reachable "$address"; then
        wait "${started[0]}" || code=$?
        die "node $node_rank: Ray ended here (exit code $code) while $address is up. All nodes need the same" \
            "RAY_AUTH_MODE and token, or RAY_AUTH_MODE=disabled"
    fi
    echo "launch_multinode: node $node_rank: the cluster has ended" >&2
}

start_cluster() {
    local address="$1" alive=0
    shift
    start "$bin/ray" start --head --node-ip-address "$master" --port "${address##*:}" --include-dashboard=false \
        --disable-usage-stats --block "$@"
    until [[ "$alive" -ge "$nnodes" ]]; do
        kill -0 "${started[0]}" 2>/dev/null || die "Ray did not start on the first node"
        ((SECONDS < timeout)) || die "only $alive of $nnodes nodes joined $address within $timeout s"
        sleep 2
        if reachable "$address"; then alive="$(alive_nodes "$address")"; fi
    done
}

run_ray() {
    local address="$master:${MASTER_PORT:-6379}" timeout="${TIMEOUT:-600}" code=0
    local -a extra=()
    read -r -a extra <<<"${RAY_ARGS:-}"
    set_authentication
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # drains Ray Serve, which no job has
    trap end_started EXIT
    # Waits for this script's end, whatever ends it, then for what it started, of which Ray's agents stay longest.
    exec 4> >(exec setsid "$bin/python" -I -S "$repo/psrl/integrations/verl/job/reaper.py" $$ 10)
    trap 'exit 130' INT
    trap 'exit 143' TERM
    if [[ "$node_rank" != 0 ]]; then
        join_cluster "$address" "${extra[@]}"
        return
    fi
    start_cluster "$address" "${extra[@]}"
    start "$bin/python" -m psrl.cli.main train "$@" "+ray_kwargs.ray_init.address=$address"
    wait "${started[1]}" || code=$?
    return "$code"
}

"run_$mode" "$@"
