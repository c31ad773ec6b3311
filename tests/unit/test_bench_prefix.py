"""The prefix suite: systems that do the same, a loop that is right, refusals to report what is wrong, and the bars."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from bench import run
from bench.baselines.blocks import BLOCK_ROWS
from bench.prefix import PARTS, attention, chat, requests
from bench.prefix.addressing import NOBODY, Addressing, Blocks, HostBlocks, HostSlots, NewRows, Slots
from bench.prefix.bars import bars
from bench.prefix.context import Context
from bench.prefix.contiguous import Sharing, Vmmkv
from bench.prefix.filling import check_rows, fill
from bench.prefix.loop import Loop, Outcome, Request, batch_sizes
from bench.prefix.model import Model
from bench.prefix.naming import named, shape_of, without_shape
from bench.prefix.paged import BlockPool, Paged
from bench.prefix.sizes import Decoder, decoder_of
from bench.prefix.systems import System, TokenIds
from bench.report import Report
from bench.rows import RowFile
from bench.settings import SHAPES, Settings, Shape
from vmmkv.errors import OutOfPages
from vmmkv.prefix.radix_tree import Piece
from vmmkv.units import GIB, PAGE_BYTES

CPU = torch.device("cpu")
SMALL = Shape(name="small", layers=2, heads=4, kv_heads=2, head_dim=1024, dtype=torch.float32, weight_bytes=0)
"""Rows of 32 KiB: 64 tokens in a page."""
MOST_TOKENS = 160
SYSTEMS = ("paged", *Sharing)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Model:
    sizes = Decoder(hidden=32, mlp=48, vocabulary=500, rope_base=10_000.0)
    return Model(SMALL, sizes, CPU, max_tokens=MOST_TOKENS, seed=3)


def opened(kind: "str | Sharing", slots: int = 10) -> Paged | Vmmkv:
    if isinstance(kind, Sharing):
        return Vmmkv(SMALL, CPU, kind, num_pages=80, slots=slots, max_tokens=MOST_TOKENS, warm={1: 2})
    return Paged(SMALL, CPU, num_blocks=120, slots=slots, max_tokens=MOST_TOKENS)


def tokens(count: int, seed: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 500, count, dtype=np.int32)


def sharers(prefix: int, own: int, count: int, seed: int, out: int = 5) -> list[Request]:
    return [
        Request(prompt=np.concatenate([tokens(prefix, 77), tokens(own, 100 * seed + index)]), out=out) for index in range(count)
    ]


def answers(model: Model, system: System, *runs: list[Request]) -> list[Outcome]:
    loop = Loop(model, system, token_budget=64, most_sequences=4)
    return [loop.run(requests, first_alone=number == 0) for number, requests in enumerate(runs)]


def plain_words(model: Model, request: Request) -> list[int]:
    """Each token by a pass over the whole sequence so far, in a cache of its own."""
    words: list[int] = []
    for _ in range(request.out):
        sequence = torch.from_numpy(np.concatenate([request.prompt, np.asarray(words, np.int32)]))
        count = len(sequence)
        planes = [(torch.zeros(1, count, 2, 1024), torch.zeros(1, count, 2, 1024)) for _ in range(SMALL.layers)]
        zeros = torch.zeros(count, dtype=torch.int32)
        rows = NewRows(
            slots_N=zeros,
            positions_N=torch.arange(count, dtype=torch.int32),
            slots_B=zeros[:1],
            lengths_B=torch.tensor([count], dtype=torch.int32),
            starts=torch.tensor([0, count], dtype=torch.int32),
        )
        addressing = HostBlocks(planes, torch.zeros(1, 1, dtype=torch.int32))
        outputs = model.forward(sequence, rows, addressing, torch.tensor([count - 1]))
        words.append(int(model.next_words(outputs)))
    return words


@pytest.mark.parametrize("kind", SYSTEMS, ids=str)
def test_every_system_says_what_a_model_without_a_loop_says(model: Model, kind: "str | Sharing") -> None:
    system = opened(kind)
    try:
        runs = sharers(70, 9, 4, seed=1), sharers(70, 9, 3, seed=2)
        for outcome, requests in zip(answers(model, system, *runs), runs, strict=True):
            assert outcome.words == [plain_words(model, request) for request in requests]
            assert all(0 < first_us <= outcome.total_us for first_us in outcome.first_us)
    finally:
        system.close()


@pytest.mark.parametrize("kind", SYSTEMS, ids=str)
def test_prompts_are_cut_into_steps_and_sequences_wait_for_room(model: Model, kind: "str | Sharing") -> None:
    system = opened(kind)
    try:
        requests = [Request(prompt=tokens(count, count), out=1 + count % 4) for count in (130, 1, 2, 64, 65, 33, 16)]
        (outcome,) = answers(model, system, requests)
        assert outcome.words == [plain_words(model, request) for request in requests]
    finally:
        system.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="in Triton's interpreter")
@pytest.mark.parametrize("over_blocks", [False, True])
@pytest.mark.parametrize("counts", [(3, 1, 0), (1, 1, 1)], ids=["mixed", "decode"])
def test_what_a_gpu_runs_does_what_the_reference_does(counts: tuple[int, ...], over_blocks: bool) -> None:
    """The kernels, as the loop calls them: q, K and V are parts of one tensor, and one row is nobody's."""
    lengths = [5, 17, 4]
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    slots_B, lengths_B = torch.tensor([1, 2, NOBODY], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    which_N = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    positions_N = lengths_B[which_N] - torch.tensor(counts)[which_N] + torch.arange(len(which_N)) - starts[which_N]
    rows = NewRows(
        slots_N=slots_B[which_N],
        positions_N=positions_N.int(),
        slots_B=slots_B,
        lengths_B=lengths_B,
        starts=starts if counts != (1, 1, 1) else None,
    )
    generator = torch.Generator().manual_seed(1)
    size = (4, 16, 2, 32) if over_blocks else (3, 32, 2, 32)
    planes = [(torch.randn(size, generator=generator), torch.randn(size, generator=generator))]
    twins = [(planes[0][0].clone(), planes[0][1].clone())]
    tables_SC = torch.tensor([[-1, -1], [2, -1], [3, 0]], dtype=torch.int32)
    limit_S = torch.full((3,), 32, dtype=torch.int32)
    given: Addressing = Blocks(planes, tables_SC, limit_S, 4) if over_blocks else Slots(planes, limit_S, 4)
    wanted: Addressing = HostBlocks(twins, tables_SC) if over_blocks else HostSlots(twins, limit_S)
    angles_TR = torch.rand(32, 16, generator=generator)
    qkv_NOD = torch.randn(len(which_N), 8, 32, generator=generator)
    mine_N = rows.slots_N != NOBODY
    outputs = []
    for addressing in (given, wanted):
        here = rows
        if addressing is wanted:  # a CPU's batches are not filled up
            starts_here = starts[:3] if rows.starts is not None else None
            here = NewRows(
                slots_N=rows.slots_N[mine_N],
                positions_N=rows.positions_N[mine_N],
                slots_B=slots_B[:2],
                lengths_B=lengths_B[:2],
                starts=starts_here,
            )
        q_NHD, k_NKD, v_NKD = (part.clone() for part in qkv_NOD[: len(here.slots_N)].split((4, 2, 2), dim=1))
        if addressing is given:
            q_NHD, k_NKD, v_NKD = qkv_NOD.clone().split((4, 2, 2), dim=1)
        addressing.append(0, q_NHD, k_NKD, v_NKD, here, angles_TR.cos(), angles_TR.sin())
        outputs.append(addressing.attend(0, q_NHD, here)[: int(mine_N.sum())])
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(planes, twins)


def test_sharing_holds_less_than_none_and_about_what_blocks_hold(model: Model) -> None:
    held = {}
    for kind in ("paged", Sharing.NONE, Sharing.ALIAS):
        system = opened(kind)
        try:
            held[kind] = answers(model, system, sharers(128, 6, 4, seed=4, out=20))[0].held_bytes
        finally:
            system.close()
    assert held[Sharing.NONE] == 4 * 3 * 64 * SMALL.layout.row_bytes
    assert held[Sharing.ALIAS] == (2 + 4) * 64 * SMALL.layout.row_bytes
    assert held["paged"] == (8 + 4 * 2) * BLOCK_ROWS * SMALL.layout.row_bytes


def test_blocks_are_shared_whole_and_counted(model: Model) -> None:
    system = opened("paged")
    assert isinstance(system, Paged)
    cold, warm = answers(model, system, sharers(70, 9, 4, seed=1), sharers(70, 9, 3, seed=2))
    assert cold.methods == {"compute": 1, "blocks": 3} and cold.hit_tokens == 3 * 64
    assert warm.methods == {"blocks": 3} and warm.hit_tokens == 3 * 64
    assert system.memory()[1] == 0, "nobody runs"
    assert (system._pool.num_refs <= 1).all(), "the tree holds each block once"


def test_blocks_of_the_tree_go_when_others_need_them() -> None:
    pool = BlockPool(4)
    held = pool.acquire(3)
    node = pool.tree.insert(None, list(range(48)), [Piece(16 * (i + 1), block) for i, block in enumerate(held)]).node
    assert pool.acquire(1)
    pool.tree.lock(node)
    with pytest.raises(OutOfPages, match="all others are in use"):
        pool.acquire(2)
    pool.tree.unlock(node)
    assert sorted(pool.acquire(3)) == sorted(held)


@budget(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_blocks_have_an_owner_or_are_free(lengths: list[int]) -> None:
    system = Paged(SMALL, CPU, num_blocks=20, slots=4, max_tokens=64)
    for number, count in enumerate(lengths):
        prompt = tokens(count, number % 3)
        attached = system.attach(prompt, count + 1)
        assert attached.num_tokens < count
        system.reserve(np.array([attached.slot]), np.array([count]))
        system.finish(attached.slot, prompt)
        assert system._pool.num_held == system._pool.tree.num_pieces
        assert system._pool.num_held + len(system._pool._free) == 20


@pytest.mark.parametrize("kind", ["paged", Sharing.ALIAS], ids=str)
def test_attached_rows_are_compared_bit_for_bit(kind: "str | Sharing") -> None:
    system = opened(kind)
    try:
        known = tokens(100, 5)
        source = fill(system, SMALL, CPU, known, seed=9)
        attached = system.attach(np.append(known, np.int32(7)), 110)
        assert attached.num_tokens == (96 if kind == "paged" else 100)
        check_rows(system, SMALL, attached.slot, source, attached.num_tokens)
        k_TKD, _ = system.rows(1, source, 100)
        system.write(1, source, k_TKD.clone() + 1, torch.zeros_like(k_TKD))
    finally:
        system.close()


def test_parts_that_there_are_not_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["prefix", "--parts", "chatt"])
    assert f"no part chatt; prefix has {', '.join(PARTS)}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run.main(["all", "--parts", "chat"])
    assert "name one suite" in capsys.readouterr().err


def test_wrong_outputs_are_not_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that says that it has a prefix, and has not."""

    def lie(self: Vmmkv, prompt: TokenIds, max_tokens: int) -> object:
        attached = honest(self, prompt, max_tokens)
        if attached.num_tokens:
            for layer in range(SHAPES["wide"].layers):
                for rows_TKD in self.rows(layer, attached.slot, attached.num_tokens):
                    rows_TKD.zero_()
        return attached

    honest = Vmmkv.attach
    monkeypatch.setattr(Vmmkv, "attach", lie)
    arguments = ("prefix", "--quick", "--device", "cpu", "--out", str(tmp_path), "--parts", "requests")
    assert run.main(arguments) == 1
    rows = [json.loads(line) for line in (tmp_path / "prefix.jsonl").read_text().splitlines()]
    failed = [row["workload"] for row in rows if row["metric"] == "failed"]
    assert {row["system"] for row in rows if row["metric"] != "failed"} == {"none", "paged 16", "vmmkv compute"}
    assert {name.rpartition(": ")[2] for name in failed} == {f"vmmkv {name}" for name in ("chooser", "alias", "adopt")}


def test_at_full_size_batches_have_slots_and_memory_fits_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each part asks for, counted and not allocated: only a large GPU has room for it."""
    settings = Settings(device=torch.device("cuda:0"), shape=SHAPES["llama-3.1-8b"])
    report = Report(cast(RowFile, None))
    context = Context(settings, report)
    asked: list[tuple[int, int]] = []

    def open_vmmkv(_self: Context, _sharing: Sharing, **given: Any) -> None:
        warm_pages = sum(num_pages * count for num_pages, count in given.get("warm", {}).items())
        assert warm_pages <= given["num_pages"]
        asked.append((given["slots"], given["num_pages"] * PAGE_BYTES))

    def open_paged(_self: Context, *, slots: int, max_tokens: int, num_tokens: int) -> None:
        assert num_tokens >= max_tokens - 1
        asked.append((slots, num_tokens * settings.shape.layout.row_bytes))

    monkeypatch.setattr(Context, "open_vmmkv", open_vmmkv)
    monkeypatch.setattr(Context, "open_paged", open_paged)
    for number, prefix_tokens in enumerate(context.sizes.prefixes):
        for _, entry in requests._plan(context, number):
            requests._open(context, entry, prefix_tokens)
            assert asked[-1][0] >= batch_sizes(context.sizes.requests)[-1]
    for sharing in chat._SYSTEMS:
        chat._open(context, sharing)
        assert asked[-1][0] >= batch_sizes(context.sizes.conversations)[-1]
    for attended in attention.SYSTEMS.values():
        attention._open(context, attended)
    assert len(asked) == requests.num_steps(context) + chat.num_steps(context) + attention.num_steps(context)
    assert max(size_bytes for _, size_bytes in asked) + settings.shape.weight_bytes < 130 * GIB


def test_batches_grow_up_to_the_most_sequences() -> None:
    assert batch_sizes(128) == [16, 32, 64, 128]
    assert batch_sizes(20) == [16, 20]
    assert batch_sizes(17) == [16, 20]
    assert batch_sizes(8) == [8]
    assert batch_sizes(1) == [4]


def test_a_loop_wants_a_slot_for_each_row_of_a_batch(model: Model) -> None:
    with pytest.raises(ValueError, match="4 slots: batches of up to 8 rows want as many"):
        Loop(model, opened("paged", slots=4), token_budget=64, most_sequences=8)


def test_bars_follow_from_rows() -> None:
    cold = "128 requests of 4096 + 128 tokens, 64 out, cold"
    medians = {
        (cold, "vmmkv chooser", "total"): 1.5,
        (cold, "paged 16", "total"): 1.5,
        (cold, "vmmkv alias", "total"): 1.49,
        (cold, "vmmkv compute", "total"): 17.0,
        (cold, "vmmkv chooser", "memory, held"): 4.4,
        (cold, "paged 16", "memory, held"): 4.0,
        ("attention", "aliased", "attention"): 8.5,
        ("attention", "copied", "attention"): 16.1,
        ("attention", "paged", "attention"): 8.6,
        ("chat: 20", "vmmkv chooser", "by adopt"): 99.0,
        ("attach 4096 tokens", "alias", "in the driver"): 700.0,
    }
    holds = [bar.holds for bar in bars(medians, {("attach 4096 tokens", "alias", "in the driver"): 2500.0})]
    assert holds == [False, True, True, True, True, True, True, False]
    for shape in ("qwen3-0.6b", "wide"):
        others = {(named(shape, workload), *rest): figure for (workload, *rest), figure in medians.items()}
        assert not any(bar.figures for bar in bars(others, others)), "nothing is promised of it"
        both = [bar.figures for bar in bars(medians | others, others)]
        assert both[:-1] == [bar.figures for bar in bars(medians, {})][:-1]


def test_a_workload_says_its_shape_unless_it_is_the_promised_one() -> None:
    for shape in SHAPES:
        workload = named(shape, "attach 4096 tokens")
        assert shape_of(workload) == shape and without_shape(workload) == "attach 4096 tokens"
    assert named("llama-3.1-8b", "chat: 20") == "chat: 20"


def test_the_model_of_every_shape_is_known() -> None:
    assert decoder_of(SHAPES["llama-3.1-8b"]).hidden == 4096
    for shape in SHAPES.values():
        assert decoder_of(shape).vocabulary > 0
    with pytest.raises(ValueError, match="its model is not known"):
        decoder_of(SMALL)
