"""Returns of a model's calls: did the calls in which a pass was written return?

A model tells its cache nothing behind the last layer, and can still fail there: in an MLP, a norm, the logits. But a call drops
its arguments when it returns, before its caller goes on; after an exception the traceback keeps them. So a mark is laid among
the keyword arguments of each call of a module that was given the cache. They have been read by then.

    the call returns    its mark goes, and the caller is still at the call
    the call raises     its mark stays as long as the exception, and goes with it: then the caller is elsewhere

An exception that was caught within the call and kept also keeps the mark, with the frames of all calls around it. The frame
of a call that has ended tells by which instruction: so it is looked up before a pass counts as failed. If the exception is
dropped before that, the pass counts as failed: nothing then tells how the call ended.
"""

import dis
import gc
import itertools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import torch

_CALL: Final = torch.nn.Module._wrapped_call_impl.__code__
"""The code of a call of a module. Its frame has the module's arguments in `args` and `kwargs`, and passes on copies."""

_RETURN: Final = dis.opmap["RETURN_VALUE"]

_numbers = itertools.count()


class PassCalls:
    """The calls of modules around one forward pass."""

    def __init__(self, cache: Any = None) -> None:
        """Mark the calls under way that were given a cache. Cost: up to 1 us for each frame of the stack."""
        self._not_returned: set[int] = set()
        for frame in _calls_under_way() if cache is not None else ():
            kwargs = frame.f_locals["kwargs"]
            if any(given is cache for given in (*kwargs.values(), *frame.f_locals["args"])):
                kwargs[f"_vmmkv_mark_{id(cache)}"] = _Mark(self._not_returned, frame.f_back)

    def have_failed(self) -> bool:
        """Has one of the calls ended without returning? Cost: if so, or if a frame is kept, a walk through Python's objects."""
        if not self._not_returned or self._not_returned <= _marks(_calls_under_way()):
            return False
        self._not_returned -= _marks(_calls_kept_that_returned())
        return not self._not_returned <= _marks(_calls_under_way())


class _Mark:
    """A mark among the arguments of one call."""

    def __init__(self, not_returned: set[int], caller: FrameType | None) -> None:
        self.number: Final = next(_numbers)
        self._not_returned = not_returned
        self._caller = _place(caller)
        not_returned.add(self.number)

    def __del__(self) -> None:
        frame = sys._getframe().f_back
        # Python 3.11 drops arguments within the call's own frame.
        if _place(frame) == self._caller or (frame is not None and frame.f_code is _CALL):
            self._not_returned.discard(self.number)


def _place(frame: FrameType | None) -> tuple[int, int]:
    """A frame, without a reference to it, and the instruction that it is at."""
    return id(frame), -1 if frame is None else frame.f_lasti


def _calls_under_way() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            yield frame
        frame = frame.f_back


def _calls_kept_that_returned() -> Iterator[FrameType]:
    instructions = _CALL.co_code
    for each in gc.get_objects():  # among frames, those that have ended
        if type(each) is FrameType and each.f_code is _CALL and instructions[each.f_lasti] == _RETURN:
            yield each


def _marks(calls: Iterator[FrameType]) -> set[int]:
    """The numbers of the marks in these calls."""
    # Without `kwargs` if the frame was cleared.
    given = itertools.chain.from_iterable(frame.f_locals.get("kwargs", {}).values() for frame in calls)
    return {each.number for each in given if isinstance(each, _Mark)}
