"""`python -m bench`: see run."""

import os
import sys

if __name__ == "__main__":
    # Before torch is loaded, which reads it. Idle OpenMP threads that spin take the cores from what is measured: on two cores,
    # beside something else that ran, small models took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from bench.run import main

    sys.exit(main())
