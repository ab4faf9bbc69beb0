"""How commands end: with a status of sysexits.h, so that a supervisor can tell a mistake from an accident, and one line that says why."""

import sys

USAGE, DATA, UNAVAILABLE, SOFTWARE, CONFIG, INTERRUPTED = 2, 65, 69, 70, 78, 130


def failed(why: object, status: int) -> int:
    """The status, once stderr says why."""
    print(f"foretoken: error: {' '.join(str(why).split())}", file=sys.stderr)
    return status
