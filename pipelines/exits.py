"""How a command ends: what is raised becomes a message on standard error and an exit code.

0 done, 1 failed, 2 the configuration is wrong, 3 the model was not blessed, 4 an alarm of `headrace monitor`, 5 what
`headrace diff` compares differs, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
from collections.abc import Iterator

DIFFERENT = 5
INTERRUPTED = 130


@contextlib.contextmanager
def reported(*, debug: bool = False, interrupted: str = "Interrupted.") -> Iterator[None]:
    """Let nothing but `SystemExit` out of the block: say what was raised and leave with its exit code.

    Args:
        debug: Print the traceback, too.
        interrupted: What to say after Ctrl-C.
    """
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise
        if debug:
            traceback.print_exc()
        message, code = _message_and_code(error, interrupted)
        print(message, file=sys.stderr)
        raise SystemExit(code) from error


def _message_and_code(error: BaseException, interrupted: str) -> tuple[str, int]:
    # Imported here: `--help` needs neither, and they bring pydantic.
    from components.artifacts import explain_disk_error
    from components.errors import HeadraceError

    if isinstance(error, KeyboardInterrupt):
        return interrupted, INTERRUPTED
    if not isinstance(error, HeadraceError) and (mendable := explain_disk_error(error)) is not None:
        error = mendable
    if isinstance(error, HeadraceError):
        return f"Error: {error}", error.exit_code
    first_line = (str(error).strip().splitlines() or ["(no message)"])[0]
    return f"Error: {type(error).__name__}: {first_line}\nThis is a defect of ours; run again with --debug.", 1
