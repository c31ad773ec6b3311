"""The least time that an H200 needs: weights, K and V at 4.5 TB/s, operations in bfloat16 at 720 TFLOP/s, nothing overlapped.

A step multiplies for as long as its weights take to be read, or its operations to be done, whichever is longer; then each
sequence reads all of its K and V. An engine that reads a prefix once for many sequences can pass this bound.
"""

from collections.abc import Sequence

from bench.kernels.attention import BF16_FLOPS
from bench.serve.models import ServedModel
from bench.step_work import HBM_BYTES_PER_S


def prefill_s(model: ServedModel, start: int, end: int) -> float:
    """To compute the tokens [start, end) of one prompt, each attending to all before it."""
    num_seen = (end * (end + 1) - start * (start + 1)) // 2
    attention = 4 * model.attention_width * model.layers * num_seen
    return (2 * model.layer_parameters * (end - start) + attention) / BF16_FLOPS


def decode_s(model: ServedModel, num_sequences: int, num_rows: int) -> float:
    """To compute one token for each sequence, which have so many rows together."""
    multiply_s = 2 * (model.layer_parameters + model.head_parameters) * num_sequences / BF16_FLOPS
    weights_s = model.step_weight_bytes / HBM_BYTES_PER_S
    return max(weights_s, multiply_s) + num_rows * model.row_bytes / HBM_BYTES_PER_S


def read_s(model: ServedModel, num_rows: int) -> float:
    """To read the weights once, and so many rows of K and V: the byte limit of a decode step."""
    return (model.step_weight_bytes + num_rows * model.row_bytes) / HBM_BYTES_PER_S


def requests_s(
    model: ServedModel, prompt_lengths: Sequence[int], outs: Sequence[int], *, shared: int = 0, known: bool = False
) -> float:
    """For requests that are all there at once: every prompt, and then steps until the longest answer has ended.

    Prompts have their first `shared` tokens in common, which are computed once, or were before if they are `known`. The
    first token of an answer comes of its prompt.
    """
    total_s = sum(prefill_s(model, shared, length) for length in prompt_lengths)
    if shared and not known:
        total_s += prefill_s(model, 0, shared)
    for step in range(1, max(outs)):
        rows = [length + step for length, out in zip(prompt_lengths, outs, strict=True) if out > step]
        total_s += decode_s(model, len(rows), sum(rows))
    return total_s
