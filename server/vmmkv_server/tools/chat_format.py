"""The format of a model's chats: how its template shows tools and calls, how the model writes calls, and how it reasons."""

import functools
import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from vmmkv_server.chats import ChatFormat, ChatPrompt, Turn
from vmmkv_server.config import EngineConfig
from vmmkv_server.protocol import Gate
from vmmkv_server.sampling_params import Limits
from vmmkv_server.structured_output.schema import Grammar, GrammarRefused
from vmmkv_server.tokenizer import PromptError, TemplateVariable, Tokenizer
from vmmkv_server.tools.calls import Tool, Toolset
from vmmkv_server.tools.form import CallForm
from vmmkv_server.tools.forms import form_named, form_of
from vmmkv_server.tools.forms.plain import PlainJson
from vmmkv_server.tools.history import HistoryStyle, has_calls, with_text_arguments
from vmmkv_server.tools.reading import PartReader
from vmmkv_server.tools.reasoning import PARSERS, Markers, Place, ReasoningReader

log = logging.getLogger(__name__)

AUTO: Final = "auto"
NONE: Final = "none"
MAX_GRAMMARS: Final = 32
"""Most grammars of calls that a format keeps. Each has at most a mebibyte."""


_UNKNOWN: Final = (
    "the form in which the model writes calls is not known: tool_choice auto is refused without --tool-call-parser"
)
_UNSEEN: Final = (
    "the chat template shows no tools: the model does not see those of a request, and --tool-call-parser only names the form "
    "in which its calls are read"
)
_UNKNOWN_FORM: Final = (
    "the form in which this model writes calls is not known, so that text could not be told from calls: send "
    '"required" or one function, or start the server with --tool-call-parser'
)


@dataclass(frozen=True, slots=True)
class ToolChatPrompt(ChatPrompt):
    """A conversation whose answer may have calls or reasoning."""

    place: Place
    """The place in the assistant's turn at which the prompt ends."""
    format: "ToolChatFormat"
    toolset: Toolset | None
    prefix: str
    """Begin of the calls that the prompt ends with."""

    @property
    def may_call(self) -> bool:
        """May the answer have calls? Then `grammar` is its grammar, if it has one."""
        return self.toolset is not None

    @property
    def needs_grammar(self) -> bool:
        """Is a request refused whose grammar is not served? Else its answer is free, and is read all the same."""
        return self.toolset is None or not self.toolset.is_free or any(tool.is_strict for tool in self.toolset.tools)

    def grammar(self, namespace: Hashable = None) -> Grammar | None:
        """The grammar of an answer that may call, from its `gate` on; None if it is free.

        Raises: GrammarRefused, as `CallForm.grammar`, and if the model's own calls cannot be read.
        Cost: as `ToolChatFormat.grammar`.
        """
        if self.toolset is None:
            return None
        if self.toolset.choice != "required" and not self.format.knows_form:
            raise GrammarRefused(_UNKNOWN_FORM, param="tool_choice")
        try:
            return self.format.grammar(self.toolset, namespace)
        except GrammarRefused as error:
            if self.needs_grammar:
                raise
            log.info("calls are read without a grammar: %s", error)
            return None

    @property
    def gate(self) -> Gate | None:
        """The place in the answer at which its grammar begins; None for its first text."""
        markers, toolset, form = self.format.markers, self.toolset, self.format.form
        behind = markers.end if markers is not None and self.place is Place.WITHIN else ""
        if toolset is not None and toolset.is_free:
            return Gate(
                behind=behind,
                triggers=form.triggers(toolset),
                is_first=form.is_first,
                repeats=form.repeats(toolset),
                in_code=form.in_code or form.is_first,
            )
        return Gate(behind=behind) if behind else None

    @property
    def kept(self) -> tuple[str, ...]:
        """Texts of special tokens that the reader must see."""
        return self.format.kept_of_reasoning + (() if self.toolset is None else self.format.kept_of_calls)

    @property
    def reasoning_end(self) -> int | None:
        """The token that ends the reasoning; None if there is none, or it is several tokens."""
        return self.format.reasoning_end

    def reader(self) -> PartReader:
        """A reader of one answer."""
        markers, toolset = self.format.markers, self.toolset
        reasoning = None if markers is None else ReasoningReader(markers, self.place)
        calls = None if toolset is None else self.format.form.reader(toolset)
        return PartReader(reasoning, calls, prefix=self.prefix)


class ToolChatFormat(ChatFormat):
    """The format of one model's chats, with calls and reasoning.

    Parsers are named as vLLM's, or `auto` for what the template shows; `none` reads no reasoning.
    Raises: ValueError, telling the names.
    """

    def __init__(self, tokenizer: Tokenizer, *, call_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        super().__init__(tokenizer)
        template = tokenizer.template
        found = form_of(template) if call_parser == AUTO else form_named(call_parser, template)
        self.knows_form = found is not None
        """Is the form known in which the model writes calls by itself?"""
        self.form: CallForm = found or PlainJson()
        self.kept_of_calls = self.form.kept(tokenizer.special_texts)
        """Texts of special tokens in the model's calls."""
        self._plain = found if isinstance(found, PlainJson) else None
        """The form of a template without tools."""
        self.markers: Markers | None = None
        """The markers of the model's reasoning; None if it has none, or none is read."""
        if reasoning_parser == AUTO:
            self.markers = Markers.found_in(template or "")
        elif reasoning_parser in PARSERS:
            self.markers = Markers(*PARSERS[reasoning_parser])
        elif reasoning_parser != NONE:
            raise ValueError(
                f"reasoning_parser={reasoning_parser!r} is not known; use one of {', '.join((AUTO, NONE, *PARSERS))}"
            )
        around = () if self.markers is None else (self.markers.begin, self.markers.end)
        self.kept_of_reasoning = tuple(text for text in tokenizer.special_texts if text in around)
        """Markers of the reasoning that are special tokens."""
        self.reasoning_end = None if self.markers is None else tokenizer.rust.token_to_id(self.markers.end)
        """The token that ends the reasoning; None if there is none, or it is several tokens."""
        self._grammars: OrderedDict[Hashable, Grammar | GrammarRefused] = OrderedDict()
        """Grammars of the last toolsets, and why others are refused."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, config: EngineConfig) -> Self:
        """The format of a model by its options. Raises: ValueError, as for one that is made by its parsers."""
        return cls(tokenizer, call_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser)

    @property
    def remark(self) -> str | None:
        """Fact that an operator should know; None for none."""
        if self.tokenizer.template is None:
            return None
        if not self.knows_form:
            return _UNKNOWN
        is_unseen = self._plain is None and isinstance(form_of(self.tokenizer.template), PlainJson)
        return _UNSEEN if is_unseen else None

    def grammar(self, toolset: Toolset, namespace: Hashable = None) -> Grammar:
        """The grammar of calls, as `CallForm.grammar`; namespaces share none. Call it in one thread at a time.

        Raises: GrammarRefused. Cost: as `of_schema` for each tool, a tenth of a millisecond for a toolset that it knows.
        """
        key = namespace, toolset.digest
        found = self._grammars.pop(key, None)
        if found is None:
            try:
                found = self.form.grammar(toolset)
            except GrammarRefused as error:
                found = error
            if len(self._grammars) == MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars[key] = found
        if isinstance(found, GrammarRefused):
            raise GrammarRefused(str(found), param=found.param)
        return found

    def encode(
        self,
        messages: Sequence[Turn],
        variables: Mapping[str, TemplateVariable] | None = None,
        limits: Limits | None = None,
        wanted: int | None = None,
        *,
        has_grammar: bool = False,
        toolset: Toolset | None = None,
    ) -> ChatPrompt:
        """The prompt of a conversation, whose answer may call the tools. `has_grammar`: the text of its answer follows one.

        A model that reasons by itself is made to where its answer has a grammar, since that begins behind the reasoning.
        Raises: PromptError, TemplateBroken, RequestRefused, as `Tokenizer.render_chat` and `Tokenizer.encode`.
        """
        is_calling = has_calls(messages)
        if toolset is None and self.markers is None and not is_calling:
            return super().encode(messages, variables, limits, wanted)
        text = self._rendered(messages, toolset, variables, is_calling=is_calling)
        prefix = self.form.prefix if toolset is not None and toolset.choice == "required" else ""
        place = Place.BEHIND
        if self.markers is not None:
            place = self.markers.place(text)
            if place is Place.BEFORE and not prefix and (has_grammar or toolset is not None) and self._opening:
                text, place = text + self._opening, Place.WITHIN
            elif place is Place.WITHIN and prefix:
                text, place = f"{text}\n{self.markers.end}\n\n", Place.BEHIND
            elif place is Place.BEFORE and (has_grammar if toolset is None else not toolset.is_free):
                place = Place.BEHIND
        ids = self.tokenizer.encode(text + prefix, limits, wanted, add_special_tokens=False)
        if toolset is None and place is Place.BEHIND:
            return ChatPrompt(ids)
        return ToolChatPrompt(ids, place, self, toolset, prefix)

    @functools.cached_property
    def _opening(self) -> str:
        """The text with which the model begins to reason by itself; empty if it does not."""
        assert self.markers is not None, "it has markers"
        asked = [{"role": "user", "content": "Why?"}]
        try:
            return self.markers.opening(lambda variables: self.tokenizer.render_chat(asked, variables))
        except PromptError:
            return ""

    def _rendered(
        self,
        messages: Sequence[Turn],
        toolset: Toolset | None,
        variables: Mapping[str, TemplateVariable] | None,
        *,
        is_calling: bool,
    ) -> str:
        """`is_calling`: as `has_calls`."""
        if self._plain is not None and (toolset is not None or is_calling):
            return self.tokenizer.render_chat(self._plain.conversation(with_text_arguments(messages), toolset), variables)
        tools = None if toolset is None else [tool.for_template() for tool in toolset.tools]

        def render(turns: Sequence[Turn]) -> str:
            return self.tokenizer.render_chat(turns, variables, tools)

        if not is_calling:
            return render(messages)
        refused: PromptError | None = None
        style = self._style if tools is None else self._style_beside_tools
        if style is not None:
            try:
                return render(style.turns(messages))
            except PromptError as error:
                refused = error
        try:
            return render(PlainJson().conversation(with_text_arguments(messages), None))
        except PromptError as error:
            raise refused or error from error

    @functools.cached_property
    def _style(self) -> HistoryStyle | None:
        """The style in which the template shows earlier calls; None if it does not."""
        return HistoryStyle.of(self.tokenizer.render_chat)

    @functools.cached_property
    def _style_beside_tools(self) -> HistoryStyle | None:
        """The same of conversations with tools, for which a model may have another template."""
        tools = [Tool(name="probe").for_template()]
        return HistoryStyle.of(lambda turns: self.tokenizer.render_chat(turns, None, tools))
