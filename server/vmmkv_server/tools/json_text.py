"""The JSON of one value as it comes: where it ends, and whether it is JSON."""

import re
from typing import Final

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS: Final = re.compile("[0-9]*")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_ESCAPES: Final = frozenset('"\\/bfnrt')
_WORDS: Final = {"t": "rue", "f": "alse", "n": "ull"}

_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _NEXT, _STRING, _ESCAPE, _CODE, _WORD = range(10)
_MINUS, _ZERO, _INTEGER, _POINT, _FRACTION, _EXPONENT, _SIGN, _POWER = range(10, 18)
"""Parts of a number."""
_MAY_END: Final = frozenset([_ZERO, _INTEGER, _FRACTION, _POWER])


class NotJson(ValueError):
    """Text that is not the JSON of a value, from `at` on."""

    def __init__(self, at: int) -> None:
        super().__init__(f"no JSON at {at}")
        self.at = at


class JsonText:
    """The JSON of a value: `feed` its text until it `is_complete`.

    Cost: a step for each character outside of strings, and one for each piece or escape within. No recursion.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self._state = _VALUE
        self._open: list[str] = []
        """Brackets that are to be closed."""
        self._is_key = False
        self._word = ""
        """The rest of a word."""
        self._num_codes = 0
        """Hexadecimal digits that an escape still needs."""

    def feed(self, text: str, start: int = 0) -> int:
        """The end of the text that belongs to the value, without the space behind it. Raises: NotJson.

        A number is complete with the character behind it.
        """
        at = start
        while at < len(text) and not self.is_complete:
            at = self._step(text, at)
        return at

    def finish(self) -> bool:
        """Is the value complete where the text is over? A number may be."""
        return self.is_complete or (self._state in _MAY_END and not self._open)

    def _step(self, text: str, at: int) -> int:
        state, letter = self._state, text[at]
        if state == _STRING:
            end = _match_end(_PLAIN, text, at)
            if end == len(text):
                return end
            if text[end] == '"':
                if self._is_key:
                    self._state = _COLON
                else:
                    self._end_value()
            elif text[end] == "\\":
                self._state = _ESCAPE
            else:
                raise NotJson(end)
            return end + 1
        if state >= _MINUS:
            return self._number(text, at)
        if state == _ESCAPE:
            if letter == "u":
                self._state, self._num_codes = _CODE, 4
            elif letter in _ESCAPES:
                self._state = _STRING
            else:
                raise NotJson(at)
            return at + 1
        if state == _CODE:
            if letter not in _HEX:
                raise NotJson(at)
            self._num_codes -= 1
            if not self._num_codes:
                self._state = _STRING
            return at + 1
        if state == _WORD:
            if letter != self._word[0]:
                raise NotJson(at)
            self._word = self._word[1:]
            if not self._word:
                self._end_value()
            return at + 1
        if (end := _match_end(_SPACE, text, at)) > at:
            return end
        if state == _NEXT:
            if letter == self._open[-1]:
                self._close()
            elif letter == ",":
                self._state = _KEY if self._open[-1] == "}" else _VALUE
            else:
                raise NotJson(at)
        elif state == _COLON:
            if letter != ":":
                raise NotJson(at)
            self._state = _VALUE
        elif state in (_KEY, _FIRST_KEY):
            if letter == '"':
                self._state, self._is_key = _STRING, True
            elif letter == "}" and state == _FIRST_KEY:
                self._close()
            else:
                raise NotJson(at)
        elif letter == "]" and state == _FIRST_ITEM:
            self._close()
        else:
            self._begin_value(letter, at)
        return at + 1

    def _begin_value(self, letter: str, at: int) -> None:
        if letter == '"':
            self._state, self._is_key = _STRING, False
        elif letter == "{":
            self._open.append("}")
            self._state = _FIRST_KEY
        elif letter == "[":
            self._open.append("]")
            self._state = _FIRST_ITEM
        elif letter == "-":
            self._state = _MINUS
        elif letter == "0":
            self._state = _ZERO
        elif letter in "123456789":
            self._state = _INTEGER
        elif letter in _WORDS:
            self._state, self._word = _WORD, _WORDS[letter]
        else:
            raise NotJson(at)

    def _number(self, text: str, at: int) -> int:
        state, letter = self._state, text[at]
        if letter in "0123456789" and state != _ZERO:
            if state == _MINUS:
                self._state = _ZERO if letter == "0" else _INTEGER
            elif state == _POINT:
                self._state = _FRACTION
            elif state in (_EXPONENT, _SIGN):
                self._state = _POWER
            return at + 1 if self._state == _ZERO else _match_end(_DIGITS, text, at)
        if letter == "." and state in (_ZERO, _INTEGER):
            self._state = _POINT
        elif letter in "eE" and state in (_ZERO, _INTEGER, _FRACTION):
            self._state = _EXPONENT
        elif letter in "+-" and state == _EXPONENT:
            self._state = _SIGN
        elif state in _MAY_END:
            self._end_value()
            return at
        else:
            raise NotJson(at)
        return at + 1

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._state = _NEXT
        self.is_complete = not self._open


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    assert match is not None, "it matches the empty text"
    return match.end()
