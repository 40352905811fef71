"""Tests of packages that are optional: skipped where one is missing, except in CI, which has them all."""

from __future__ import annotations

import importlib.util
import os

import pytest


def needs(module: str) -> pytest.MarkDecorator:
    """Skip a test, or a module of tests, where an optional package is missing."""
    missing = importlib.util.find_spec(module) is None and "CI" not in os.environ
    return pytest.mark.skipif(missing, reason=f"{module} is not installed: pip install -e '.[test]'")
