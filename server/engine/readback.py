"""What a launched step gives the host, once it has run: tokens, candidates of beams, log-probabilities, also of prompts."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.server.engine.beams import Candidate
from vmmkv.server.engine.prompt_scores import ScoredRows


class Logprobs(NamedTuple):
    """Of one sampled token, under the model's own distribution."""

    chosen: float
    likeliest: list[tuple[int, float]]
    """Token ids and theirs, the highest first; as many as were asked for."""


class PromptScores(NamedTuple):
    """Of some tokens of a prompt, under the model's own distribution: W of them, each with its T likeliest."""

    first: int
    """As in `prompt_scores.ScoredRows`."""
    chosen_W: npt.NDArray[np.float32]
    values_WT: npt.NDArray[np.float32]
    ids_WT: npt.NDArray[np.int64]


class Readback:
    """The way of a step's results through pinned memory. `wait` blocks until they are there."""

    def __init__(self, tokens_B: torch.Tensor) -> None:
        self._tokens_B = _to_host(tokens_B)
        self._logprobs: tuple[Sequence[tuple[int, int]], tuple[torch.Tensor, ...]] | None = None
        self._candidates: tuple[Sequence[tuple[int, int]], tuple[torch.Tensor, ...]] | None = None
        self._prompt_scores: tuple[Sequence[tuple[int, ScoredRows]], tuple[torch.Tensor, ...]] | None = None
        self._done: torch.cuda.Event | None = None
        self._on_gpu: Final = tokens_B.is_cuda

    def add_logprobs(
        self, rows: Sequence[tuple[int, int]], chosen_R: torch.Tensor, values_RT: torch.Tensor, ids_RT: torch.Tensor
    ) -> None:
        """Rows of the step, with how many of the likeliest each asked for, and theirs; T at least that many."""
        self._logprobs = rows, tuple(map(_to_host, (chosen_R, values_RT, ids_RT)))

    def add_candidates(self, rows: Sequence[tuple[int, int]], values_RC: torch.Tensor, ids_RC: torch.Tensor) -> None:
        """Rows of the step, with how many candidates each asked for, and theirs."""
        self._candidates = rows, tuple(map(_to_host, (values_RC, ids_RC)))

    def add_prompt_scores(
        self, scored: Sequence[tuple[int, ScoredRows]], chosen_W: torch.Tensor, values_WT: torch.Tensor, ids_WT: torch.Tensor
    ) -> None:
        """Which chunks of the step asked about which rows, and theirs, side by side; T as many as anybody wants."""
        self._prompt_scores = scored, tuple(map(_to_host, (chosen_W, values_WT, ids_WT)))

    def close(self) -> None:
        """All has been added: mark the place in the stream behind which it can be read."""
        if self._on_gpu:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> npt.NDArray[np.int32]:
        """The tokens, by row. Blocks until the device is there."""
        if self._done is not None:
            self._done.synchronize()
        return self._tokens_B.numpy()

    def logprobs(self) -> dict[int, Logprobs]:
        """By row; after `wait`."""
        if self._logprobs is None:
            return {}
        rows, (chosen_R, values_RT, ids_RT) = self._logprobs
        chosen, values, ids = chosen_R.tolist(), values_RT.tolist(), ids_RT.tolist()
        return {
            row: Logprobs(chosen[index], list(zip(ids[index][:count], values[index][:count], strict=True)))
            for index, (row, count) in enumerate(rows)
        }

    def prompt_scores(self) -> dict[int, PromptScores]:
        """By chunk of the step; after `wait`. They are views."""
        if self._prompt_scores is None:
            return {}
        scored, (chosen_W, values_WT, ids_WT) = self._prompt_scores
        found, begin = dict[int, PromptScores](), 0
        for index, each in scored:
            rows, columns = slice(begin, begin + len(each.tokens)), slice(each.num_likeliest)
            begin = rows.stop
            found[index] = PromptScores(
                each.first, chosen_W[rows].numpy(), values_WT[rows, columns].numpy(), ids_WT[rows, columns].numpy()
            )
        return found

    def candidates(self) -> dict[int, list[Candidate]]:
        """By row, the likeliest first; after `wait`."""
        if self._candidates is None:
            return {}
        rows, (values_RC, ids_RC) = self._candidates
        values, ids = values_RC.tolist(), ids_RC.tolist()
        return {
            row: [Candidate(*each) for each in zip(values[index][:count], ids[index][:count], strict=True)]
            for index, (row, count) in enumerate(rows)
        }


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for the host: pinned, and not there yet, if it comes from a GPU."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
