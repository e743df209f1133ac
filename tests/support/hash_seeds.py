"""Run a module as `python -m` does, with hashes that are unlike those of other ranks.

    torchrun --nproc-per-node 2 -m tests.support.hash_seeds examples.grpo --steps 2

Sets have another order then on each rank.
"""

import os
import sys

if __name__ == "__main__":
    seed = {"PYTHONHASHSEED": str(1 + int(os.environ["RANK"]))}
    os.execve(sys.executable, [sys.executable, "-m", *sys.argv[1:]], os.environ | seed)
