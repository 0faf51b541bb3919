#!/usr/bin/env python3
"""Train on stored agent traces without Ray, with prefix sharing.

    torchrun --nproc-per-node 2 scripts/train_torchrun.py traces.jsonl.gz --model tiny-qwen2 --epochs 2 \
        --checkpoints outputs/checkpoints --save-every 10

``--help`` lists the options; ``scripts/launch_multinode.sh`` starts it on several nodes.
"""

from psrl.cli.offline import offline
from psrl.cli.root import command_line

if __name__ == "__main__":
    command_line(offline)()
