"""`vmmkv serve`: a model over HTTP, with the API that OpenAI's clients speak."""

import argparse

from vmmkv.cli import serve_front

SUMMARY = "serve a model over HTTP, its KV cache in vmmkv"

EXAMPLES = """\
examples:
  vmmkv serve                                        SmolLM2-135M, fetched first if need be
  vmmkv serve --model ./my-model --device cuda:1     a transformers directory, on the second GPU
  vmmkv serve --port 0 --kv-budget 512MiB            any free port, and little memory
  vmmkv serve --model ./my-model --max-num-seqs 512 --max-num-batched-tokens 8192
                                                     more requests at once, and larger steps
  vmmkv serve --model ./my-model --load-format dummy random weights in this shape, to measure speed

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"model": "smollm2-135m", "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe this command's options; the defaults are those of ServeConfig."""
    add, absent = parser.add_argument, argparse.SUPPRESS
    add("--model", metavar="NAME|DIR", default=absent, help="smollm2-135m (default), a transformers directory, or a hub name")
    add("--host", default=absent, help="address to listen on (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, default=absent, help="port to listen on, 0 for any that is free (default: 8000)")
    add("--device", default=absent, help="auto, cpu, cuda or cuda:INDEX (default: auto, a GPU if there is one)")
    add("--dtype", default=absent, help="auto, float32, bfloat16 or float16 (default: auto, float32 on the CPU, else bfloat16)")
    add(
        "--kv-budget", metavar="SIZE", default=absent, help="memory for the KV cache, such as 4GiB (default: from what is free)"
    )
    add("--max-tokens", metavar="N", type=int, default=absent, help="longest prompt and answer together (default: the model's)")
    add("--max-num-seqs", metavar="N", type=int, default=absent, help="sequences that run at once (default: 256)")
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=int,
        default=absent,
        help="tokens that a step computes at most: more is faster in all, fewer keep answers flowing while prompts are "
        "computed (default: by the device)",
    )
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        default=absent,
        help="compute every prompt from its first token, and share nothing",
    )
    add(
        "--model-impl",
        default=absent,
        help="auto, vmmkv (the decoder driven by the model's configuration) or transformers (its own code, unmodified) "
        "(default: auto, vmmkv for the models that it knows)",
    )
    add("--load-format", default=absent, help="auto, or dummy for random weights (default: auto, the model's safetensors)")
    add("--seed", metavar="N", type=int, default=absent, help="of dummy weights (default: 0)")
    serve_front.add_arguments(parser)
    add("--log-level", default=absent, help="debug, info, warning or error (default: $VMMKV_LOG_LEVEL, else info)")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    from vmmkv.config import read_environment
    from vmmkv.server.settings import ServeConfig
    from vmmkv.units import parse_bytes

    options = {name: value for name, value in vars(arguments).items() if name not in ("command", "run")}
    front = serve_front.take(options)
    if "kv_budget" in options:
        options["kv_budget_bytes"] = parse_bytes(options.pop("kv_budget"))
    config = ServeConfig(**{"log_level": read_environment().log_level, **options})
    try:
        from vmmkv.server.launch import run as launch
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("vmmkv"):
            raise
        raise ValueError(f"serving needs {error.name}, which is not installed: pip install 'vmmkv[server,hf]'") from error
    return launch(config, front)
