"""Perplexity along a text of 4 times the length that a small model was trained for, with all rows and with StreamingLLM's.

The model reads the text in passes of 256 tokens. StreamingLLM keeps the first rows and the last ones after each pass. Positions
are then those in the cache: the keys that have moved are turned, and the next tokens stand behind them. The text begins again
where it ends; a window has forgotten it by then. Full attention stops at one and a half times the trained length, in nonsense.
"""

import math
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy

from bench.figures import Drawing
from bench.harness import Recorder
from bench.systems.models import REAL, TEXT, load_real, windows_of_text
from vmmkv import GIB, Pool
from vmmkv.eviction import StreamingLLM
from vmmkv_kernels.reference import turn

FIGURES: Final = (
    Drawing(
        *("perplexity", "Along a text of 4 times the trained length", ("perplexity",)),
        *(r".+: \d+ to (?P<x>\d+) tokens", "tokens read"),
    ),
)

TRAINED: Final = 8192
"""`max_position_embeddings` of the model."""
POLICY: Final = StreamingLLM(sinks=4, window=1020)

_WINDOWS: Final = 22
"""Of 1,024 tokens: nearly the whole text."""
_PASS_TOKENS: Final = 256
_POINT_TOKENS: Final = 1024
"""A perplexity is of so many tokens; in a quick run of one pass, of which there are 8."""


def run(recorder: Recorder) -> None:
    """A row for each piece of the text. Raises: ModelUnavailable."""
    settings = recorder.settings
    model = load_real(settings.device)
    point, trained = (_PASS_TOKENS, 2 * _PASS_TOKENS) if settings.quick else (_POINT_TOKENS, TRAINED)
    text = torch.cat(windows_of_text(settings.device, 2 if settings.quick else _WINDOWS))
    policy = StreamingLLM(sinks=4, window=252) if settings.quick else POLICY
    for system, chosen, num_tokens in (("full attention", None, 3 * trained // 2), (str(policy), policy, 4 * trained)):
        losses: list[float] = []
        for end, loss in zip(
            range(_PASS_TOKENS, num_tokens + 1, _PASS_TOKENS), losses_along(model, text, chosen), strict=False
        ):
            losses.append(loss)
            if end % point == 0:
                recorder.note(f"{system}: {end} of {num_tokens} tokens")
                what = f"{REAL} in {str(model.dtype).removeprefix('torch.')}, {TEXT.name}: {end - point} to {end} tokens"
                recorder.figure(what, system, "perplexity", "", math.exp(sum(losses) / len(losses)), point)
                losses.clear()


def losses_along(model: Any, text_N: torch.Tensor, policy: StreamingLLM | None) -> Iterator[float]:
    """The mean loss of each next 256 tokens of the text, for ever; `policy` chooses rows after each pass."""
    from vmmkv.adapters.transformers import VmmCache

    num_rows, first = 0, 0
    with Pool(text_N.device, 8 * GIB) as pool, VmmCache(model.config, pool, max_tokens=16 * TRAINED) as cache:
        while True:
            ids = text_N[torch.arange(first, first + _PASS_TOKENS + 1, device=text_N.device) % len(text_N)]
            positions = torch.arange(num_rows, num_rows + _PASS_TOKENS, device=text_N.device)
            with torch.inference_mode():
                logits = model(ids[None, :-1], past_key_values=cache, position_ids=positions[None]).logits[0]
                yield float(cross_entropy(logits.float(), ids[1:]))
                first, num_rows = first + _PASS_TOKENS, num_rows + _PASS_TOKENS
                if policy is not None and num_rows > policy.budget:
                    kept = policy.keep(num_rows).to(text_N.device)
                    cache.compact(kept)
                    num_rows, back_T = len(kept), kept - torch.arange(len(kept), device=text_N.device)
                    for layer in range(len(cache.layers)):
                        keys_KTD = cache.states(layer)[0][0]
                        turned_TKD = turn(keys_KTD.transpose(0, 1), back_T, model.model.rotary_emb.inv_freq)
                        keys_KTD.copy_(turned_TKD.transpose(0, 1))
