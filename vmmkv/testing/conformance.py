"""The conformance suite: is an attention function right on vmmkv memory?"""

from collections.abc import Callable, Iterable

import torch

from vmmkv.arguments import whole
from vmmkv.driver.cuda import find_device
from vmmkv.testing.checks import CHECKS
from vmmkv.testing.report import Report
from vmmkv.testing.subject import Form, Subject
from vmmkv.testing.worker import Worker


def conformance(
    attention_fn: Callable[..., torch.Tensor],
    *,
    form: Form = "decode",
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    guard_tokens: int = 0,
    error_ratio: float = 2.0,
    error_floor: float = 1e-5,
    capturable: bool = True,
    checks: Iterable[str] | None = None,
    worker: Worker | None = None,
) -> Report:
    """Run an attention function over vmmkv's memory in all the ways that such memory differs from a plain tensor.

    form: "decode" calls `attention_fn(q_BHD, k_STKD, v_STKD, lengths_B, slots_B)`, "prefill"
    `attention_fn(q_NHD, k_STKD, v_STKD, query_starts, lengths_B, slots_B)`, causal. Sequence b has the rows
    [0, lengths_B[b]) of slot slots_B[b], its queries' own among them; in prefill its last tokens are the queries
    [query_starts[b], query_starts[b + 1]). Lengths are at least 1; indices are int32 on the device; q is contiguous; K and V
    are strided views of all slots, of which most is not mapped. It returns a new tensor of q's shape and dtype, and writes
    nothing to the cache. It must be at the top of a module: the checks run in a child process. That imports the script that
    calls this, which so is to be a file, and to do it under `if __name__ == "__main__":`.

    device: "cuda:0" if there is one, else "cpu". dtype: bfloat16 on a GPU, float32 on a CPU. guard_tokens: rows past each
    length that it may load (whole tiles), which then are mapped; their values must not matter. The error may be `error_ratio`
    times that of torch in the same dtype, plus `error_floor` (the rule of FlashAttention's tests). capturable: False for a
    function that reads lengths on the host. checks: names of `vmmkv.testing.checks.CHECKS`, all by default. worker: the
    process to run in, one of its own by default.

    Cost: a process, and seconds; some 200 MiB of memory. Raises: ValueError, TypeError; DriverUnavailable if there is no such
    GPU; CheckError if a check could not be done, as when the device has no memory. What the function does wrong is raised by
    the report's `raise_if_failed` alone.
    """
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda":
        device = find_device(device)
    names = tuple(CHECKS if checks is None else checks)
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"checks={unknown}: there are {', '.join(CHECKS)}")
    subject = Subject(
        attention_fn=attention_fn,
        form=form,
        device=device,
        dtype=dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16),
        heads=whole("heads", heads),
        kv_heads=whole("kv_heads", kv_heads),
        head_dim=whole("head_dim", head_dim),
        guard_tokens=whole("guard_tokens", guard_tokens),
        error_ratio=error_ratio,
        error_floor=error_floor,
        capturable=capturable,
    )
    own = Worker() if worker is None else worker
    try:
        results = tuple(own.run(name, subject) for name in names)
    finally:
        if worker is None:
            own.close()
    return Report(kernel=subject.name, subject=str(subject), results=results)
