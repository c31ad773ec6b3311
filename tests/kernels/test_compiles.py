"""The compiler takes what the interpreter takes: every kernel, for an H200 (sm_90) that is not there.

    python -m tests.kernels.test_compiles (frontend|binary)

The test runs this in a child process, without the interpreter.

`frontend` stops at Triton's own representation, a tenth of a second a kernel. `binary` goes on to machine code, and checks the
shared memory.

The interpreter accepts what the compiler refuses, such as a name that changes its type in a loop. The launchers run as they
are, on tensors without memory of the sizes that models have; instead of being launched, a kernel is compiled for its arguments.
"""

import functools
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from vmmkv_kernels import checks
from vmmkv_kernels.activation import silu_mul
from vmmkv_kernels.attention import append, cascade, column_sums, decode, prefill, turn
from vmmkv_kernels.attention.kv_memory import LayerKV
from vmmkv_kernels.linear import linear
from vmmkv_kernels.norm import rms_norm
from vmmkv_kernels.quantise import PAYLOAD_DTYPES, Kind, payload_width
from vmmkv_kernels.sampling import logits, sample
from vmmkv_kernels.step import begin_step, end_step
from vmmkv_kernels.sums import Region, sum_ranks

H200 = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 227 * 1024
HAS_GLUON = importlib.util.find_spec("triton.experimental.gluon") is not None
"""Else prefill for Hopper is left out."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
META = torch.device("meta")
TYPES = {
    FP16: "fp16", BF16: "bf16", FP32: "fp32", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
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


def build(to_binary: bool, kernel: JITFunction[Any], *positional: Any, **named: Any) -> None:
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
    program = source(kernel, signature, constants, attributes)
    if not to_binary:
        backend = make_backend(H200)
        parsed = backend.parse_options(options | program.parse_options())
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        program.make_ir(H200, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
        return
    binary = triton.compile(program, target=H200, options=options)
    assert binary.metadata.shared <= SHARED_BYTES, f"{binary.metadata.shared} bytes of shared memory"


def pretend_to_have_a_gpu(to_binary: bool) -> None:
    """Let the launchers believe that tensors without memory are on an H200, and compile what they launch."""
    JITFunction.__getitem__ = lambda kernel, grid: functools.partial(build, to_binary, kernel)  # type: ignore[method-assign]
    checks.runnable = lambda argument, device: None
    checks.launches_dependents = lambda device: True  # type: ignore[assignment]
    checks.has_tma = lambda device: True  # type: ignore[assignment]
    append.casts_to_fp8 = lambda device: True  # type: ignore[assignment]
    # By addresses, which tensors without memory have not.
    LayerKV.has_paired_scales = property(lambda memory: memory.scale == "token" and memory.k_scale.stride(2) == 2)  # type: ignore
    for module in (decode, cascade):
        module.resident_splits = lambda device, num_kv_heads, programs_per_sm: 33  # type: ignore[assignment]
    if HAS_GLUON:
        from vmmkv_kernels.attention import prefill_hopper

        prefill_hopper.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
        prefill.hopper_kernels = lambda device: prefill_hopper  # type: ignore[assignment]


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
            if kv_heads % 2 == 0:  # in pairs, as a cache has them
                k_scale, v_scale = empty(*shape, 32, kv_heads, 2, dtype=torch.float16)[:, :, 7].unbind(3)
            else:
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

    def prefill(self, index: torch.dtype = torch.int32, *, limit: bool = True, lse: bool = False, **options: Any) -> None:
        """Its launch, and those of decode for sequences of one query."""
        where = (empty(SLOTS + 1), empty(SLOTS, dtype=index), empty(SLOTS, dtype=index))
        options |= self.tables | {"lse_NH": empty(*self.q_NHD.shape[:2], dtype=FP32) if lse else None}
        prefill.prefill(self.q_NHD, *self.kv, *where, **self.scales, limit_S=empty(SLOTS) if limit else None, **options)

    def append(self, index: torch.dtype = torch.int32, *, rope: bool = False, norms: bool = False) -> None:
        """Its one launch."""
        where = (empty(SLOTS, dtype=index), empty(SLOTS, dtype=index), empty(SLOTS))
        angles = empty(ROWS, self.q_NHD.shape[2] // 2, dtype=torch.float32)
        options: dict[str, Any] = {"cos_TR": angles, "sin_TR": angles} if rope else {}
        if norms:
            weight_D = empty(self.q_NHD.shape[2], dtype=self.q_NHD.dtype)
            options |= {"q_norm_D": weight_D, "k_norm_D": weight_D, "norm_eps": 1e-6}
        if options:
            options["q_NHD"] = self.q_NHD
        append.append(self.k_NKD, self.k_NKD, *self.kv, *where, **self.scales, **self.tables, **options)

    def column_sums(self, index: torch.dtype = torch.int32, **options: Any) -> None:
        """Its two launches, and that of the turn behind them."""
        where = empty(9), empty(8, dtype=index), empty(8, dtype=index)
        column_sums.column_sums(self.q_NHD[None], self.kv[0][None], *where, **options)
        turn.turn(self.kv[0], empty(ROWS), empty(self.q_NHD.shape[2] // 2, dtype=FP32))

    def cascade(self, **options: Any) -> None:
        """Its two launches, and those of decode."""
        rows, groups = (empty(SLOTS), empty(SLOTS)), (empty(9), empty(8), empty(8))
        cascade.cascade(self.q_NHD, *self.kv, *rows, *groups, **self.tables, **self.scales, firsts_B=empty(SLOTS), **options)


def attention() -> None:
    """One of each kind of code, and each dtype in one of them."""
    llama = (32, 8, 128, BF16)
    Model(*llama).decode(settled=True)
    Model(*llama, block=16).decode(torch.int64, window=4096)
    Model(*llama, block=128).decode()
    Model(*llama, "fp8").decode()
    Model(9, 3, 64, FP16, "fp8", "head").decode(limit=False, softcap=30.0)
    Model(*llama, "int8", block=5).decode()
    Model(*llama, "int4").decode()
    Model(128, 2, 64, BF16).decode()  # the largest query of its tile
    Model(4, 1, 80, FP32).decode(torch.int64, limit=False)
    Model(32, 8, 128, FP16).prefill()
    Model(64, 1, 256, BF16, "int4", block=16).prefill(window=100, softcap=30.0, lse=True)
    for form in (
        *((*llama, None, "", block) for block in (0, 16, 128)),
        (9, 3, 64, FP16, None, "", 0),
        (4, 1, 80, FP32, None, "", 0),
    ):
        Model(*form).cascade(limit_S=empty(SLOTS) if form[3] == BF16 else None, softcap=30.0 if form[3] == FP16 else None)
    Model(*llama).cascade(query_starts=empty(SLOTS + 1))
    Model(*llama, "fp8").cascade(limit_S=empty(SLOTS))
    Model(*llama, "int4", block=16).cascade()
    Model(9, 3, 64, FP16, "int8").cascade(softcap=30.0)
    Model(9, 3, 64, FP16, "fp8", "head").cascade()
    Model(*llama).column_sums()
    Model(9, 3, 64, FP16).column_sums(softcap=30.0)
    Model(4, 1, 80, FP32).column_sums(torch.int64)
    Model(4, 1, 256, FP32).column_sums()


def hopper() -> None:
    """Prefill for Hopper, and that it is launched where it applies and nowhere else."""
    from vmmkv_kernels.attention import prefill_hopper

    launch, launched = prefill_hopper.launch_prefill_hopper, []
    prefill_hopper.launch_prefill_hopper = lambda *arguments: launched.append(launch(*arguments))  # type: ignore[assignment]
    for heads, kv_heads in ((32, 8), (7, 1)):
        for limit in (False, True):
            Model(heads, kv_heads, 128, BF16).prefill(torch.int64 if limit else torch.int32, limit=limit)
    Model(32, 8, 128, BF16, block=128).prefill(lse=True)
    assert len(launched) == 5
    for other in (Model(8, 8, 128, FP16), Model(8, 8, 64, BF16), Model(8, 8, 128, BF16, "fp8")):
        other.prefill()
    Model(8, 8, 128, BF16, block=16).prefill()
    Model(8, 8, 128, BF16).prefill(window=9)
    Model(8, 8, 128, BF16).prefill(softcap=9.0)
    assert len(launched) == 5
    prefill_hopper.launch_prefill_hopper = launch


def writing() -> None:
    """Append."""
    llama = (32, 8, 128, BF16)
    Model(*llama).append()
    Model(*llama).append(rope=True)
    Model(*llama).append(rope=True, norms=True)
    Model(16, 8, 128, BF16, "fp8").append(norms=True)
    Model(8, 8, 80, BF16, "fp8", block=16).append(rope=True)
    Model(8, 8, 96, FP32, "int4").append(torch.int64)


def rows() -> None:
    """Norm, activation and linear layers."""
    for dtype, width in ((BF16, 1024), (BF16, 8192), (FP16, 576), (FP32, 16_384)):
        x_NE, weight_E = empty(16, width, dtype=dtype), empty(width, dtype=dtype)
        rms_norm(x_NE, weight_E, 1e-6)
        rms_norm(x_NE, weight_E, 1e-6, residual_NE=x_NE)
        region = Region.open(1, 2, 2 << 20, lambda _: [0, 0], META)
        sum_ranks(x_NE, region)
        sum_ranks(x_NE, region, residual_NE=x_NE, weight_E=weight_E, eps=1e-6)
    for dtype, width, pitch in ((BF16, 28_672, 57_600), (FP16, 1111, 2224), (FP32, 111, 224)):
        silu_mul(empty(16, pitch, dtype=dtype)[:, : 2 * width])
    for dtype, num_rows in ((BF16, 1), (BF16, 8), (FP16, 3), (FP32, 2)):
        x_MK, weight_NK, norm_K = empty(num_rows, 1024, dtype=dtype), empty(512, 1024, dtype=dtype), empty(1024, dtype=dtype)
        bias_N, residual_MN = empty(512, dtype=dtype), empty(num_rows, 512, dtype=dtype)
        linear(x_MK, weight_NK, bias_N=bias_N, norm_weight_K=norm_K, norm_eps=1e-6, residual_MN=residual_MN)
        linear(x_MK, weight_NK, gated=True)


def sampling() -> None:
    """Sampling, changes to logits, and the ends of a step."""
    floats = {name: empty(257, dtype=FP32) for name in ("temperature_S", "top_p_S", "min_p_S")}
    penalties = dict.fromkeys(("repetition_S", "frequency_S", "presence_S"), empty(257, dtype=FP32))
    for num_rows, size, dtype in ((1, 50_257, FP32), (256, 128_256, BF16)):
        logits_BV, index_B = empty(num_rows, size, dtype=dtype), empty(num_rows)
        sample.argmax(logits_BV)
        sample.sample(logits_BV, index_B, index_B, **floats, top_k_S=empty(257), seed_S=empty(257, dtype=torch.int64))
        state = {"counts_RV": empty(5, size), "prompt_RV": empty(5, size, dtype=torch.uint8)}
        bias_RV = empty(5, size, dtype=FP32)
        logits.apply_penalties(logits_BV, index_B, state_row_S=empty(257), bias_RV=bias_RV, **penalties, **state)
        logits.apply_token_mask(logits_BV, index_B, empty(num_rows, -(-size // 32)))
        slots = empty(513)
        begin_step(index_B, slots, slots, slots, index_B, index_B, index_B, index_B)
        end_step(index_B, index_B, index_B, slots, slots, slots, index_B)


@pytest.mark.parametrize("what", ["frontend", pytest.param("binary", marks=[pytest.mark.nightly, pytest.mark.timeout(1200)])])
def test_kernels_compile_for_a_gpu_that_is_not_there(what: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.test_compiles", what]
    root = Path(__file__).parents[2]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, cwd=root)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "done\n"


if __name__ == "__main__":
    pretend_to_have_a_gpu(sys.argv[1] == "binary")
    for compile_family in (attention, *([hopper] if HAS_GLUON else []), writing, rows, sampling):
        compile_family()
    print("done")
