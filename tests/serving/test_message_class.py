"""Messages that are made of their fields."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from serving.message_class import message_class

INNER = message_class("tests.Inner", {"name": "string", "is_on": "bool"})
OUTER = message_class(
    "tests.Outer",
    {"inner": "tests.Inner", "limit": "google.protobuf.Int64Value", "sizes": "repeated int64", "ratio": "double"},
    first_number=1001,
)


def test_fields() -> None:
    message = text_format.Parse(
        'inner { name: "a" is_on: true } limit { value: 0 } sizes: 1 sizes: 2 ratio: 0.5', OUTER()
    )
    assert message.inner == INNER(name="a", is_on=True)
    assert message.HasField("limit")
    assert list(message.sizes) == [1, 2]
    assert [field.number for field, _ in message.ListFields()] == [1001, 1002, 1003, 1004]
    assert OUTER.FromString(message.SerializeToString()) == message


def test_line_and_name_of_what_is_wrong() -> None:
    with pytest.raises(text_format.ParseError, match=r'2:1 : .*"tests.Outer" has no field named "x"'):
        text_format.Parse("ratio: 1\nx: 2", OUTER())


@pytest.mark.parametrize(("type_name", "named"), [("int46", "TYPE_INT46"), ("tests.Unknown", "tests.Unknown")])
def test_unknown_type(type_name: str, named: str) -> None:
    with pytest.raises((ValueError, KeyError), match=named):
        message_class("tests.Wrong", {"field": type_name})
