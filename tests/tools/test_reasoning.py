"""Reasoning: the place at which a prompt ends, and answers split behind it, in whatever pieces they come."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmmkv_server.tools.calls import CallArguments, CallBegun, Content, Reasoning, Toolset
from vmmkv_server.tools.forms.hermes import HERMES
from vmmkv_server.tools.reading import PartReader
from vmmkv_server.tools.reasoning import PARSERS, Markers, Place, ReasoningReader

THINK = Markers("<think>", "</think>")
TOOLS = Toolset.of([{"type": "function", "function": {"name": "f"}}])
assert TOOLS is not None

pieces = st.lists(st.sampled_from(["<think>", "</think>", "</thi", "<", " ", "\n", "a", "b c", "<tool_call>"]), max_size=9)


@settings(deadline=None)  # whatever else the machine does
@given(pieces, st.sampled_from(Place), st.lists(st.integers(0, 60), max_size=6))
def test_an_answer_is_split_alike_in_whatever_pieces_it_comes(parts: list[str], place: Place, cuts: list[int]) -> None:
    text = "".join(parts)
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    reader, read = ReasoningReader(THINK, place), []
    for start, end in itertools.pairwise(edges):
        read.append(reader.feed(text[start:end]))
    read.append(reader.finish())
    reasoning, behind = ("".join(each) for each in zip(*read, strict=True))
    first = text.lstrip()
    is_open = place is Place.WITHIN or (place is Place.BEFORE and first.startswith("<think>"))
    if not is_open:
        assert (reasoning, behind) == ("", text)
        return
    inner, _, rest = first.removeprefix("<think>").partition("</think>")
    assert reasoning.split() == inner.split() and behind == rest.lstrip()
    assert reasoning == reasoning.strip()


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ("<|user|>hi<|assistant|>", Place.BEFORE),
        ("<|user|>hi</think><|assistant|>\n", Place.BEFORE),
        ("<|assistant|><think>\n", Place.WITHIN),
        ("<|assistant|><think>\n\n</think>\n\n", Place.BEHIND),
        ("", Place.BEFORE),
    ],
)
def test_the_place_is_that_at_which_the_prompt_ends(prompt: str, place: Place) -> None:
    assert THINK.place(prompt) is place


def test_markers_are_those_that_a_template_has() -> None:
    for markers in PARSERS.values():
        assert Markers.found_in(f"text {markers[0]} and {markers[1]}") == Markers(*markers)
    assert Markers.found_in("{{ messages }}") is None


@pytest.mark.parametrize(
    ("prompt", "told", "opening"),
    [
        ("<|user|>Why?<|assistant|>\n", "<|user|>Why?<|assistant|>\n<think>\n\n</think>\n\n", "<think>"),
        ("<|user|>Why?<|assistant|>", "<|user|>Why?/nothink<|assistant|>\n<think></think>", "\n<think>"),
        ("<|user|>Why?<|assistant|>", "<|user|>Why?<|assistant|></think>", ""),
        ("<|user|>Why?<|assistant|>", "<|user|>Why?<|assistant|>", ""),
        ("<|user|>Why?<|assistant|><think>\n", "<|user|>Why?<|assistant|><think></think>", ""),
    ],
)
def test_a_model_that_may_be_told_not_to_reason_begins_by_itself(prompt: str, told: str, opening: str) -> None:
    markers = Markers("<think>", "</think>")
    assert markers.opening(lambda variables: told if variables else prompt) == opening


def test_calls_count_behind_the_reasoning_alone() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    reader = PartReader(ReasoningReader(THINK, Place.BEFORE), HERMES.reader(TOOLS))
    parts = [*reader.feed(f"<think>{call}</think>\nSo: {call}"), *reader.finish()]
    assert parts == [Reasoning(call), Content("So:"), CallBegun(0, "f"), CallArguments(0, "{}")]
    assert reader.has_whole_calls


def test_a_prefix_that_the_prompt_has_is_read_before_the_answer() -> None:
    reader = PartReader(None, HERMES.reader(TOOLS), prefix="<tool_call>")
    parts = [*reader.feed('{"name": "f", "arguments": {}}</tool_call>'), *reader.finish()]
    assert parts == [CallBegun(0, "f"), CallArguments(0, "{}")]
