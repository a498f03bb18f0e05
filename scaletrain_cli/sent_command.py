"""Read the variables and files that another machine sent with this command (launch/login_node, launch/node/view.py)."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

ON_LOGIN_NODE = "SCALETRAIN_ON_LOGIN_NODE"
SENT_CLUSTERS = "SCALETRAIN_SENT_CLUSTERS"
SENT_SPEC = "SCALETRAIN_SENT_SPEC"
SENT_RUN = "SCALETRAIN_SENT_RUN"


@dataclass(frozen=True)
class Sent:
    """``here``: another machine has sent the command line, so it runs here.

    ``clusters``: a clusters file with the cluster that was named there, in place of the own file; ``spec``: the path of
    the spec on that machine, for errors. ``run``: a file with what that machine knows of a run (sent_run.py).
    """

    here: bool
    clusters: Path | None
    spec: str | None
    run: Path | None = None


@functools.cache
def sent() -> Sent:
    """Return it, and take the variables out of the environment: a job would follow them to files that are gone."""
    names = (ON_LOGIN_NODE, SENT_CLUSTERS, SENT_SPEC, SENT_RUN)
    here, clusters, spec, run = (os.environ.pop(name, None) for name in names)
    is_here = here is not None or bool(run)
    return Sent(is_here, Path(clusters) if clusters else None, spec or None, Path(run) if run else None)
