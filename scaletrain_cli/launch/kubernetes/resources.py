"""What one pod asks of its node: devices, cores, memory, as Kubernetes writes quantities. Pure arithmetic.

A pod is a whole node's worth of GPUs, so the nodes of a gang are its own. Memory that is asked for is also the limit,
and what lies in /dev/shm is a part of it.
"""

from __future__ import annotations

from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.spec import RunSpec

_MIB, _GIB = 2**20, 2**30
# Of one rank on a GPU: the interpreter with torch and CUDA, pinned buffers, NCCL's proxies, the loader.
_GPU_RANK_BYTES = 8 * _GIB
_CPU_RANK_BYTES = 3 * _GIB // 2  # the interpreter with torch; its tensors are in the plan
_AGENT_BYTES = _GIB
_SHM_BASE_BYTES = _GIB
_SHM_RANK_BYTES = _GIB  # NCCL's rings between the GPUs of a node take some hundred MB; 64 MB is what a container gets
_CPUS_PER_GPU = 4  # a request that every GPU node can grant; without a limit the pod may use all that it finds


def pod_resources(spec: RunSpec, plan: RunPlan) -> dict[str, dict[str, str]]:
    """``requests`` and ``limits`` of the container."""
    kubernetes, cluster = spec.cluster.kubernetes, spec.cluster
    whole = {"memory": quantity(memory_bytes(spec, plan))}
    if kubernetes.ephemeral_storage is not None:
        whole["ephemeral-storage"] = quantity(kubernetes.ephemeral_storage)
    if cluster.gpu != "cpu":
        whole[kubernetes.gpu_resource] = str(cluster.gpus_per_node)
    if kubernetes.rdma_resource is not None:
        whole[kubernetes.rdma_resource] = str(kubernetes.rdma_count)
    cores = str(cores_per_node(spec))
    # Cores that were asked for by number are a limit too: the pod is then Guaranteed, the last that a node evicts. A
    # guess must not throttle anyone.
    chosen = kubernetes.cpus_per_node != "auto" or cluster.cpus_per_gpu != "auto"
    return {"requests": {"cpu": cores, **whole}, "limits": {**({"cpu": cores} if chosen else {}), **whole}}


def cores_per_node(spec: RunSpec) -> int:
    """``cpus_per_node``, or ``cluster.cpus_per_gpu`` of each rank, or what any node has."""
    cluster, asked = spec.cluster, spec.cluster.kubernetes.cpus_per_node
    if asked != "auto":
        return asked
    each = cluster.cpus_per_gpu
    if each == "auto":
        each = 1 if cluster.gpu == "cpu" else _CPUS_PER_GPU
    return each * cluster.gpus_per_node


def shm_bytes(spec: RunSpec) -> int:
    """Size of /dev/shm: 1 GiB, and 1 GiB for each rank."""
    asked = spec.cluster.kubernetes.shm_size
    return asked if asked != "auto" else _SHM_BASE_BYTES + _SHM_RANK_BYTES * spec.cluster.gpus_per_node


def memory_bytes(spec: RunSpec, plan: RunPlan) -> int:
    """The pod's memory: the plan's copy of checkpoints and what it offloads, /dev/shm, and a base for each process.

    On CPUs, what the plan calls the device's memory is the node's too.
    """
    asked, ranks = spec.cluster.kubernetes.memory_per_node, spec.cluster.gpus_per_node
    if asked != "auto":
        return asked
    rank = plan.memory.host + (_CPU_RANK_BYTES + plan.memory.peak if spec.cluster.gpu == "cpu" else _GPU_RANK_BYTES)
    whole = plan.durability.copy_bytes_per_node + shm_bytes(spec) + _AGENT_BYTES + ranks * rank
    return -(-whole // _GIB) * _GIB


def quantity(size_bytes: int) -> str:
    """Bytes rounded up to whole Mi, in the largest unit that divides them, as the API server writes them back."""
    amount, units = -(-size_bytes // _MIB), ["Mi", "Gi", "Ti", "Pi"]
    while amount % 1024 == 0 and len(units) > 1:
        amount //= 1024
        units.pop(0)
    return f"{amount}{units[0]}"
