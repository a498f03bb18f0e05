"""The API for training processes under ScaleTrain: signals, heartbeat, checkpoints, metrics, failures. No torch.

    from scaletrain_cli.worker import ExitCode, Rank

    rank = Rank.start(sys.argv[1])  # before torch is imported

The names below are the stable surface, versioned by WORKER_API_VERSION as semver.org says: a major version changes or
removes a name or a signature, a minor one adds some. Modules below this package are internal.
"""

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.checkpoints import Checkpoint, FileDigest
from scaletrain_cli.worker.checkpoint_commit import HashingWriter, SupersededAttemptError
from scaletrain_cli.worker.heartbeat import Heartbeat
from scaletrain_cli.worker.rank import Checkpoints, Rank, StagedCheckpoint
from scaletrain_cli.worker.run_environment import ResolvedRun, RunEnvironment
from scaletrain_cli.worker.signals import PreemptionFlag

WORKER_API_VERSION = "1.3"

__all__ = [
    "WORKER_API_VERSION",
    "Checkpoint",
    "Checkpoints",
    "ExitCode",
    "FileDigest",
    "HashingWriter",
    "Heartbeat",
    "PreemptionFlag",
    "Rank",
    "ResolvedRun",
    "RunEnvironment",
    "StagedCheckpoint",
    "SupersededAttemptError",
]
