"""The parts of the vLLM adapter that need no vLLM: where blocks lie, and which requests load, store and wait."""

import hashlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from tests.laws.faulty_tier import FaultyTier
from tests.stores import until
from vmmkv import KeyChain, Store
from vmmkv.adapters.vllm.blocks import BlockMemory, BlockMover, IdlePoller, blocks_of_record, of_rank
from vmmkv.adapters.vllm.directory import Directory, listen_to
from vmmkv.adapters.vllm.namespaces import Features, Namespaces
from vmmkv.adapters.vllm.plugin import options_of
from vmmkv.adapters.vllm.schedule import PlannedLoad, Schedule, StepPlan, of_group
from vmmkv.adapters.vllm.worth import Worth
from vmmkv.rate import Rate
from vmmkv.tiers import HostTier
from vmmkv.tiers.shared import SharedTier

# options


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_role": "kv_producer"}, 'kv_role must be "kv_both" in --kv-transfer-config, and is "kv_producer"'),
        ({"kv_load_failure_policy": "fail"}, 'kv_load_failure_policy must be "recompute"'),
        ({"kv_connector_extra_config": {"kv_host_budget": "1"} | {"kv_disks": "/kv"}}, "has no 'kv_disks'"),
    ],
)
def test_what_the_connector_cannot_serve_is_refused_by_the_name_of_the_option(given, said):
    fits = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    transfer = SimpleNamespace(**{**fits, "kv_connector_extra_config": {"kv_host_budget": "1GiB"}, **given})
    with pytest.raises(ValueError, match=said):
        options_of(transfer)
    assert options_of(SimpleNamespace(**fits, kv_connector_extra_config={"kv_host_budget": "1GiB"})).kv_host_budget == "1GiB"


# blocks


@pytest.mark.parametrize(
    ("block_bytes", "count"),
    [(2 << 20, 1), (3 << 20, 1), (1 << 20, 2), (1792 << 10, 1), (4096, 512), (2560, 816), (1000, 2048)],
)
def test_a_record_has_whole_blocks_and_pages_of_a_disk(block_bytes, count):
    assert blocks_of_record(block_bytes) == count and block_bytes * count % 4096 == 0


LAYOUTS = {
    "blocks of all layers": lambda: [torch.zeros(6, 3, 2, 8, 4)],
    "K and V of each layer": lambda: [torch.zeros(2, 6, 4, 8) for _ in range(3)],
    "blocks of each layer": lambda: [torch.zeros(6, 2, 4, 8) for _ in range(3)],
    "heads before tokens": lambda: [torch.zeros(6, 8, 4, 2).permute(0, 2, 1, 3) for _ in range(3)],
    "heads outside of blocks": lambda: [torch.zeros(4, 6, 8, 2) for _ in range(2)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_runs_of_a_block_are_its_bytes_and_no_others(layout):
    tensors = LAYOUTS[layout]()
    memory = BlockMemory(tensors, 6)
    assert memory.block_bytes == sum(tensor.nbytes for tensor in tensors) // 6
    for block in range(6):
        for tensor in tensors:
            tensor.zero_()
            tensor.select(tensor.shape.index(6), block).fill_(1.0)
        spans = memory.spans(block)
        assert sum(size for _, size in spans) == memory.block_bytes
        marked = set()
        for tensor in tensors:
            flat = torch.tensor(tensor.untyped_storage(), dtype=torch.uint8).view(torch.float32)
            start = tensor.untyped_storage().data_ptr()
            marked |= {start + 4 * at for at in flat.nonzero()[:, 0].tolist()}
        assert {at for start, size in spans for at in range(start, start + size, 4)} == marked


@pytest.mark.parametrize(
    ("layout", "count"), [("blocks of all layers", 1), ("K and V of each layer", 2), ("heads before tokens", 1)]
)
def test_bytes_of_a_block_that_lie_side_by_side_are_one_run(layout, count):
    tensor, *_ = LAYOUTS[layout]()  # one layer, lest layers lie side by side by chance
    assert len(BlockMemory([tensor], 6).spans(3)) == count


def test_parts_of_groups_and_ranks_have_keys_of_their_own():
    key = KeyChain("m", every=1).of([1]).keys()[0]
    parts = [of_rank(of_group(key, group), rank) for group in (0, 1, 255) for rank in (0, 1, 255, 256, 65535)]
    assert parts[0] == key and len(set(parts)) == 15 and {len(part) for part in parts} == {32}


def test_a_cache_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"shape \(5, 2\) has no dimension of 6 blocks"):
        BlockMemory([torch.zeros(5, 2)], 6)


# adapters


def test_an_adapter_is_told_by_its_name_and_files_and_one_that_may_change_is_not_kept(tmp_path, caplog):
    def request(name, path, **options):
        adapter = SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=str(path), load_inplace=False)
        adapter.__dict__.update(options)
        return SimpleNamespace(cache_salt="salt", lora_request=adapter, mm_features=[])

    for name, weights in (("one", b"1"), ("copy", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
        (tmp_path / name / "adapter_model.safetensors").write_bytes(weights * 10_000)
    of = Namespaces().of
    assert of(SimpleNamespace(cache_salt="salt", lora_request=None, mm_features=[])) == ("salt",)
    assert of(request("a", tmp_path / "one")) == of(request("a", tmp_path / "copy"))
    assert (
        len({of(request("a", tmp_path / "one")), of(request("b", tmp_path / "one")), of(request("a", tmp_path / "other"))}) == 3
    )
    before = of(request("a", tmp_path / "one"))
    (tmp_path / "one" / "adapter_config.json").write_text('{"r": 8}')
    assert of(request("a", tmp_path / "one")) == before != Namespaces().of(request("a", tmp_path / "one"))
    assert of(request("a", "org/adapter")) is None and "org/adapter is no directory here" in caplog.text
    assert of(request("a", tmp_path / "one", load_inplace=True)) is None
    assert of(request("a", tmp_path / "one")) is None, "it was loaded over the other"


# images and sounds


def image(content, offset, length):
    """A feature as vLLM has it, named by its content."""
    name = hashlib.sha256(content.encode()).hexdigest()
    return SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))


def keys_with(*images, num_tokens=16):
    """Keys of records of 4 tokens, which are the same ones whatever the images are."""
    return KeyChain("m", every=4).of([7] * num_tokens, "salt", Features(images)).keys()


@pytest.mark.parametrize(
    ("offset", "length", "first"),
    [(0, 4, 0), (4, 4, 1), (6, 1, 1), (6, 7, 1), (7, 9, 1), (8, 3, 2), (15, 1, 3), (16, 4, 4)],
)
def test_an_image_counts_from_the_first_record_that_has_one_of_its_tokens(offset, length, first):
    text = KeyChain("m", every=4).of([7] * 16, "salt").keys()
    one, other = (keys_with(image(content, offset, length)) for content in ("one", "other"))
    assert keys_with() == text and keys_with(image("one", offset, length)) == one
    assert one[:first] == other[:first] == text[:first]
    assert not {*one[first:]} & {*other[first:]} and not {*one[first:], *other[first:]} & {*text}


def test_the_place_of_an_image_counts_and_each_image_does():
    sets = [
        *([image("a", 5, 2)], [image("a", 6, 2)], [image("a", 5, 3)], [image("b", 5, 2)]),
        *([image("a", 5, 2), image("b", 9, 2)], [image("b", 5, 2), image("a", 9, 2)], [image("a", 5, 2), image("a", 9, 2)]),
        [image("a", 5, 4), image("b", 7, 2)],  # a sound within its video
    ]
    assert len({keys_with(*images)[2] for images in sets}) == len(sets)
    assert len({keys_with(*images)[1] for images in sets}) == 5, "a second one begins behind this record, but for the sound"
    assert {keys_with(*images)[0] for images in sets} == {*keys_with()[:1]}
    assert keys_with(image("b", 9, 2), image("a", 5, 2)) == keys_with(image("a", 5, 2), image("b", 9, 2))


def test_images_that_come_with_later_tokens_count_and_change_no_earlier_record():
    images = [image("a", 2, 3)]
    chain = KeyChain("m", every=4).of([7] * 8, "salt", Features(images))
    before = chain.keys()
    images.append(image("b", 9, 2))
    chain = chain.grown([7] * 16)
    assert chain.keys() == keys_with(*images) and chain.keys()[:2] == before
    images.append(SimpleNamespace(identifier="a client's name", mm_position=SimpleNamespace(offset=17, length=2)))
    keys = chain.grown([7] * 24).keys()
    assert keys[:4] == chain.keys() and keys == chain.grown([7] * 24).keys()
    assert keys[4] != KeyChain("m", every=4).of([7] * 24, "salt", Features(images)).keys()[4]


@pytest.mark.parametrize("name", [None, "", "cat.png", "request-1-image-0", "a" * 63, "A" * 64, "g" * 64, f"{'a' * 64}-0"])
def test_a_request_with_an_image_whose_name_is_no_hash_is_not_kept(name, caplog):
    place = SimpleNamespace(offset=0, length=4)
    of = Namespaces().of
    for _ in range(2):
        images = [image("a", 8, 4), SimpleNamespace(identifier=name, mm_position=place)]
        assert of(SimpleNamespace(cache_salt=None, lora_request=None, mm_features=images)) is None
    assert len(caplog.records) == 1 and "names tell no content" in caplog.text
    hashed = [SimpleNamespace(identifier=f"{before}{'0f' * 32}", mm_position=place) for before in ("", "adapter:", "a:b:")]
    assert of(SimpleNamespace(cache_salt=None, lora_request=None, mm_features=hashed)) == (None,)


# which records there are


def test_a_record_is_there_when_each_rank_has_reported_its_part():
    directory, key = Directory([], 2), KeyChain("m", every=1).of([1]).keys()[0]
    directory.learn([("host", key, True)], is_busy=False)
    assert directory.lookup([key]) == [""]
    directory.learn([("host", of_rank(key, 1), True)], is_busy=False)
    assert directory.lookup([key]) == ["host"]
    directory.learn([("host", key, False)], is_busy=False)
    assert directory.lookup([key]) == [""]


class Dictionary(SharedTier):
    """A store in this process."""

    name = "dictionary"

    def __init__(self, values):
        super().__init__("a dictionary", timeout_s=60.0, record_bytes=4096)
        self.values = values

    def ask(self, names):
        return [name in self.values for name in names]

    def get(self, name):
        return self.values[name]

    def put(self, name, header, record):
        self.values[name] = header + bytes(record)

    def remove(self, name):
        self.values.pop(name, None)


def test_a_record_that_a_worker_has_put_into_a_store_is_there_though_the_store_has_lacked_it():
    tiers = [Dictionary(values := {}), Dictionary(values)]
    directory, changes, key = Directory(tiers[:1], 1), [], KeyChain("m", every=1).of([1]).keys()[0]
    listen_to(tiers[1:], changes.append)
    until(lambda: directory.lookup([key]) == [""])
    with Store(tiers[1:]) as store:
        mover = BlockMover(store, BlockMemory([torch.ones(1, 1024, dtype=torch.int32)], 1))
        mover.after_step(StepPlan(stores=[(key, [0])]))
        until(lambda: mover.go_on(computes=True) or not mover.is_busy)
    assert changes == [("dictionary", key, True)], "it is reported before the worker has nothing more to do"
    directory.learn(changes, is_busy=False)
    assert directory.lookup([key]) == ["dictionary"]
    directory.close()
    for tier in tiers:
        tier.close()


# requests


class Tiers:
    def __init__(self):
        self.held = set()
        self.knows = True

    def lookup(self, keys):
        return ["host" if key in self.held else "" for key in keys] if self.knows else None


@pytest.fixture
def tiers():
    return Tiers()


def worth(**clock):
    return Worth(record_tokens=4, record_bytes=4000, **clock)


@pytest.fixture
def schedule(tiers):
    return Schedule("model", block_tokens=2, record_tokens=4, lookup=tiers.lookup, worth=worth())


def computed(schedule, name, tokens, *, at_once=100):
    """Compute a request that found nothing. The plans."""
    blocks, plans = itertools.count(100 * int(name)), []
    for start in range(0, len(tokens), at_once):
        num_new = min(at_once, len(tokens) - start)
        new = [next(blocks) for _ in range(-(-(start + num_new) // 2) - -(-start // 2))]
        schedule.scheduled(name, [new], start, num_new, is_new=start == 0)
        plans.append(schedule.take_plan())
    return plans


def test_what_is_computed_is_stored_when_its_last_token_is_and_found_again(schedule, tiers):
    tokens = list(range(11))
    assert schedule.matched("1", tokens, None, 0) == 0
    plans = computed(schedule, "1", tokens, at_once=3)
    assert [[blocks for _, blocks in plan.stores] for plan in plans] == [[], [[100, 101]], [[102, 103]], []]
    assert [plan.written for plan in plans] == [[100, 101], [102], [103, 104], [105]]
    tiers.held = {key for plan in plans for key, _ in plan.stores}
    assert schedule.matched("2", tokens, None, 0) == 8
    assert schedule.matched("3", tokens[:8], None, 0) == 4, "the last token is computed"
    assert schedule.matched("4", tokens, "another tenant", 0) == 0
    assert schedule.matched("5", [9, *tokens[1:]], None, 0) == 0


def test_equal_tokens_hit_with_equal_images_alone_and_text_before_an_image_is_shared(schedule, tiers):
    def matched(name, *images):
        return schedule.matched(name, [7] * 19, None, 0, beside=Features(images))

    assert matched("1", image("a", 6, 7)) == 0
    tiers.held = {key for plan in computed(schedule, "1", [7] * 19, at_once=3) for key, _ in plan.stores}
    assert len(tiers.held) == 4
    assert matched("2", image("a", 6, 7)) == 16
    schedule.allocated("2", [[*range(20, 28)]], 16)
    assert {key for key, _ in schedule.take_plan().loads[0].records} == tiers.held
    schedule.ended("2")
    images = [image("b", 6, 7)], [image("a", 5, 7)], [image("a", 6, 6)], [image("a", 6, 7), image("c", 7, 1)], []
    assert [matched(str(name), *each) for name, each in enumerate(images, 3)] == [4] * 5
    assert matched("8", image("a", 6, 7), image("b", 15, 2)) == 12
    assert matched("9", image("a", 6, 7), image("b", 16, 2)) == 16


def test_a_preempted_request_finds_what_it_stored_with_its_image(schedule, tiers):
    tokens = [7] * 11
    assert schedule.matched("1", tokens, None, 0, beside=Features([image("a", 1, 4)])) == 0
    tiers.held = {key for plan in computed(schedule, "1", tokens, at_once=3) for key, _ in plan.stores}
    schedule.preempted("1")
    tokens += [7, 7]
    assert schedule.matched("1", tokens, None, 0, beside=Features([image("a", 1, 4)])) == 8


def test_a_record_of_which_the_device_has_a_part_is_loaded_behind_that_part(schedule, tiers):
    tokens = list(range(11))
    schedule.matched("1", tokens, None, 0)
    tiers.held = {key for plan in computed(schedule, "1", tokens) for key, _ in plan.stores}
    assert schedule.matched("2", tokens, None, 2) == 6
    schedule.allocated("2", [[7, 20, 21, 22]], 6)
    plan = schedule.take_plan()
    ((name, records, _),) = plan.loads
    assert name == "2" and [blocks for _, blocks in records] == [[-1, 20], [21, 22]] and plan.written == [20, 21, 22]


def test_blocks_that_a_request_shares_are_not_written_by_it(schedule):
    tokens = list(range(11))
    for name, num_computed, blocks in (("1", 0, [10, 11, 12, 13, 14, 15]), ("2", 8, [10, 11, 12, 13, 20, 21])):
        schedule.matched(name, tokens, None, num_computed)
        schedule.scheduled(name, [blocks], num_computed, 11 - num_computed, is_new=True)
    assert schedule.take_plan().written == [10, 11, 12, 13, 14, 15, 20, 21]


def test_requests_that_decode_are_looked_at_when_they_get_a_block_or_fill_a_record(schedule):
    tokens = list(range(6))
    assert schedule.matched("1", tokens, None, 0) == 0
    schedule.scheduled("1", [[10, 11, 12]], 0, 6, is_new=True)
    plans = [schedule.take_plan()]
    for computed, blocks in ((6, [[13]]), (7, ()), (8, [[14]]), (9, ())):
        tokens.append(computed)
        schedule.go_on(["1", "other"], [blocks, ()], [computed, 0], {"1": 1, "other": 1}, set())
        plans.append(schedule.take_plan())
    assert [[blocks for _, blocks in plan.stores] for plan in plans] == [[[10, 11]], [], [[12, 13]], [], []]
    assert [plan.written for plan in plans] == [[10, 11, 12], [13], [], [14], []] and all(plan.computes for plan in plans)


@pytest.mark.parametrize("ends", ["loaded", "ended"])
def test_one_loads_and_all_others_wait_until_it_has_or_is_gone(schedule, tiers, ends):
    tokens = list(range(11))
    schedule.matched("1", tokens, None, 0)
    tiers.held = {key for plan in computed(schedule, "1", tokens) for key, _ in plan.stores}
    assert schedule.matched("2", tokens, None, 0) == 8
    schedule.allocated("2", [[20, 21, 22, 23]], 8)
    assert [schedule.matched(str(each), tokens, None, 0) for each in range(3, 9)] == [None] * 6
    assert schedule.matched("9", [5, 5, 5, 5, 5], None, 0) == 0
    schedule.loaded("2") if ends == "loaded" else schedule.ended("2")
    assert schedule.matched("3", tokens, None, 8 if ends == "loaded" else 0) == (0 if ends == "loaded" else 8)


def test_who_needs_what_another_computes_waits_for_that_record_alone(schedule):
    tokens = list(range(11))
    assert schedule.matched("1", tokens, None, 0) == 0
    schedule.scheduled("1", [[10, 11]], 0, 3, is_new=True)
    assert schedule.matched("2", tokens, None, 0) is None
    schedule.scheduled("1", [[12]], 3, 3, is_new=False)
    assert schedule.matched("2", tokens, None, 4) is None, "the second record is being computed"
    assert schedule.matched("3", [*tokens[:4], 50, 51, 52, 53, 54], None, 4) == 0
    schedule.scheduled("1", [[13, 14, 15]], 6, 5, is_new=False)
    assert schedule.matched("2", tokens, None, 8) == 0


def test_nobody_waits_in_an_engine_that_shares_nothing(tiers):
    schedule = Schedule("model", block_tokens=2, record_tokens=4, lookup=tiers.lookup, worth=worth(), may_wait=False)
    for name in ("1", "2"):
        assert schedule.matched(name, list(range(11)), None, 0) == 0
        schedule.scheduled(name, [[*range(6)]], 0, 11, is_new=True)


def test_a_preempted_request_holds_up_no_other_and_loads_what_it_had_stored(schedule, tiers):
    tokens = list(range(11))
    assert schedule.matched("1", tokens, None, 0) == 0
    schedule.scheduled("1", [[10, 11]], 0, 4, is_new=True)
    tiers.held = {key for key, _ in schedule.take_plan().stores}
    assert schedule.matched("1", tokens, None, 0) == 4
    schedule.allocated("1", [[20, 21]], 4)
    schedule.loaded("1")
    schedule.scheduled("1", [[20, 21, 22, 23, 24, 25]], 4, 7, is_new=True)
    assert [blocks for _, blocks in schedule.take_plan().stores] == [[22, 23]]


def test_a_preempted_request_gives_up_what_it_was_to_compute(schedule):
    tokens = list(range(11))
    assert schedule.matched("1", tokens, None, 0) == 0
    schedule.scheduled("1", [[10]], 0, 2, is_new=True)
    assert schedule.matched("2", tokens, None, 0) is None
    schedule.preempted("1")
    assert schedule.matched("2", tokens, None, 0) == 0


def test_loaded_tokens_are_those_of_loads_that_ended_well(schedule, tiers):
    tokens = list(range(11))
    schedule.matched("1", tokens, None, 0)
    tiers.held = {key for plan in computed(schedule, "1", tokens) for key, _ in plan.stores}
    for name, failed in (("2", ["2"]), ("3", [])):
        assert schedule.matched(name, tokens, None, 0) == 8
        schedule.allocated(name, [[20, 21, 22, 23]], 8)
        assert not schedule.loaded_tokens
        schedule.failed(failed)
        schedule.loaded(name)
    assert schedule.loaded_tokens == {"host": 8} and schedule.counts["loads"] == 2


def test_a_request_whose_load_has_failed_computes_whatever_tiers_say(schedule, tiers):
    tokens = list(range(11))
    schedule.matched("1", tokens, None, 0)
    tiers.held = {key for plan in computed(schedule, "1", tokens) for key, _ in plan.stores}
    assert schedule.matched("2", tokens, None, 0) == 8
    schedule.allocated("2", [[20, 21, 22, 23]], 8)
    schedule.failed({"2", "unknown"})
    schedule.loaded("2")
    assert schedule.matched("2", tokens, None, 0) == 0 and schedule.matched("3", tokens, None, 0) == 8


def test_a_block_that_two_requests_store_is_read_for_both_before_it_is_written():
    """They share its memory, by vLLM's prefix cache."""
    tier = FaultyTier(HostTier(8192, record_bytes=4096), 0, ("refuses",), chance=1.0)
    memory = torch.full((2, 1024), 11, dtype=torch.int32)
    with Store([tier]) as store:
        mover, key = BlockMover(store, BlockMemory([memory], 2)), KeyChain("m", every=1).of([1]).keys()[0]
        for other in (key, KeyChain("m", every=1).of([2]).keys()[0]):
            mover.after_step(StepPlan(stores=[(other, [0])]))
        mover.before_step(StepPlan(written=[0]))
        memory[0] = 99
        tier.faults.clear()
        assert store.flush(60) and store.lookup([key]) == [False]
    tier.close()


def test_a_request_that_needs_all_logits_of_its_prompt_loads_nothing_and_is_stored(schedule, tiers):
    tokens = list(range(11))
    schedule.matched("1", tokens, None, 0, may_load=False)
    stored = {key for plan in computed(schedule, "1", tokens) for key, _ in plan.stores}
    tiers.held = set(stored)
    assert len(stored) == 2 and schedule.matched("2", tokens, None, 0, may_load=False) == 0
    assert schedule.matched("3", tokens, None, 0) == 8
    schedule.allocated("3", [[20, 21, 22, 23]], 8)
    assert schedule.matched("2", tokens, None, 0, may_load=False) == 0, "nor does it wait for a load"


def test_a_request_waits_while_a_tier_finds_out(schedule, tiers):
    tiers.knows = False
    assert schedule.matched("1", list(range(11)), None, 0) is None
    tiers.knows = True
    assert schedule.matched("1", list(range(11)), None, 0) == 0


def test_each_record_that_is_given_up_counts_once():
    tier = FaultyTier(HostTier(8 * 4096, record_bytes=8192), 0, ("refuses",), chance=1.0)
    keys = KeyChain("m", every=1).of([1, 2, 3]).keys()
    with Store([tier]) as store:
        mover = BlockMover(store, BlockMemory([torch.zeros(8, 1024, dtype=torch.int32)], 8))
        mover.after_step(StepPlan(stores=[(key, [2 * number, 2 * number + 1]) for number, key in enumerate(keys)]))
        store.poll()
        mover.before_step(StepPlan(written=[0, 1, 2, 5]))
        mover.before_step(StepPlan(written=[3, 4]))
        assert mover.counts["given_up"] == 3
    tier.close()


# groups of layers


def test_of_layers_with_a_window_what_the_next_record_sees_is_stored_and_the_last_window_is_loaded(tiers):
    schedule = Schedule("model", block_tokens=2, record_tokens=4, lookup=tiers.lookup, worth=worth(), windows=[None, 3, 6])
    tokens = list(range(13))
    schedule.matched("1", tokens, None, 0)
    schedule.scheduled("1", [[10, 11, 12, 13, 14, 15, 16], [*range(20, 27)], [*range(30, 37)]], 0, 13, is_new=True)
    plan = schedule.take_plan()
    keys = [key for key, _ in plan.stores]
    assert keys == [of_group(key, group) for key in keys[::3] for group in range(3)] and len(set(keys)) == 9
    assert [blocks for _, blocks in plan.stores] == [
        *([10, 11], [-1, 21], [30, 31]),
        *([12, 13], [-1, 23], [32, 33]),  # of record 1 the token 8 sees [6, 8) or [3, 8); of record 2 the token 12 [7, 12)
        *([14, 15], [-1, 25], [34, 35]),
    ]
    tiers.held = {*keys}
    assert schedule.matched("2", tokens, None, 2) == 10
    schedule.allocated("2", [[10, 41, 42, 43, 44, 45], [0, 0, 0, 0, 0, 55], [0, 0, 0, 63, 64, 65]], 10)
    plan = schedule.take_plan()
    ((_, records, _),) = plan.loads
    assert [blocks for _, blocks in records] == [[-1, 41], [42, 43], [44, 45], [-1, 55], [-1, 63], [64, 65]]
    assert [key for key, _ in records] == [*keys[::3], keys[7], keys[5], keys[8]]
    assert {41, 42, 43, 44, 45, 55, 63, 64, 65} == {*plan.written} - {0}


def test_records_that_fail_are_counted_and_not_those_beside_them():
    keys = KeyChain("m", every=1).of([1, 2, 3]).keys()
    with Store([tier := HostTier(8 * 4096, record_bytes=4096)]) as store:
        mover = BlockMover(store, BlockMemory([torch.zeros(8, 1024, dtype=torch.int32)], 8))
        mover.after_step(StepPlan(stores=[(keys[0], [0]), (keys[2], [2])]))
        assert store.flush()
        mover.begin(StepPlan(loads=[PlannedLoad("1", [(key, [block]) for block, key in enumerate(keys)], 60.0)]))
        assert store.flush() and mover.ended_loads() == ({"1"}, {"1": {0, 1, 2}}) and mover.counts["failed"] == 1
    tier.close()


def test_a_put_for_which_there_is_no_room_keeps_no_thread_awake_for_ever(monkeypatch):
    monkeypatch.setattr("vmmkv.adapters.vllm.blocks.PUT_TIMEOUT_S", 0.05)
    tier = FaultyTier(HostTier(8192, record_bytes=4096), 0, ("refuses",), chance=1.0)
    with Store([tier]) as store:
        mover, poller = BlockMover(store, BlockMemory([torch.zeros(2, 1024, dtype=torch.int32)], 2)), IdlePoller(store)
        mover.after_step(StepPlan(stores=[(KeyChain("m", every=1).of([1]).keys()[0], [0])]))
        poller.stepped()
        until(lambda: store.is_idle)
        poller.close()
    tier.close()


# worth


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def measured(clock):
    """Prefill at 2,000 tokens a second, a host tier of 8 MB/s and a disk of 1 MB/s: a record is computed in 2 ms."""
    made = worth(clock=clock)
    assert made.step_begins(1, 512) and not made.step_begins(2, 255)
    clock.now_s += 0.256
    made.step_ends(1)
    for tier, took_s in (("host", 0.05), ("disk", 0.4)):
        made.load_begins("1", [tier] * 100)
        made.step_ends(None)
        clock.now_s += took_s
        made.load_ends("1", has_failed=False)
    assert made.prefill.per_s == pytest.approx(2000) and made.loads["host"].per_s == pytest.approx(8e6)
    return made


def test_what_is_slower_to_load_than_to_compute_is_left_out_with_what_is_behind_it(measured):
    assert measured.most(["host"] * 9) == 9
    assert measured.most(["disk"] * 9) == 0
    assert measured.most(["host", "disk", "disk", "host"]) == 1
    assert measured.most(["host"] * 5 + ["disk"]) == 6, "together they take less time"
    assert worth().most(["disk"] * 9) == 9, "nothing is measured"


def test_a_tier_that_was_left_out_long_enough_is_tried_again(measured):
    for _ in range(68):
        assert measured.most(["disk"]) == 0
    assert all(measured.most(["disk"], hopes=False) == 0 for _ in range(99)), "asked for once"
    for _ in range(3):
        measured.most(["disk"])
    assert measured.most(["disk"]) == 1


def test_a_load_that_fails_has_brought_one_record(measured, clock):
    measured.load_begins("1", ["host"] * 100)
    measured.step_ends(None)
    clock.now_s += 0.5
    measured.load_ends("1", has_failed=True)
    assert measured.most(["host"]) == 0
    measured.given_up("1")
    measured.load_ends("1", has_failed=False)


def test_a_load_within_a_step_is_as_fast_as_can_be_however_long_the_step_is(clock):
    made = worth(clock=clock)
    for _ in range(20):
        made.load_begins("1", ["host"] * 100)
        clock.now_s += 3.0
        made.step_ends(None)
        made.load_ends("1", has_failed=False)
    assert made.loads["host"].per_s == math.inf
    made.load_begins("1", ["host"] * 100)
    for _ in range(3):
        clock.now_s += 3.0
        made.step_ends(None)
    made.load_ends("1", has_failed=False)
    assert made.loads["host"].per_s < 1e6, "it took two steps more"


def test_steps_one_behind_the_other_measure_their_own_time(clock):
    made = worth(clock=clock)
    made.step_begins(1, 1000)
    made.step_begins(2, 1000)  # launched while the first one runs
    for number in (1, 2):
        clock.now_s += 0.1
        made.step_ends(number)
    assert made.prefill.per_s == pytest.approx(10_000)
    made.step_ends(None)


def test_a_load_is_given_up_when_computing_would_long_have_ended(measured):
    assert [measured.timeout_s(records) for records in (1, 1000, 10**6)] == [1.0, pytest.approx(8.0), 15.0]


def test_a_request_that_declines_is_counted_once_and_computes(schedule, tiers):
    tokens = list(range(11))
    schedule.matched("1", tokens, None, 0)
    tiers.held = {key for plan in computed(schedule, "1", tokens) for key, _ in plan.stores}
    schedule.worth.loads["host"] = Rate(1.0)
    assert [schedule.matched("2", tokens, None, 0) for _ in range(3)] == [0] * 3
    assert schedule.counts["declined"] == 1 and schedule.worth.loads["host"].per_s == pytest.approx(1.01)
