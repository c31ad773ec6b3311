"""Features of the engine: a module each, which can be deleted with its line in `FEATURES` of `engine.py`.

prompt_scores   log-probabilities of prompts
beams           beam search
grammars        answers that follow a grammar
fetches         requests that wait for tiers, and what is stored in these
compaction      rows that a `kv_policy` drops as requests run
prefix_groups   the rows of a step that share a prefix, side by side for cascade attention
"""

from collections.abc import Callable
from dataclasses import dataclass

from vmmkv_server.engine.answers import Answers
from vmmkv_server.engine.kv_backend import KVBackend
from vmmkv_server.engine.runner import Runner
from vmmkv_server.engine.scheduler import Scheduler
from vmmkv_server.protocol import FromEngine
from vmmkv_server.sampling_params import Limits
from vmmkv_server.structured_output.matcher import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The parts of an engine that its features work with."""

    memory: KVBackend
    runner: Runner
    scheduler: Scheduler
    answers: Answers
    limits: Limits
    send: Callable[[FromEngine], None]
    vocabulary: Callable[[], Vocabulary]
