"""Rooms that can be deleted: each, taken out of a copy of the tree, leaves one that imports, passes tests and serves.

    python -m tests.deletable [ROOM ...]    all rooms, or these
    python -m tests.deletable --list        the rooms, and what is deleted and run for each

A room is deleted with its folder or module, its lines of registration and its tests. What is left is proven to work:

1. no import names a module that has gone, in functions and for types too, and every module of the packages is imported;
2. the default tests of its neighbours pass: of the rooms that meet it;
3. `vmmkv serve` starts with a small model, and completes a prompt.

Documents, benchmarks' rows and the list of faults in tests/mutants.py may still name the room; nothing that runs does.

Exit status 1 if a room cannot be deleted, or if a line of registration is not there once: then the table here is to be mended.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.side_by_side import side_by_side

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("vmmkv", "kernels/vmmkv_kernels", "server/vmmkv_server", "bench")
SOURCE_ROOTS = tuple(dict.fromkeys(os.path.dirname(package) or "." for package in PACKAGES))
TIMEOUT_S = 1200


class Line(NamedTuple):
    """Text of a file that registers a room, there once: its whole lines are deleted, or it alone is replaced by `new`."""

    file: str
    old: str
    new: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A part of the tree that can be deleted."""

    name: str
    paths: tuple[str, ...]
    """Its files and folders."""
    lines: tuple[Line, ...]
    """Its registration, in files that stay."""
    functions: tuple[str, ...] = ()
    """Functions, methods and classes of it in files that stay, as `file::function` and `file::Class.method`."""
    tests: tuple[str, ...]
    """Tests of it, or of it with others: files, folders, or definitions in a file that stays, named as `functions`."""
    neighbours: tuple[str, ...]
    """Tests of the rooms that meet it, as pytest names them; they pass without it."""
    serves: bool = True
    """Does `vmmkv serve` work without it?"""


class Outcome(NamedTuple):
    """A room's row of the table."""

    room: str
    lines: int
    """Lines of its code, tests not counted."""
    deleted: int
    """Files deleted."""
    touched: int
    """Other files that change."""
    passed: int
    """Tests of neighbours that passed."""
    seconds: float
    failure: str
    """What did not work; empty if all did."""


# ---------------------------------------------------------------------- the rooms

ENGINE = "server/vmmkv_server/engine"
LOOP = f"{ENGINE}/engine.py"
CORE = tuple(f"tests/engine/test_{name}.py" for name in ("features", "engine", "scheduler", "lookahead"))
"""Tests of the engine's loop."""
SOAK = "tests/engine/test_soak.py"
"""Requests of all kinds at once, by several features."""
SERVE, HOST = "bench/suites/serve/__init__.py", "bench/suites/prefix/host.py"

STORES = ("tests/laws/test_stores.py", "tests/laws/test_tiers.py", "tests/unit/test_store.py")
"""Tests of tiers, over any store and over those that are left."""


def exported(door: str, module: str, name: str) -> tuple[Line, Line]:
    """A name that the door of a package offers."""
    return Line(door, f"from {module} import {name}\n"), Line(door, f'    "{name}",\n')


def plugged(name: str, kind: str) -> tuple[Line, Line]:
    """A feature in `FEATURES` of the engine's loop."""
    return Line(LOOP, f"features.{name} import {kind}\n"), Line(LOOP, f"    {kind},\n")


def listed(name: str) -> Line:
    """A suite in `SUITES` of bench."""
    return Line("bench/suites/__init__.py", f'    "{name}": Suite(')


COMPACTED = (
    Line(SOAK, 'options["kv_policy"] = own.choice(policies)', "pass"),
    Line(SOAK, "assert sum(isinstance(message, Compacted)"),
)
"""Compactions in the soak."""
KV_POLICY = "server/vmmkv_server/kv_policy.py"
LLM = "server/vmmkv_server/llm.py"
CALLS_ON_PAGE = (
    "calling",
    "test_a_call_is_shown_as_it_comes_and_a_person_plays_its_function",
    "test_tools_that_are_no_list_are_refused_beside_their_field",
)
GRAMMAR_OF_CALLS = """\
        if self.toolset is None:
            return super().grammar_param
        return "tools" if self.toolset.choice == "auto" else "tool_choice"
"""
NO_OTHER_GRAMMAR = """\
        if self.toolset is not None and self.structured_outputs is not None:
            why = 'leave it out, or send "tool_choice": "none"; response_format may say what text is'
            yield "structured_outputs", f"an answer that may call tools"""
GENERATION, RESPONSES, SCHEMAS = (f"server/vmmkv_server/http/{each}.py" for each in ("generation", "responses", "schemas"))
RESPONSES_API = "server/vmmkv_server/http/responses_api.py"
WITH_RESPONSES_API = (
    Line("server/vmmkv_server/http/app.py", "responses, responses_api, schemas", "responses, schemas"),
    Line("server/vmmkv_server/http/app.py", "        responses_api.routes(service),\n"),
    Line("server/vmmkv_server/http/limits.py", ', "/v1/responses"})', "})"),
    Line("server/vmmkv_server/http/wire.py", '    "previous_response_id": '),
    Line("tests/server/test_refusals.py", '"did you mean /v1/responses?"'),
)
"""Registration of the Responses API, which stands on tools."""


def feature(
    name: str,
    kind: str,
    *lines: Line,
    paths: tuple[str, ...] = (),
    functions: tuple[str, ...] = (),
    tests: tuple[str, ...],
    neighbours: tuple[str, ...],
) -> Room:
    """A feature of the engine, with more `paths` than its module, and more `lines` than those of its loop."""
    return Room(
        name=name,
        paths=(f"{ENGINE}/features/{name}.py", *paths),
        lines=(*plugged(name, kind), *lines),
        functions=functions,
        tests=tests,
        neighbours=(*CORE, SOAK, *neighbours),
    )


def others(folder: str, *names: str) -> tuple[str, ...]:
    """The modules of a folder of tests but for these."""
    return tuple(f"{folder}/{path.name}" for path in sorted((ROOT / folder).glob("*.py")) if path.stem not in names)


def suite(name: str, *lines: Line, path: str = "", tests: tuple[str, ...] = ()) -> Room:
    """A suite of bench, with more `lines` than that of `SUITES`; `path` and `tests` if they are not named like it."""
    return Room(
        name=f"bench_{name}",
        paths=(path or f"bench/suites/{name}.py",),
        lines=(listed(name), *lines),
        tests=tests or (f"tests/unit/test_bench_{name}.py",),
        neighbours=tuple(f"tests/unit/test_bench_{each}.py" for each in ("registered", "rows", "report", "tables", "systems")),
    )


GATHER = "kernels/vmmkv_kernels/gather.py"
DOCTOR = "vmmkv/cli/doctor.py"
VLLM_LINES = (
    Line("pyproject.toml", 'vmmkv = "vmmkv.adapters.vllm.plugin'),
    Line("vmmkv/cli/main.py", "chat, doctor, fetch", "chat, fetch"),
    Line("vmmkv/cli/main.py", ", doctor)", ")"),
)
"""Registration of the connector, and of `vmmkv doctor`, which looks at vLLM alone."""
ELASTIC = "vmmkv/adapters/vllm/elastic", "deploy/vllm-one-gpu.sh"
ELASTIC_LINES = (
    Line("vmmkv/adapters/vllm/plugin.py", "    from vmmkv.adapters.vllm.elastic import install\n"),
    Line("vmmkv/adapters/vllm/plugin.py", "    install()\n"),
)
ELASTIC_TESTS = (
    *(f"tests/adapters/{name}.py" for name in ("test_elastic", "test_elastic_process", "elastic_process", "elastic_pool")),
    *("tests/laws/test_elastic_machine.py", "tests/gpu/test_elastic_cuda.py"),
    *("tests/adapters/test_deploy_vllm.py", "tests/laws/test_kept_machine.py", "tests/gpu/test_kept_cuda.py"),
    *("tests/unit/test_bench_engines.py", "tests/adapters/test_vllm_hooks.py"),
)
"""With those of the names that it uses of vLLM, and of the suite that measures it."""
VLLM_TESTS = (
    *(f"tests/adapters/{name}.py" for name in ("test_vllm", "test_vllm_machine", "test_vllm_process", "vllm_process")),
    *(f"tests/adapters/{name}.py" for name in ("test_vllm_jobs", "test_vllm_secondary", "vllm_secondary")),
    *("tests/adapters/test_vllm_hooks.py", "tests/adapters/record_vllm.py", "tests/adapters/vllm_names"),
    *("tests/gpu/test_blocks_cuda.py", "tests/kernels/test_gather.py"),
    *ELASTIC_TESTS,
)
BATCH, TRANSFORMERS = (f"vmmkv/adapters/transformers/{name}.py" for name in ("batch", "cache"))
FAILURES, INTERRUPTS, TIERS_CUDA = (
    "tests/laws/test_failures.py",
    "tests/laws/test_interrupts.py",
    "tests/gpu/test_tiers_cuda.py",
)
SAVED_LINES = tuple(Line(f"vmmkv/{name}.py", "from vmmkv import saved\n") for name in ("cache", "sequence"))
SAVED_METHODS = ("vmmkv/cache.py::KVCache.restore", "vmmkv/sequence.py::Sequence.save")
SAVED_IN_TESTS = (
    Line(FAILURES, "from vmmkv.saved import Offloaded\n"),
    *(Line(FAILURES, f'    "{name}": of_prefixes(OffloadWorld.') for name in ("offload", "come_back")),
    Line("tests/unit/test_prefix.py", '"adopt", "restore")', '"adopt")'),
)
HOLDER_LINES = (
    Line("vmmkv/memory/pool.py", "    from vmmkv.holder.source import open_source\n"),
    Line("vmmkv/memory/pool.py", "    return open_source(", "    raise NotImplementedError("),
    Line("vmmkv/prefix/cache.py", "from vmmkv.holder.borrowed import BorrowedPrefixes", "pass"),
    Line("vmmkv/prefix/cache.py", "        from vmmkv.holder.borrowed import follow\n"),
    Line("vmmkv/prefix/cache.py", "        return follow(", "        raise NotImplementedError("),
    Line("vmmkv/prefix/cache.py", "prefix.restored import RestoredPrefixes\n"),
    Line("vmmkv/prefix/cache.py", "None if holder is None else RestoredPrefixes(slots, self.index, self._attacher)", "None"),
)
TIERS_LINES = (
    Line("vmmkv/prefix/cache.py", "from vmmkv.tiers.transfers import Transfers", "pass"),
    Line("vmmkv/prefix/cache.py", "        from vmmkv.tiers.transfers import follow_tree\n"),
    Line("vmmkv/prefix/cache.py", "        return follow_tree(", "        raise NotImplementedError("),
    Line("vmmkv/__init__.py", "    from vmmkv.tiers import"),
    Line("vmmkv/__init__.py", '    "tiers": ('),
    *(Line("vmmkv/__init__.py", f'    "{name}",\n') for name in ("DiskTier", "HostTier", "KeyChain", "Store")),
)
"""Registration of these rooms in the library's core."""
CORE_UNIT = (
    *("conftest", "support", "test_pool", "test_cache", "test_prefix", "test_radix_tree", "test_copy_rows"),
    *("test_dlpack", "test_null_page", "test_storage", "test_units", "test_fake_driver", "test_driver_host"),
    "test_driver_cuda_unavailable",
)
CORE_LAWS = (
    *("machine", "model", "simulated_driver", "driver_laws", "test_order", "test_failures", "test_stress"),
    *(f"test_{name}_machine" for name in ("cache", "prefix", "radix")),
)
"""Tests of the library's core, and what they stand on."""
FETCH_FAILS = """\
    "fetch": of_prefixes(
        lambda world: world.prefix.fetch([*PROMPT, 7], namespace="red"), TierWorld.store, world=TierWorld, evicts=True
    ),
"""
OFFLOAD = f"{FAILURES}::OffloadWorld"
SGLANG_TESTS = (
    *(f"tests/adapters/{name}.py" for name in ("host_pool", "test_sglang", "test_sglang_process", "sglang_process")),
    *("tests/adapters/sglang_engine.py", "tests/gpu/test_sglang_cuda.py"),
)

ROOMS: tuple[Room, ...] = (
    feature(
        "prompt_scores",
        "PromptScores",
        Line(SOAK, 'options["prompt_logprobs"] ='),
        Line(SOAK, "assert num_scored(one, answered)"),
        tests=(
            "tests/engine/test_prompt_logprobs.py",
            "tests/gpu/test_prompt_logprobs_cuda.py",
            "tests/engine/test_ranks.py::test_quantised_rows_have_the_scores_of_one_rank",
        ),
        neighbours=("tests/engine/test_beams.py",),
    ),
    feature(
        "beams",
        "Beams",
        Line(SOAK, 'elif kind < 0.09:\n            options |= {"beam_width"'),
        Line(SOAK, '"length", "beams", "failed"', '"length", "failed"'),
        Line("tests/engine/test_ranks.py", "beam_width=3, max_tokens=5"),
        Line("tests/engine/test_ranks.py", "beam_width=3, max_tokens=8"),
        tests=("tests/engine/test_beams.py", "tests/gpu/test_beams_cuda.py"),
        neighbours=("tests/engine/test_prompt_logprobs.py",),
    ),
    feature(
        "grammars",
        "Grammars",
        Line(SERVE, "compared, grammar, steps", "compared, steps"),
        Line(SERVE, '    "grammar": grammar.run,\n'),
        Line(SERVE, '    "grammar": ("tokenizers", "xgrammar"),\n'),
        paths=("bench/suites/serve/grammar.py",),
        tests=(
            "tests/structured_output/test_gates.py",
            "tests/structured_output/test_in_engine.py",
            "tests/structured_output/test_over_http.py",
            "tests/gpu/test_grammar_cuda.py",
            "tests/engine/test_ranks.py::test_an_answer_by_a_grammar_has_the_tokens_of_one_rank",
            "tests/unit/test_bench_serve.py::test_answers_by_a_grammar_are_measured_beside_free_text",
        ),
        neighbours=(
            *("tests/structured_output/test_matcher.py", "tests/engine/test_min_tokens.py"),
            "tests/unit/test_bench_serve.py",
        ),
    ),
    feature(
        "fetches",
        "Fetches",
        listed("tiers"),
        paths=("bench/suites/tiers.py",),
        tests=(
            "tests/engine/test_fetches.py",
            "tests/engine/test_shared_store.py",
            "tests/engine/test_soak_tiers.py",
            "tests/engine/test_operator.py",
            "tests/gpu/test_fetches_cuda.py",
            "tests/unit/test_bench_tiers.py",
        ),
        neighbours=("tests/unit/test_tiers.py", "tests/unit/test_store.py", "tests/unit/test_bench_registered.py"),
    ),
    feature(
        "compaction",
        "Compaction",
        *COMPACTED,
        tests=("tests/engine/test_kv_policy.py", "tests/gpu/test_kv_policy_cuda.py"),
        neighbours=("tests/unit/test_kv_policy.py", "tests/unit/test_eviction.py"),
    ),
    feature(
        "prefix_groups",
        "PrefixGroups",
        Line(HOST, "    time_groups = _groups_timer("),
        Line(HOST, "        time_groups(step)\n"),
        functions=(f"{HOST}::_groups_timer",),
        tests=("tests/engine/test_prefix_groups.py", "tests/gpu/test_prefix_groups_cuda.py"),
        neighbours=("tests/kernels/test_cascade.py", "tests/unit/test_bench_prefix.py"),
    ),
    Room(
        name="kv_events",
        paths=(f"{ENGINE}/kv_events.py",),
        lines=(
            Line(f"{ENGINE}/loading.py", "kv_events import KVEventPublisher\n"),
            Line(f"{ENGINE}/loading.py", "publisher = KVEventPublisher(", "raise NotImplementedError("),
            Line(HOST, "    _time_with_events(timed"),
        ),
        functions=(f"{HOST}::_time_with_events",),
        tests=("tests/engine/test_kv_events.py", "tests/end_to_end/test_routers.py"),
        neighbours=(
            *(f"tests/unit/test_{each}.py" for each in ("radix_tree", "tiers", "bench_prefix")),
            "tests/engine/test_llm.py",
        ),
    ),
    Room(
        name="redis",
        paths=("vmmkv/tiers/contrib/redis.py",),
        lines=(
            Line("pyproject.toml", 'redis = "vmmkv.tiers'),
            Line("pyproject.toml", 'rediss = "vmmkv.tiers'),
            *exported("vmmkv/tiers/__init__.py", "vmmkv.tiers.contrib.redis", "RedisTier"),
            Line("tests/laws/test_tiers.py", '"redis": (redis_server, ()),'),
        ),
        tests=("tests/laws/test_redis.py", "tests/engine/test_shared_store.py"),
        neighbours=STORES,
    ),
    Room(
        name="mooncake",
        paths=("vmmkv/tiers/contrib/mooncake.py",),
        lines=(
            Line("pyproject.toml", 'mooncake = "vmmkv.tiers'),
            *exported("vmmkv/tiers/__init__.py", "vmmkv.tiers.contrib.mooncake", "MooncakeTier"),
            Line("tests/laws/test_tiers.py", '"mooncake": (mooncake_store, pytest.mark.nightly),'),
        ),
        tests=("tests/laws/test_mooncake.py",),
        neighbours=STORES,
    ),
    Room(
        name="edge",
        paths=("server/vmmkv_server/http/edge.py",),
        lines=tuple(
            Line(file, text)
            for file in ("server/vmmkv_server/launch.py", "tests/server/support.py")
            for text in ("from vmmkv_server.http import edge\n", "    edge.install(")
        ),
        tests=("tests/server/test_connections.py",),
        neighbours=("tests/server/test_app.py", "tests/server/test_routes.py", "tests/server/test_launch.py"),
    ),
    Room(
        name="responses_api",
        paths=(RESPONSES_API,),
        lines=WITH_RESPONSES_API,
        tests=("tests/server/test_responses_api.py", "tests/server/test_schemas.py"),
        neighbours=tuple(f"tests/server/test_{each}.py" for each in ("app", "chat", "refusals", "routes", "tools")),
    ),
    Room(
        name="tools",
        paths=("server/vmmkv_server/tools", "server/vmmkv_server/http/tools.py", RESPONSES_API),
        lines=(
            *WITH_RESPONSES_API,
            Line("tests/end_to_end/test_page.py", "from tests.server.test_tools import"),
            Line(GENERATION, "from vmmkv_server.tools.calls import Toolset\n"),
            Line(GENERATION, "tools.chat_format import ToolChatFormat\n", "chats import ChatFormat as ToolChatFormat\n"),
            Line(GENERATION, "ToolChatFormat.of(self.tokenizer, self.config.engine)", "ToolChatFormat(self.tokenizer)"),
            Line(GENERATION, "                toolset=body.toolset,\n"),
            Line(GENERATION, "limits, toolset=body.toolset)", "limits)"),
            Line(GENERATION, "    toolset: Toolset | None,\n"),
            Line(GENERATION, "has_grammar=has_grammar, toolset=toolset", "has_grammar=has_grammar"),
            Line(GENERATION, "toolset is not None or any(message.model_extra or message.tool_calls", "any(message.model_extra"),
            Line(RESPONSES, "from vmmkv_server.http.tools import AnswerFields, answer_fields\n"),
            Line(RESPONSES, "class AssistantMessage(AnswerFields):", "class AssistantMessage(BaseModel):"),
            Line(RESPONSES, "class Delta(AnswerFields):", "class Delta(BaseModel):"),
            Line(RESPONSES, "Delta(**answer_fields(delta.parts, is_whole=False))", "Delta()"),
            Line(RESPONSES, "AssistantMessage(**answer_fields(delta.parts, is_whole=True))", "AssistantMessage(content=None)"),
            Line(SCHEMAS, "from vmmkv_server.http.tools import ToolChoiceFields, ToolFields, TurnFields\n"),
            Line(SCHEMAS, "class ChatMessage(TurnFields):", "class ChatMessage(WireRequest):"),
            Line(SCHEMAS, "class ChatRequest(ToolChoiceFields, GenerationRequest):", "class ChatRequest(GenerationRequest):"),
            Line(SCHEMAS, "class TokenizeRequest(ToolFields):", "class TokenizeRequest(WireRequest):"),
            Line(SCHEMAS, "        yield from self.tool_conflicts()\n"),
            Line(SCHEMAS, "        for param, why in self.tool_conflicts():\n            raise refusal(param, why)\n"),
            Line(SCHEMAS, "        if self.tools and self.messages is None:\n            raise refusal("),
            Line(SCHEMAS, NO_OTHER_GRAMMAR),
            Line(SCHEMAS, GRAMMAR_OF_CALLS, "        return super().grammar_param\n"),
            Line(LLM, "from vmmkv_server.tools.calls import"),
            Line(LLM, "tools.chat_format import ToolChatFormat\n", "chats import ChatFormat\n"),
            Line(LLM, "ToolChatFormat.of(self._tokenizer, config)", "ChatFormat(self._tokenizer)"),
            Line(LLM, "    tool_calls: list[Call] ="),
            Line(LLM, "        tools: Sequence[Mapping[str, Any]] | None = None,\n"),
            Line(LLM, '        tool_choice: str | Mapping[str, Any] = "auto",\n'),
            Line(LLM, "        parallel_tool_calls: bool = True,\n"),
            Line(LLM, "        toolset = Toolset.of("),
            Line(LLM, "            if has_grammar and toolset is not None:\n                raise ValueError("),
            Line(LLM, "has_grammar=has_grammar, toolset=toolset\n", "has_grammar=has_grammar\n"),
            Line(LLM, "                if answer.reader is not None:\n"),
            Line(LLM, "_read_parts(answer.output, answer.reader)", "assert answer.reader is None"),
        ),
        functions=(f"{LLM}::_read_parts",),
        tests=(
            "tests/tools",
            "tests/server/test_tools.py",
            "tests/server/test_schemas.py",
            "tests/server/test_responses_api.py",
            "tests/server/test_chat.py::test_reasoning_is_shown_and_is_no_part_of_the_conversation",
            "tests/end_to_end/test_tools.py",
            *(f"tests/end_to_end/test_page.py::{each}" for each in CALLS_ON_PAGE),
            "tests/end_to_end/test_clients.py",
            "tests/end_to_end/clients",
        ),
        neighbours=(
            *(f"tests/server/test_{each}.py" for each in ("chat", "routes", "text", "logprobs")),
            *("tests/structured_output/test_over_http.py", "tests/engine/test_llm.py"),
        ),
    ),
    Room(
        name="adapters",
        paths=(
            *("vmmkv/adapters", DOCTOR, GATHER),
            *(f"examples/{each}.py" for each in ("chat", "custom_kernel", "tiny")),
            *(f"bench/suites/{each}.py" for each in ("transformers", "streaming")),
        ),
        lines=(
            *VLLM_LINES,
            Line("vmmkv/testing/__main__.py", "        *adapted_kernels(),\n"),
            *(listed("transformers"), listed("streaming")),
        ),
        functions=("vmmkv/testing/__main__.py::adapted_kernels",),
        tests=(
            *("tests/adapters", "tests/unit/test_bench_transformers.py", "tests/unit/test_bench_streaming.py"),
            *VLLM_TESTS,
        ),
        neighbours=(
            *(f"tests/unit/test_{each}.py" for each in ("cache", "eviction", "bench_registered")),
            "tests/engine/test_transformers.py",
        ),
    ),
    Room(
        name="vllm",
        paths=("vmmkv/adapters/vllm", DOCTOR, GATHER),
        lines=VLLM_LINES,
        tests=VLLM_TESTS,
        neighbours=("tests/unit/test_store.py", "tests/adapters/test_transformers_cache.py"),
    ),
    Room(
        name="sglang",
        paths=("vmmkv/adapters/sglang",),
        lines=(),
        tests=SGLANG_TESTS,
        neighbours=("tests/unit/test_store.py", "tests/adapters/test_tier_options.py"),
    ),
    Room(
        name="holder",
        paths=("vmmkv/holder", "vmmkv/prefix/restored.py", "vmmkv/cli/hold.py", "vmmkv/cli/resize.py", *ELASTIC),
        lines=(
            *ELASTIC_LINES,
            *HOLDER_LINES,
            Line(f"{ENGINE}/loading.py", "from vmmkv.holder import check_there\n"),
            Line(
                f"{ENGINE}/loading.py",
                "    for path in filter(None, (config.kv_holder, config.kv_lender)):\n        check_there(path)\n",
            ),
            Line("vmmkv/cli/main.py", "fetch, hold, plan, resize", "fetch, plan"),
            Line("vmmkv/cli/main.py", "fetch, hold, resize, doctor)", "fetch, doctor)"),
        ),
        tests=(
            "tests/unit/holder_engines.py",
            "tests/unit/test_holder.py",
            "tests/unit/test_holder_damage.py",
            "tests/unit/test_borrowing.py",
            "tests/engine/test_over_a_holder.py",
            "tests/engine/test_apart.py",
            "tests/engine/test_operator.py",
            "tests/end_to_end/test_holder.py",
            "tests/gpu/test_holder_cuda.py",
            "tests/gpu/test_apart_cuda.py",
            *ELASTIC_TESTS,
        ),
        neighbours=("tests/unit/test_pool.py", "tests/unit/test_prefix.py", "tests/engine/test_engine.py"),
    ),
    Room(
        name="tiers",
        paths=(
            *("vmmkv/tiers", f"{ENGINE}/tiers.py", "bench/suites/tiers.py", "vmmkv/adapters/vllm", DOCTOR, GATHER),
            *("vmmkv/adapters/sglang", "vmmkv/adapters/tier_options.py"),
        ),
        lines=(
            *VLLM_LINES,
            *TIERS_LINES,
            Line(f"{ENGINE}/loading.py", "    from vmmkv_server.engine.tiers import opened\n"),
            Line(f"{ENGINE}/loading.py", "    return opened(", "    raise NotImplementedError("),
            Line(f"{ENGINE}/loading.py", "                from vmmkv_server.engine.tiers import mirror\n"),
            Line(f"{ENGINE}/loading.py", "                mirror(", "                raise NotImplementedError("),
            *(Line("pyproject.toml", f'{scheme} = "vmmkv.tiers.contrib') for scheme in ("mooncake", "redis", "rediss")),
            listed("tiers"),
            Line(HOST, '        ("tokens that a tier has", _time_fetch'),
        ),
        functions=(f"{HOST}::_time_fetch",),
        tests=(
            *("tests/laws/faulty_tier.py", "tests/laws/store_laws.py", "tests/laws/test_tier_machine.py"),
            *(
                f"tests/laws/test_{each}.py"
                for each in ("tiers", "disk_sharing", "stores", "store_machine", "redis", "mooncake")
            ),
            *VLLM_TESTS,
            *(*SGLANG_TESTS, "tests/adapters/test_tier_options.py"),
            *("tests/laws/test_interrupts.py", "tests/laws/test_failures.py"),
            *(f"tests/unit/test_{each}.py" for each in ("tiers", "store", "fuzz_tiers", "bench_tiers", "bench_prefix")),
            *(f"tests/engine/test_{each}.py" for each in ("fetches", "shared_store", "soak_tiers", "operator", "kv_events")),
            *("tests/engine/test_administration.py", "tests/end_to_end/test_routers.py", "tests/unit/conftest.py::host"),
            *(f"tests/gpu/test_{each}_cuda.py" for each in ("tiers", "fetches", "sleep")),
        ),
        neighbours=(
            *(*CORE, SOAK, "tests/engine/test_prefix_groups.py"),
            *(f"tests/unit/test_{each}.py" for each in ("prefix", "radix_tree", "cache", "pool", "statistics")),
            "tests/laws/test_prefix_machine.py",
            "tests/unit/test_bench_registered.py",
        ),
    ),
    Room(
        name="elastic",
        paths=ELASTIC,
        lines=ELASTIC_LINES,
        tests=ELASTIC_TESTS,
        neighbours=("tests/adapters/test_vllm.py", "tests/adapters/test_vllm_jobs.py"),
    ),
    Room(
        name="saved",
        paths=("vmmkv/saved.py", "vmmkv/adapters/transformers/saved.py"),
        lines=(
            *SAVED_LINES,
            Line(BATCH, "from vmmkv.saved import Offloaded\n"),
            Line(BATCH, "self._offloaded: Offloaded | None", "self._offloaded: Any"),
            Line(BATCH, "self._offloaded = Offloaded(", "raise NotImplementedError("),
            Line(TRANSFORMERS, "attention, registry, saved\n", "attention, registry\n"),
            Line(TRANSFORMERS, "self._restore_file(", "raise NotImplementedError("),
            *SAVED_IN_TESTS,
            *(Line(file, "from vmmkv.saved import Offloaded\n") for file in (INTERRUPTS, TIERS_CUDA)),
            Line(INTERRUPTS, 'lambda world: world.cache.restore("saved"'),
            Line(INTERRUPTS, 'live.sequence.save("saved")', "pass"),
            Line("tests/adapters/test_transformers_batch.py", "            ours.offload()\n"),
            Line("tests/adapters/test_transformers_cache.py", ", cache.offload):", "):"),
        ),
        functions=(
            *SAVED_METHODS,
            *(f"{TRANSFORMERS}::VmmCache.{name}" for name in ("save", "_restore_file")),
        ),
        tests=(
            *(
                "tests/unit/test_saved.py",
                "tests/unit/test_fuzz_files.py::test_a_saved_sequence_is_restored_as_it_was_or_refused",
            ),
            *(f"tests/adapters/test_transformers_{name}.py" for name in ("offload", "saved")),
            OFFLOAD,
            f"{INTERRUPTS}::test_host_memory_goes_behind_the_copy_whatever_comes_after_its_launch",
            *(
                f"{TIERS_CUDA}::test_{name}"
                for name in ("a_saved_sequence_is_restored", "offloaded_sequences_come_back_to_their_addresses")
            ),
            "tests/adapters/test_transformers_cuda.py::test_offloaded_rows_come_back_after_others_wrote_their_memory",
        ),
        neighbours=(
            *(FAILURES, "tests/laws/test_cache_machine.py", "tests/unit/test_cache.py", "tests/unit/test_fuzz_tiers.py"),
            *(f"tests/adapters/test_transformers_{name}.py" for name in ("batch", "cache")),
        ),
    ),
    Room(
        name="eviction",
        paths=("vmmkv/eviction", f"{ENGINE}/features/compaction.py", "bench/suites/streaming.py"),
        lines=(
            Line(KV_POLICY, "from vmmkv.eviction import"),
            *(Line(KV_POLICY, f'    "{name}": (') for name in ("streaming_llm", "h2o", "snapkv", "tova")),
            *plugged("compaction", "Compaction"),
            *COMPACTED,
            listed("streaming"),
        ),
        tests=(
            "tests/unit/test_eviction.py",
            "tests/unit/test_kv_policy.py",
            "tests/unit/test_bench_streaming.py",
            "tests/engine/test_kv_policy.py",
            "tests/adapters/test_eviction.py",
            "tests/adapters/test_transformers_policy.py",
            "tests/adapters/test_transformers_policy_cuda.py",
            "tests/gpu/test_kv_policy_cuda.py",
        ),
        neighbours=(
            *(*CORE, SOAK),
            *("tests/kernels/test_turn.py", "tests/unit/test_sampling.py", "tests/unit/test_bench_registered.py"),
            *("tests/adapters/test_transformers_cache.py", "tests/adapters/test_transformers_saved.py"),
        ),
    ),
    Room(
        name="all_but_the_core",
        paths=(
            *("server", "bench", "examples", "vmmkv/__main__.py", "vmmkv/cli", "vmmkv/adapters"),
            *("vmmkv/tiers", "vmmkv/holder", "vmmkv/eviction", "vmmkv/saved.py", "vmmkv/prefix/restored.py"),
            *(f"vmmkv/{name}.py" for name in ("config", "kv_policy", "model_config", "rate", "unmodified")),
            "vmmkv/memory/memory_map.py",
        ),
        lines=(
            *(*HOLDER_LINES, *TIERS_LINES, *SAVED_LINES, *SAVED_IN_TESTS),
            Line("vmmkv/layout.py", "from vmmkv.model_config import"),
            Line("vmmkv/cache.py", "from vmmkv.memory.memory_map import"),
            Line("vmmkv/cache.py", "states import SlotMap, SlotState", "states import SlotState"),
            Line("vmmkv/testing/__main__.py", "        *adapted_kernels(),\n"),
            Line(FAILURES, "DriverError, HostTier, KVCache", "DriverError, KVCache"),
            *(Line(FAILURES, f'    "{name}": of_prefixes(') for name in ("store", "load")),
            Line(FAILURES, FETCH_FAILS),
        ),
        functions=(
            *("vmmkv/layout.py::KVLayout.from_config", "vmmkv/testing/__main__.py::adapted_kernels", *SAVED_METHODS),
            "vmmkv/cache.py::KVCache.slot_maps",
            *(f"vmmkv/memory/states.py::{name}" for name in ("RunState", "MappedRun", "SlotMap")),
        ),
        tests=(
            *(f"tests/{name}" for name in ("adapters", "end_to_end", "engine", "gpu", "server", "structured_output", "tools")),
            *("tests/kernels", "tests/deletable.py", "tests/mutants.py", "tests/stores.py"),
            *(*others("tests/unit", *CORE_UNIT), *others("tests/laws", *CORE_LAWS)),
            *("tests/conftest.py::smollm2", "tests/unit/conftest.py::host", OFFLOAD, f"{FAILURES}::TierWorld"),
        ),
        neighbours=(
            *(f"tests/unit/{name}.py" for name in CORE_UNIT if name.startswith("test_")),
            *(f"tests/laws/{name}.py" for name in CORE_LAWS if name.startswith("test_")),
        ),
        serves=False,
    ),
    suite("driver_calls"),
    suite("append", Line("Makefile", "bench append memory_efficiency", "bench memory_efficiency")),
    suite("resize"),
    suite("memory_efficiency", Line("Makefile", "bench append memory_efficiency", "bench append")),
    suite(
        "kernels",
        path="bench/suites/kernels",
        tests=("tests/unit/test_bench_kernels.py", "tests/kernels/test_bench_kernels.py"),
    ),
    suite("products"),
    suite("prefix", Line("Makefile", "memory_efficiency prefix", "memory_efficiency"), path="bench/suites/prefix"),
    suite("serve", Line("Makefile", "bench serve --parts"), path="bench/suites/serve"),
    suite("collectives"),
    suite("tiers"),
    suite("engines"),
    suite("transformers"),
    suite("quality", tests=("tests/kernels/test_bench_quality.py",)),
    suite("streaming"),
)

# ---------------------------------------------------------------------- deleting


def main(arguments: list[str]) -> int:
    """Delete the rooms, side by side, each from a copy of its own; the exit status."""
    names = [each for each in arguments if each != "--list"]
    if unknown := set(names) - {room.name for room in ROOMS}:
        print(f"no room is named {', '.join(sorted(unknown))}; there are {', '.join(room.name for room in ROOMS)}")
        return 1
    chosen = [room for room in ROOMS if not names or room.name in names]
    if "--list" in arguments:
        for room in chosen:
            print(described(room))
        return 0
    outcomes = []
    for outcome in side_by_side(attempt, chosen):
        outcomes.append(outcome)
        print(f"{outcome.room}: {outcome.failure or 'deleted'} ({outcome.seconds:.0f} s)", flush=True)
    print(table(outcomes))
    return int(any(outcome.failure for outcome in outcomes))


def described(room: Room) -> str:
    """The declaration of a room, for people."""
    registered = [f"{line.file}: {line.old.strip()}" for line in room.lines]
    parts = {
        "deleted": room.paths,
        "registered": (*registered, *room.functions),
        "tests": room.tests,
        "neighbours": room.neighbours,
    }
    return "\n".join([room.name, *(f"  {part:10}  {each}" for part, every in parts.items() for each in every)])


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as a table."""
    rows = [("room", "lines", "files deleted", "other files touched", "tests passed", "seconds", "")]
    for each in outcomes:
        numbers = (each.lines, each.deleted, each.touched, each.passed, round(each.seconds))
        rows.append((each.room, *map(str, numbers), "FAILED" if each.failure else ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def attempt(room: Room) -> Outcome:
    """Delete one room from a copy of the tree, and try what is left."""
    began_s = time.monotonic()
    files = tracked()
    gone = {file for file in files for path in (*room.paths, *room.tests) if is_within(file, path)}
    code = {file for file in gone if any(is_within(file, path) for path in room.paths)}
    num_lines = sum((ROOT / file).read_text(encoding="utf-8").count("\n") for file in code)
    touched = {line.file for line in room.lines} | {each.partition("::")[0] for each in functions_of(room)}
    num_passed, failure = 0, ""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        try:
            copy(files - gone, tree)
            change(room, tree)
            dangling(tree, gone)
            run(tree, "-c", IMPORTS, *sorted(modules(tree)))
            num_passed = passed(run(tree, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *room.neighbours))
            if room.serves:
                run(tree, "-c", SERVES, str(Path(folder) / "model"))
        except Broken as error:
            failure = str(error)
    return Outcome(room.name, num_lines, len(gone), len(touched), num_passed, time.monotonic() - began_s, failure)


class Broken(Exception):
    """A tree that does not work without a room, or a table that does not say how it is deleted."""


def tracked() -> set[str]:
    """Files of the tree, and new ones that git would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {file for file in listed.split("\0") if (ROOT / file).is_file()}


def is_within(file: str, path: str) -> bool:
    """Is a file this one, or in this folder?"""
    return file == path or file.startswith(f"{path}/")


def copy(files: set[str], tree: Path) -> None:
    """Copy these files of the tree."""
    for file in files:
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tree / file, follow_symlinks=False)


def change(room: Room, tree: Path) -> None:
    """Take a room's lines of registration and its functions out of files that stay. Raises: Broken."""
    for line in room.lines:
        path = tree / line.file
        path.write_text(without(line, path.read_text(encoding="utf-8")), encoding="utf-8")
    for each in functions_of(room):
        file, _, name = each.partition("::")
        path = tree / file
        path.write_text(without_definition(name, path.read_text(encoding="utf-8"), file), encoding="utf-8")


def functions_of(room: Room) -> list[str]:
    """Functions, methods and classes that a room has in files that stay, tests included."""
    return [each for each in (*room.functions, *room.tests) if "::" in each]


def without(line: Line, text: str) -> str:
    """A file's text without a line of registration. Raises: Broken."""
    if (count := text.count(line.old)) != 1:
        raise Broken(f"{line.file} has {line.old!r} {count} times; wanted once")
    if line.new is not None:
        return text.replace(line.old, line.new)
    place = text.index(line.old)
    start, end = text.rfind("\n", 0, place) + 1, text.index("\n", place + len(line.old.rstrip("\n")))
    return text[:start] + text[end + 1 :]


def without_definition(name: str, text: str, file: str) -> str:
    """A file's text without a function or class, or a method named `Class.method`, and its decorators. Raises: Broken."""
    found: list[ast.AST] = [ast.parse(text)]
    for part in name.split("."):
        inner = (each for outer in found for each in ast.iter_child_nodes(outer))
        found = [each for each in inner if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == part]
    if len(found) != 1:
        raise Broken(f"{file} has {len(found)} definitions of {name}; wanted one")
    (definition,) = found
    assert isinstance(definition, ast.FunctionDef | ast.ClassDef)
    start = min(node.lineno for node in (definition, *definition.decorator_list)) - 1
    lines = text.splitlines(keepends=True)
    return "".join(lines[:start] + lines[definition.end_lineno :])


def modules(tree: Path) -> dict[str, Path]:
    """Every module of the packages by name."""
    found = {}
    for package in PACKAGES:
        for path in (tree / package).rglob("*.py"):
            parts = path.relative_to((tree / package).parent).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return {name: path for name, path in found.items() if not name.endswith("__main__")}


def dangling(tree: Path, gone: set[str]) -> None:
    """Look for imports of modules that have gone. Raises: Broken."""
    roots = "|".join(f"{root}/" for root in SOURCE_ROOTS)
    names = {re.sub(rf"^({roots})", "", file).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in gone}
    left = [f"{path.relative_to(tree)} imports {name}" for path in sources(tree) for name in imported(path) if name in names]
    if left:
        raise Broken("what has gone is imported: " + ", ".join(sorted(set(left))))


def sources(tree: Path) -> list[Path]:
    """Python files of the packages, the tests and the examples."""
    return [path for folder in (*PACKAGES, "tests", "examples") for path in (tree / folder).rglob("*.py")]


def imported(path: Path) -> Iterator[str]:
    """Names that a file imports, each of which may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


IMPORTS = """
import importlib, sys

names = sys.argv[1:]
ours = {name.partition(".")[0] for name in names}
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # of a package that is not installed here, as vllm
        if error.name.partition(".")[0] in ours:
            raise
"""

SERVES = """
import sys
from pathlib import Path
from tests.end_to_end.small import small_server

directory = Path(sys.argv[1])
directory.mkdir()
with small_server(directory) as server:
    model = server.openai().models.list().data[0].id
    answer = server.openai().completions.create(
        model=model, prompt="Once upon a time", max_tokens=5, extra_body={"ignore_eos": True}
    )
assert answer.usage.completion_tokens == 5, answer
"""


def run(tree: Path, *arguments: str) -> str:
    """Run Python in a copy of the tree; what it prints. Raises: Broken."""
    roots = os.pathsep.join(str(tree / root) for root in SOURCE_ROOTS)
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tree,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": roots},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Broken(f"no end after {TIMEOUT_S} s: {error.cmd}") from error
    if done.returncode != 0:
        raise Broken(f"{' '.join(arguments[:3])[:80]} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def passed(output: str) -> int:
    """The number of tests that passed, by pytest's last line."""
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
