"""What the garbage collector looks at, and when."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from serving.backends import memory


class Node:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_has_settled_is_searched_when_a_version_goes_and_only_then() -> None:
    node = Node()
    gone = weakref.ref(node)
    memory.settle()
    del node
    gc.collect()
    assert gone() is not None
    memory.give_back()
    assert gone() is None
    assert gc.get_freeze_count() > 10_000  # what stays has settled again
