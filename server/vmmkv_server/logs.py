"""Logging of both processes: lines for people, or an object of JSON a line. Libraries' messages are formatted alike.

All goes through `logging`: values that belong to a message are its `extra`.
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


def configure_logging(level: str, log_format: str, file: IO[str] | None = None) -> None:
    """Set up this process's logging, to stderr by default; `level` and `log_format` as in EngineConfig."""
    file = file or sys.stderr
    if log_format == "json":
        render: list[Processor] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        plain = structlog.dev.plain_traceback
        render = [structlog.dev.ConsoleRenderer(colors=file.isatty(), exception_formatter=plain, pad_event_to=0)]
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _drop_colours, *render],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _drop_colours(_: object, __: str, event: EventDict) -> EventDict:
    """Drop the second, coloured form of uvicorn's messages."""
    event.pop("color_message", None)
    return event


def bind_request(request_id: str) -> None:
    """Add the id to all that this task, and tasks that it starts, log from now on."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


class LogLines:
    """A writable file that logs each line: for rich's console where logs are JSON."""

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
        """Do nothing: an incomplete line waits for its end."""
