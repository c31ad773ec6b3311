"""The two ends of a decode step: they do what the engine does on a CPU, and touch nobody else's slots."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kernels.test_checks import Refusal, assert_refused, meta
from vmmkv.kernels import step
from vmmkv.kernels.step import begin_step, end_step
from vmmkv.server.engine import runner
from vmmkv.server.engine.runner import DeviceState, SampledRows
from vmmkv.server.engine.sampler import NOT_A_NUMBER

SLOTS = 700
POISON = -77
BATCHES = [1, 2, 255, 256, 257, 600]
"""A program has 256 rows."""


def int32(values: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(values).to(device, torch.int32)


class Step:
    """Random slots, some of which pad, and where each stands."""

    def __init__(self, num_rows: int, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots_B = 1 + torch.randperm(SLOTS - 1, generator=generator)[:num_rows]
        slots_B[torch.rand(num_rows, generator=generator) < 0.3] = 0
        self.device = device
        self.slots_B = int32(slots_B, device)
        self.tokens_S = int32(torch.randint(1, 200_000, (SLOTS,), generator=generator), device)
        self.lengths_S = int32(torch.randint(1, 1000, (SLOTS,), generator=generator), device)
        self.limit_S = int32(torch.randint(1, 1000, (SLOTS,), generator=generator), device)
        for of_nobody in (self.tokens_S, self.lengths_S, self.limit_S):
            of_nobody[0] = 0
        self.ends_B = int32(torch.randint(1, 1000, (num_rows,), generator=generator), device) * (self.slots_B > 0)
        at_its_limit = torch.arange(0, num_rows, 3)
        self.ends_B[at_its_limit] = self.limit_S[self.slots_B[at_its_limit].long()]
        self.sampled_B = int32(torch.randint(0, 200_000, (num_rows,), generator=generator), device)
        self.sampled_B[1::5] = NOT_A_NUMBER

    def on_a_cpu(self) -> DeviceState:
        """The engine's own, in the same state."""
        state = DeviceState(SimpleNamespace(limit=self.limit_S.cpu()))  # type: ignore[arg-type]
        state.tokens_S.copy_(self.tokens_S)
        state.lengths_S.copy_(self.lengths_S)
        return state

    def in_poison(self, num_tensors: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each output the memory around it, and itself in the middle."""
        wide = [torch.full((len(self.slots_B) + 8,), POISON, dtype=torch.int32, device=self.device) for _ in range(num_tensors)]
        return [(each, each[4:-4]) for each in wide]


def assert_only_within(wide: torch.Tensor) -> None:
    assert (wide[:4] == POISON).all() and (wide[-4:] == POISON).all()


@pytest.mark.parametrize("num_rows", BATCHES)
def test_a_step_begins_where_each_slot_stands(num_rows: int, device: torch.device) -> None:
    one = Step(num_rows, device)
    before = one.tokens_S.clone(), one.lengths_S.clone()
    outputs = one.in_poison(3)
    begin_step(one.slots_B, one.tokens_S, one.lengths_S, *(output for _, output in outputs))
    wanted = [torch.empty(num_rows, dtype=torch.int32) for _ in range(3)]
    one.on_a_cpu().begin(one.slots_B.cpu(), *wanted)
    for (wide, output), each in zip(outputs, wanted, strict=True):
        assert torch.equal(output.cpu(), each)
        assert_only_within(wide)
    assert torch.equal(one.tokens_S, before[0]) and torch.equal(one.lengths_S, before[1])
    ids_B, positions_B, ends_B = (output.cpu() for _, output in outputs)
    pads = one.slots_B.cpu() == 0
    assert not (ids_B[pads].any() or positions_B[pads].any() or ends_B[pads].any())
    assert torch.equal(ends_B[~pads], positions_B[~pads] + 1)


@pytest.mark.parametrize("num_rows", BATCHES)
def test_a_step_ends_with_each_slot_moved_on_that_may(num_rows: int, device: torch.device) -> None:
    one = Step(num_rows, device, seed=1)
    ((wide, out_B),) = one.in_poison(1)
    state = one.on_a_cpu()
    before = one.tokens_S.clone(), one.lengths_S.clone()
    end_step(one.slots_B, one.sampled_B, one.ends_B, one.limit_S, one.tokens_S, one.lengths_S, out_B)
    wanted = torch.empty(num_rows, dtype=torch.int32)
    state.end(one.sampled_B.cpu(), SampledRows(one.slots_B.cpu(), one.ends_B.cpu(), wanted))
    assert torch.equal(out_B.cpu(), wanted)
    assert torch.equal(one.tokens_S.cpu(), state.tokens_S) and torch.equal(one.lengths_S.cpu(), state.lengths_S)
    assert_only_within(wide)
    stays = torch.ones(SLOTS, dtype=torch.bool, device=device)
    moves = (one.slots_B > 0) & (one.ends_B <= one.limit_S[one.slots_B.long()])
    stays[one.slots_B[moves].long()] = False
    assert torch.equal(one.tokens_S[stays], before[0][stays]) and torch.equal(one.lengths_S[stays], before[1][stays])
    assert (one.tokens_S >= 0).all(), "an embedding is looked up with it"


def test_who_has_no_room_or_is_nobody_idles(device: torch.device) -> None:
    slots_B = int32([3, 0, 1, 2, 4], device)
    tokens_S, lengths_S = int32([0, 11, 12, 13, 14], device), int32([0, 5, 6, 7, 8], device)
    limit_S = int32([0, 6, 6, 8, 0], device)
    ids_B, positions_B, ends_B, out_B = (torch.full_like(slots_B, POISON) for _ in range(4))
    begin_step(slots_B, tokens_S, lengths_S, ids_B, positions_B, ends_B)
    assert ids_B.tolist() == [13, 0, 11, 12, 14]
    assert positions_B.tolist() == [7, 0, 5, 6, 8] and ends_B.tolist() == [8, 0, 6, 7, 9]
    end_step(slots_B, int32([21, 22, NOT_A_NUMBER, 24, 25], device), ends_B, limit_S, tokens_S, lengths_S, out_B)
    assert out_B.tolist() == [21, step.IDLE, NOT_A_NUMBER, step.IDLE, step.IDLE]
    assert tokens_S.tolist() == [0, 0, 12, 21, 14] and lengths_S.tolist() == [0, 6, 6, 8, 8]


def test_the_engine_and_the_kernel_say_idle_alike() -> None:
    assert step.IDLE == runner.IDLE != NOT_A_NUMBER


def test_many_steps_walk_to_the_limit_and_stay_there(device: torch.device) -> None:
    """As a graph is replayed: each step begins from what the one before has left."""
    slots_B = int32([2, 1, 0], device)
    tokens_S, lengths_S, limit_S = (int32(each, device) for each in ([0, 5, 6], [0, 3, 7], [0, 6, 9]))
    ids_B, positions_B, ends_B, out_B = (torch.zeros_like(slots_B) for _ in range(4))
    said = []
    for _ in range(5):
        begin_step(slots_B, tokens_S, lengths_S, ids_B, positions_B, ends_B)
        end_step(slots_B, ids_B + 1, ends_B, limit_S, tokens_S, lengths_S, out_B)
        said.append(out_B.tolist())
    assert [row[0] for row in said] == [7, 8, *[step.IDLE] * 3]
    assert [row[1] for row in said] == [6, 7, 8, *[step.IDLE] * 2]
    assert [row[2] for row in said] == [step.IDLE] * 5
    assert lengths_S.tolist() == [0, 6, 9] and tokens_S.tolist() == [0, 8, 8]


def test_the_output_may_be_the_input(device: torch.device) -> None:
    """A row reads and writes its own places only."""
    one = Step(300, device)
    wanted = torch.empty_like(one.sampled_B)
    state = one.on_a_cpu()
    state.end(one.sampled_B.cpu(), SampledRows(one.slots_B.cpu(), one.ends_B.cpu(), wanted))
    end_step(one.slots_B, one.sampled_B, one.ends_B, one.limit_S, one.tokens_S, one.lengths_S, one.sampled_B)
    assert torch.equal(one.sampled_B.cpu(), wanted.cpu())


BEGIN = ("slots_B", "tokens_S", "lengths_S", "ids_B", "positions_B", "ends_B")
END = ("slots_B", "sampled_B", "ends_B", "limit_S", "tokens_S", "lengths_S", "out_B")


def spoils(name: str) -> list[Refusal]:
    """What is wrong for each of them alike."""
    shorter = [] if name in ("slots_B", "tokens_S") else [(name, lambda tensor: tensor[:-1], "contiguous torch.int32 of shape")]
    return [
        (name, lambda tensor: tensor.long(), "contiguous torch.int32 of shape"),
        (name, lambda tensor: tensor.float(), "contiguous torch.int32 of shape"),
        (name, lambda tensor: tensor.repeat_interleave(2)[::2], "contiguous torch.int32 of shape"),
        *shorter,
        *([] if name == "slots_B" else [(name, meta, "contiguous torch.int32 of shape")]),
    ]


def arguments(names: tuple[str, ...], device: torch.device) -> dict[str, Any]:
    return {name: torch.zeros(9 if name.endswith("_S") else 5, dtype=torch.int32, device=device) for name in names}


@pytest.mark.parametrize("refusal", [each for name in BEGIN for each in spoils(name)], ids=lambda refusal: refusal[0])
def test_begin_step_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    assert_refused(begin_step, arguments(BEGIN, device), refusal)


@pytest.mark.parametrize("refusal", [each for name in END for each in spoils(name)], ids=lambda refusal: refusal[0])
def test_end_step_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    assert_refused(end_step, arguments(END, device), refusal)
