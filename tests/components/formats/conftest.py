"""What the tests of the converters share."""

from __future__ import annotations

import pytest

from components.formats import Network
from tests.components.formats.models import Case, resnet_case


@pytest.fixture(scope="module")
def resnet() -> Case:
    return resnet_case()


@pytest.fixture(scope="module")
def network(resnet: Case) -> Network:
    return Network.of(resnet.model)
