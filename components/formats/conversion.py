"""What converters share: that the package is there, that the request fits, and what a file says of itself."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from components.errors import HeadraceError, did_you_mean
from components.formats.network import Arrays, Network


def require(module: str, extra: str) -> Any:
    """Import a module of an optional package.

    Raises:
        HeadraceError: it is not installed; says what to install.
    """
    try:
        with _as_a_ci_job():
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise HeadraceError(f"{module} is not installed: pip install 'headrace[{extra}]'.") from error


def require_coremltools() -> Any:
    """`require` without the warnings of what it does not find beside it."""
    with quiet_coremltools():
        return require("coremltools", "coreml")


@contextlib.contextmanager
def quiet_coremltools() -> Iterator[None]:
    """coremltools warns of every version it was not tested with, and draws progress bars."""
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _as_a_ci_job() -> Iterator[None]:
    """What OpenVINO and NNCF look at, when first imported, before they report imports and calls to their makers."""
    before = os.environ.get("CI")
    os.environ["CI"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["CI"]
        else:
            os.environ["CI"] = before


def check_form(
    title: str,
    form: str,
    forms: Collection[str],
    network: Network,
    calibration: Arrays | None,
    *,
    needs_calibration: bool,
) -> None:
    """Refuse a form that there is not, and calibration examples that are not there or lack an input."""
    if form not in forms:
        raise HeadraceError(f"{title} has no form '{form}'.{did_you_mean(form, forms)}")
    if needs_calibration and not calibration:
        raise HeadraceError(f"{title} {form} needs calibration={{name: examples}}, by which ranges are set.")
    if calibration and (missing := [name for name in network.specs if name not in calibration]):
        raise HeadraceError(f"calibration lacks '{missing[0]}'.{did_you_mean(missing[0], calibration)}")


def described(network: Network, metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """What a file says of itself, as texts: strings as they are, other values as JSON, and the digest of the weights."""
    entries = {"weights_sha256": network.weights_sha256(), **(metadata or {})}
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in sorted(entries.items())}
