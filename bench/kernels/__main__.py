"""`python -m bench.kernels`: this suite alone."""

import sys

from bench.run import main

if __name__ == "__main__":
    sys.exit(main(["kernels", *sys.argv[1:]]))
