"""`python -m vmmkv`: the same as the `vmmkv` command, also from a checkout that is not installed."""

import sys

from vmmkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
