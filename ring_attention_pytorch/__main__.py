"""`python -m ring_attention_pytorch` lists its commands."""

import sys

from ring_attention_pytorch.doctor.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
