"""Elastic memory without vLLM: blocks in groups, the budget's thread, and engines that share a budget. Memory is real."""

import contextlib
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmmkv.adapters.vllm.elastic.control import BudgetControl
from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks, Run, aligned, blocks_of_group, bytes_of_groups
from vmmkv.adapters.vllm.elastic.options import ElasticOptions
from vmmkv.cli.main import main
from vmmkv.driver.host import HostDriver
from vmmkv.errors import BudgetError, HolderUnavailable
from vmmkv.holder.arbiter import Share, free_bytes, settle
from vmmkv.holder.control import BudgetClient
from vmmkv.holder.process import Holder
from vmmkv.holder.sharing import SharedBudget
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import GIB, KIB, MIB, PAGE_BYTES

SIDE_BY_SIDE = [Run(0, PAGE_BYTES)]
CPU = torch.device("cpu")


@pytest.fixture
def driver():
    with contextlib.closing(HostDriver()) as driver:
        yield driver


# blocks and groups


@pytest.mark.parametrize(
    ("strides", "blocks", "in_much"),
    [
        ([2 * MIB], 1, 8),  # all layers of Llama-3.1-8B, 16 tokens
        ([64 * KIB] * 32, 32, 32),  # its layers apart
        ([9 * MIB // 4], 8, 8),  # all 36 layers of Qwen3-8B
        ([PAGE_BYTES // 4, PAGE_BYTES * 3 // 2], 4, 4),
    ],
)
def test_a_group_is_whole_pages_and_16_mib_of_much_memory(strides, blocks, in_much):
    assert blocks_of_group(strides, 100) == blocks
    assert bytes_of_groups(100, aligned(100, strides), 100) % (blocks * sum(strides)) == 0
    assert blocks_of_group(strides, (16 << 30) // sum(strides) + 1) == in_much
    assert blocks_of_group(strides, (64 << 30) // sum(strides) + 1) == in_much


def test_the_lowest_groups_are_mapped_first_and_zeroed(driver):
    memory = ElasticBlocks(driver, aligned(20, [PAGE_BYTES // 4, PAGE_BYTES // 2]), 20)
    assert memory.grow(5) == [*range(4, 12)] and memory.num_growable == 8
    tensor = memory.tensor()
    assert tensor[: 3 * PAGE_BYTES].count_nonzero() == 0
    tensor[PAGE_BYTES : 2 * PAGE_BYTES] = 1
    memory.set_budget(2 * memory.group_bytes)
    assert memory.settle() == ([1], [])
    memory.reclaim()
    memory.set_budget(20 * memory.group_bytes)
    assert memory.grow(1) == [4, 5, 6, 7] and tensor[: 3 * PAGE_BYTES].count_nonzero() == 0
    memory.close()


def test_a_group_without_prefixes_goes_first_then_the_one_used_least_recently(driver):
    memory = ElasticBlocks(driver, SIDE_BY_SIDE, 8)
    memory.grow(7)
    for block in (3, 1, 5):
        memory.take([block])
        memory.give([block])
    memory.take([2, 4, 6, 7])
    memory.set_budget(6 * PAGE_BYTES)
    assert memory.settle(lambda group: group == 3) == ([1, 5], [])
    memory.close()


def test_a_group_that_waits_for_a_request_stays_when_another_one_can_go(driver):
    memory = ElasticBlocks(driver, SIDE_BY_SIDE, 4)
    memory.grow(3)
    memory.take([1, 2, 3])
    memory.set_budget(3 * PAGE_BYTES)
    assert memory.settle() == ([1], []) and memory.reclaim() == 0
    memory.give([3])
    assert memory.settle() == ([3], [1])
    assert memory.reclaim() == PAGE_BYTES and memory.may_hand_out(1)
    memory.close()


def test_memory_goes_only_when_the_work_before_has_ended():
    driver = FakeDriver()
    memory = ElasticBlocks(driver, SIDE_BY_SIDE, 3)
    memory.take(memory.grow(2))
    base = memory.tensor().data_ptr()
    step = driver.launch([(base + PAGE_BYTES, base + 3 * PAGE_BYTES)])
    memory.give([1, 2])
    memory.set_budget(PAGE_BYTES)
    memory.settle()
    assert memory.reclaim() == 0
    step.finish()
    assert memory.reclaim() == 2 * PAGE_BYTES
    memory.close()
    assert driver.live_handles == driver.live_mappings == driver.live_reservations == 0


def test_memory_that_the_device_does_not_give_is_not_promised_for_a_moment():
    now = [0.0]
    driver = FakeDriver(memory_bytes=2 * PAGE_BYTES)
    memory = ElasticBlocks(driver, SIDE_BY_SIDE, 8, clock=lambda: now[0])
    assert memory.grow(7) == [1] and memory.num_growable == 0
    now[0] = 1.0
    driver.memory_bytes = GIB
    assert memory.num_growable == 6 and len(memory.grow(6)) == 6
    memory.close()


def test_what_writes_anywhere_before_blocks_are_handed_out_has_scratch_memory(driver):
    memory = ElasticBlocks(driver, aligned(50, [PAGE_BYTES, PAGE_BYTES // 2]), 50)
    before = driver.calls["create"] - driver.calls["release"]
    with memory.scratch():
        memory.tensor().fill_(1)
        assert driver.calls["create"] - driver.calls["release"] <= before + 2
    assert driver.calls["create"] - driver.calls["release"] == before
    memory.close()


def test_a_budget_below_a_group_is_refused(driver):
    memory = ElasticBlocks(driver, aligned(64, [PAGE_BYTES // 32]), 64)
    with pytest.raises(BudgetError, match=r"a budget of 1\.0 MiB is below 2\.0 MiB, the memory of the 32 blocks"):
        memory.set_budget(MIB)
    memory.close()


# options


def test_options_are_texts():
    options = ElasticOptions.of({"arbiter": "/run/kv", "floor": "8GiB", "control": "/run/a"})
    assert (options.arbiter, options.floor_bytes, options.control) == (Path("/run/kv"), 8 * GIB, Path("/run/a"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["24GiB"], "is to be an object"),
        ({"budgets": "1GiB"}, "has no 'budgets'; did you mean budget"),
        ({"budget": 24}, "budget of vmmkv_elastic is 24, and is to be a text"),
        ({"control": "kv.sock"}, "is to be an absolute path"),
        ({"arbiter": "/run/kv"}, "needs both arbiter"),
        ({"arbiter": "/run/kv", "floor": "1GiB", "budget": "2GiB"}, "so leave one out"),
    ],
)
def test_options_that_are_not_understood_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        ElasticOptions.of(given)


# the budget, from outside


class Engine:
    """An engine that makes no steps, in the way of vLLM's pool."""

    def __init__(self, driver, num_blocks=16, **options):
        self.memory = ElasticBlocks(driver, SIDE_BY_SIDE, num_blocks)
        self.control = BudgetControl(self.memory, self.settle, **options)

    def settle(self):
        self.memory.settle()
        self.memory.reclaim()

    def use(self, count, is_running=True):
        """A request takes so many blocks; return those that it got."""
        with self.memory.lock:
            self.control.apply()
            got = self.memory.grow(count)
            if len(got) < count:
                self.control.ask(count - len(got), is_running)
                got += self.memory.grow(count - len(got))
            self.memory.take(got)
            return got

    def end(self, blocks):
        with self.memory.lock:
            self.memory.give(blocks)

    @property
    def mapped(self):
        return self.memory.state().mapped_bytes // PAGE_BYTES

    def close(self):
        self.control.close()
        with self.memory.lock:
            self.memory.close()


def eventually(is_so):
    end_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_vmmkv_resize_shrinks_an_idle_engine(driver, tmp_path, capsys):
    path = tmp_path / "engine.sock"
    with contextlib.closing(Engine(driver, control=path)) as engine:
        engine.end(engine.use(9))
        assert main(["resize", str(path)]) == 0
        said = capsys.readouterr().out
        assert said == "budget 32.0 MiB, mapped 20.0 MiB, used by requests 0 B, reserved 32.0 MiB; 2.0 MiB at a time\n"
        assert main(["resize", str(path), "6MiB", "--wait"]) == 0
        assert engine.mapped == 3 and "budget 6.0 MiB, mapped 6.0 MiB" in capsys.readouterr().out
        assert main(["resize", str(path), "1MiB"]) == 1
        assert "a budget of 1.0 MiB cannot be" in capsys.readouterr().err
    assert not path.exists()
    assert main(["resize", str(path)]) == 1
    assert f"no elastic engine, and no holder, answers at {path}: No such file" in capsys.readouterr().err


def test_blocks_in_use_stay_until_they_are_given_back(driver, tmp_path, capsys):
    path = tmp_path / "engine.sock"
    with contextlib.closing(Engine(driver, control=path)) as engine:
        blocks = engine.use(9)
        BudgetClient(path).resize(PAGE_BYTES)
        eventually(lambda: engine.memory.state().budget_bytes == PAGE_BYTES)
        assert main(["resize", str(path)]) == 0
        assert "more is mapped than the budget" in capsys.readouterr().out and engine.mapped == 10
        engine.end(blocks)
        eventually(lambda: engine.mapped == 1)


# one budget for several engines


@pytest.fixture
def holder(driver, tmp_path):
    path = tmp_path / "kv.sock"
    lines = []
    with contextlib.closing(Holder(path, 12 * PAGE_BYTES, driver, lines.append)) as holder:
        thread = threading.Thread(target=holder.run)
        thread.start()
        yield path
        holder.stop()
        thread.join()


@pytest.fixture
def sharing(holder):
    with contextlib.ExitStack() as closing:

        def sharing(floor=2):
            driver = closing.enter_context(contextlib.closing(HostDriver()))
            shared = SharedBudget(holder, CPU, floor_bytes=floor * PAGE_BYTES, most_bytes=16 * PAGE_BYTES)
            shared.wait_for(floor * PAGE_BYTES)
            engine = Engine(driver, shared=shared)
            with engine.memory.lock:
                engine.memory.set_budget(shared.budget_bytes)
                engine.memory.take([0])
            return closing.enter_context(contextlib.closing(engine))

        yield sharing


@pytest.mark.parametrize("is_running", [True, False])
def test_engines_use_one_budget_in_turn(sharing, holder, is_running):
    one, other = sharing(), sharing()
    blocks = one.use(9)
    assert len(blocks) == 9 and other.mapped == 1
    assert len(other.use(5, is_running)) == 1, "the first one needs the rest"
    one.end(blocks)
    eventually(lambda: other.use(4, is_running))
    shares = BudgetClient(holder).state()["shares"]
    assert sum(max(each["budget_bytes"], each["mapped_bytes"]) for each in shares) <= 12 * PAGE_BYTES


def test_the_share_of_an_engine_that_ends_is_free_at_once(sharing, holder, capsys):
    one, other = sharing(), sharing()
    one.use(9)
    one.control.close()
    eventually(lambda: len(BudgetClient(holder).state()["shares"]) == 1)
    assert len(other.use(9)) == 9
    assert main(["resize", str(holder)]) == 0
    assert "budget 24.0 MiB, of which handles 0 B\nprocess " in capsys.readouterr().out


def test_a_floor_that_cannot_be_kept_is_refused(sharing, holder):
    sharing(floor=8)
    with pytest.raises(
        HolderUnavailable, match=r"a floor of 10\.0 MiB does not fit beside those of 1 other engines, 16\.0 MiB"
    ):
        sharing(floor=5)


def test_an_engine_that_shares_is_not_resized_by_hand(sharing, holder, tmp_path):
    shared = SharedBudget(holder, CPU, floor_bytes=2 * PAGE_BYTES, most_bytes=16 * PAGE_BYTES)
    path = tmp_path / "engine.sock"
    said = pytest.raises(BudgetError, match="the budget of this engine is set by the holder at")
    with contextlib.closing(HostDriver()) as own, contextlib.closing(Engine(own, control=path, shared=shared)), said:
        BudgetClient(path).resize(4 * PAGE_BYTES)


# the policy


def share(**sizes):
    return Share(**({"floor_bytes": 0, "most_bytes": 100} | sizes))


def test_needs_are_met_from_free_memory_and_then_by_those_idle_longest():
    old = share(budget_bytes=40, mapped_bytes=40, busy_s=1.0, floor_bytes=10)
    late = share(budget_bytes=40, mapped_bytes=20, busy_s=2.0)
    busy = share(needed_bytes=45, busy_s=3.0)
    settle([old, late, busy], 90)
    assert (old.budget_bytes, late.budget_bytes, busy.budget_bytes) == (10, 35, 15), "30 are still mapped by the first"
    old.mapped_bytes = 10
    settle([old, late, busy], 90)
    assert (old.budget_bytes, late.budget_bytes, busy.budget_bytes) == (10, 35, 45)


def test_wants_take_nothing_from_others():
    one, other = share(budget_bytes=60, mapped_bytes=60), share(wanted_bytes=80)
    settle([one, other], 100)
    assert (one.budget_bytes, other.budget_bytes) == (60, 40)


sizes = st.integers(0, 120)


@given(
    st.lists(st.tuples(sizes, sizes, sizes, sizes, st.integers(0, 30), st.floats(0, 9)), min_size=1, max_size=5),
    st.integers(100, 400),
)
def test_budgets_are_within_the_total_and_nobody_is_left_with_less_than_its_claim(given, total):
    shares = [
        share(budget_bytes=budget, mapped_bytes=mapped, needed_bytes=needed, wanted_bytes=wanted, floor_bytes=floor, busy_s=at)
        for budget, mapped, needed, wanted, floor, at in given
    ]
    before = [each.budget_bytes for each in shares]
    was_within = free_bytes(shares, total) >= 0
    settle(shares, total)
    if was_within:
        assert free_bytes(shares, total) >= 0
    for budget, each in zip(before, shares, strict=True):
        assert each.budget_bytes >= min(budget, each.claim_bytes)
    if any(each.short_bytes for each in shares) and was_within:
        idle = [each for each in shares if each.budget_bytes > each.claim_bytes]
        coming = sum(max(0, each.mapped_bytes - each.budget_bytes) for each in shares)
        assert not idle or coming >= sum(each.short_bytes for each in shares)
