"""A chat with SmolLM2 by transformers: a VmmCache keeps the keys and values from turn to turn.

    python examples/chat.py
    python examples/chat.py "Name a fruit." "And a vegetable?"

`generate` gets the whole conversation and a cache of all but the newest message, so it computes only that message. Rows of
earlier turns are neither moved nor copied. Memory is mapped as the conversation grows. An unwanted answer is cropped.
"""

import sys
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from vmmkv import MIB, Pool
from vmmkv.adapters.transformers import VmmCache
from vmmkv_server.models import resolve

MESSAGES = ["What is the capital of France?", "And of Italy?", "Which language do they speak there?"]
SYSTEM = [{"role": "system", "content": "You are a helpful assistant. You answer in one sentence."}]
ANSWER_TOKENS = 24


@dataclass
class Chat:
    """A conversation: its tokens so far, and the cache of those that the model has computed."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    cache: VmmCache
    ids: torch.Tensor = field(init=False)
    """[1, tokens]"""

    def __post_init__(self) -> None:
        self.ids = torch.empty(1, 0, dtype=torch.long, device=self.model.device)

    def say(self, message: str) -> str:
        """The model's answer to one message."""
        told = self._template([*SYSTEM, {"role": "user", "content": message}], add_generation_prompt=True)
        if self.ids.shape[1]:
            told = "\n" + told.removeprefix(self._template(SYSTEM))  # what comes behind the end of the last answer
        self._append(self.tokenizer(told, return_tensors="pt", add_special_tokens=False).input_ids)
        return self._answer()

    def take_back(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of the conversation."""
        self.ids = self.ids[:, :num_tokens]
        self.cache.crop(-max(0, self.cache.get_seq_length() - num_tokens))

    def _answer(self) -> str:
        start, end_of_answer = self.ids.shape[1], self.tokenizer.eos_token_id
        options = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "pad_token_id": end_of_answer}
        mask = torch.ones_like(self.ids)
        self.ids = self.model.generate(self.ids, attention_mask=mask, past_key_values=self.cache, **options)
        answer = self.ids[0, start:]
        if answer[-1] != end_of_answer:
            self._append(torch.tensor([[end_of_answer]]))  # cut short: the template wants an end all the same
        return self.tokenizer.decode(answer, skip_special_tokens=True)

    def _append(self, ids: torch.Tensor) -> None:
        self.ids = torch.cat([self.ids, ids.to(self.ids.device)], dim=1)

    def _template(self, messages: list[dict[str, str]], **options: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)


def main() -> None:
    """Ask each question and count the computed tokens; then ask the last question again."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    path = resolve("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device).eval()
    computed: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].shape[1]))
    messages = sys.argv[1:] or MESSAGES
    with Pool(device, 256 * MIB) as pool, VmmCache(model.config, pool) as cache:
        chat = Chat(model, AutoTokenizer.from_pretrained(path), cache)
        for message in messages:
            before, cached = chat.ids.shape[1], cache.get_seq_length()
            computed.clear()
            answer = chat.say(message)
            print(f"> {message}\n{answer}")
            print(f"  {chat.ids.shape[1]} tokens, {sum(computed)} of them computed; {pool.held_bytes / MIB:.0f} MiB")
            assert cached + sum(computed) == cache.get_seq_length() < chat.ids.shape[1]  # none twice
        chat.take_back(before)
        assert chat.say(message) == answer
        print("  asked again: the same answer")
        cache.check()


if __name__ == "__main__":
    main()
