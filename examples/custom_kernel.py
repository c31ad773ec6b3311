"""A Triton attention kernel of thirty lines over vmmkv memory. It uses strides and no block table.

    python examples/custom_kernel.py        (without a GPU in Triton's interpreter)

One program for each sequence and query head walks the rows of the sequence's slot with an online softmax. A kernel over vmmkv
memory uses the views' strides, offsets of 64 bits, and masks for loads past the length.

Legend: B sequences, S slots, T rows of a slot, H query heads, K kv heads, D head dim.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton
import triton.language as tl

from vmmkv import MIB, KVCache, KVLayout, Pool
from vmmkv.adapters.attention import sdpa_decode
from vmmkv.testing import conformance

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64


@triton.jit
def decode_kernel(
    p_q, p_k, p_v, p_out, p_lengths, p_slots, scale, stride_ks, stride_kt, stride_kk, stride_vs, stride_vt, stride_vk,
    GROUP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attend from one query of sequence `program_id(0)` under head `program_id(1)`."""
    b, head = tl.program_id(0), tl.program_id(1)
    i_q = (b * tl.num_programs(1) + head) * D + tl.arange(0, D)
    q = tl.load(p_q + i_q).to(tl.float32) * scale
    length = tl.load(p_lengths + b)
    slot = tl.load(p_slots + b).to(tl.int64)  # slots are far apart: their offsets pass 2**31
    p_k += slot * stride_ks + head // GROUP * stride_kk + tl.arange(0, D)[None, :]
    p_v += slot * stride_vs + head // GROUP * stride_vk + tl.arange(0, D)[None, :]
    peak, total = -float("inf"), 0.0
    acc = tl.zeros([D], tl.float32)
    for row in range(0, length, TILE):
        i_t = (row + tl.arange(0, TILE)).to(tl.int64)  # and so do offsets of rows, whose stride spans all layers
        m_t = i_t < length
        k = tl.load(p_k + (i_t * stride_kt)[:, None], mask=m_t[:, None], other=0.0).to(tl.float32)
        v = tl.load(p_v + (i_t * stride_vt)[:, None], mask=m_t[:, None], other=0.0).to(tl.float32)
        scores = tl.where(m_t, tl.sum(q[None, :] * k, 1), -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 0))
        weights = tl.exp(scores - new_peak)
        rescale = tl.exp(peak - new_peak)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(weights[:, None] * v, 0)
        peak = new_peak
    tl.store(p_out + i_q, (acc / total).to(p_out.dtype.element_ty))


def my_decode(
    q_BHD: torch.Tensor, k_STKD: torch.Tensor, v_STKD: torch.Tensor, lengths_B: torch.Tensor, slots_B: torch.Tensor
) -> torch.Tensor:
    """The form that the conformance suite calls. One launch without a host read: a graph of it serves all lengths."""
    num_sequences, heads, head_dim = q_BHD.shape
    out_BHD = torch.empty_like(q_BHD)
    decode_kernel[(num_sequences, heads)](
        q_BHD, k_STKD, v_STKD, out_BHD, lengths_B, slots_B, head_dim**-0.5, *k_STKD.stride()[:3], *v_STKD.stride()[:3],
        GROUP=heads // k_STKD.shape[2], D=head_dim, TILE=64,
    )  # fmt: skip
    return out_BHD


def main() -> None:
    """Grow three sequences, compare the kernel with torch's attention, and run the conformance suite."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    layout = KVLayout.uniform(layers=24, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float16)
    with Pool(device, 64 * MIB) as pool, KVCache(layout, pool, slots=8, max_tokens=100_000) as cache:
        sequences = [cache.open() for _ in range(3)]
        for step in range(2):
            for number, sequence in enumerate(sequences):
                new = 100 * number + 33
                sequence.grow(sequence.length + new)
                for view in (sequence.k(7), sequence.v(7)):
                    view[sequence.length : sequence.length + new] = torch.randn(new, KV_HEADS, HEAD_DIM)
                sequence.advance(new)
            lengths_B, slots_B = (
                torch.tensor([getattr(sequence, name) for sequence in sequences], dtype=torch.int32, device=device)
                for name in ("length", "slot")
            )
            q_BHD = torch.randn(3, HEADS, HEAD_DIM, dtype=torch.float16, device=device)
            arguments = q_BHD, cache.k(7), cache.v(7), lengths_B, slots_B
            torch.testing.assert_close(my_decode(*arguments), sdpa_decode(*arguments), rtol=1e-2, atol=1e-3)
            print(f"step {step}: right over {lengths_B.tolist()} tokens at strides {cache.k(7).stride()}")
    checks = ["strides", "64-bit slot offsets", "unmapped past the guard"]  # without `checks` all of them
    report = conformance(my_decode, dtype=torch.float16, heads=2, kv_heads=1, checks=checks)
    print(report)
    report.raise_if_failed()


if __name__ == "__main__":
    main()
