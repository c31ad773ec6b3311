"""Run as a child process without the interpreter: compile the kernels for an H200 (sm_90), which needs no GPU.

    python -m tests.kernels.compiled

The interpreter accepts what the compiler refuses, such as a name that changes its type in a loop. The launchers run as they
are, on tensors without memory of the sizes that models have; instead of being launched, a kernel is compiled for its arguments.
"""

import functools
import importlib.util
import inspect
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from vmmkv.kernels import checks, copy
from vmmkv.kernels.attention import append, cascade, decode, prefill
from vmmkv.kernels.quantise import PAYLOAD_DTYPES, Kind, payload_width

H200 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
HAS_GLUON = importlib.util.find_spec("triton.experimental.gluon") is not None
"""Else prefill for Hopper is left out here; test_prefill.py says so."""
META = torch.device("meta")
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
SLOTS, ROWS, BLOCKS = 64, 32_768, 4096


def type_of(argument: Any) -> str:
    """As Triton's launcher has it."""
    if type(argument).__name__ == "TensorDescriptor" and hasattr(argument, "layout"):  # Gluon's, not imported for this
        return f"tensordesc<{TYPES[argument.base.dtype]}{list(argument.block_shape)},{argument.layout!r}>"
    if isinstance(argument, TensorDescriptor):
        return f"tensordesc<{TYPES[argument.base.dtype]}{list(argument.block_shape)}>".replace(" ", "")
    if isinstance(argument, torch.Tensor):
        return f"*{TYPES[argument.dtype]}"
    if isinstance(argument, float):
        return "fp32"
    return "i32" if -(2**31) <= argument < 2**31 else "i64"


def build(kernel: JITFunction[Any], *positional: Any, **named: Any) -> None:
    """Compile a kernel for these arguments and options."""
    options = {name: value for name, value in named.items() if name not in kernel.arg_names}
    given = {name: value for name, value in named.items() if name not in options}
    arguments = inspect.signature(kernel.fn).bind(*positional, **given).arguments
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        argument = arguments[parameter.name]
        is_special = isinstance(argument, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or argument is None or (is_special and argument == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", argument
            continue
        signature[parameter.name] = type_of(argument)
        if isinstance(argument, torch.Tensor) or (is_special and argument % 16 == 0):
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source
    binary = triton.compile(source(kernel, signature, constants, attributes), target=H200, options=options)
    assert binary.metadata.shared <= SHARED_BYTES, f"{binary.metadata.shared} bytes of shared memory"


def pretend_to_have_a_gpu() -> None:
    """Let the launchers believe that tensors without memory are on an H200, and compile what they launch."""
    JITFunction.__getitem__ = lambda kernel, grid: functools.partial(build, kernel)  # type: ignore[method-assign]
    checks.runnable = lambda argument, device: None
    checks.launches_dependents = lambda device: True  # type: ignore[assignment]
    checks.has_tma = lambda device: True  # type: ignore[assignment]
    append._casts_to_fp8 = lambda device: True  # type: ignore[assignment]
    for module in (decode, cascade):
        module.resident_splits = lambda device, num_kv_heads, programs_per_sm: 33  # type: ignore[assignment]
    copy._num_programs = lambda device: 528  # type: ignore[assignment]
    if HAS_GLUON:
        from vmmkv.kernels.attention import prefill_hopper

        prefill_hopper._num_multiprocessors = lambda device: 132  # type: ignore[assignment]
        prefill._hopper = lambda device: prefill_hopper  # type: ignore[assignment]


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class Model:
    """Tensors of one layer of 32, whose rows hold all layers; in slots, or in blocks of a table."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, kind: Kind | None = None, scale: str = "token",
        block: int = 0,
    ) -> None:  # fmt: skip
        self.block = block
        self.q_NHD = empty(SLOTS, heads, head_dim, dtype=dtype)
        self.k_NKD = empty(SLOTS, kv_heads, head_dim, dtype=dtype)
        shape = (BLOCKS, block) if block else (SLOTS, ROWS)
        width, stored = payload_width(kind, head_dim), PAYLOAD_DTYPES[kind] if kind else dtype
        self.kv = empty(*shape, 32, 2, kv_heads, width, dtype=stored)[:, :, 7].unbind(2)
        self.scales = {}
        if kind and scale == "token":
            k_scale, v_scale = empty(*shape, 32, 2, kv_heads, dtype=torch.float16)[:, :, 7].unbind(2)
            self.scales = {"k_scale": k_scale, "v_scale": v_scale}
        elif kind:
            self.scales = dict.fromkeys(("k_scale", "v_scale"), empty(kv_heads, dtype=torch.float32))
        self.tables = {"tables_SC": empty(SLOTS, ROWS // block)} if block else {}

    def decode(self, index: torch.dtype = torch.int32, *, limit: bool = True, **options: Any) -> None:
        """Both launches."""
        where = (empty(SLOTS, dtype=index), empty(SLOTS, dtype=index))
        options |= self.tables
        decode.decode(self.q_NHD, *self.kv, *where, **self.scales, limit_S=empty(SLOTS) if limit else None, **options)

    def prefill(self, index: torch.dtype = torch.int32, *, limit: bool = True, **options: Any) -> None:
        """Its launch, and those of decode for sequences of one query."""
        where = (empty(SLOTS + 1), empty(SLOTS, dtype=index), empty(SLOTS, dtype=index))
        options |= self.tables
        prefill.prefill(self.q_NHD, *self.kv, *where, **self.scales, limit_S=empty(SLOTS) if limit else None, **options)

    def append(self, index: torch.dtype = torch.int32, *, rope: bool = False) -> None:
        """Its one launch."""
        where = (empty(SLOTS, dtype=index), empty(SLOTS, dtype=index), empty(SLOTS))
        angles = empty(ROWS, self.q_NHD.shape[2] // 2, dtype=torch.float32)
        options = {"q_NHD": self.q_NHD, "cos_TR": angles, "sin_TR": angles} if rope else {}
        append.append(self.k_NKD, self.k_NKD, *self.kv, *where, **self.scales, **self.tables, **options)


def main() -> None:
    """One of each kind of code, and each dtype in one of them."""
    pretend_to_have_a_gpu()
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    llama = (32, 8, 128, bf16)
    Model(*llama).decode()
    Model(*llama).prefill()
    Model(32, 8, 128, fp16).prefill()
    Model(*llama).append(rope=True)
    Model(*llama, block=16).decode(torch.int64, window=4096)
    Model(*llama, "fp8").decode()
    Model(9, 3, 64, fp16, "fp8", "head").decode(limit=False, softcap=30.0)
    Model(*llama, "int8", block=5).decode()
    Model(*llama, "int4").decode()
    Model(128, 2, 64, bf16).decode()  # the largest query of its tile
    Model(4, 1, 80, fp32).decode(torch.int64, limit=False)
    Model(64, 1, 256, bf16, "int4", block=16).prefill(window=100, softcap=30.0)
    Model(*llama).append()
    Model(8, 8, 80, bf16, "fp8", block=16).append(rope=True)
    Model(8, 8, 96, fp32, "int4").append(torch.int64)
    copy.copy_rows(empty(SLOTS, ROWS, 131_072, dtype=torch.uint8), *(empty(9) for _ in range(4)))
    copy.copy_extents(empty(4096, dtype=torch.int64), empty(4096, dtype=torch.int64), 2**21)


if __name__ == "__main__":
    main()
    print("done")
