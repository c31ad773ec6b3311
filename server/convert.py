"""A GGUF file made into a directory that transformers loads: `python -m vmmkv.server.convert FILE.gguf DIRECTORY`.

The weights are stored as float32: a dequantised weight is `scale * level + minimum`, which float32 holds and bfloat16 would
round again, so that tests can hold the server to transformers' own output exactly. Served on a GPU they are cast once at
load.

What a GGUF's tokenizer metadata says, and transformers does not carry over, is put right here:

- the end token: transformers takes the first special token of GPT-2 style vocabularies, here `<|im_start|>`;
- digits: the pre-tokenizer named `smollm` splits numbers into single digits, before a space is attached to a word;
- decoding: tokens are bytes and no more; transformers puts SentencePiece's rules before that (a `▁` would become a
  space) and asks for spaces before punctuation to be removed;
- the context length, which tells users of the tokenizer that a prompt is too long.
"""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
DIGIT_SPLITTING_PRE_TOKENIZERS = frozenset({"smollm"})


def convert(gguf: Path, target: Path, *, eos_token: str) -> None:
    """Write the model, its tokenizer with the chat template, and its generation defaults into `target`.

    Takes about 20 s and 1.5 GB of memory for 135 million parameters.

    Raises: ValueError if the tokenizer has no such end token or no chat template; what transformers raises.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = _tokenizer(gguf, eos_token, model.config.max_position_embeddings)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model.config.update(ids)
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


def _tokenizer(gguf: Path, eos_token: str, max_tokens: int) -> Any:
    """The tokenizer of a GGUF file, with the special tokens and the splitting that its metadata names."""
    from gguf import GGUFReader
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    fields = GGUFReader(str(gguf)).fields
    if tokenizer.convert_tokens_to_ids(eos_token) != fields["tokenizer.ggml.eos_token_id"].contents():
        raise ValueError(f"{gguf.name} says that another token than {eos_token} ends a turn")
    if not tokenizer.chat_template:
        raise ValueError(f"{gguf.name} has no chat template")
    tokenizer.eos_token = tokenizer.pad_token = eos_token
    tokenizer.model_max_length = max_tokens
    tokenizer.clean_up_tokenization_spaces = False
    if fields["tokenizer.ggml.model"].contents() == "gpt2":
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    if fields["tokenizer.ggml.pre"].contents() in DIGIT_SPLITTING_PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """The command line of the child process that `fetch` starts."""
    parser = argparse.ArgumentParser(prog="python -m vmmkv.server.convert", description="convert a GGUF file for transformers")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--eos-token", required=True)
    arguments = parser.parse_args(argv)
    _end_with_parent()
    convert(arguments.gguf, arguments.target, eos_token=arguments.eos_token)
    return 0


def _end_with_parent() -> None:
    """Be killed when the process that waits for this one ends, however it does.

    Its lock goes with it; a converter that outlived it would write beside that of the next fetch.
    """
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        sys.exit("the process that started this conversion has ended")


if __name__ == "__main__":
    sys.exit(main())
