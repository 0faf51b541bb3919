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

run_ray() {
    local address="$master:${MASTER_PORT:-6379}" timeout="${TIMEOUT:-600}"
    local -a extra=()
    read -r -a extra <<<"${RAY_ARGS:-}"
    if [[ "$node_rank" != 0 ]]; then
        until reachable "$address"; do
            ((SECONDS < timeout)) || die "node $node_rank: no Ray cluster at $address within $timeout s"
            sleep 2
        done
        "$bin/ray" start --address "$address" --block "${extra[@]}" && return
        sleep 2
        if reachable "$address"; then die "node $node_rank: Ray ended here, while $address is up"; fi
        echo "launch_multinode: node $node_rank: the cluster has ended" >&2
        return
    fi
    "$bin/ray" start --head --node-ip-address "$master" --port "${address##*:}" --include-dashboard=false --block \
        "${extra[@]}" &
    local cluster=$! alive=0 code=0
    # Ends this cluster's processes only.
    # shellcheck disable=SC2064
    trap "kill $cluster 2>/dev/null; wait $cluster 2>/dev/null || true" EXIT
    until [[ "$alive" -ge "$nnodes" ]]; do
        kill -0 "$cluster" 2>/dev/null || die "Ray did not start on the first node"
        ((SECONDS < timeout)) || die "only $alive of $nnodes nodes joined $address within $timeout s"
        sleep 2
        if reachable "$address"; then alive="$(alive_nodes "$address")"; fi
    done
    "$bin/psrl" train "$@" "+ray_kwargs.ray_init.address=$address" || code=$?
    return "$code"
}

"run_$mode" "$@"
