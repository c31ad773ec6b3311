"""`python -m bench.elastic`: this suite alone."""

import sys

from bench.run import main

if __name__ == "__main__":
    sys.exit(main(["elastic", *sys.argv[1:]]))
