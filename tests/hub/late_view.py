"""A node agent that sees the notes of other nodes late, as on a network file system that caches attributes.

``python -m tests.hub.late_view STATE UNTIL ...``: until the file UNTIL exists, every note of another node has the state
STATE. All further arguments are those of the node agent.
"""

import sys
from pathlib import Path
from typing import Any

from scaletrain_cli.launch.node import agent, hub
from scaletrain_cli.rundir.documents import read_document


def main() -> int:
    """Run the agent with the late view; return its exit code."""
    state, until, *arguments = sys.argv[1:]
    own = int(arguments[arguments.index("--node-rank") + 1])

    def late(path: Path) -> dict[str, Any] | None:
        found = read_document(path)
        seen_late = found is not None and path.parent.name == "hub" and int(path.stem) != own
        return {**found, "state": state} if found is not None and seen_late and not Path(until).exists() else found

    hub.read_document = late  # type: ignore[attr-defined]
    return agent.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
