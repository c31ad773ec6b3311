"""`vmmkv serve` over `vmmkv hold`, as a user runs them: the engine is killed, and the next one answers warm."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.small import server_process, until
from vmmkv_server.models import resolve

MODEL = "smollm2-135m"
PROMPT = "A prompt that both send, word by word. " * 60


@pytest.mark.nightly
def test_a_server_whose_engine_is_killed_leaves_its_prefixes_to_the_next(tmp_path: Path) -> None:
    resolve(MODEL)
    path = tmp_path / "kv.sock"
    command = [sys.executable, "-m", "vmmkv", "hold", "--socket", str(path), "--budget", "256MiB", "--device", "cpu"]
    answers = []
    with subprocess.Popen(command) as holder:
        until(path.exists)
        for number in range(2):
            with server_process(tmp_path / f"log-{number}", MODEL, "--kv-holder", str(path), "--max-num-seqs", "4") as served:
                assert served.metric("kv_budget_bytes") == 256 << 20
                reply = served.openai().completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
                answers.append((reply.choices[0].text, reply.usage))
                if number == 0:
                    os.kill(served.pids()[1], signal.SIGKILL)
                    assert served.process.wait(60) == 1
                else:
                    holder.terminate()
                    assert holder.wait(60) == 0
                    until(lambda: served.metric("holder_up") == 0)
    (cold, first), (warm, second) = answers
    assert cold == warm
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= 0.8 * second.prompt_tokens
