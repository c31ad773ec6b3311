"""Faults that the default tests must find. Each is put into a copy of the tree, and the tests nearest to it must fail.

    python tests/mutants.py [WORD ...]      all faults, or those whose name has one of these words

Exit status 1 if a fault survives, or if the text that it replaces is not there once: then this list is to be mended.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600

ORDER = "tests/laws/test_order.py"
CACHE = "tests/laws/test_cache_machine.py::TestOnASimulatedDevice"
PREFIX = "tests/laws/test_prefix_machine.py::TestOnASimulatedDevice"
FAILURES = "tests/laws/test_failures.py"
PREFIX_UNIT = "tests/unit/test_prefix.py"
TIERS = "tests/laws/test_tiers.py"
STORES = "tests/laws/test_stores.py"
TIERS_UNIT = "tests/unit/test_tiers.py"
TIER_MACHINE = "tests/laws/test_tier_machine.py"
FETCHES = "tests/engine/test_fetches.py"
SWAPS = f"{FETCHES}::test_what_preempted_requests_generated_comes_back_from_a_tier"
HOLDER = "tests/unit/test_holder.py"
BORROWING = "tests/unit/test_borrowing.py"
POLICIES = ("tests/engine/test_kv_policy.py::test_the_tokens_are_those_of_the_reference",)
SUMS_UNIT = "tests/kernels/test_sums.py"
CACHE_POLICY = "tests/adapters/test_transformers_policy.py"


class Mutant(NamedTuple):
    """A fault: `old` is replaced by `new` in a file of vmmkv/, and one of the tests fails.

    `also`: more such files, texts and replacements, where what is left would still do.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    also: tuple[tuple[str, str, str], ...] = ()


SEALED, BORROWED, SAVED = "prefix/sealed.py", "prefix/borrowed.py", "tiers/saved.py"
SLOT_MEMORY, MAPPER, SHARING, POOL = (f"memory/{name}.py" for name in ("slot_memory", "mapper", "sharing", "pool"))
SUMS = "kernels/sums.py"

COMPACTION = "server/engine/compaction.py"
TRANSFERS, RECORD, SHARED = "prefix/transfers.py", "tiers/record.py", "tiers/shared.py"
OTHERS = (f"{TIERS_UNIT}::test_no_other_tenant_model_or_layout_finds_a_record",)

RAISED_BEHIND = "                for fence in behind.values():\n                    fence.order(self.streams)\n"

MUTANTS = (
    # limits
    Mutant("a limit raised ahead of a lowering on another stream", SLOT_MEMORY, RAISED_BEHIND, "", (ORDER,)),
    Mutant(
        "limits raised without waiting for a lowering",
        SLOT_MEMORY,
        "if (fence := self._on_its_way(slot)) is not None}",
        "if (fence := self._on_its_way(slot)) is not None and False}",
        (CACHE,),
    ),
    Mutant(
        "a limit raised behind a lowering forgets its own fence",
        SLOT_MEMORY,
        "        self._written.update(dict.fromkeys(limits, fence))\n        return fence",
        "        if not any(limits.values()):\n            self._written.update(dict.fromkeys(limits, fence))\n"
        "        return fence",
        (CACHE,),
    ),
    Mutant(
        "a limit lowered ahead of a raise that is on its way",
        SLOT_MEMORY,
        "        self.order()  # a raise of it may be on its way\n",
        "",
        (ORDER,),
    ),
    Mutant(
        "a limit lowered ahead of a raise on another stream",
        SLOT_MEMORY,
        "            written.order(self.streams)  # so may a write on a stream that is not known\n",
        "            pass\n",
        (ORDER,),
    ),
    Mutant(
        "limits lowered on the control stream, ahead of running work",
        SLOT_MEMORY,
        "        fence = self._write_behind({slot: limit})\n        self.table",
        "        self.pool.driver.write(self.limit, {slot: limit})\n        fence = self.fence()\n        self.table",
        (CACHE,),
    ),
    Mutant(
        "limits written behind the current stream alone",
        SLOT_MEMORY,
        "fence = driver.write_behind(self.limit, limits, self.streams)",
        "fence = driver.write_behind(self.limit, limits)",
        (ORDER,),
    ),
    Mutant(
        "zeroes and limits not ordered before use",
        SLOT_MEMORY,
        "                self.pool.driver.write(self.limit, at_once)\n            self.order()\n",
        "                self.pool.driver.write(self.limit, at_once)\n",
        (CACHE,),
    ),
    Mutant(
        "zeroes and limits ordered before use on the current stream alone",
        SLOT_MEMORY,
        "self.pool.driver.order(self.streams)",
        "self.pool.driver.order()",
        (CACHE,),
    ),
    # fences
    Mutant(
        "recorded streams forgotten in a fence",
        SLOT_MEMORY,
        "return self.pool.driver.fence(self.streams)",
        "return self.pool.driver.fence()",
        (CACHE,),
    ),
    Mutant(
        "adoption not ordered behind the parked fence",
        "cache.py",
        "            parked.fence.order(self.memory.streams)\n",
        "",
        (ORDER,),
        also=((SLOT_MEMORY, RAISED_BEHIND, ""),),
    ),
    Mutant(
        "a parked source's fence not renewed after a copy",
        "prefix/attach.py",
        "cache.parked_slots[hit.resident].fence = memory.fence()",
        "memory.fence()",
        (ORDER,),
    ),
    Mutant(
        "an exchange that unmaps without waiting",
        SHARING,
        "        memory.fence().wait()\n        mapper.unmap(old)\n",
        "        memory.fence()\n        mapper.unmap(old)\n",
        (PREFIX,),
    ),
    Mutant(
        "a rollback that unmaps without waiting",
        MAPPER,
        "                never_live.wait()  # zeroes may be on their way to it\n",
        "",
        (ORDER,),
    ),
    Mutant(
        "a busy page evicted without waiting",
        MAPPER,
        "            if fence.done():\n                while batch:",
        "            if True:\n                while batch:",
        (CACHE,),
    ),
    Mutant(
        "pages reclaimed before their rows have moved",
        SHARING,
        "    with memory.copying():\n        for span in memory.spans(slot) if",
        "    memory.reclaim_from(slot, len(rows))\n    with memory.copying():\n        for span in memory.spans(slot) if",
        (CACHE,),
    ),
    Mutant(
        "rows that move over others that have still to be read",
        SHARING,
        "for at in range(0, len(moved_T), chunk_rows):",
        "for at in reversed(range(0, len(moved_T), chunk_rows)):",
        ("tests/unit/test_cache.py::test_no_row_is_written_before_it_is_read",),
    ),
    Mutant(
        "rows that move into pages that others hold too",
        "cache.py",
        "            sharing.own_from(cache.memory, self.slot, first, len(rows))\n",
        "",
        (PREFIX,),
    ),
    Mutant(
        "rows that have moved pass for a prompt's",
        "cache.py",
        "            cache.forget_rows(self.slot, first)\n",
        "",
        (PREFIX,),
    ),
    Mutant(
        "a cut that leaves the positions of rows that are gone",
        "cache.py",
        "            self.known_positions = _cut(self.known_positions, num_tokens)\n            cache.memory",
        "            cache.memory",
        (PREFIX,),
    ),
    Mutant(
        "keys turned from the first row on, not from the first that has moved",
        COMPACTION,
        "self._keys.turn(sequence.slot, first, back_T)",
        "self._keys.turn(sequence.slot, 0, back_T)",
        POLICIES,
    ),
    Mutant(
        "scores of rows that have moved left where they were",
        COMPACTION,
        "self.scores_T = sums_T[rows] if",
        "self.scores_T = sums_T[: len(rows)] if",
        POLICIES,
    ),
    Mutant(
        "a generated query that stands for no other",
        COMPACTION,
        "end - since if is_generated else 1)",
        "1)",
        POLICIES,
    ),
    Mutant(
        "scores of rows that have moved in a cache of transformers left where they were",
        "adapters/transformers/eviction.py",
        "self._sums_BT.gather(1, chosen[list(parents)]) if",
        "self._sums_BT[:, : chosen.shape[1]] if",
        (f"{CACHE_POLICY}::test_the_logits_are_those_without_the_rows_that_the_policy_drops",),
    ),
    Mutant(
        "queries that stay where their tokens are while keys are turned",
        "adapters/transformers/attention.py",
        "            query = _caches[number].turned(layer, query)\n",
        "",
        (f"{CACHE_POLICY}::test_with_inv_freq_a_sequence_goes_past_the_positions_of_its_model",),
    ),
    Mutant(
        "a fork that forgets which tokens its rows hold",
        "cache.py",
        "                forks[-1].known_positions = parent.known_positions\n",
        "",
        (PREFIX,),
    ),
    Mutant(
        "a window unmapped before its copy has run",
        SHARING,
        "            memory.mapper.reclaim([mapping], fence)\n",
        "            memory.mapper.unmap(mapping)\n            memory.mapper.let_go(mapping)\n",
        (ORDER,),
    ),
    Mutant(
        "copies not ordered behind recorded streams",
        SLOT_MEMORY,
        "            self.fence().order()\n        yield\n",
        "            pass\n        yield\n",
        (ORDER,),
    ),
    Mutant(
        "an exchange not ordered behind recorded streams",
        SHARING,
        "                with memory.copying():\n                    _exchange(memory, mapping)",
        "                _exchange(memory, mapping)",
        (ORDER,),
    ),
    Mutant(
        "recorded streams not ordered behind copies",
        SLOT_MEMORY,
        "        if self.streams:\n            try:\n",
        "        if False:\n            try:\n",
        (ORDER,),
    ),
    # whose bytes
    Mutant(
        "fresh memory taken for zeroed",
        POOL,
        "Extent(handle, num_pages, zeroed=self.driver.creates_zeroed, serial=serial)",
        "Extent(handle, num_pages, zeroed=True, serial=serial)",
        (CACHE,),
    ),
    Mutant(
        "the tenant not compared when memory is used again",
        POOL,
        "return not self.zeroed and self.tenant != tenant",
        "return not self.zeroed and self.tenant is None",
        (CACHE,),
    ),
    Mutant(
        "memory still taken for zeroed once it was written",
        MAPPER,
        "mapping.extent.tenant, mapping.extent.zeroed = tenant, False",
        "mapping.extent.tenant = tenant",
        (ORDER,),
    ),
    Mutant(
        "a little free memory of other classes given back",
        POOL,
        "if self.free_bytes <= _MOST_IDLE * self.budget_bytes and",
        "if False and",
        ("tests/unit/test_pool.py",),
    ),
    Mutant(
        "of extents side by side only the last one zeroed",
        MAPPER,
        "start = runs.pop()[0] if adjoins else mapping.address",
        "start = [adjoins and runs.pop(), mapping.address][1]",
        (CACHE,),
    ),
    Mutant(
        "an exchanged page without its tenant",
        SHARING,
        "mapping.extent.tenant = tenant_of(mapping.page)",
        "pass",
        ("tests/unit/test_cache.py",),
    ),
    Mutant(
        "rows copied to another tenant",
        SHARING,
        "if memory.tenants[source] != memory.tenants[target]:",
        "if False:",
        ("tests/unit/test_copy_rows.py",),
    ),
    Mutant(
        "a page revived that was never live",
        MAPPER,
        "if not isinstance(fence, _NeverLive) and not",
        "if not",
        (CACHE, FAILURES),
    ),
    Mutant(
        "a page revived that others have come to hold",
        MAPPER,
        "and not extent.shared and mapping.end_page <= target.end_page:",
        "and mapping.end_page <= target.end_page:",
        (ORDER,),
    ),
    # the books
    Mutant(
        "a holder that is not dropped",
        MAPPER,
        "        self._forget(mapping)\n        self.let_go(mapping)\n",
        "        self._forget(mapping)\n",
        (CACHE,),
    ),
    Mutant(
        "a slot that is not free again when nothing is mapped there",
        MAPPER,
        "            self.emptied_slots.add(mapping.span.slot)\n",
        "            pass\n",
        (CACHE,),
    ),
    Mutant(
        "a rollback that leaves a page",
        MAPPER,
        "for mapping in reversed(self._new):",
        "for mapping in reversed(self._new[1:]):",
        (CACHE,),
    ),
    Mutant(
        "a pinned slot not spared",
        "cache.py",
        "next(self.unpinned(parked_slots), next(iter(parked_slots))).slot",
        "next(iter(parked_slots)).slot",
        (PREFIX_UNIT,),
    ),
    Mutant(
        "pinned slots not spared by a batch", "cache.py", "for spared in (pinned, ()):", "for spared in ((),):", (PREFIX_UNIT,)
    ),
    Mutant(
        "mappings inherited by fork",
        "driver/host.py",
        "                madvise(address, size_bytes, MADV_DONTFORK)\n",
        "",
        ("tests/unit/test_driver_host.py",),
    ),
    # tiers
    Mutant(
        "rows stored before the copies that make them",
        TRANSFERS,
        "while number > self._num_written:",
        "while False:",
        (f"{TIER_MACHINE}::test_a_store_comes_behind_the_copies_that_made_the_rows",),
    ),
    Mutant(
        "loads that are over before their copies",
        TRANSFERS,
        "for copy in [copy for copy in self._copies if copy.fence.done()]:",
        "for copy in [*self._copies]:",
        (f"{TIER_MACHINE}::TestOnASimulatedDevice",),
    ),
    Mutant(
        "loads on the stream of stores",
        TRANSFERS,
        "self._store_stream if part is None else self._load_stream",
        "self._store_stream",
        (f"{TIER_MACHINE}::test_a_load_waits_for_no_store_and_a_store_holds_nothing_before_its_rows_are_written",),
    ),
    Mutant(
        "stores that take every window",
        TRANSFERS,
        "left=_SPARE_WINDOWS + _LOAD_WINDOWS)",
        "left=_SPARE_WINDOWS)",
        (f"{TIER_MACHINE}::test_a_load_waits_for_no_store_and_a_store_holds_nothing_before_its_rows_are_written",),
    ),
    Mutant(
        "a load for each that waits",
        TRANSFERS,
        "return next(filter(None, map(self._loading.get, keys)), None)",
        "return None",
        (f"{TIERS_UNIT}::test_one_load_serves_all_that_wait_for_it",),
    ),
    Mutant(
        "extents of a fetch that was given up stay held",
        TRANSFERS,
        "            pool.drop(part.extent)\n",
        "",
        (f"{TIERS_UNIT}::test_a_fetch_that_nothing_waits_for_gives_everything_back",),
    ),
    Mutant(
        "extents that a load has written pass for zero",
        TRANSFERS,
        "            extent.tenant, extent.zeroed = None, False",
        "            pass",
        (f"{TIERS_UNIT}::test_memory_of_a_load_that_failed_is_zeroed_for_the_next_tenant",),
    ),
    Mutant("keys without the namespace", RECORD, "_VERSION + self.identity + name", "_VERSION + self.identity", OTHERS),
    Mutant("keys without the layout", RECORD, "repr((groups, fingerprint))", "repr(fingerprint)", OTHERS),
    Mutant("keys without the fingerprint", RECORD, "repr((groups, fingerprint))", "repr(groups)", OTHERS),
    Mutant(
        "host memory overwritten while it is copied to the device",
        "tiers/host.py",
        "if not held.num_copies), None)",
        "if held.num_copies >= 0), None)",
        (f"{TIERS}::test_what_is_being_loaded_is_not_overwritten",),
    ),
    Mutant(
        "records of the disk that are not verified",
        "tiers/disk.py",
        "is_right = checksum_of(key, data) == slot.checksum",
        "is_right = True",
        (f"{TIERS}::test_a_changed_byte_on_the_disk_is_never_returned",),
    ),
    Mutant(
        "entries of an index that are not verified",
        "tiers/disk.py",
        "if own == _own_checksum(number, fields):",
        "if True:",
        (f"{TIERS}::test_a_changed_entry_is_no_entry",),
    ),
    Mutant(
        "what is stored of a path is newer than what was there",
        TRANSFERS,
        "        if 0 < num_held < len(has):\n",
        "        if False:\n",
        (f"{TIERS_UNIT}::test_a_path_that_is_stored_in_pieces_loses_its_end_first",),
    ),
    Mutant(
        "a path that two tiers use",
        "tiers/disk.py",
        "fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        (f"{TIERS}::test_a_second_tier_of_a_path_is_refused_and_the_path_is_named",),
    ),
    Mutant(
        "a slot that a failed write does not give back",
        "tiers/disk.py",
        "                self._free.append(number)\n            raise",
        "                pass\n            raise",
        (f"{TIERS}::test_a_write_that_fails_is_a_miss_and_the_disk_goes_on",),
    ),
    Mutant(
        "a load that is later than computing is waited for",
        "server/engine/fetches.py",
        "if wait.fetch.done or self._is_late(wait, now_s)]",
        "if wait.fetch.done]",
        (f"{FETCHES}::test_what_has_come_of_a_fetch_that_is_later_than_computing_is_used",),
    ),
    Mutant(
        "a tier that finds out what it has is taken to have nothing",
        TRANSFERS,
        "            if len(answers) == len(self.tiers):\n",
        "            if True:\n",
        (f"{TIERS_UNIT}::test_a_fetch_waits_for_a_tier_that_finds_out_what_it_has",),
    ),
    Mutant(
        "a load that fails while it is looked at",
        TRANSFERS,
        "any(move.transfer.missed for move in part.coming)",
        "any(move.transfer.missed for move in part.coming if move not in come)",
        (f"{TIERS_UNIT}::test_a_load_that_fails_between_two_looks_at_it_is_a_miss",),
    ),
    Mutant(
        "values of a store that are not verified",
        SHARED,
        "if len(record) == len(data) and header == _HEADER.pack(_MAGIC, len(data), checksum_of(key, record)):",
        "if len(record) == len(data):",
        (f"{STORES}::test_a_value_that_is_not_the_record_is_a_miss_and_is_removed",),
    ),
    Mutant(
        "a store that is late is waited for",
        SHARED,
        "        if is_late:\n",
        "        if False:\n",
        (f"{STORES}::test_a_store_that_answers_byte_by_byte_is_late",),
    ),
    Mutant(
        "a store that does not answer is asked for every record",
        SHARED,
        "return missed(key) if self._pause_s else super().load(key)",
        "return super().load(key)",
        (f"{STORES}::test_a_store_that_is_killed_in_the_middle_is_left_alone_and_comes_back",),
    ),
    Mutant(
        "weights whose words change places",
        "server/engine/loading.py",
        "each * factors[: len(each)]",
        "each",
        (f"{FETCHES}::test_no_change_of_the_weights_goes_unseen",),
    ),
    Mutant(
        "memory that is being loaded into is kept from running requests",
        "server/engine/scheduler.py",
        " or self._give_up_fetch():",
        ":",
        (f"{FETCHES}::test_a_running_request_takes_the_memory_that_is_being_loaded_into",),
    ),
    Mutant(
        "all of a prompt computed where its end is in a slow tier",
        TRANSFERS,
        "            for pages in have:  # what is before",
        "            break\n            for pages in have:  # what is before",
        (f"{FETCHES}::test_what_is_before_the_records_of_a_slow_tier_is_loaded_and_those_are_computed",),
    ),
    Mutant(
        "a prompt computed where there is no room yet to load it",
        "server/engine/fetches.py",
        'return None if request.unfetched == "no_room" else False',
        "return False",
        (f"{FETCHES}::test_a_request_waits_for_room_to_load_rather_than_compute",),
    ),
    Mutant(
        "rows kept that a load does not go on from",
        TRANSFERS,
        "chain.tokens[:end_token]).node",
        "chain.tokens[:end_token]).node and match.path[-1]",
        (f"{FETCHES}::test_rows_behind_a_common_beginning_give_way_to_a_load",),
    ),
    Mutant(
        "a load that leaves no room for its own request",
        "server/engine/scheduler.py",
        "layout.pages_for(request.num_first_rows) + spare_pages",
        "0",
        (
            f"{FETCHES}::test_a_running_request_takes_the_memory_that_is_being_loaded_into",
            f"{FETCHES}::test_a_request_waits_for_room_to_load_rather_than_compute",
        ),
    ),
    Mutant(
        "what requests generate stored only once they are preempted",
        "server/engine/engine.py",
        "            self._scheduler.insert_generated()\n",
        "",
        (SWAPS,),
    ),
    Mutant(
        "rows stored for tiers whose step has not been read back",
        "server/engine/scheduler.py",
        "self._insert(self._prefix, request, request.confirmed_tokens)",
        "self._insert(self._prefix, request, request.tokens)",
        (SWAPS,),
    ),
    Mutant(
        "nothing stored any more in a tier that was slow",
        "server/engine/fetches.py",
        "return is_faster or self._num_paths[tier] % _TRIAL == 0",
        "return is_faster",
        (f"{FETCHES}::test_little_is_stored_in_a_tier_that_is_slower_than_computing",),
    ),
    # rows in host memory
    Mutant(
        "limits of what was to be offloaded not taken back",
        SAVED,
        "sequence.cache.memory.raise_limits({sequence.slot: limit})",
        "pass",
        (FAILURES,),
    ),
    Mutant("shared pages offloaded and restored for each", SAVED, "if owner is not part.span:", "if False:", (FAILURES,)),
    Mutant("an owner's pages past what is shared", SAVED, "if mapping.end_page <= part.shared_end}", "}", (FAILURES,)),
    Mutant(
        "large extents past what is shared",
        SHARING,
        "large_end = filled_end if large_end is None else min(large_end, filled_end)",
        "large_end = filled_end",
        (FAILURES,),
    ),
    Mutant(
        "memory mapped ahead for offloaded rows",
        "cache.py",
        "self.table.lengths[slot] = self.table.ends[slot] = 0",
        "self.table.lengths[slot] = 0",
        (
            "tests/adapters/test_transformers_offload.py::test_offloaded_rows_come_back_to_their_addresses_and_share_what_they_shared",
        ),
    ),
    Mutant(
        "offloaded rows restored over what is still mapped",
        SAVED,
        "                sequence.cache.make_bare(sequence.slot)\n",
        "",
        (FAILURES,),
    ),
    Mutant(
        "a fetch in a pool full of what has just ended",
        TRANSFERS,
        "                self.cache.collect()  #",
        "                pass  #",
        (TIERS_UNIT,),
    ),
    # what outlives the process
    Mutant(
        "rows of an earlier process taken for zeroes",
        POOL,
        "imported=False, sealed=not is_lent,",
        "imported=False, zeroed=True, sealed=not is_lent,",
        (HOLDER,),
    ),
    Mutant("a drop not logged before reuse", SEALED, "if not self._log.drop(extent.serial):", "if False:", (HOLDER,)),
    Mutant("sealed before the work is done", SEALED, "is None or written.done()):", "is None or True):", (HOLDER,)),
    Mutant("another model's rows restored", SEALED, "if contents.identity == self._identity:", "if True:", (HOLDER,)),
    Mutant("namespaces forgotten", SEALED, "name = repr(namespace).encode() if", 'name = b"None" if', (HOLDER,)),
    Mutant(
        "what a rewrite leaves out still counts as sealed",
        SEALED,
        "            extent.sealed, extent.lent = False, bool(self._log.num_borrowers)\n",
        "            pass\n",
        (HOLDER,),
    ),
    Mutant(
        "what is not here stored in a tier",
        TRANSFERS,
        "if not has.issuperset(keys) and not self._index.import_extents([placed.extent]):",
        "if False:",
        (HOLDER,),
    ),
    Mutant(
        "what comes from a tier is not sealed",
        "prefix/index.py",
        "        if self.sealed is not None and pieces:\n",
        "        if written is not None:\n",
        (HOLDER,),
    ),
    Mutant("what no seal names kept", "holder/process.py", "if serial not in named])", "if False])", (HOLDER,)),
    Mutant(
        "two engines at once",
        "holder/process.py",
        "if self._owner is not None:\n            error",
        "if False:\n            error",
        (HOLDER,),
    ),
    Mutant(
        "a rewrite in place",
        "holder/sealed_log.py",
        "half = 1 - self._words[1] % 2",
        "half = self._words[1] % 2",
        (HOLDER,),
    ),
    Mutant(
        "a record that counts before it is whole",
        "holder/sealed_log.py",
        "        start = _HEADER_BYTES + half * self._half_bytes + place\n        _RECORD",
        "        self._words[2 + half] = end\n        start = _HEADER_BYTES + half * self._half_bytes + place\n        _RECORD",
        (HOLDER,),
    ),
    # what another engine borrows
    Mutant("lent memory used again", POOL, " or extent.lent or not extent.imported:", " or not extent.imported:", (BORROWING,)),
    Mutant("a lent extent written in place", POOL, "return self.lent or self.holders", "return self.holders", (BORROWING,)),
    Mutant("a drop forgets the loan", SEALED, "extent.lent = bool(self._log.num_borrowers)  #", "pass  #", (BORROWING,)),
    Mutant("borrowed rows writable", MAPPER, "Access.READ if extent.lent else ", "", (BORROWING,)),
    Mutant("lent memory not counted", "holder/process.py", "if serial in lent:", "if False:", (BORROWING,)),
    Mutant("what was given back kept", "holder/process.py", "if serial in self._given_up])", "if False])", (BORROWING,)),
    Mutant("another model's rows borrowed", BORROWED, "return identity == self._identity", "return True", (BORROWING,)),
    Mutant("a rewrite not seen", "holder/sealed_log.py", "        self._words[5] += 1  #", "        pass  #", (BORROWING,)),
    Mutant("a page borrowed twice", BORROWED, "(seal.end_token, seal.group) not in taken", "True", (BORROWING,)),
    Mutant("what windows have passed borrowed", BORROWED, "> firsts[seal.group]", "> 0", (BORROWING,)),
    Mutant(
        "pages in use need room", "prefix/index.py", "if piece.value.extent.users and piece.end", "if 0 > piece.end", (FETCHES,)
    ),
    Mutant(
        "the room that one waits for taken", "server/engine/fetches.py", "return is_finding or len(", "return len(", (FETCHES,)
    ),
    Mutant(
        "what is borrowed counted for ever", POOL, "            self.borrowed_bytes -= extent.size_bytes\n", "", (BORROWING,)
    ),
    Mutant(
        "lent memory released that was borrowed again",
        POOL,
        "            if self._borrowed[extent.serial]:\n",
        "            if False:\n",
        (BORROWING,),
    ),
    Mutant("dropped seals borrowed", BORROWED, "if live.get(seals[place].serial) == place:", "if True:", (BORROWING,)),
    # sums over ranks
    Mutant(
        "each sum written over the last one",
        SUMS,
        "tl.store(p_peer + first + RANK",
        "tl.store(p_peer + R * num_words + i_n * W + RANK",
        (SUMS_UNIT,),
    ),
    Mutant("words taken of an earlier sum", SUMS, "((words >> 32).to(tl.int32) != number)", "(words == 0)", (SUMS_UNIT,)),
)


def main(words: list[str]) -> int:
    """Try the faults, one after the other; the exit status."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "results", "__pycache__"))
        for mutant in chosen:
            began = time.monotonic()
            outcome = attempt(mutant, tree)
            bad += not outcome.startswith("killed")
            print(f"{outcome:9} {time.monotonic() - began:5.0f} s  {mutant.name}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} killed")
    return int(bad > 0)


def attempt(mutant: Mutant, tree: Path) -> str:
    """What became of one fault; the tree is as before."""
    before: dict[Path, str] = {}
    try:
        for file, old, new in ((mutant.file, mutant.old, mutant.new), *mutant.also):
            path = tree / "vmmkv" / file
            source = path.read_text(encoding="utf-8")
            before.setdefault(path, source)
            if source.count(old) != 1:
                return f"does not apply: {file}"
            path.write_text(source.replace(old, new), encoding="utf-8")
        return outcome_of(mutant.tests, tree)
    finally:
        for path, source in before.items():
            path.write_text(source, encoding="utf-8")


def outcome_of(tests: tuple[str, ...], tree: Path) -> str:
    """What some tests say of the tree."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed"  # what waits for ever is noticed
    if done.returncode == 0:
        return "SURVIVED"
    return "killed" if done.returncode == 1 else f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
