"""`python -m bench.prefix`: this suite alone."""

import sys

from bench.run import main

if __name__ == "__main__":
    sys.exit(main(["prefix", *sys.argv[1:]]))
