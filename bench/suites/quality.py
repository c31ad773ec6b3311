"""What quantised K and V cost in quality: attention outputs and perplexity of a small model on real text, by KV type.

Each window of the text goes through the model in one causal pass whose attention sees K (rotated) and V quantised and
dequantised, as `append` writes and `decode` reads them. Every token attends to dequantised rows alone, its own among them,
so the losses are those of decoding the window token by token over a quantised cache. Attention itself is computed in
float32: what is measured is what the payload and its scales lose, and no kernel's rounding.

Then the engine serves the beginnings of some windows, by each type that it has: how far its greedy answers are those over exact
K and V.

Legend: N tokens of a window, H query heads, K kv heads, D head dim.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from bench.figures import Drawing
from bench.harness import Recorder, WrongNumbers
from bench.systems.models import REAL, TEXT, WINDOW_TOKENS, load_real, windows_of_text
from vmmkv import KVLayout
from vmmkv.layout import KVType
from vmmkv.units import GIB
from vmmkv_kernels.quantise import QMAX, Kind, dequantise, quantise

FIGURES: Final = (Drawing("losses", "What quantised K and V lose", ("perplexity above exact", "attention output error")),)

KV_TYPES: Final = (KVType("fp8"), KVType("fp8", "head"), KVType("int8"), KVType("int4"))

NUM_WINDOWS: Final = 20
"""20 * 1023 tokens are predicted."""
_QUICK_WINDOW_TOKENS: Final = 256
"""A quick run has one such window."""
NUM_ANSWERS: Final = 16
PROMPT_TOKENS: Final = 256
ANSWER_TOKENS: Final = 64
_ERROR_WINDOWS: Final = 4
"""Attention outputs are compared in so many windows: 30 layers of each are samples enough."""

_SERVED_BYTES: Final = 1 * GIB
_NAME: Final = "vmmkv_quality"
_AGREEMENT: Final = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of the mean loss with this attention and with transformers' own."""

Scales = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""By layer, K's and V's static scales: float32 [K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """What one layer attends with, as the model computed it: K is rotated."""

    layer: int
    q_NHD: torch.Tensor
    k_NKD: torch.Tensor
    v_NKD: torch.Tensor
    scale: float | None

    def outputs(self, kv_type: KVType | None, head_scales: Scales) -> torch.Tensor:
        """Float32 [N, H, D]: causal attention over K and V as this type keeps them; None keeps them as they are."""
        planes: tuple[torch.Tensor, ...] = (self.k_NKD, self.v_NKD)
        if kv_type is not None:
            kind = cast(Kind, kv_type.kind)
            scales = head_scales[self.layer] if kv_type.scale == "head" else (None, None)
            planes = tuple(dequantise(*quantise(x_NKD, kind, scale)) for x_NKD, scale in zip(planes, scales, strict=True))
        q_HND, k_KND, v_KND = (tensor.float().transpose(0, 1)[None] for tensor in (self.q_NHD, *planes))
        out_HND = scaled_dot_product_attention(q_HND, k_KND, v_KND, is_causal=True, scale=self.scale, enable_gqa=True)
        return out_HND[0].transpose(0, 1)


class QuantisingAttention:
    """The attention of a transformers model, over K and V as a KV type keeps them.

    Registered under one name for the whole process, as transformers has it: the last one made is the one in use.
    """

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        self.model = model
        self.head_scales: Scales = {}
        self._kv_type: KVType | None = None
        self._watch: Callable[[Attended], None] | None = None
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)  # all windows are causal, and none is padded
        model.set_attn_implementation(_NAME)

    @torch.inference_mode()
    def losses(self, tokens_N: torch.Tensor, kv_type: KVType | None) -> torch.Tensor:
        """Float32 [N - 1]: what each token but the first costs, in nats, given those before it; None keeps K and V exact."""
        self._kv_type = kv_type
        return losses(self.model, tokens_N)

    @torch.inference_mode()
    def watch(self, tokens_N: torch.Tensor, watch: Callable[[Attended], None]) -> None:
        """One exact pass, of which `watch` is shown every layer."""
        self._kv_type, self._watch = None, watch
        try:
            self.model(input_ids=tokens_N[None], use_cache=False, logits_to_keep=1)
        finally:
            self._watch = None

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """The signature of transformers: query [1, H, N, D], key and value [1, K, N, D]; gives [1, N, H, D]."""
        assert isinstance(module.layer_idx, int)
        q_NHD, k_NKD, v_NKD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        attended = Attended(layer=module.layer_idx, q_NHD=q_NHD, k_NKD=k_NKD, v_NKD=v_NKD, scale=scaling)
        if self._watch is not None:
            self._watch(attended)
        return attended.outputs(self._kv_type, self.head_scales).to(query.dtype)[None], None


def losses(model: Any, tokens_N: torch.Tensor) -> torch.Tensor:
    """Float32 [N - 1]: the model's cross-entropy of each token but the first, in nats."""
    logits_NV = model(input_ids=tokens_N[None], use_cache=False).logits[0, :-1]
    return cross_entropy(logits_NV.float(), tokens_N[1:], reduction="none")


def calibrate(attention: QuantisingAttention, tokens_N: torch.Tensor) -> None:
    """Give it static scales by which these tokens' largest element of each layer and head is the largest payload of fp8."""
    scales = {}

    def watch(seen: Attended) -> None:
        amax = (x_NKD.float().abs().amax(dim=(0, 2)) for x_NKD in (seen.k_NKD, seen.v_NKD))
        k_scale_K, v_scale_K = (amax_K / QMAX["fp8"] for amax_K in amax)
        scales[seen.layer] = k_scale_K, v_scale_K

    attention.watch(tokens_N, watch)
    attention.head_scales = scales


def output_errors(attention: QuantisingAttention, windows: Iterable[torch.Tensor]) -> dict[KVType, list[float]]:
    """By KV type, for each layer |outputs over quantised KV - outputs| / |outputs|, of the same q, k and v."""
    errors: dict[KVType, list[float]] = {kv_type: [] for kv_type in KV_TYPES}

    def watch(seen: Attended) -> None:
        exact_NHD = seen.outputs(None, {})
        for kv_type, samples in errors.items():
            given_NHD = seen.outputs(kv_type, attention.head_scales)
            samples.append(float((given_NHD - exact_NHD).norm() / exact_NHD.norm()))

    for tokens_N in windows:
        attention.watch(tokens_N, watch)
    return errors


def run(recorder: Recorder) -> None:
    """All KV types on the same windows; the rows of each as it is done.

    Raises: WrongNumbers if exact KV does not give the model's own losses, or a loss is not finite; ModelUnavailable.
    """
    settings = recorder.settings
    model = load_real(settings.device)
    count, num_tokens = (1, _QUICK_WINDOW_TOKENS) if settings.quick else (NUM_WINDOWS, WINDOW_TOKENS)
    windows = windows_of_text(settings.device, count, num_tokens)
    what = f"{count} window{'s' if count > 1 else ''} of {num_tokens} tokens of {TEXT.name}"
    dtype_name = str(model.dtype).removeprefix("torch.")
    workload = f"{REAL} in {dtype_name}, {what}"
    with torch.inference_mode():
        own_loss = float(losses(model, windows[0]).mean())
    attention = QuantisingAttention(model)
    calibrate(attention, windows[0])
    errors = output_errors(attention, recorder.track(windows[:_ERROR_WINDOWS], lambda _: "attention outputs"))
    exact_loss = 0.0
    for system in recorder.track((None, *KV_TYPES)):
        name = f"{dtype_name} KV" if system is None else str(system)
        losses_N = torch.cat([attention.losses(window, system) for window in windows])
        if not losses_N.isfinite().all():
            raise WrongNumbers(f"{name}: a loss is not finite")
        loss, num_predicted = float(losses_N.double().mean()), losses_N.numel()
        if system is None:
            exact_loss = loss
            first_loss = float(losses_N[: num_tokens - 1].mean())
            if not abs(first_loss - own_loss) <= _AGREEMENT[model.dtype]:  # NaN is not
                own = f"and transformers' own attention {own_loss:.6f}"
                raise WrongNumbers(f"exact KV gives a mean loss of {first_loss:.6f}, {own}")
        row_bytes = KVLayout.from_config(model.config, system or model.dtype).row_bytes
        recorder.figure(workload, name, "row", "bytes", row_bytes)
        recorder.figure(workload, name, "perplexity", "", math.exp(loss), num_predicted)
        if system is not None:
            above = 100 * math.expm1(loss - exact_loss)
            recorder.figure(workload, name, "perplexity above exact", "%", above, num_predicted)
            recorder.samples(workload, name, "attention output error", "%", [100 * error for error in errors[system]])
    del attention, model
    serve(recorder, windows)


def serve(recorder: Recorder, windows: Sequence[torch.Tensor]) -> None:
    """Greedy answers to the beginnings of windows, by the engine over each type that it serves."""
    settings = recorder.settings
    num_tokens = ANSWER_TOKENS // 8 if settings.quick else ANSWER_TOKENS
    prompts = [window[: min(PROMPT_TOKENS, len(window) // 2)].tolist() for window in windows[:NUM_ANSWERS]]
    workload = f"{REAL} served, {len(prompts)} x {num_tokens} greedy tokens behind {len(prompts[0])} of {TEXT.name}"
    exact = answers(settings.device, "auto", prompts, num_tokens)
    for kv_type in recorder.track([each for each in KV_TYPES if each.scale == "token"]):
        given = answers(settings.device, kv_type.kind, prompts, num_tokens)
        shares = [100 * num_alike(one, other) / num_tokens for one, other in zip(given, exact, strict=True)]
        recorder.samples(workload, str(kv_type), "answer as over exact KV", "% of its tokens", shares)
        recorder.figure(workload, str(kv_type), "answer as over exact KV, mean", "% of its tokens", sum(shares) / len(shares))


def answers(device: torch.device, kv_cache_dtype: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Of an engine with this type of KV cache, all prompts side by side."""
    from vmmkv_server import LLM, SamplingParams

    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    with LLM(
        REAL, device=str(device), max_num_seqs=len(prompts), kv_budget_bytes=_SERVED_BYTES, kv_cache_dtype=kv_cache_dtype
    ) as llm:
        return [each.outputs[0].token_ids for each in llm.generate(prompts, params, progress=False)]


def num_alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))
