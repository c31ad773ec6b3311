"""Calls as JSON between tags: Hermes, Qwen 2.5 and 3, and many that were trained by their data.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Brest"}}
</tool_call>
"""

from vmmkv_server.tools.calls import Toolset
from vmmkv_server.tools.form import ObjectForm
from vmmkv_server.tools.reading import CallReader, Waiting


class Hermes(ObjectForm):
    """The form."""

    name = "hermes"
    begin, end = "<tool_call>\n", "\n</tool_call>"

    def reader(self, toolset: Toolset) -> CallReader:
        """A reader of one answer."""
        return _Reader(toolset)


class _Reader(CallReader):
    def read(self) -> Waiting[None]:
        while self.may_call:
            yield from self.next_trigger(["<tool_call>"])
            if (yield from self.attempt(self._call())):
                yield from self.attempt(self._end())

    def _call(self) -> Waiting[None]:
        yield from self.space()
        yield from self.object_call()

    def _end(self) -> Waiting[None]:
        yield from self.space()
        yield from self.expect("</tool_call>")
