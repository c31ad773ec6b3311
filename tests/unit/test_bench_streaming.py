"""The suite `streaming`: perplexity along a text of 4 times the trained length."""

import math
from itertools import islice
from statistics import fmean

import pytest
import torch

from bench.suites.streaming import POLICY, TRAINED, losses_along
from bench.systems.models import load_real, windows_of_text


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_streaming_llm_reads_4_times_the_trained_length_where_full_attention_breaks() -> None:
    """By passes of 256 tokens. A text that it reads again costs what it cost before, 22,528 tokens earlier."""
    model, text_N = load_real(torch.device("cpu")), torch.cat(windows_of_text(torch.device("cpu"), 22))
    stream = [*islice(losses_along(model, text_N, POLICY), 4 * TRAINED // 256)]
    whole = [*islice(losses_along(model, text_N, None), 3 * TRAINED // 2 // 256)]
    assert stream[88 + 8 :] == pytest.approx(stream[8 : 128 - 88], abs=0.01)  # past the first passes, which had no window yet
    assert fmean(stream[: TRAINED // 256]) < fmean(whole[: TRAINED // 256]) + 0.1
    assert fmean(whole[-4:]) > fmean(stream[44:48]) + math.log(2)
