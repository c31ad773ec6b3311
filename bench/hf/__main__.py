"""`python -m bench.hf`: this suite alone."""

import sys

from bench.run import main

if __name__ == "__main__":
    sys.exit(main(["hf", *sys.argv[1:]]))
