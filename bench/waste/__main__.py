"""`python -m bench.waste`: this suite alone."""

import sys

from bench.run import main

if __name__ == "__main__":
    sys.exit(main(["waste", *sys.argv[1:]]))
