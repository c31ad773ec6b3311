"""What the benchmarks bind of our kernels gives right outputs over each of their memories: found out before a GPU is asked."""

import pytest
import torch

from bench.harness import Shape
from bench.suites import kernels
from bench.suites.kernels import Queries, memories
from bench.suites.kernels.memories import Case, Format
from tests.kernels.cases import some
from vmmkv.layout import KVType

SHAPE = Shape(name="small", layers=2, heads=2, kv_heads=1, head_dim=64, dtype=torch.float32, weight_bytes=0)
PLAIN, INT4 = Format(shape=SHAPE), Format(shape=SHAPE, quantised=KVType("int4"))
OVER = [("tensor", PLAIN), ("vmmkv", PLAIN), ("paged", PLAIN), ("vmmkv", INT4)]

DECODE = (Case(name="decode", lengths=(33, 7)), kernels.bind_decode)
PREFILL = (Case(name="prefill", lengths=(33, 7), counts=(17, 1)), kernels.bind_prefill)


@pytest.mark.parametrize(
    ("kind", "form", "case", "bind"),
    some(
        [("vmmkv", INT4, *DECODE), ("paged", PLAIN, *PREFILL)],
        [*((*over, *DECODE) for over in OVER[:3]), *((*over, *PREFILL) for over in (*OVER[:2], OVER[3]))],
    ),
)
def test_attention(kind: str, form: Format, case: Case, bind: kernels.Bind, device: torch.device) -> None:
    copies = 2 if kind == "tensor" else 1
    memory = memories.open_memory(kind, case, copies, form, device)
    try:
        batch = Queries(case, copies, memory, seed=0)
        batch.check(batch.passes(bind)())
    finally:
        memory.close()
