"""Logging of the processes of a run, and of the verbs: level, UTC time and the process that writes, one line each.

    2026-03-01T12:00:03.512Z INFO rank 0: checkpoint: step 500 committed, 1.20 GB in 1.90 s
    2026-03-01T12:00:04.020Z WARNING rank 3 [DeepSpeed]: a line of a library

Modules log with ``logging.getLogger(__name__)``; the entry point of a process calls ``set_up_logging`` once. Lines of
libraries stay in the same log and carry the library's name, so that a reader can leave them out.
``SCALETRAIN_LOG=debug`` (or warning, error) sets the level of this package. Standard library only.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping

LEVEL_VARIABLE = "SCALETRAIN_LOG"
_PACKAGE = "scaletrain_cli"
_LEVELS = ("debug", "info", "warning", "error")
_LIBRARY_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z ([A-Z]+) [^:[]+ \[[^]\s]+\]: ")


def set_up_logging(source: str, *, descriptor: int = 2, environment: Mapping[str, str] | None = None) -> None:
    """Write the log records and warnings of this process to a file descriptor, marked with ``source`` ("rank 3").

    ``source`` holds no colon and no bracket. Replaces an earlier set-up of this process. The level is that of
    SCALETRAIN_LOG in ``environment`` (default: this process's), else info. Records of other packages are written from
    info on, whatever that level is.
    """
    given = (os.environ if environment is None else environment).get(LEVEL_VARIABLE, "")
    level = given.strip().lower() or "info"
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, DescriptorHandler)]:
        root.removeHandler(handler)
    root.addHandler(DescriptorHandler(descriptor, source))
    root.setLevel(logging.INFO)
    logging.getLogger(_PACKAGE).setLevel(level.upper() if level in _LEVELS else logging.INFO)
    logging.captureWarnings(True)
    if level not in _LEVELS:
        logging.getLogger(__name__).warning("%s=%s: use %s", LEVEL_VARIABLE, given, ", ".join(_LEVELS))


def take_over_library_logger(name: str) -> None:
    """Send the records of a library that brings its own handlers through this process's log instead."""
    logger = logging.getLogger(name)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True


def is_library_noise(line: str) -> bool:
    """Return whether a line of a log was written for a library, at a level below error."""
    match = _LIBRARY_LINE.match(line)
    return match is not None and match[1] not in ("ERROR", "CRITICAL")


class DescriptorHandler(logging.Handler):
    """Writes each record with one ``write`` to a file descriptor, past Python's buffers.

    An error of that write is ignored: the log may be on the disk that is full, and what a buffered stream cannot write
    at exit would replace the process's exit code by 120.
    """

    def __init__(self, descriptor: int, source: str) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.setFormatter(_LineFormatter(source))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record."""
        try:
            line = (self.format(record) + "\n").encode(errors="backslashreplace")
        except Exception:  # wrong arguments of a log call end no training
            self.handleError(record)
            return
        with contextlib.suppress(OSError):
            os.write(self._descriptor, line)


class _LineFormatter(logging.Formatter):
    def __init__(self, source: str) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{seconds}.{int(record.msecs):03d}Z {record.levelname} {self._source}"
        text = super().format(record)
        if record.name.partition(".")[0] in (_PACKAGE, "__main__", "root"):
            return f"{head}: {text}"
        # Every line of a library's record is marked, so that a reader can leave all of it out.
        return "\n".join(f"{head} [{record.name}]: {line}" for line in text.splitlines() or [""])
