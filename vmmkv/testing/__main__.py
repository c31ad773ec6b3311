"""`python -m vmmkv.testing`: the conformance table of every kernel at hand on this machine, as Markdown."""

import argparse
import dataclasses
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from vmmkv.testing import Worker, conformance
from vmmkv.testing.report import markdown

HEAD_DIM = 64


_DOES = "Print the conformance table of every kernel at hand on this machine, as Markdown."
_ENDS = "The exit status is 1 if something failed or crashed, else 0. It takes a few minutes, and progress goes to stderr."


def main(argv: Sequence[str] = ()) -> int:
    """Print the table; the exit status is 1 if something failed or crashed."""
    parser = argparse.ArgumentParser(prog="python -m vmmkv.testing", description=_DOES, epilog=_ENDS)
    parser.parse_args(argv)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        # Triton reads this when it is first imported, which the next import does; child processes inherit it.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from vmmkv.testing.kernels import KERNELS

    reports, absent = [], []
    with Worker() as worker:
        for kernel in KERNELS:
            if reason := kernel.missing(device):
                absent.append(f"- {kernel.name}: {reason}")
                continue
            report = conformance(
                kernel.attention_fn,
                form=kernel.form,
                device=device,
                dtype=dtype,
                head_dim=HEAD_DIM,
                guard_tokens=kernel.guard_tokens(HEAD_DIM, dtype),
                capturable=kernel.capturable,
                worker=worker,
            )
            reports.append(dataclasses.replace(report, kernel=kernel.name))
            print(kernel.name, "right" if report.passed else "wrong", file=sys.stderr, flush=True)
    print(f"{_machine(device)}, {str(dtype).removeprefix('torch.')}, heads of {HEAD_DIM}.\n")
    print(markdown(reports))
    print("\n".join(["\nNot here:\n", *absent]) if absent else "", end="\n" if absent else "")
    return 0 if all(report.passed for report in reports) else 1


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    versions = [f"torch {torch.__version__}"]
    for package in ("triton", "vmmkv"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    interpreted = ", Triton interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    return f"{name}{interpreted}; {', '.join(versions)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
