"""`python -m vmmkv.testing`: the conformance table of every kernel at hand on this machine, as Markdown."""

import argparse
import dataclasses
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from vmmkv.testing import Worker, conformance
from vmmkv.testing.checks import Form
from vmmkv.testing.conformance import markdown

HEAD_DIM: Final = 64


@dataclass(frozen=True, slots=True)
class KnownKernel:
    """An attention function, and what it needs."""

    name: str
    form: Form
    attention_fn: Callable[..., torch.Tensor]
    library: str | None = None
    """Module that the function imports when called, if vmmkv does not require it. Such libraries need a GPU."""
    guard: Callable[[int, torch.dtype], int] | None = None
    """Rows of guard, by head dim and dtype; none if None."""
    capturable: bool = False

    def missing(self, device: torch.device) -> str | None:
        """The reason why the kernel cannot run on this device; None if it can."""
        if self.library is None:
            return None
        if importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return None if device.type == "cuda" else f"{self.library} needs a GPU"


def every_kernel() -> tuple[KnownKernel, ...]:
    """vmmkv's own attention functions, and those of `vmmkv.adapters.attention`.

    Imports Triton, which reads `TRITON_INTERPRET` when it is first imported.
    """
    from vmmkv_kernels.attention import decode, prefill

    return (
        KnownKernel("vmmkv decode", "decode", decode.decode, capturable=True),
        KnownKernel("vmmkv prefill", "prefill", prefill.prefill, capturable=True),
        *adapted_kernels(),
    )


def adapted_kernels() -> tuple[KnownKernel, ...]:
    """Attention functions of torch and of other libraries, by `vmmkv.adapters.attention`."""
    from vmmkv.adapters import attention as of

    flash_3, guard = "flash_attn_interface", of.flash_3_guard_tokens
    return (
        KnownKernel("SDPA, decode", "decode", of.sdpa_decode),
        KnownKernel("SDPA grouped, decode", "decode", of.sdpa_decode_grouped),
        KnownKernel("SDPA, prefill", "prefill", of.sdpa_prefill),
        KnownKernel("FlexAttention, decode", "decode", of.flex_decode),
        KnownKernel("FlexAttention, prefill", "prefill", of.flex_prefill),
        KnownKernel("FlashAttention-2, decode", "decode", of.flash_2_decode, "flash_attn", capturable=True),
        KnownKernel("FlashAttention-2, prefill", "prefill", of.flash_2_prefill, "flash_attn"),
        KnownKernel("FlashAttention-3, decode", "decode", of.flash_3_decode, flash_3, guard, capturable=True),
        KnownKernel("FlashAttention-3, prefill", "prefill", of.flash_3_prefill, flash_3, guard, capturable=True),
        KnownKernel("FlashAttention-3 varlen, prefill", "prefill", of.flash_3_varlen, flash_3, guard, capturable=True),
        KnownKernel("FlashInfer, decode", "decode", of.flashinfer_decode, "flashinfer"),
        KnownKernel("FlashInfer, prefill", "prefill", of.flashinfer_prefill, "flashinfer"),
    )


def main(argv: Sequence[str] = ()) -> int:
    """Print the table; the exit status is 1 if something failed or crashed."""
    argparse.ArgumentParser(
        prog="python -m vmmkv.testing",
        description="Print the conformance table of every kernel at hand on this machine, as Markdown.",
        epilog="The exit status is 1 if something failed or crashed, else 0. It takes a few minutes; progress goes to stderr.",
    ).parse_args(argv)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # child processes inherit it
    reports, absent = [], []
    with Worker() as worker:
        for kernel in every_kernel():
            if reason := kernel.missing(device):
                absent.append(f"- {kernel.name}: {reason}")
                continue
            report = conformance(
                kernel.attention_fn,
                form=kernel.form,
                device=device,
                dtype=dtype,
                head_dim=HEAD_DIM,
                guard_tokens=kernel.guard(HEAD_DIM, dtype) if kernel.guard is not None else 0,
                capturable=kernel.capturable,
                worker=worker,
            )
            reports.append(dataclasses.replace(report, kernel=kernel.name))
            print(kernel.name, "right" if report.passed else "wrong", file=sys.stderr, flush=True)
    print(f"{_machine(device)}, {str(dtype).removeprefix('torch.')}, heads of {HEAD_DIM}.\n")
    print(markdown(reports))
    if absent:
        print("\n".join(["\nNot here:\n", *absent]))
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
