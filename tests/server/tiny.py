"""A tokenizer of single bytes, so that characters and stop strings always span tokens, and a chat template for it."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = """\
{%- if messages[0].role == 'assistant' %}{{ raise_exception('a conversation starts with the user') }}{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = {letter: token_id for token_id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    rust = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token="<|im_end|>", chat_template=TEMPLATE)


def token_ids(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().backend_tokenizer.encode(text).ids
    return ids
