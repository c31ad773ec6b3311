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

import torch

from vmmkv.testing import Worker, conformance
from vmmkv.testing.checks import Form
from vmmkv.testing.conformance import markdown

HEAD_DIM = 64


_DOES = "Print the conformance table of every kernel at hand on this machine, as Markdown."
_ENDS = "The exit status is 1 if something failed or crashed, else 0. It takes a few minutes, and progress goes to stderr."


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An attention function, and what it needs."""

    name: str
    attention_fn: Callable[..., torch.Tensor]
    form: Form
    library: str | None = None
    """The module that it imports when it is called, if that is none of vmmkv's requirements."""
    guard: Callable[[int, torch.dtype], int] | None = None
    """Rows of guard, by head dim and dtype; none if None."""
    capturable: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on this device; None if it can."""
        if self.library is None:
            return None
        if importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return None if device.type == "cuda" else f"{self.library} needs a GPU"

    def guard_tokens(self, head_dim: int, dtype: torch.dtype) -> int:
        """What the cache is to be made with."""
        return 0 if self.guard is None else self.guard(head_dim, dtype)


def every_kernel() -> tuple[Kernel, ...]:
    """vmmkv's own attention functions, and those of `vmmkv.adapters.attention`.

    Imports Triton, which reads `TRITON_INTERPRET` when it is first imported.
    """
    from vmmkv.adapters import attention
    from vmmkv.kernels.attention import decode, prefill

    flash_3 = "flash_attn_interface"
    return (
        Kernel(name="vmmkv decode", attention_fn=decode.decode, form="decode", capturable=True),
        Kernel(name="vmmkv prefill", attention_fn=prefill.prefill, form="prefill", capturable=True),
        Kernel(name="SDPA, decode", attention_fn=attention.sdpa_decode, form="decode"),
        Kernel(name="SDPA grouped, decode", attention_fn=attention.sdpa_decode_grouped, form="decode"),
        Kernel(name="SDPA, prefill", attention_fn=attention.sdpa_prefill, form="prefill"),
        Kernel(name="FlexAttention, decode", attention_fn=attention.flex_decode, form="decode"),
        Kernel(name="FlexAttention, prefill", attention_fn=attention.flex_prefill, form="prefill"),
        Kernel(
            name="FlashAttention-2, decode",
            attention_fn=attention.flash_2_decode,
            form="decode",
            library="flash_attn",
            capturable=True,
        ),
        Kernel(name="FlashAttention-2, prefill", attention_fn=attention.flash_2_prefill, form="prefill", library="flash_attn"),
        Kernel(
            name="FlashAttention-3, decode",
            attention_fn=attention.flash_3_decode,
            form="decode",
            library=flash_3,
            guard=attention.flash_3_guard_tokens,
            capturable=True,
        ),
        Kernel(
            name="FlashAttention-3, prefill",
            attention_fn=attention.flash_3_prefill,
            form="prefill",
            library=flash_3,
            guard=attention.flash_3_guard_tokens,
            capturable=True,
        ),
        Kernel(
            name="FlashAttention-3 varlen, prefill",
            attention_fn=attention.flash_3_varlen,
            form="prefill",
            library=flash_3,
            guard=attention.flash_3_guard_tokens,
            capturable=True,
        ),
        Kernel(name="FlashInfer, decode", attention_fn=attention.flashinfer_decode, form="decode", library="flashinfer"),
        Kernel(name="FlashInfer, prefill", attention_fn=attention.flashinfer_prefill, form="prefill", library="flashinfer"),
    )


def main(argv: Sequence[str] = ()) -> int:
    """Print the table; the exit status is 1 if something failed or crashed."""
    parser = argparse.ArgumentParser(prog="python -m vmmkv.testing", description=_DOES, epilog=_ENDS)
    parser.parse_args(argv)
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
