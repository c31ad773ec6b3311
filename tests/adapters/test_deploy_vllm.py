"""deploy/vllm-one-gpu.sh over a stand-in for `vllm serve`: one holder, an engine after the other, and all end together."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT, SOURCE_ROOTS
from tests.stores import free_port

VLLM = """\
#!{python}
import http.server, json, sys
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
assert sys.argv[1] == "serve"
with open({seen!r}, "a") as seen:
    print(json.dumps([sys.argv[2], options]), file=seen)

class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Healthy).serve_forever()
"""


@pytest.mark.nightly
def test_engines_on_one_gpu_share_a_holder_and_all_end_together(tmp_path: Path) -> None:
    seen, port = tmp_path / "seen", free_port()
    for name, text in (
        ("vllm", VLLM.format(python=sys.executable, seen=str(seen))),
        ("vmmkv", f'#!/usr/bin/env bash\nexec "{sys.executable}" -m vmmkv "$@"\n'),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = subprocess.Popen(
        [ROOT / "deploy" / "vllm-one-gpu.sh", "1GiB", "256MiB", "first second", "--max-model-len", "1024"],
        env=os.environ
        | {
            "PORT": str(port),
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, SOURCE_ROOTS)),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert script.stdout is not None
    lines: list[str] = []
    for line in script.stdout:
        lines.append(line)
        if "1.0 GiB" in line and "vmmkv hold:" not in line:  # of `vmmkv resize`, which comes last
            break
    else:
        raise AssertionError("".join(lines))
    engines = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [(model, options["--port"]) for model, options in engines] == [("first", str(port)), ("second", str(port + 1))]
    elastic = [json.loads(options["--additional-config"])["vmmkv_elastic"] for _, options in engines]
    assert elastic[0] == elastic[1] and elastic[0]["floor"] == "256MiB"
    assert {options["--kv-cache-memory-bytes"] for _, options in engines} == {"1G"}
    assert {options["--max-model-len"] for _, options in engines} == {"1024"}
    script.send_signal(signal.SIGTERM)
    assert script.wait(30) == 0
    assert not Path(elastic[0]["arbiter"]).exists()
