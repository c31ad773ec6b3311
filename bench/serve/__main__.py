"""`python -m bench.serve`: this suite alone."""

import sys

from bench.run import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
