"""The two ends of a decode step: they do what the engine does on a CPU, and touch no other slot."""

import pytest
import torch

from tests.kernels.cases import DEVICE, index, some
from vmmkv_kernels import step
from vmmkv_kernels.step import begin_step, end_step
from vmmkv_server.engine import runner
from vmmkv_server.engine.runner import DeviceState, SampledRows
from vmmkv_server.engine.sampler import NOT_A_NUMBER

SLOTS = 700
POISON = -77
batches = pytest.mark.parametrize("num_rows", some([1, 257], [2, 255, 256, 600]))  # a program has 256 rows


class Step:
    """Random slots, some of which pad, and where each stands."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(end: int, size: int) -> torch.Tensor:
            return torch.randint(1, end, (size,), generator=generator).int()

        slots_B = 1 + torch.randperm(SLOTS - 1, generator=generator)[:num_rows].int()
        slots_B[torch.rand(num_rows, generator=generator) < 0.3] = 0
        tokens_S, lengths_S, limit_S = random(200_000, SLOTS), random(1000, SLOTS), random(1000, SLOTS)
        for of_null_slot in (tokens_S, lengths_S, limit_S):
            of_null_slot[0] = 0
        ends_B = random(1000, num_rows) * (slots_B > 0)
        ends_B[::3] = limit_S[slots_B[::3].long()]
        sampled_B = random(200_000, num_rows)
        sampled_B[1::5] = NOT_A_NUMBER
        self.slots_B, self.ends_B, self.sampled_B = slots_B.to(DEVICE), ends_B.to(DEVICE), sampled_B.to(DEVICE)
        self.tokens_S, self.lengths_S, self.limit_S = tokens_S.to(DEVICE), lengths_S.to(DEVICE), limit_S.to(DEVICE)
        self.shifts_S = (random(1000, SLOTS) * (tokens_S % 2)).to(DEVICE)

    def on_a_cpu(self) -> DeviceState:
        """The engine's own, in the same state."""
        state = DeviceState(self.limit_S.cpu())
        state.tokens_S.copy_(self.tokens_S)
        state.lengths_S.copy_(self.lengths_S)
        state.shifts_S.copy_(self.shifts_S)
        return state

    def outputs(self, num_tensors: int) -> torch.Tensor:
        """So many outputs in poison: [:, 4:-4] of what is returned."""
        return torch.full((num_tensors, len(self.slots_B) + 8), POISON, dtype=torch.int32, device=DEVICE)


@batches
def test_a_step_begins_where_each_slot_stands(num_rows: int) -> None:
    one = Step(num_rows)
    before = one.tokens_S.clone(), one.lengths_S.clone()
    wide = one.outputs(4)
    begin_step(one.slots_B, one.tokens_S, one.lengths_S, one.shifts_S, *wide[:, 4:-4])
    wanted = torch.empty(4, num_rows, dtype=torch.int32)
    one.on_a_cpu().begin(one.slots_B.cpu(), *wanted)
    assert torch.equal(wide[:, 4:-4].cpu(), wanted)
    assert (wide[:, :4] == POISON).all() and (wide[:, -4:] == POISON).all()
    assert torch.equal(one.tokens_S, before[0]) and torch.equal(one.lengths_S, before[1])
    is_pad = one.slots_B.cpu() == 0
    assert not wanted[:, is_pad].any()
    assert torch.equal(wanted[3, ~is_pad], wanted[1, ~is_pad] + 1)
    assert torch.equal(wanted[2], wanted[1] + one.shifts_S.cpu()[one.slots_B.cpu()])


@batches
@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_ends_with_each_slot_moved_on_that_may(num_rows: int, in_place: bool) -> None:
    one = Step(num_rows, seed=1)
    wide, state = one.outputs(1)[0], one.on_a_cpu()
    wanted = torch.empty(num_rows, dtype=torch.int32)
    state.end(one.sampled_B.cpu(), SampledRows(one.slots_B.cpu(), one.ends_B.cpu(), wanted))
    before = one.tokens_S.clone(), one.lengths_S.clone()
    out_B = one.sampled_B if in_place else wide[4:-4]
    end_step(one.slots_B, one.sampled_B, one.ends_B, one.limit_S, one.tokens_S, one.lengths_S, out_B)
    assert torch.equal(out_B.cpu(), wanted)
    assert (wide[:4] == POISON).all() and (wide[-4:] == POISON).all()
    assert torch.equal(one.tokens_S.cpu(), state.tokens_S) and torch.equal(one.lengths_S.cpu(), state.lengths_S)
    stays = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE)
    moves = (one.slots_B > 0) & (one.ends_B <= one.limit_S[one.slots_B.long()])
    stays[one.slots_B[moves].long()] = False
    assert torch.equal(one.tokens_S[stays], before[0][stays]) and torch.equal(one.lengths_S[stays], before[1][stays])
    assert (one.tokens_S >= 0).all(), "an embedding is looked up with it"


def test_steps_walk_to_the_limit_and_stay_there() -> None:
    """As a graph is replayed: each step begins from what the one before has left. A row that may not advance is IDLE."""
    assert step.IDLE == runner.IDLE != NOT_A_NUMBER
    slots_B, tokens_S, lengths_S, limit_S = index(2, 1, 0), index(0, 5, 6), index(0, 3, 7), index(0, 6, 9)
    ids_B, rows_B, positions_B, ends_B, out_B = (torch.zeros_like(slots_B) for _ in range(5))
    said = []
    for _ in range(5):
        begin_step(slots_B, tokens_S, lengths_S, torch.zeros_like(limit_S), ids_B, rows_B, positions_B, ends_B)
        end_step(slots_B, ids_B + 1, ends_B, limit_S, tokens_S, lengths_S, out_B)
        said.append(out_B.tolist())
    assert [row[0] for row in said] == [7, 8, *[step.IDLE] * 3]
    assert [row[1] for row in said] == [6, 7, 8, *[step.IDLE] * 2]
    assert [row[2] for row in said] == [step.IDLE] * 5
    assert lengths_S.tolist() == [0, 6, 9] and tokens_S.tolist() == [0, 8, 8]
