"""JSON as TF Serving reads it (RapidJSON with NaN allowed, stopping after the first value).

orjson reads what is ordinary, the standard library what has NaN in it. What both refuse goes through a parser of our
own, which accepts the rest of what RapidJSON accepts beyond the standard (Inf, any depth) and words its errors like
RapidJSON, with the offset of the byte where the trouble is. It is slow: some microseconds a value.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

import orjson

from serving.errors import ServingError, invalid_argument

_SPACE = re.compile(rb"[ \t\n\r]*")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# Without a repetition in a repetition, which would try every division of a string that is not closed.
_STRING = re.compile(rb'"[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*"', re.DOTALL)
_WORDS: tuple[tuple[bytes, Any], ...] = (
    (b"true", True),
    (b"false", False),
    (b"null", None),
    (b"NaN", float("nan")),
    (b"Infinity", float("inf")),
    (b"Inf", float("inf")),
    (b"-Infinity", float("-inf")),
    (b"-Inf", float("-inf")),
)
_MAX_ECHO_CHARACTERS = 256


def loads(body: bytes) -> Any:
    """Parse the first JSON value of a request body.

    Raises:
        ServingError: INVALID_ARGUMENT, "JSON Parse error: ... at offset: N".
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return _with_standard_library(body)
    except (ValueError, RecursionError):
        return _Parser(body).parse()


def _with_standard_library(body: bytes) -> Any:
    if b"\\u" in body:  # it would let lone surrogates pass
        raise ValueError("escaped code points are left to the own parser")
    text = body.decode("utf-8", "surrogateescape").lstrip(" \t\n\r")
    return _DECODER.raw_decode(text)[0]


def _finite(literal: str) -> float:
    number = float(literal)
    if number in (float("inf"), float("-inf")):
        raise ValueError("number too big")
    return number


def _integer(literal: str) -> int | float:
    number = _wide_number(literal.encode(), is_decimal=False)
    return _finite(literal) if isinstance(number, float) else number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_integer)


def echo(value: Any) -> str:
    """A value as an error message shows it: cut after 256 characters."""
    try:
        return json.dumps(value, indent=4, ensure_ascii=False)[:_MAX_ECHO_CHARACTERS]
    except RecursionError:
        return "<deeply nested JSON>"


class _Parser:
    """An iterative parser: its depth is bounded by memory, not by the stack."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = 3 if text.startswith(codecs.BOM_UTF8) else 0

    def parse(self) -> Any:
        if not self._text:
            raise invalid_argument("JSON Parse error: The document is empty")
        self._skip_space()
        if self._at == len(self._text):
            raise self._error("The document is empty.")
        root: list[Any] = []
        # Containers that are still open; `root` collects the one value of the document.
        stack: list[Any] = [root]
        keys: list[str] = []
        while True:
            opened = self._value_into(stack[-1], keys)
            if opened is not None:
                stack.append(opened)
                if self._opens_with_value(opened, keys):
                    continue
                stack.pop()
            while len(stack) > 1 and self._closes(stack[-1], keys):
                stack.pop()
            if len(stack) == 1:
                return root[0]

    def _value_into(self, container: Any, keys: list[str]) -> Any:
        """Read one scalar, or the opening of a container, and put it where it belongs; returns what was opened."""
        opening = self._text[self._at : self._at + 1]
        value: Any = [] if opening == b"[" else {} if opening == b"{" else None
        opened = value is not None
        if opened:
            self._at += 1
        else:
            value = self._scalar(opening)
        if isinstance(container, list):
            container.append(value)
        else:
            container[keys.pop()] = value
        return value if opened else None

    def _opens_with_value(self, container: Any, keys: list[str]) -> bool:
        """Step to the first element of a fresh container; False when it is empty (and closed)."""
        self._skip_space()
        closing = b"]" if isinstance(container, list) else b"}"
        if self._text[self._at : self._at + 1] == closing:
            self._at += 1
            return False
        if closing == b"}":
            self._key(keys)
        return True

    def _closes(self, container: Any, keys: list[str]) -> bool:
        """After an element: True at the container's end, False after stepping to its next element."""
        self._skip_space()
        mark = self._text[self._at : self._at + 1]
        is_list = isinstance(container, list)
        if mark == (b"]" if is_list else b"}"):
            self._at += 1
            return True
        if mark != b",":
            after = "] after an array element." if is_list else "} after an object member."
            raise self._error(f"Missing a comma or {after}")
        self._at += 1
        self._skip_space()
        if not is_list:
            self._key(keys)
        return False

    def _key(self, keys: list[str]) -> None:
        if self._text[self._at : self._at + 1] != b'"':
            raise self._error("Missing a name for object member.")
        keys.append(self._string())
        self._skip_space()
        if self._text[self._at : self._at + 1] != b":":
            raise self._error("Missing a colon after a name of object member.")
        self._at += 1
        self._skip_space()

    def _scalar(self, opening: bytes) -> Any:
        if opening == b'"':
            return self._string()
        for word, value in _WORDS:
            if self._text.startswith(word, self._at):
                self._at += len(word)
                return value
        return self._number()

    def _number(self) -> int | float:
        match = _NUMBER.match(self._text, self._at)
        if match is None:
            raise self._error("Invalid value.")
        following = self._text[match.end() : match.end() + 1]
        if following == b"." or following in (b"e", b"E"):
            raise self._error(
                f"Miss {'fraction' if following == b'.' else 'exponent'} part in number.", match.end() + 1
            )
        if not (match[1] or match[2]) and len(match[0]) < 20:
            number: int | float = int(match[0])
        else:
            number = _wide_number(match[0], is_decimal=bool(match[1] or match[2]))
            if number in (float("inf"), float("-inf")):
                raise self._error("Number too big to be stored in double.")
        self._at = match.end()
        return number

    def _string(self) -> str:
        match = _STRING.match(self._text, self._at)
        if match is None:
            raise self._error("Missing a closing quotation mark in string.")
        literal = match[0].decode("utf-8", "surrogateescape")
        try:
            value = json.loads(literal)
            value.encode("utf-8", "surrogateescape")
        except (json.JSONDecodeError, UnicodeEncodeError) as error:  # a lone surrogate is refused too
            raise self._error("Invalid escape character in string.") from error
        self._at = match.end()
        return value

    def _skip_space(self) -> None:
        if self._text[self._at : self._at + 1] > b" ":
            return
        match = _SPACE.match(self._text, self._at)
        if match is not None:
            self._at = match.end()

    def _error(self, message: str, at: int | None = None) -> ServingError:
        return invalid_argument(f"JSON Parse error: {message} at offset: {self._at if at is None else at}")


def _wide_number(literal: bytes, *, is_decimal: bool) -> int | float:
    """An integer that fits 64 bits stays one; a wider one becomes a double, as in RapidJSON."""
    if not is_decimal and len(literal) <= 20 and -(2**63) <= int(literal) < 2**64:
        return int(literal)
    return float(literal)
