"""How both processes log: lines for people, or an object of JSON a line for machines; what libraries log, too.

All goes through `logging`: values that belong to a message are its `extra`. What is logged while a request is served
has its id.
"""

import logging
import sys
from typing import IO, Final

import structlog
from structlog.typing import EventDict, Processor

_SHARED: Final[tuple[Processor, ...]] = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure(level: str, log_format: str, file: IO[str] | None = None) -> None:
    """Once for each process: levels and formats as in ServeConfig, to stderr by default."""
    file = file or sys.stderr
    if log_format == "json":
        render: list[Processor] = [_drop_colours, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        render = [_drop_colours, structlog.dev.ConsoleRenderer(colors=file.isatty(), exception_formatter=plain, pad_event_to=0)]
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _drop_colours(_: object, __: str, event: EventDict) -> EventDict:
    """uvicorn says some things twice, the second time in colour."""
    event.pop("color_message", None)
    return event


def bind_request(request_id: str) -> None:
    """From now on what this task logs, and what it starts, has the id."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


class LogLines:
    """A file whose lines are logged: for what prints to a console, where each line is to be an object of JSON."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._begun = ""

    def write(self, text: str) -> int:
        """Log the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            self._logger.info("%s", line.rstrip())
        return len(text)

    def flush(self) -> None:
        """Nothing: a line that is not complete waits for its end."""
