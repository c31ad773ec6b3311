"""Tests of attention kernels on vmmkv memory, for authors and callers of kernels.

    from vmmkv.testing import conformance

    def my_decode(q_BHD, k_STKD, v_STKD, lengths_B, slots_B): ...  # at the top of a module, as a child process runs it

    if __name__ == "__main__":
        report = conformance(my_decode)
        print(report)
        report.raise_if_failed()

`python -m vmmkv.testing` prints the table of every kernel at hand on this machine, as Markdown.

    conformance    the public function, its report, and the child process in which the checks run
    checks         the checks, by name, and the memory and tensors they use
    fake_driver    a driver that refuses what would break a device, for the tests of vmmkv itself
"""

from vmmkv.testing.conformance import CheckError, ConformanceError, Report, Result, Worker, conformance

__all__ = ["CheckError", "ConformanceError", "Report", "Result", "Worker", "conformance"]
