"""The errors a user can mend, each with the exit code that scripts see.

A message says what is wrong, where, and how to mend it. Anything else that is raised is a defect of ours and keeps its
traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadraceError(Exception):
    """A failure with a message for the user; the command ends with `exit_code`."""

    exit_code = 1


class ConfigError(HeadraceError):
    """The configuration is wrong; nothing was started."""

    exit_code = 2


class NotBlessedError(HeadraceError):
    """The model did not pass the gate, so it was not pushed."""

    exit_code = 3


class ArtifactError(HeadraceError):
    """An artifact is missing, incomplete or not what its manifest says."""


class DataError(HeadraceError):
    """The data cannot be read or is not fit to train on."""


def did_you_mean(received: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of `known`, or else the list of them."""
    names = sorted(known)
    near = difflib.get_close_matches(received, names, n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else f" Known: {', '.join(names)}."
