"""The number of files that a process may have open: each socket is one.

Systems give a process 1024 at first and let it ask for more. A server without free files accepts no
connection, so a few hundred idle connections of one client would lock all others out.
"""

import resource

from ramify.actors.kit.log import get_log

OTHERS = 1256  # connections that only ask something by HTTP, libraries, logs

log = get_log(__name__)


def allow_files(sockets: int) -> int:
    """Raise this process' limit so far that `sockets` fit; children inherit it. Returns the limit.

    A limit that the system does not let us raise is logged.
    """
    needed = sockets + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return soft
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):
        allowed = soft
    if allowed < needed:
        log.warning(
            "the limit of open files is too low for --max-sockets: raise it with `ulimit -n`",
            open_files=allowed,
            needed=needed,
        )
    return allowed
