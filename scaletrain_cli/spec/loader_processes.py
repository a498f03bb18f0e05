"""The processes of each rank that read its batches, and the CPU cores that they take."""

from scaletrain_cli.spec.corpus_files import SKLEARN_DIGITS
from scaletrain_cli.spec.data import NO_DATA
from scaletrain_cli.spec.run import RunSpec

# Cores that a job requests for each GPU where ``cluster.cpus_per_gpu`` is auto: nearly all GPU nodes have as many.
CORES_PER_GPU = 4
_MOST_AUTOMATIC = 15  # processes of a rank, of about 250 MB each; they decode 5,000 images of 224 pixels a second


def set_cores(spec: RunSpec) -> int | None:
    """Return the CPU cores of a rank that the spec sets; None if it leaves them to the node."""
    cluster, of_node = spec.cluster, spec.cluster.section.cores_per_node
    if of_node is not None:
        return max(1, of_node // cluster.gpus_per_node)
    return None if cluster.cpus_per_gpu == "auto" else cluster.cpus_per_gpu


def cores_per_rank(spec: RunSpec) -> int:
    """Return the CPU cores that a job requests for each rank: those that the spec sets, else what every node has."""
    return set_cores(spec) or (1 if spec.cluster.gpu == "cpu" else CORES_PER_GPU)


def decodes_images(spec: RunSpec) -> bool:
    """Return whether CPU cores read and decode files of images."""
    has_files = any(path not in (NO_DATA, SKLEARN_DIGITS) for _, path in spec.data.paths())
    return spec.unit != "tokens" and has_files and not spec.code.own_program


def decodes_beside_gpus(spec: RunSpec) -> bool:
    """Return whether CPU cores decode images while GPUs train the engine's model."""
    return spec.cluster.gpu != "cpu" and decodes_images(spec)


def loader_processes(spec: RunSpec, cores: int | None = None) -> int:
    """Return the processes of each rank that read; 0: a thread reads.

    ``cores``: those of a rank on its node; None: those that the job requests. ``data.loader.workers: auto`` is one
    process for each core but that of the training loop, at least 1 and at most 15, for images beside GPUs, and a thread
    for tokens, which cost little, and on CPUs, whose cores compute.
    """
    given = spec.data.loader.workers
    if given != "auto":
        return given
    if not decodes_beside_gpus(spec):
        return 0
    return min(_MOST_AUTOMATIC, max(1, (cores_per_rank(spec) if cores is None else cores) - 1))
