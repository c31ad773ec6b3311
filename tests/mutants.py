"""Faults that the default tests must find. Each is put into a copy of the tree, and the tests nearest to it must fail.

    python -m tests.mutants [WORD ...]      all faults, or those whose name has one of these words

Exit status 1 if a fault survives, or if the text that it replaces is not there once: then this list is to be mended. A fault
survives, too, if its tests are skipped: `make test` installs redis-server, which some need.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.side_by_side import side_by_side

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600

ORDER = "tests/laws/test_order.py"
CACHE = "tests/laws/test_cache_machine.py::TestOnASimulatedDevice"
PREFIX = "tests/laws/test_prefix_machine.py::TestOnASimulatedDevice"
FAILURES = "tests/laws/test_failures.py"
INTERRUPTS = "tests/laws/test_interrupts.py"
PREFIX_UNIT = "tests/unit/test_prefix.py"
TIERS = "tests/laws/test_tiers.py"
SHARING_UNIT = "tests/laws/test_disk_sharing.py"
VLLM_MACHINE = "tests/adapters/test_vllm_machine.py"
STORES = "tests/laws/test_stores.py"
REDIS = "tests/laws/test_redis.py"
TIERS_UNIT = "tests/unit/test_tiers.py"
SAVED_UNIT = "tests/unit/test_saved.py"
TIER_MACHINE = "tests/laws/test_tier_machine.py"
STORE_UNIT = "tests/unit/test_store.py"
STORE_MACHINE = "tests/laws/test_store_machine.py"
FETCHES = "tests/engine/test_fetches.py"
SWAPS = f"{FETCHES}::test_what_preempted_requests_generated_comes_back_from_a_tier"
HOLDER = "tests/unit/test_holder.py"
BORROWING = "tests/unit/test_borrowing.py"
POLICIES = "tests/engine/test_kv_policy.py::test_the_tokens_are_those_of_the_reference"
SUMS_UNIT = "tests/kernels/test_sums.py"
CACHE_POLICY = "tests/adapters/test_transformers_policy.py"
ADMINISTRATION_UNIT = "tests/engine/test_administration.py"
LLM_UNIT = "tests/engine/test_llm.py"
DAMAGE = "tests/unit/test_holder_damage.py"
EVENTS = "tests/engine/test_kv_events.py"
GATES = "tests/structured_output/test_gates.py"
CALL_GRAMMARS = "tests/server/test_tools.py::TestGrammars"
FORMS = "tests/tools/test_forms.py"
SCHEDULER_MACHINE = "tests/laws/test_scheduler_machine.py::TestScheduler"


class Mutant(NamedTuple):
    """A fault: in some files, each `(file, old, new)` has `old` replaced by `new`, and one of the tests fails."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


SEALED, BORROWED, SAVED = "vmmkv/holder/sealed.py", "vmmkv/holder/borrowed.py", "vmmkv/saved.py"
SLOTS, POOL, EXTENTS = (f"vmmkv/memory/{name}.py" for name in ("slots", "pool", "extents"))
SLOT_MEMORY, MAPPER, SHARING = (f"vmmkv/memory/{name}.py" for name in ("slot_memory", "mapper", "sharing"))
SEQUENCE, SOURCE = "vmmkv/sequence.py", "vmmkv/holder/source.py"
SUMS = "kernels/vmmkv_kernels/sums.py"
ENGINE = "server/vmmkv_server/engine"
TOOLS = "server/vmmkv_server/tools"
COMPACTION = f"{ENGINE}/features/compaction.py"
SCHEDULER, GRAMMARS = f"{ENGINE}/scheduler.py", f"{ENGINE}/features/grammars.py"
TRANSFERS, KEYS, SHARED = "vmmkv/tiers/transfers.py", "vmmkv/tiers/keys.py", "vmmkv/tiers/shared.py"
MOVER, FETCH_SEARCH = "vmmkv/tiers/mover.py", "vmmkv/tiers/fetch_search.py"
THREADED, HOST, DISK, ANSWERING = (f"vmmkv/tiers/{name}.py" for name in ("threaded", "host", "disk", "answering"))
ADMINISTRATION, OWN_PROCESS = f"{ENGINE}/administration.py", "server/vmmkv_server/llm.py"
OTHERS = f"{TIERS_UNIT}::test_no_other_tenant_model_or_layout_finds_a_record"

RAISED_BEHIND = "                for fence in behind.values():\n                    fence.order(self.streams)\n"

# By file and tests: of each fault the text that is replaced, its replacement, and edits of other files where what is left would
# still do.
FAULTS: dict[tuple[str, ...], dict[str, tuple[Any, ...]]] = {
    (SLOT_MEMORY, ORDER): {
        "a limit raised ahead of a lowering on another stream": (RAISED_BEHIND, ""),
        "a limit lowered ahead of a raise that is on its way": (
            "        self.order()  # a raise of it may be on its way\n",
            "",
        ),
        "a limit lowered ahead of a raise on another stream": (
            "            written.order(self.streams)  # it may be on a stream that is not known\n",
            "            pass\n",
        ),
        "limits written behind the current stream alone": (
            "fence = driver.write_behind(self.limit, limits, self.streams)",
            "fence = driver.write_behind(self.limit, limits)",
        ),
        "copies not ordered behind recorded streams": (
            "            self.fence().order()\n        yield\n",
            "            pass\n        yield\n",
        ),
        "recorded streams not ordered behind copies": (
            "        if self.streams:\n            retried(",
            "        if False:\n            retried(",
        ),
    },
    (SLOT_MEMORY, CACHE): {
        "limits raised without waiting for a lowering": (
            "if (fence := self._on_its_way(slot)) is not None}",
            "if (fence := self._on_its_way(slot)) is not None and False}",
        ),
        "a limit raised behind a lowering forgets its own fence": (
            "        self._written.update(dict.fromkeys(limits, fence))\n        return fence",
            "        if not any(limits.values()):\n            self._written.update(dict.fromkeys(limits, fence))\n"
            "        return fence",
        ),
        "limits lowered on the control stream, ahead of running work": (
            "        fence = self._write_behind({slot: limit})\n        self.table",
            "        self.pool.driver.write(self.limit, {slot: limit})\n        fence = self.fence()\n        self.table",
        ),
        "zeroes and limits not ordered before use": (
            "                self.pool.driver.write(self.limit, at_once)\n            self.order()\n",
            "                self.pool.driver.write(self.limit, at_once)\n",
        ),
        "zeroes and limits ordered before use on the current stream alone": (
            "self.pool.driver.order(self.streams)",
            "self.pool.driver.order()",
        ),
        "recorded streams forgotten in a fence": (
            "return self.pool.driver.fence(self.streams)",
            "return self.pool.driver.fence()",
        ),
    },
    (SLOTS, ORDER): {
        "adoption not ordered behind the parked fence": (
            "            parked.fence.order(self.memory.streams)\n",
            "",
            (SLOT_MEMORY, RAISED_BEHIND, ""),
        ),
    },
    ("vmmkv/prefix/attach.py", ORDER): {
        "a parked source's fence not renewed after a copy": (
            "slots.parked_slots[hit.resident].fence = memory.fence()",
            "memory.fence()",
        ),
    },
    (SHARING, PREFIX): {
        "an exchange that unmaps without waiting": (
            "        memory.fence().wait()\n        mapper.unmap(old)\n",
            "        memory.fence()\n        mapper.unmap(old)\n",
        ),
    },
    (MAPPER, ORDER): {
        "a rollback that unmaps without waiting": (
            "            never_live.wait()  # zeroes may be on their way to it\n",
            "",
        ),
        "memory still taken for zeroed once it was written": (
            "mapping.extent.tenant, mapping.extent.zeroed = tenant, False",
            "mapping.extent.tenant = tenant",
        ),
        "a page revived that others have come to hold": (
            "and not extent.shared and mapping.end_page <= target.end_page:",
            "and mapping.end_page <= target.end_page:",
        ),
    },
    (MAPPER, CACHE): {
        "a busy page evicted without waiting": (
            "            if fence.done():\n                while batch:",
            "            if True:\n                while batch:",
        ),
        "of extents side by side only the last one zeroed": (
            "start = runs.pop()[0] if adjoins else mapping.address",
            "start = [adjoins and runs.pop(), mapping.address][1]",
        ),
        "a holder that is not dropped": (
            "        self._forget(mapping)\n        self.let_go(mapping)\n",
            "        self._forget(mapping)\n",
        ),
        "a slot that is not free again when nothing is mapped there": (
            "            self.emptied_slots.add(mapping.span.slot)\n",
            "            pass\n",
        ),
        "a rollback that leaves a page": ("for mapping in reversed(self._new):", "for mapping in reversed(self._new[1:]):"),
    },
    (SHARING, CACHE): {
        "pages reclaimed before their rows have moved": (
            "    with memory.copying():\n        for span in memory.spans(slot) if",
            "    memory.reclaim_from(slot, len(rows))\n    with memory.copying():\n        for span in memory.spans(slot) if",
        ),
    },
    (SHARING, "tests/unit/test_cache.py::test_no_row_is_written_before_it_is_read"): {
        "rows that move over others that have still to be read": (
            "for at in range(0, len(moved_T), chunk_rows):",
            "for at in reversed(range(0, len(moved_T), chunk_rows)):",
        ),
    },
    (SEQUENCE, PREFIX): {
        "rows that move into pages that others hold too": (
            "            sharing.own_from(slots.memory, self.slot, first, len(rows))\n",
            "",
        ),
    },
    (SEQUENCE, f"{PREFIX_UNIT}::test_what_was_inserted_stays_when_its_sequence_is_compacted"): {
        "rows that have moved pass for a prompt's": ("            slots.keeper.forget(self.slot, first)\n", ""),
    },
    (SEQUENCE, "tests/unit/test_cache.py::test_forks_and_cuts_know_which_tokens_their_rows_hold"): {
        "a cut that leaves the positions of rows that are gone": (
            "            self.live.positions = cut_positions(self.live.positions, num_tokens)\n",
            "",
        ),
    },
    ("vmmkv/cache.py", "tests/unit/test_cache.py::test_forks_and_cuts_know_which_tokens_their_rows_hold"): {
        "a fork that forgets which tokens its rows hold": (
            "        fork.positions = parent.positions\n",
            "",
        ),
    },
    (COMPACTION, POLICIES): {
        "keys turned from the first row on, not from the first that has moved": (
            "self._keys.turn(sequence.slot, first, back_T)",
            "self._keys.turn(sequence.slot, 0, back_T)",
        ),
        "scores of rows that have moved left where they were": (
            "self.scores_T = sums_T[rows] if",
            "self.scores_T = sums_T[: len(rows)] if",
        ),
        "a generated query that stands for no other": ("end - since if is_generated else 1)", "1)"),
    },
    (
        "vmmkv/adapters/transformers/policy.py",
        f"{CACHE_POLICY}::test_the_logits_are_those_without_the_rows_that_the_policy_drops",
    ): {
        "scores of rows that have moved in a cache of transformers left where they were": (
            "self._sums_BT.gather(1, chosen[list(parents)]) if",
            "self._sums_BT[:, : chosen.shape[1]] if",
        ),
    },
    (
        "vmmkv/adapters/transformers/attention.py",
        f"{CACHE_POLICY}::test_with_inv_freq_a_sequence_goes_past_the_positions_of_its_model",
    ): {
        "queries that stay where their tokens are while keys are turned": (
            "    q_BHND = cache.turned(layer, q_BHND)\n",
            "",
        ),
    },
    (SHARING, ORDER): {
        "a window unmapped before its copy has run": (
            "            memory.mapper.reclaim([mapping], fence)\n",
            "            memory.mapper.unmap(mapping)\n            memory.mapper.let_go(mapping)\n",
        ),
        "an exchange not ordered behind recorded streams": (
            "                with memory.copying():\n                    _exchange(memory, mapping, end if",
            "                _exchange(memory, mapping, end if",
        ),
    },
    (EXTENTS, CACHE): {
        "fresh memory taken for zeroed": ("num_pages, zeroed=self._driver.creates_zeroed)", "num_pages, zeroed=True)"),
        "the tenant not compared when memory is used again": (
            "return not self.zeroed and self.tenant != tenant",
            "return not self.zeroed and self.tenant is None",
        ),
    },
    (POOL, "tests/unit/test_pool.py"): {
        "a little free memory of other classes given back": (
            "if self.free_bytes <= _MOST_IDLE * self.budget_bytes and",
            "if False and",
        ),
    },
    (SLOT_MEMORY, "tests/unit/test_cache.py"): {
        "a page of one group not zeroed for another group": (
            "(span.index, page * PAGE_BYTES % group.row_bytes)",
            "page * PAGE_BYTES % group.row_bytes",
        ),
    },
    (SHARING, "tests/unit/test_cache.py"): {
        "an exchanged page without its tenant": ("mapping.extent.tenant = tenant_of(mapping.page)", "pass"),
    },
    (SHARING, "tests/unit/test_copy_rows.py"): {
        "rows copied to another tenant": ("if memory.tenants[source] != memory.tenants[target]:", "if False:"),
    },
    (MAPPER, CACHE, FAILURES): {
        "a page revived that was never live": ("if not isinstance(fence, _NeverLive) and not", "if not"),
    },
    (SLOTS, PREFIX_UNIT): {
        "a pinned slot not spared": (
            "count == 1 and (parked := next(self.unpinned(self.parked_slots.values()), None)) is not None",
            "count == 1 and (parked := next(iter(self.parked_slots.values()), None)) is not None",
        ),
        "a pinned slot taken before a closing one": (
            "for spared in (pinned, pinned[1:], ()):",
            "for spared in (pinned[1:], ()):",
        ),
        "pinned slots not spared by a batch": ("for spared in (pinned, pinned[1:], ()):", "for spared in ((),):"),
    },
    ("vmmkv/prefix/index.py", PREFIX_UNIT): {
        "a page that keeps its place in the tree against one with more rows": (
            "        if piece.value.extent is held.value.extent or piece.value.first_token >= held.value.first_token:\n"
            "            return piece\n",
            "        return piece\n",
        ),
        "the last pinned rows left to a node that goes": ("                self.tree.keep(below, pins)\n", ""),
    },
    (POOL, PREFIX_UNIT): {
        "pinned pages taken to be evictable": ("// PAGE_BYTES - self._pinned_pages()", "// PAGE_BYTES"),
    },
    ("vmmkv/driver/host.py", "tests/unit/test_driver_host.py"): {
        "mappings inherited by fork": ("                madvise(address, size_bytes, MADV_DONTFORK)\n", ""),
    },
    (TRANSFERS, f"{TIER_MACHINE}::test_copies_that_another_brings_while_a_path_is_stored_come_first"): {
        "rows stored before the copies that make them": ("if not self._transfers.is_written_in(placed.extent):", "if False:"),
    },
    (TRANSFERS, f"{TIER_MACHINE}::test_copies_of_a_path_not_worth_storing_come_before_the_store_of_another"): {
        "a path stored before copies that were queued for no tier": (
            "while not self._transfers.is_written(self._number):",
            "while False:",
        ),
    },
    (MOVER, STORE_UNIT, STORE_MACHINE): {
        "spans free before they are copied": (
            "        of.num_under_way += 1\n",
            "        of.num_under_way += isinstance(of, Load)\n",
        ),
        "a put that waits for ever": ("if source.deadline_s >= time.monotonic() else None", ""),
        "a tier without room taken to have the record": ("answer not in (Refusal.NO_ROOM, Refusal.NOT_NOW)", "True"),
    },
    ("vmmkv/tiers/store.py", STORE_UNIT, STORE_MACHINE): {
        "a record that one tier misses asked of no other": (
            "if self.missed and all(self._left.get(key) for key in self.missed):",
            "if False:",
        ),
        "what one tier gives brought to no other": (
            "        for tier in self._store.tiers_worth_it():\n",
            "        for tier in ():\n",
        ),
        "a get that is waited for for ever": ("if self.deadline_s < time.monotonic():", "if False:"),
        "spans copied to where others begin": ("            offset += size_bytes\n", ""),
    },
    (DISK, f"{TIERS}::test_a_disk_with_records_of_another_size_is_refused_and_keeps_them"): {
        "records of another size taken for empty slots": (
            "        self._check_record_bytes()\n        self._allocate()\n",
            "        self._allocate()\n",
        ),
    },
    (MOVER, f"{TIER_MACHINE}::TestOnASimulatedDevice"): {
        "loads that are over before their copies": (
            "for copy in [copy for copy in self._copies if copy.fence.done()]:",
            "for copy in [*self._copies]:",
        ),
    },
    (TRANSFERS, f"{TIER_MACHINE}::test_a_load_waits_for_no_store_and_a_store_holds_nothing_before_its_rows_are_written"): {
        "loads on the stream of stores": (
            "self._load_stream if is_load else self._store_stream):\n            return self._windows",
            "self._store_stream):\n            return self._windows",
        ),
        "stores that take every window": ("(_SPARE_WINDOWS if is_load else _SPARE_WINDOWS + _LOAD_WINDOWS)", "_SPARE_WINDOWS"),
    },
    (FETCH_SEARCH, f"{TIERS_UNIT}::test_one_load_serves_all_that_wait_for_it"): {
        "a load for each that waits": ("self.other = next(filter(None, map(self._loading.get, keys)), None)", "pass"),
    },
    (TRANSFERS, f"{TIERS_UNIT}::test_a_fetch_that_nothing_waits_for_gives_everything_back"): {
        "extents of a fetch that was given up stay held": ("                pool.drop(part.buffer)\n", ""),
    },
    (TRANSFERS, f"{TIERS_UNIT}::test_memory_of_a_load_that_failed_is_zeroed_for_the_next_tenant"): {
        "extents that a load has written pass for zero": (
            "            extent.tenant, extent.zeroed = None, False",
            "            pass",
        ),
    },
    (KEYS, OTHERS): {
        "keys without the namespace": ("self._identity + self._name", "self._identity"),
    },
    ("vmmkv/layout.py", OTHERS): {
        "keys without the layout": ("repr((groups, fingerprint))", "repr(fingerprint)"),
        "keys without the fingerprint": ("repr((groups, fingerprint))", "repr(groups)"),
    },
    ("vmmkv/tiers/host.py", f"{TIERS}::test_what_is_being_loaded_is_not_overwritten"): {
        "host memory overwritten while it is copied to the device": (
            "if not held.num_copies), None)",
            "if held.num_copies >= 0), None)",
        ),
    },
    ("vmmkv/tiers/disk.py", f"{TIERS}::test_a_changed_byte_on_the_disk_is_never_returned"): {
        "records of the disk that are not verified": ("is_right = checksum_of(key, data) == slot.checksum", "is_right = True"),
    },
    ("vmmkv/tiers/disk.py", f"{TIERS}::test_a_changed_entry_is_no_entry"): {
        "entries of an index that are not verified": (
            "if entry[_ENTRY.size :] != _own_checksum(",
            "if False and entry[_ENTRY.size :] != _own_checksum(",
        ),
    },
    (MOVER, f"{TIERS_UNIT}::test_a_path_that_is_stored_in_pieces_loses_its_end_first"): {
        "what is stored of a path is newer than what was there": (
            "        if 0 < num_held < len(has):\n",
            "        if False:\n",
        ),
    },
    (
        f"{ENGINE}/features/fetches.py",
        f"{FETCHES}::test_what_has_come_of_a_fetch_that_is_later_than_computing_is_used",
    ): {
        "a load that is later than computing is waited for": (
            "if wait.fetch.done or self._is_late(wait, now_s)]",
            "if wait.fetch.done]",
        ),
    },
    (MOVER, f"{TIERS_UNIT}::test_a_fetch_waits_for_a_tier_that_finds_out_what_it_has"): {
        "a tier that finds out what it has is taken to have nothing": (
            "return found if len(known) == len(answers) or all(found) else None",
            "return found",
        ),
    },
    (MOVER, f"{TIERS_UNIT}::test_a_load_that_fails_between_two_looks_at_it_is_a_miss"): {
        "a load that fails while it is looked at": (
            "for move in load.coming if move.transfer.missed)",
            "for move in load.coming if move.transfer.missed and move not in come)",
        ),
    },
    (SHARED, f"{STORES}::test_a_value_that_is_not_the_record_is_a_miss_is_removed_and_found_no_more"): {
        "values of a store that are not verified": (
            "if len(record) == len(data) and header == _HEADER.pack(_MAGIC, len(data), checksum_of(key, record)):",
            "if len(record) == len(data):",
        ),
        "a wrong record found again": (
            "            self._learn([key], [False])\n        raise OSError",
            "            pass\n        raise OSError",
        ),
    },
    (ANSWERING, f"{REDIS}::TestRedis::test_a_store_that_answers_byte_by_byte_is_late"): {
        "a store that is late is waited for": ("        if is_late:\n", "        if False:\n"),
    },
    (SHARED, f"{STORES}::test_a_load_from_a_store_that_is_left_alone_is_a_miss_and_takes_no_buffer"): {
        "a store that does not answer is asked for every record": (
            "return missed(key) if self.answering.is_left_alone else super().load(key)",
            "return super().load(key)",
        ),
    },
    (f"{ENGINE}/loading.py", f"{FETCHES}::test_no_change_of_the_weights_goes_unseen"): {
        "weights whose words change places": ("each * factors[: len(each)]", "each"),
    },
    (SCHEDULER, SCHEDULER_MACHINE): {
        "the oldest of the lowest priority preempted": ("in reversed(self.running) if", "in self.running if"),
        "a request preempted while a step in flight may free pages": ("if self.drain() or self.slide", "if self.slide"),
        "slots of held requests given to others": ("self._max_sequences - num_held - ", "self._max_sequences - "),
        "a request without a next token begun again beside those for which it was preempted": (
            "math.inf if may_resume else max_others",
            "math.inf",
        ),
        "tokens kept that were sampled before a mask began": ("        table.epochs[slot] += 1\n", ""),
        "rows kept of tokens that are dropped": ("if request.memory.length > num_rows:", "if False:"),
    },
    (SCHEDULER, f"{GATES}::test_answers_are_the_same_however_many_steps_are_in_flight"): {
        "nothing left to compute for a request whose masks begin": (" - (not tokens)", ""),
    },
    (SCHEDULER, f"{GATES}::test_what_counts_every_token_counts_those_of_gated_answers"): {
        "tokens counted by penalties that are dropped": ("if self._sampler.counts(slot):", "if False:"),
    },
    (GRAMMARS, f"{GATES}::test_answers_are_free_until_their_grammar_begins_and_follow_it"): {
        "triggers looked for once": ("        self.search.restart(num_tokens)\n", "        self.search.restart(1 << 30)\n"),
    },
    (
        "server/vmmkv_server/structured_output/gate.py",
        f"{GATES}::test_a_trigger_in_a_code_block_begins_no_grammar_if_it_may_not",
    ): {
        "code blocks forgotten behind a grammar": ('self._num_read, self._unread = num_tokens, b""', "pass"),
    },
    (f"{TOOLS}/chat_format.py", CALL_GRAMMARS): {
        "a grammar that begins within the reasoning": (
            'behind = markers.end if markers is not None and self.place is Place.WITHIN else ""',
            'behind = ""',
        ),
        "no reasoning in front of a grammar": ("text, place = text + self._opening, Place.WITHIN", "place = Place.BEHIND"),
        "strict tools that are called by no schema": (" or any(tool.is_strict for tool in self.toolset.tools)", ""),
    },
    (f"{TOOLS}/form.py", f"{FORMS}::test_text_of_a_schema_is_an_answer_beside_calls"): {
        "text of a schema left out beside calls": (
            'root = f"{root} | {text}" if toolset.choice == "auto" else root',
            "pass",
        ),
    },
    (f"{TOOLS}/form.py", f"{FORMS}::test_answers_under_a_grammar_are_calls_that_validate"): {
        "several calls where one may be": ("is_alone = toolset.most_calls == 1 or ", "is_alone = "),
    },
    (f"{TOOLS}/reading.py", f"{FORMS}::test_an_answer_is_read_into_its_parts_however_it_is_cut"): {
        "calls of tools that nobody offered": (
            "                if name not in self.tools:\n                    raise NoCall\n",
            "",
        ),
    },
    (
        "server/vmmkv_server/structured_output/compiler.py",
        "tests/structured_output/test_compiler.py::test_a_slow_grammar_is_refused_by_its_cpu_time_and_the_worker_stays",
    ): {
        "a refused grammar that is compiled again": ("                self._keep(key, str(error))\n", ""),
    },
    (f"{ENGINE}/request.py", SCHEDULER_MACHINE): {
        "the room of slots that join left out": (
            "max(0, min(self._num_roomy, int(room.min())))",
            "self._num_roomy",
        ),
    },
    (f"{ENGINE}/waiting.py", SCHEDULER_MACHINE): {
        "the youngest of requests with as long cached prefixes begun first": (
            "if num_cached > longest and",
            "if num_cached >= longest and",
        ),
    },
    (
        SCHEDULER,
        f"{FETCHES}::test_a_running_request_takes_the_memory_that_is_being_loaded_into",
    ): {
        "memory that is being loaded into is kept from running requests": (" or self._give_up_held():", ":"),
    },
    (FETCH_SEARCH, f"{FETCHES}::test_what_is_before_the_records_of_a_slow_tier_is_loaded_and_those_are_computed"): {
        "all of a prompt computed where its end is in a slow tier": (
            "            for pages in have:  # what is before",
            "            break\n            for pages in have:  # what is before",
        ),
    },
    (f"{ENGINE}/features/fetches.py", f"{FETCHES}::test_a_request_waits_for_room_to_load_rather_than_compute"): {
        "a prompt computed where there is no room yet to load it": (
            'return None if asked.unfetched == "no_room" else False',
            "return False",
        ),
    },
    (FETCH_SEARCH, f"{FETCHES}::test_rows_behind_a_common_beginning_give_way_to_a_load"): {
        "rows kept that a load does not go on from": (
            "chain.tokens[:end_token]).node",
            "chain.tokens[:end_token]).node and match.path[-1]",
        ),
    },
    (
        f"{ENGINE}/features/fetches.py",
        f"{FETCHES}::test_a_running_request_takes_the_memory_that_is_being_loaded_into",
        f"{FETCHES}::test_a_request_waits_for_room_to_load_rather_than_compute",
    ): {
        "a load that leaves no room for its own request": (
            "self._layout.pages_for(request.shape.num_first_rows) + spare_pages",
            "0",
        ),
    },
    (f"{ENGINE}/engine.py", SWAPS): {
        "what requests generate stored only once they are preempted": (
            "                feature.mapped_ahead()\n",
            "                pass\n",
        ),
    },
    (f"{ENGINE}/features/fetches.py", SWAPS): {
        "rows stored for tiers whose step has not been read back": (
            "scheduler.insert(request, request.confirmed_tokens)",
            "scheduler.insert(request, request.tokens)",
        ),
    },
    (f"{ENGINE}/features/fetches.py", f"{FETCHES}::test_little_is_stored_in_a_tier_that_is_slower_than_computing"): {
        "nothing stored any more in a tier that was slow": (
            "return is_faster or self._num_paths[tier] % TRIAL == 0",
            "return is_faster",
        ),
    },
    (SAVED, FAILURES): {
        "limits of what was to be offloaded not taken back": (
            "retried(functools.partial(live.slots.memory.raise_limits, {live.slot: limit}))",
            "pass",
        ),
        "offloaded rows that come back in part when a limit is refused twice": (
            "retried(functools.partial(live.slots.memory.lower_limit, live.slot, 0))",
            "live.slots.memory.lower_limit(live.slot, 0)",
        ),
        "shared pages offloaded and restored for each": ("if owner is not part.span:", "if False:"),
        "an owner's pages past what is shared": ("if mapping.end_page <= part.shared_end}", "}"),
        "offloaded rows restored over what is still mapped": ("                live.slots.make_bare(live.slot)\n", ""),
    },
    (SLOTS, FAILURES): {
        "a sequence open on shared rows when its end is refused once": (
            "retried(lambda: self.memory.lower_limit(slot, 0))",
            "self.memory.lower_limit(slot, 0)",
        ),
    },
    ("vmmkv/prefix/attach.py", FAILURES): {
        "an attached sequence left open when its end is refused once": ("retried(lambda: slots.end(live))", "slots.end(live)"),
    },
    (SHARING, FAILURES): {
        "a page lost whose exchange is refused twice": ("            retried(restore)\n", "            restore()\n"),
        "large extents past what is shared": (
            "large_end = filled_end if large_end is None else min(large_end, filled_end)",
            "large_end = filled_end",
        ),
    },
    (
        SLOTS,
        "tests/adapters/test_transformers_offload.py::test_offloaded_rows_come_back_to_their_addresses_and_share_what_they_shared",
    ): {
        "memory mapped ahead for offloaded rows": (
            "self.table.lengths[slot] = self.table.ends[slot] = 0",
            "self.table.lengths[slot] = 0",
        ),
    },
    (MOVER, TIERS_UNIT): {
        "records that are neighbours in an extent alone moved by one copy": (
            "return tier, offset - number * record_bytes, transfer.address - number * record_bytes",
            "return tier, offset - number * record_bytes, 0",
        ),
    },
    (TRANSFERS, TIERS_UNIT): {
        "a fetch in a pool full of what has just ended": ("                self.cache.collect()  #", "                pass  #"),
        "what one tier loads never stored in another": ("if len(self.mover.tiers) > 1:", "if False:"),
    },
    (SOURCE, HOLDER): {
        "rows of an earlier process taken for zeroes": (
            "imported=False, sealed=True)",
            "imported=False, zeroed=True, sealed=True)",
        ),
    },
    (SEALED, HOLDER): {
        "a drop not logged before reuse": ("if not self._log.drop(extent.serial):", "if False:"),
        "sealed before the work is done": ("is None or written.done()):", "is None or True):"),
        "another model's rows restored": (
            "if contents.identity == self._identity:\n            self._insert(",
            "if True:\n            self._insert(",
        ),
        "namespaces forgotten": ("name = repr(namespace).encode() if", 'name = b"None" if'),
        "what a rewrite leaves out still counts as sealed": (
            "            extent.sealed, extent.lent = False, bool(self._log.num_borrowers)\n",
            "            pass\n",
        ),
    },
    (TRANSFERS, HOLDER): {
        "what is not here stored in a tier": (
            "if not has.issuperset(keys) and not self._transfers.index.import_extents([placed.extent]):",
            "if False:",
        ),
    },
    ("vmmkv/prefix/index.py", HOLDER): {
        "what comes from a tier is not sealed": (
            "        for follower in self.followers if pieces else ():\n            follower.added(",
            "        for follower in self.followers if written is not None else ():\n            follower.added(",
        ),
    },
    ("vmmkv/holder/process.py", HOLDER): {
        "what no seal names kept": ("if serial not in named])", "if False])"),
        "two engines at once": ("if self._owner is not None:\n            error", "if False:\n            error"),
    },
    ("vmmkv/holder/log.py", HOLDER): {
        "a rewrite in place": ("half = 1 - self._half", "half = self._half"),
        "a record that counts before it is whole": (
            "        start = _HEADER_BYTES + half * self._half_bytes + place\n        _RECORD",
            "        self.words[2 + half] = end\n"
            "        start = _HEADER_BYTES + half * self._half_bytes + place\n        _RECORD",
        ),
    },
    (EXTENTS, BORROWING): {
        "lent memory used again": ("return self.sealed or self.lent or", "return self.sealed or"),
        "a lent extent written in place": ("return self.lent or self.holders", "return self.holders"),
    },
    (SOURCE, BORROWING): {
        "what is borrowed counted for ever": ("        self.borrowed_bytes -= extent.size_bytes\n", ""),
        "lent memory released that was borrowed again": (
            "        if self._borrowed[extent.serial]:\n",
            "        if False:\n",
        ),
    },
    (SEALED, BORROWING): {
        "a drop forgets the loan": ("extent.lent = bool(self._log.num_borrowers)  #", "pass  #"),
    },
    (MAPPER, BORROWING): {
        "borrowed rows writable": ("Access.READ if extent.lent else ", ""),
    },
    ("vmmkv/holder/process.py", BORROWING): {
        "lent memory not counted": ("if serial in lent:", "if False:"),
        "what was given back kept": ("if serial in self._given_up])", "if False])"),
    },
    (BORROWED, BORROWING): {
        "another model's rows borrowed": ("return identity == self._identity", "return True"),
        "a page borrowed twice": ("(seal.end_token, seal.group) not in taken", "True"),
        "what windows have passed borrowed": ("> firsts[seal.group]", "> 0"),
        "dropped seals borrowed": ("if live.get(seals[place].serial) == place:", "if True:"),
    },
    ("vmmkv/holder/log.py", BORROWING): {
        "a rewrite not seen": ("        self.words[5] = (self.words[5] + 1)", "        _ = (self.words[5] + 1)"),
    },
    ("vmmkv/prefix/index.py", FETCHES): {
        "pages in use need room": ("if piece.value.extent.users and piece.end", "if 0 > piece.end"),
    },
    (f"{ENGINE}/features/fetches.py", FETCHES): {
        "the room that one waits for taken": ("return is_finding or len(", "return len("),
    },
    (ADMINISTRATION, f"{ADMINISTRATION_UNIT}::test_a_sleep_stores_what_a_tier_has_not_had_time_to_take"): {
        "a sleep that stores nothing": ("            engine.store_all(STORE_S)\n", ""),
    },
    (
        ADMINISTRATION,
        f"{ADMINISTRATION_UNIT}::test_a_larger_budget_that_an_operator_gives_admits_requests_that_found_no_room",
    ): {
        "a budget that the scheduler does not hear of": ("            engine.budget_changed()\n", "            pass\n"),
    },
    (ADMINISTRATION, f"{ADMINISTRATION_UNIT}::test_what_goes_back_to_the_device_and_what_to_the_pool_counts_as_freed"): {
        "created memory that went back not counted": ("before.pool_created_bytes - after.pool_created_bytes", "0"),
    },
    (ADMINISTRATION, f"{ADMINISTRATION_UNIT}::test_after_a_map_there_is_none_for_many_times_as_long_but_when_idle"): {
        "maps that leave no time for steps": (
            "self._rest_until_s = now_s + self._took_us * REST / 1e6",
            "self._rest_until_s = now_s",
        ),
        "an idle engine's map that rests": (
            'began_s < self._rest_until_s and budget_us < float("inf")',
            "began_s < self._rest_until_s",
        ),
    },
    (ADMINISTRATION, f"{ADMINISTRATION_UNIT}::test_a_slice_has_no_more_slots_than_fit_where_each_takes_long"): {
        "a map made in one slice": ("if now_s >= until_s:", "if False:"),
        "slots forgotten between slices": (
            "some, self._left = self._left[:count], self._left[count:]",
            "some, self._left = self._left[:count], self._left[count + 1 :]",
        ),
    },
    (OWN_PROCESS, f"{LLM_UNIT}::test_without_a_seed_requests_differ_and_a_run_of_the_program_does_not"): {
        "a refused call that moves a seed": ("                    self._random.setstate(state)", "                    pass"),
    },
    (OWN_PROCESS, f"{LLM_UNIT}::test_what_comes_behind_a_stop_string_or_with_an_end_token_is_not_the_answers"): {
        "tokens kept behind a stop string": ("                del own.token_ids[self.detokenizer.num_tokens :]\n", ""),
        "log-probabilities of an end token kept": (
            "                    del of_tokens[len(own.token_ids) :]\n",
            "                    pass\n",
        ),
    },
    (OWN_PROCESS, f"{LLM_UNIT}::test_a_stop_string_ends_an_answer_and_only_that"): {
        "a request that runs on behind its stop string": ("return output.finish_reason is None", "return False"),
    },
    (OWN_PROCESS, f"{LLM_UNIT}::test_ctrl_c_ends_everything_after_the_step_and_the_engine_can_be_used_again"): {
        "requests that run on after Ctrl-C": (
            "                engine.receive(Abort(request_id=request_id))\n            while",
            "                pass\n            while",
        ),
    },
    (OWN_PROCESS, f"{LLM_UNIT}::test_progress_counts_the_prompt_tokens_that_were_computed"): {
        "cached tokens counted as computed": (
            "len(result.prompt_token_ids) - output.cached_tokens",
            "len(result.prompt_token_ids)",
        ),
    },
    (OWN_PROCESS, f"{LLM_UNIT}::test_what_a_tier_lacks_is_stored_when_an_llm_ends"): {
        "an LLM that ends without storing": ("                loaded.engine.store_all(_STORE_S)\n", ""),
    },
    (OWN_PROCESS, f"{LLM_UNIT}::test_answers_of_one_prompt_have_the_seeds_that_follow"): {
        "answers of one prompt with one seed": ("seed=(seed + index) & SEED_MASK", "seed=seed"),
    },
    (OWN_PROCESS, f"{LLM_UNIT}::test_one_thread_generates_at_a_time"): {
        "a call beside another thread's": (
            'raise RuntimeError("this LLM is generating in another thread: give both lists of prompts to one call")',
            "pass",
        ),
    },
    (THREADED, f"{TIERS}::test_a_store_for_which_no_buffer_is_free_is_refused_and_counts_once"): {
        "stores that take all buffers": (" or len(self._storing) >= self._num_buffers // 2", ""),
    },
    (THREADED, TIERS_UNIT, TIERS): {
        "a flush that waits for nothing": ("lambda: not self._num_writes", "lambda: True"),
        "the end of a path used last": ("    for key in reversed(keys):\n", "    for key in keys:\n"),
    },
    (THREADED, f"{TIERS}::test_a_buffer_is_not_lent_again_while_a_thread_reads_into_it"): {
        "a buffer lent again while a thread still reads into it": (
            "transfer.future.add_done_callback(lambda _: self.give_back(transfer))",
            "self.give_back(transfer)",
        ),
    },
    (MOVER, f"{TIERS_UNIT}::test_what_a_failed_copy_was_to_store_is_not_kept"): {
        "what a failed copy stored kept": (
            "move.tier.drop if copy.failed else move.tier.finished, move.transfer)\n            source",
            "move.tier.finished, move.transfer)\n            source",
        ),
    },
    (TRANSFERS, f"{TIERS_UNIT}::test_a_page_that_lacks_its_first_rows_is_not_stored"): {
        "an extent that lacks its first rows stored": ("keys = [] if placed.first_token else self.chain", "keys = self.chain"),
    },
    (FETCH_SEARCH, f"{TIERS_UNIT}::test_rows_that_a_page_on_the_device_lacks_are_fetched"): {
        "a find that counts lacking rows as on the device": (" and not piece.value.first_token]", "]"),
    },
    (SHARING, f"{TIERS_UNIT}::test_a_page_that_lacks_its_first_rows_is_not_stored"): {
        "rows that a copy lacks taken to be there": (
            "np.where(first_token < starts, starts, memory.table.firsts[:, target])",
            "memory.table.firsts[:, target]",
        ),
    },
    ("vmmkv/prefix/attach.py", f"{TIERS_UNIT}::test_a_turn_that_begins_within_a_page_of_a_window_has_the_page_stored"): {
        "rows before a window taken to be missing": (
            "begin(slot, hit.starts, hit.extents.firsts)\n        with self.reading(hit):\n",
            "begin(slot, hit.starts)\n        with self.reading(hit):\n",
        ),
    },
    (THREADED, f"{TIERS}::test_a_listener_hears_what_becomes_of_each_record"): {
        "a store that failed in silence": (
            '            self._count("errors", 1)\n            self.listener([transfer.key], False)\n',
            '            self._count("errors", 1)\n',
        ),
        "a store given up in silence": (
            "        if transfer.is_store:\n            self.listener([transfer.key], False)\n",
            "",
        ),
    },
    (THREADED, f"{TIERS}::test_a_record_is_stored_once"): {
        "a record found before it is stored": ("key in records and key not in storing for", "key in records for"),
    },
    (THREADED, f"{TIERS}::test_memory_that_is_lent_is_not_given_back_under_a_copy"): {
        "a tier closed while its memory is lent": ("            check_returned(self.name, self._num_lent)\n", ""),
    },
    (THREADED, f"{TIERS}::test_memory_that_is_lent_comes_back_however_a_transfer_ends"): {
        "a buffer lost with a store given up": (
            "        else:\n            self.give_back(transfer)\n",
            "        elif not transfer.is_store:\n            self.give_back(transfer)\n",
        ),
    },
    (HOST, f"{TIERS}::test_a_record_is_stored_once"): {
        "a record loaded while it is stored": ("if held is None or key in self._storing:", "if held is None:"),
    },
    (HOST, f"{TIERS}::test_a_listener_hears_what_becomes_of_each_record"): {
        "a record of the host that goes in silence": (
            "        self.listener([key], False)\n        self._counts",
            "        self._counts",
        ),
    },
    (HOST, f"{TIERS}::test_memory_that_is_lent_comes_back_however_a_transfer_ends"): {
        "a load given up keeps its record for ever": (
            "            elif transfer.address:\n                self._records[transfer.key].num_copies -= 1\n",
            "            else:\n                pass\n",
        ),
    },
    (DISK, f"{TIERS}::test_a_slot_is_not_written_while_a_thread_reads_it"): {
        "a record of the disk overwritten while it is read": (" and not self._num_reads[number]", ""),
    },
    ("vmmkv/adapters/vllm/blocks.py", VLLM_MACHINE): {
        "stores of blocks that are written again": (
            "            put.give_up()\n",
            "            pass\n",
            (
                "vmmkv/adapters/vllm/blocks.py",
                "        while any(not put.done for put in reading):\n",
                "        while False:\n",
            ),
        ),
        "a request scheduled whose loads have not all ended": ("if all(get.done for get, _ in loads):", "if True:"),
        "blocks of a failed load taken for good": (
            "failed[name].update(block for block in blocks if block >= 0)",
            "failed[name].update(())",
        ),
    },
    ("vmmkv/adapters/vllm/schedule.py", VLLM_MACHINE, "tests/adapters/test_vllm.py"): {
        "waiting for a request that has ended": (
            "            self.worth.given_up(name)\n            self._give_up_claims(request)\n",
            "            self.worth.given_up(name)\n",
        ),
        "each request loading for itself": ("= self._may_wait and self._claimed", "= False and self._claimed"),
        "records stored before their last token": (
            "num_whole = end // self.record_tokens",
            "num_whole = -(-end // self.record_tokens)",
        ),
        "a resumed request storing what it had before": (
            "request.blocks = [[] for _ in self._windows]",
            "request.blocks = request.blocks or [[] for _ in self._windows]",
        ),
    },
    (DISK, SHARING_UNIT): {
        "a slot that a failed write does not give back": (
            "                if not is_kept:\n                    shared.free(number)\n",
            "",
        ),
        "a tier begun anew while others have it open": (
            "                    if self._is_alone():\n                        self._begin(",
            "                    if True:\n                        self._begin(",
        ),
        "a slot overwritten while another process reads it": (
            "if self._may_write(each) and shared.take(each)",
            "if self._may_write(each)",
        ),
        "a record kept twice that two processes store": ("is_there = key in self._records ", "is_there = False "),
        "a change that other processes do not hear of": ("            shared.changed(number)\n", ""),
        "the order of uses lost when the last one closes": ("if self._shared is shared and self._is_alone():", "if False:"),
        "an evicted record read from what is in its slot now": (
            "        if entry == _packed(key, slot):\n",
            "        if True:\n",
        ),
        "a record that has moved dropped with its old slot": ("old is not None and old.number == number:", "old is not None:"),
    },
    ("vmmkv/tiers/shared_slots.py", SHARING_UNIT): {
        "changes forgotten where they are too many": (
            "        if end - start > _RING:\n",
            "        if False:\n",
            ("vmmkv/tiers/shared_slots.py", "if is_known else None", "if True else None"),
        ),
        "a slot that is free passed by": ("        self._candidates.append((0, number))\n", ""),
    },
    (DISK, f"{TIERS}::test_a_disk_that_does_not_answer_is_left_alone_until_it_does"): {
        "a disk that hangs is waited for": ("        self.answering.check()\n", ""),
    },
    ("vmmkv/tiers/contrib/redis.py", REDIS): {
        "a question that is no use of a record": ("pipeline.touch(name)", "pipeline.exists(name)"),
    },
    (ANSWERING, STORES): {
        "a store that is down is asked as often as before": (
            "max(2 * self._pause_s, FIRST_PAUSE_S)",
            "max(self._pause_s, FIRST_PAUSE_S)",
        ),
        "an old call ends a store's pause": ("if self._pause_s and began_s is not None:", "if self._pause_s:"),
    },
    (SHARED, STORES, REDIS): {
        "a question asked twice": ("if key not in self._asked]", "if True]"),
        "a close that waits for a store that hangs": ("        late.start()\n", ""),
        "known records of a store that outlive its outage": ("            self._known.clear()  #", "            pass  #"),
    },
    (FETCH_SEARCH, TIERS_UNIT, TIER_MACHINE): {
        "what a fetch goes on from evicted": (
            "            tree.lock(self.node)\n",
            "",
            (TRANSFERS, "            self.index.tree.unlock(search.node)\n", "            pass\n"),
        ),
    },
    (TRANSFERS, TIERS_UNIT, TIER_MACHINE): {
        "loads of a fetch that was given up go on": ("            self.mover.drop(part)\n", "            pass\n"),
    },
    (MOVER, f"{TIERS_UNIT}::test_of_too_many_paths_that_wait_to_be_stored_the_oldest_is_dropped"): {
        "paths queued without a bound": (
            "            if len(stores) > MOST_QUEUED:\n                self._forget(stores, first)\n",
            "",
        ),
    },
    (FETCH_SEARCH, FETCHES): {
        "a load that is worth nothing": ("if self._worth is None or self._worth(fetch):", "if True:"),
    },
    (TRANSFERS, FETCHES): {
        "a load that takes the room of running requests": (
            "if not counts or pool.spare_pages + pool.kept_pages < room_pages:",
            "if not counts:",
        ),
    },
    (MOVER, f"{TIERS_UNIT}::test_of_a_path_that_is_longer_than_the_tier_its_beginning_is_stored"): {
        "a path longer than a tier evicts its own beginning": (
            "            has.update(source.keys[stats.budget_bytes // self.record_bytes :])",
            "            pass",
        ),
    },
    (SEALED, f"{HOLDER}::test_rows_are_sealed_once_they_are_known_to_be_written"): {
        "an end that seals rows on their way": (
            "                written.wait()\n        self.look()",
            "                pass\n        self.look()",
        ),
    },
    (BORROWED, f"{BORROWING}::test_room_for_what_is_borrowed_is_not_made_by_evicting_what_it_goes_on_from"): {
        "what a prompt matches evicted for what is behind it": (
            "            tree.lock(match.path[-1])\n",
            "            pass\n",
            (BORROWED, "                tree.unlock(match.path[-1])\n", "                pass\n"),
        ),
    },
    (SAVED, SAVED_UNIT): {
        "a header whose rows begin behind what is needed": (
            "start > slots.layout.start_for(group, num_tokens) for",
            "False for",
        ),
        "positions of a saved sequence that go back": (
            "any(position >= following for position, following in itertools.pairwise(positions))",
            "False",
        ),
        "a header as long as it likes": (
            "    if size_bytes > most_bytes:\n",
            "    if False:\n",
        ),
        "rows of a file not verified": (
            " or file.read(_NUMBER.size) != _NUMBER.pack(zlib.crc32(data)):",
            " or not file.read(_NUMBER.size):",
        ),
        "a sequence that loses rows while it is saved": ("                    self.check()\n", ""),
        "files of others beside a save removed": ("if os.pread(fd, len(_UNFINISHED), 0) == _UNFINISHED:", "if True:"),
        "a save that failed leaves its file": ("            os.unlink(new)\n", "            pass\n"),
    },
    (SLOTS, SAVED_UNIT, INTERRUPTS): {
        "a call that failed leaves its sequence open": ("            retried(live.close)\n", "            pass\n"),
    },
    ("vmmkv/prefix/index.py", TIER_MACHINE, PREFIX_UNIT): {
        "pages stored that others hold already": (
            "        returned = {piece.value.extent for piece in duplicates}\n",
            "        returned = set()\n",
        ),
    },
    (DISK, TIERS): {
        "a disk's records found in the order of their slots": ("sorted(found, key=lambda entry: entry[1].generation)", "found"),
    },
    ("vmmkv/holder/process.py", f"{HOLDER}::test_the_owners_end_is_heard_before_the_next_one_that_wants_to_own"): {
        "other engines heard before the owner's end": (
            "                if self._owner in heard:\n",
            "                if False:\n",
        ),
    },
    (SEALED, f"{HOLDER}::test_a_seal_that_fills_a_gap_goes_on_from_what_ends_before_it"): {
        "a seal whose parent ends behind it": ("if above.end_token <= pieces[0].end_token and above", "if above"),
    },
    (SEALED, f"{DAMAGE}::test_an_engine_starts_cold_from_a_log_with_a_seal_that_no_engine_writes"): {
        "a seal believed whose handle has another size": ("if left.get(serial) != wanted:", "if False:"),
    },
    (SEALED, f"{DAMAGE}::test_an_extent_stands_at_a_multiple_of_its_size"): {
        "a seal believed whose extent stands anywhere": ("        or seal.page % seal.num_pages\n", ""),
    },
    ("vmmkv/holder/log.py", f"{DAMAGE}::test_an_engine_starts_cold_from_a_log_with_a_seal_that_no_engine_writes"): {
        "a seal believed whose rows begin behind its end": ("        or not 0 <= first_token < end_token\n", ""),
    },
    ("vmmkv/holder/client.py", f"{DAMAGE}::test_a_borrower_computes_what_a_handle_of_another_size_was_to_hold"): {
        "a handle of another size borrowed": ("if sizes_bytes.get(serial) == size_bytes:", "if True:"),
    },
    ("vmmkv/holder/messages.py", f"{DAMAGE}::test_a_welcome_that_is_none_is_refused"): {
        "a truth value taken for a number": ("if type(value) is not int or", "if not isinstance(value, int) or"),
    },
    (POOL, f"{HOLDER}::test_prefixes_make_room_for_prompts_where_descriptors_are_short"): {
        "nothing evicted where descriptors are short": (
            "except (OutOfDeviceMemory, OutOfDescriptors) as",
            "except OutOfDeviceMemory as",
        ),
    },
    (
        f"{ENGINE}/kv_events.py",
        f"{EVENTS}::test_a_peer_that_reads_nothing_or_sends_too_much_loses_its_connection",
    ): {
        "a request for replay as large as it likes": ("socket.setsockopt(zmq.MAXMSGSIZE, _MOST_ASKED_BYTES)", "pass"),
        "a client of replays that does not read waited for": ("socket.setsockopt(zmq.TCP_MAXRT, UNREAD_MS)", "pass"),
    },
    (
        f"{ENGINE}/kv_events.py",
        f"{EVENTS}::test_a_client_that_does_not_read_its_replays_holds_up_a_few_batches_and_no_other_client",
    ): {
        "replays lost to a client that is slow": (
            "self.replayer.router_mandatory = True",
            "self.replayer.router_mandatory = False",
        ),
    },
    ("server/vmmkv_server/http/edge.py", "tests/server/test_connections.py::test_a_client_that_reads_nothing_is_given_up"): {
        "a client of a stream that does not read waited for": ("asyncio.timeout(SEND_S)", "asyncio.timeout(None)"),
    },
    ("vmmkv/holder/process.py", f"{HOLDER}::test_a_process_that_does_not_read_costs_the_holder_one_answer_and_no_time"): {
        "an engine that does not read answered again": (
            "if engine.share is None and has_unread(engine.connection):",
            "if False:",
        ),
    },
    ("vmmkv/adapters/vllm/elastic/kept.py", "tests/laws/test_kept_machine.py::TestKept"): {
        "a block kept that was not written": ("while self._waiting and self._waiting[0][0].done():", "while self._waiting:"),
        "a block kept that was evicted": ("            self._drop(_FIRST_BLOCK + block)\n", "            pass\n"),
        "blocks of another model taken over": ("if contents.identity == self._identity:", "if True:"),
        "a block that is cached again named twice": ("        self.dropped(block)\n", ""),
    },
    ("vmmkv/adapters/vllm/elastic/memory.py", "tests/laws/test_elastic_machine.py", "tests/adapters/test_elastic.py"): {
        "memory taken from under launched work": ("                if fence.done():\n", "                if True:\n"),
        "memory that comes with another engine's bytes": ("if not handles and not self._source.creates_zeroed:", "if False:"),
        "more memory than the budget": ("groups = min(self._budget_groups, self.num_groups)", "groups = self.num_groups"),
    },
    (f"{ENGINE}/loading.py", "tests/engine/test_transformers.py::test_rows_of_other_frequencies_have_another_identity"): {
        "rows of other rotary frequencies taken for the same": ("{code}{self._rotary}", "{code}"),
    },
    (SUMS, SUMS_UNIT): {
        "each sum written over the last one": (
            "tl.store(p_peer + first + RANK",
            "tl.store(p_peer + R * num_words + i_n * W + RANK",
        ),
        "words taken of an earlier sum": ("((words >> 32).to(tl.int32) != number)", "(words == 0)"),
    },
}

MUTANTS = [
    Mutant(name, ((file, old, new), *also), tuple(tests))
    for (file, *tests), faults in FAULTS.items()
    for name, (old, new, *also) in faults.items()
]


def main(words: list[str]) -> int:
    """Try the faults, side by side; the exit status."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        bad = list(side_by_side(partial(is_killed, Path(folder)), chosen)).count(False)
    print(f"{len(chosen) - bad} of {len(chosen)} killed")
    return int(bad > 0)


def is_killed(folder: Path, mutant: Mutant) -> bool:
    """Try one fault in the tree of this thread, a copy in the folder, and print what became of it."""
    began = time.monotonic()
    tree = folder / str(threading.get_ident())
    if not tree.exists():
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "results", "__pycache__"))
    outcome = attempt(mutant, tree)
    print(f"{outcome:9} {time.monotonic() - began:5.0f} s  {mutant.name}", flush=True)
    return outcome.startswith("killed")


def attempt(mutant: Mutant, tree: Path) -> str:
    """What became of one fault; the tree is as before."""
    before: dict[Path, str] = {}
    try:
        for file, old, new in mutant.edits:
            path = tree / file
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
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed"  # what waits for ever is noticed
    if done.returncode == 0:
        return f"SURVIVED {done.stdout.splitlines()[-1]}"  # which says how many were skipped
    is_noticed = done.returncode == 1 or done.returncode < 0  # a wrong address ends the process
    return "killed" if is_noticed else f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
