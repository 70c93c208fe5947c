"""What users must read, in the host's own log where it has one.

Everything goes to the logger ``quest_core``, whose records reach the root logger's handlers. A host with a logger of
its own gets them through a handler that its plugin adds (`Adapter.forward_notices`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

LOGGER = logging.getLogger("quest_core")


def say(message: str) -> None:
    """Write one line to the host's log, or to standard error if nothing listens."""
    if is_heard(logging.INFO):
        LOGGER.info(message)
    else:
        print(f"quest: {message}", file=sys.stderr)


def is_heard(level: int) -> bool:
    """Return whether a handler receives records of this level; a `Forward` does if the host has its logger ready."""
    handlers = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
    ready = any(handler.logger().handlers if isinstance(handler, Forward) else True for handler in handlers)
    return ready and LOGGER.isEnabledFor(level)


class Forward(logging.Handler):
    """Passes records to the handlers of another logger.

    Args:
        logger: called for every record, because hosts make their logger late and once for each run.
    """

    def __init__(self, logger: Callable[[], logging.Logger]) -> None:
        super().__init__()
        self.logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler. The logger's parents are left out, because the root logger has the record already."""
        for handler in self.logger().handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
