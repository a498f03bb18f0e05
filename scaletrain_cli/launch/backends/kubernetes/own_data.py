"""The preparation of data by a training pod itself, on its own volume (``cluster.kubernetes.runs.per_pod``)."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

from scaletrain_cli.errors import PreemptedError
from scaletrain_cli.launch.backends.kubernetes.messages import reason

if TYPE_CHECKING:
    from scaletrain_cli.rundir.paths import RunDir
    from scaletrain_cli.rundir.record import RunRecord

logger = logging.getLogger(__name__)


def prepare_own_data(run: RunDir, record: RunRecord) -> None:
    """Prepare the data on the volume of this pod, which no other pod could do.

    Raises the error of the preparation, and PreemptedError once the pod is terminated.
    """
    from scaletrain_cli.launch import preparation

    spec = record.spec
    if spec.cluster.kubernetes.runs.per_pod and preparation.reads_prepared_data(spec):
        logger.info("preparing the data on the volume of this pod")
        with _ended_by_termination():
            preparation.prepare_here(spec, run.path.parent, known=record.hub)


@contextlib.contextmanager
def _ended_by_termination() -> Iterator[None]:
    """End the block with PreemptedError at SIGTERM or SIGINT, which are blocked before and after it."""
    terminated = False

    def end(*_: object) -> None:
        nonlocal terminated
        if not terminated:  # a second signal must not interrupt the end
            terminated = True
            raise PreemptedError(reason("preparation-interrupted"))

    handlers = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers.keys())
        yield
    except Exception as error:
        if terminated and not isinstance(error, PreemptedError):
            raise PreemptedError(reason("preparation-interrupted")) from error
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if terminated:  # and the block has ended in spite of it
        raise PreemptedError(reason("preparation-interrupted"))
