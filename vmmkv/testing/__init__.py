"""Is an attention kernel right on vmmkv memory? For those who write one, or call one.

    from vmmkv.testing import conformance

    def my_decode(q_BHD, k_STKD, v_STKD, lengths_B, slots_B): ...  # at the top of a module, as a child process runs it

    if __name__ == "__main__":
        report = conformance(my_decode)
        print(report)
        report.raise_if_failed()

`python -m vmmkv.testing` prints the table of every kernel at hand on this machine, as Markdown.

    conformance    the public function          report     what it found          subject    what is tested
    checks         the checks, by name          worker     the child process in which they run
    caches         memory as the checks want it: sequences, poison, shuffled pages, far addresses
    batch          the tensors of a call, and the truth      kernels    every kernel at hand
"""

from vmmkv.testing.conformance import conformance
from vmmkv.testing.report import ConformanceError, Report, Result
from vmmkv.testing.worker import CheckError, Worker

__all__ = ["CheckError", "ConformanceError", "Report", "Result", "Worker", "conformance"]
