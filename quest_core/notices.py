"""The lines that users must read: in the log of the host or of the program, else on standard error.

A host with a logger of its own gets them by a handler that its plugin adds to ours (`Adapter.forward_notices`).
"""

import logging
import sys
from collections.abc import Callable

LOGGER = logging.getLogger("quest_core")


def say(message: str) -> None:
    """Write one line to the log, or to standard error if no handler receives it."""
    if is_heard(logging.INFO):
        LOGGER.info(message)
    else:
        print(f"quest: {message}", file=sys.stderr)


def is_heard(level: int) -> bool:
    """Return whether a handler receives records of this level."""
    return LOGGER.isEnabledFor(level) and LOGGER.hasHandlers()


class Forward(logging.Handler):
    """Passes records to the handlers of another logger, or to standard error if none has a handler.

    Args:
        logger: called for every record, because hosts create their logger late and once per run.
    """

    def __init__(self, logger: Callable[[], logging.Logger]) -> None:
        super().__init__()
        self.logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Handle a record. The parents of the logger are left out, because the root logger has the record already."""
        handlers = self.logger().handlers
        for handler in handlers:
            if record.levelno >= handler.level:
                handler.handle(record)
        if not handlers and not logging.getLogger().handlers:
            print(f"quest: {record.getMessage()}", file=sys.stderr)
