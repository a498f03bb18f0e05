"""The accelerator catalogue: memory, peak rates and bandwidths of each device.

Rates are dense, per device, in FLOP/s; bandwidths are per direction, in bytes/s; memory is the part available to a
process. hardware.json documents the fields and cites a data sheet for each row. The share of these rates that kernels
reach is in speed/kernels.py.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.plan.identity_cache import cached_by_identity
from scaletrain_cli.project_files import packaged_data
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ClusterSpec, RunSpec
from scaletrain_cli.spec.loader_processes import CORES_PER_GPU, set_cores
from scaletrain_cli.text import nearest_name

HOPPER = 9.0  # CUDA compute capability
# Smallest rate: a smaller one is a typing error, and dividing by it would overflow.
SLOWEST = 1.0
# Defaults for a device that the user describes: a host link of PCIe 4.0 x16, a server, and a network between nodes.
_USUAL_HOST_BANDWIDTH = 31.5e9
_USUAL_HOST = "server-64"
_USUAL_NETWORK = "ethernet-100g"


@dataclass(frozen=True)
class Accelerator:
    """One device. ``flops`` maps each supported precision to its dense peak in FLOP/s."""

    name: str
    memory_bytes: int
    flops: dict[str, float]
    memory_bandwidth: float
    intra_node_bandwidth: float
    host_bandwidth: float  # to pinned host memory
    compute_capability: str  # CUDA compute capability or AMD target; empty if neither applies
    multiprocessors: int  # 0: unknown
    network: str  # name in the network catalogue: the links between nodes of the manufacturer's reference system
    source: str
    host_gpus: int  # of the usual server
    host_cores: int  # of that server for each of them: physical cores, and the peak rate of its memory
    host_memory_bandwidth: float
    is_cpu: bool = False
    package: int = 1  # devices with faster links among each other than ``intra_node_bandwidth``, and the rate of these
    package_bandwidth: float = 0.0
    # Shares of the rates that kernels reach, as the spec states them: (matmul, attention, memory); None: not stated.
    efficiency: tuple[float | None, float | None, float | None] = (None, None, None)

    @cached_property
    def cuda_capability(self) -> float:
        """CUDA compute capability, such as 9.0; 0 for other devices and for those described in a spec."""
        text = self.compute_capability
        return float(text) if re.fullmatch(r"\d+\.\d+", text) else 0.0

    def fuses_attention(self, precision: str, head_dim: int, grouped: bool) -> bool:
        """Return whether torch's scaled_dot_product_attention has a fused kernel, which stores no matrix of scores.

        On CUDA, FlashAttention supports 16-bit types and head sizes up to 256 on Ampere and later. The memory-efficient
        kernel also supports fp32 and older devices, but no grouped queries (torch, ``scaled_dot_product_attention``:
        "only for Flash_attention and math kernel"; ``sdp_utils.cpp check_flash_attention_hardware_support``: sm80).
        """
        if self.is_cpu:
            return True
        sixteen_bits = precision in self.flops and precision not in ("fp32", "tf32")
        return (sixteen_bits and head_dim <= 256 and not 7.0 <= self.cuda_capability < 8.0) or not grouped

    def peak_flops(self, precision: str) -> float:
        """Return the dense peak in FLOP/s at a precision; that of fp32 if the device does not support the precision."""
        return self.flops.get(precision, self.flops["fp32"])


def accelerator_names() -> list[str]:
    """Return the names of the catalogue. ``cluster.gpu`` may also be a unique part of a name, such as ``l40s``."""
    return list(_catalogue())


@cached_by_identity
def find_accelerator(cluster: ClusterSpec) -> Accelerator:
    """Return the device that the cluster section names or describes. Raises UsageError for an unknown name."""
    wanted = cluster.gpu
    if isinstance(wanted, str):
        name = full_name(wanted)
        row = _catalogue()[name]
        device = Accelerator(
            name=name,
            flops={key.removesuffix("_flops"): float(value) for key, value in row.items() if key.endswith("_flops")},
            is_cpu=name == "cpu",
            **_host(row.get("host", _USUAL_HOST)),
            **{key: value for key, value in row.items() if not key.endswith(("_flops", "nvlink_domain", "host"))},
        )
        if cluster.gpu_slice is not None:
            device = _part_of(device, *cluster.gpu_slice)
    else:
        given = {key: getattr(wanted, f"{key}_flops") for key in ("bf16", "fp16", "fp8", "fp4")}
        flops = {"fp32": wanted.fp32_flops, "tf32": wanted.fp32_flops} | {k: v for k, v in given.items() if v}
        device = Accelerator(
            name=wanted.name,
            memory_bytes=wanted.memory,
            flops={key: max(rate, SLOWEST) for key, rate in flops.items()},
            memory_bandwidth=max(wanted.memory_bandwidth, SLOWEST),
            intra_node_bandwidth=max(wanted.intra_node_bandwidth, SLOWEST),
            host_bandwidth=max(wanted.host_bandwidth or _USUAL_HOST_BANDWIDTH, SLOWEST),
            compute_capability="",
            multiprocessors=0,
            network=_USUAL_NETWORK,
            source="the run spec",
            **_host(_USUAL_HOST),
        )
    if cluster.intra_node_bandwidth != "auto":
        device = replace(device, intra_node_bandwidth=max(cluster.intra_node_bandwidth, SLOWEST), package=1)
    stated, host_bandwidth = cluster.efficiency, stated_rate(cluster.host_bandwidth, device.host_bandwidth)
    efficiency = stated.matmul, stated.attention, stated.memory
    return replace(device, host_bandwidth=host_bandwidth, efficiency=efficiency)


def stated_rate(given: float | Literal["auto"], usual: float) -> float:
    """Return the rate that a spec states, in bytes/s, or for ``auto`` the usual one."""
    return usual if given == "auto" else max(given, SLOWEST)


def rank_cores(spec: RunSpec) -> int:
    """Return the CPU cores of each rank, for the processes that read its data and for an optimizer on the CPU.

    ``auto``: those of the device's usual server, which the node agent divides among the ranks
    (launch/node/ranks.py ``rank_environment``), and at least what a job requests.
    """
    given, device = set_cores(spec), find_accelerator(spec.cluster)
    return given or (device.host_cores if device.is_cpu else max(device.host_cores, CORES_PER_GPU))


def _host(name: str) -> dict[str, Any]:
    """Return the cores of a server and the bandwidth of its memory, for each of its devices."""
    row = packaged_data("plan/catalogue/hardware.json")["hosts"][name]
    return {
        "host_gpus": row["gpus"],
        "host_cores": row["cores"] // row["gpus"],
        "host_memory_bandwidth": row["memory_bandwidth"] / row["gpus"],
    }


def _part_of(device: Accelerator, slices: int, gib: int) -> Accelerator:
    """Return a part of a GPU: an eighth of its multiprocessors for each compute slice, seven being the whole GPU."""
    compute = 1.0 if slices >= 7 else slices / 8
    # 9,728 MiB of a 1g.10gb (NVIDIA's Multi-Instance GPU User Guide, of an A100).
    memory = min(device.memory_bytes, round(0.95 * gib * 2**30))
    return replace(
        device,
        name=f"{device.name} {slices}g.{gib}gb",
        memory_bytes=memory,
        flops={precision: rate * compute for precision, rate in device.flops.items()},
        memory_bandwidth=device.memory_bandwidth * min(1.0, memory / device.memory_bytes),
        multiprocessors=round(device.multiprocessors * compute),
        host_cores=max(1, int(device.host_cores * compute)),
        host_memory_bandwidth=device.host_memory_bandwidth * compute,
    )


def _catalogue() -> dict[str, dict[str, Any]]:
    gpus: dict[str, dict[str, Any]] = packaged_data("plan/catalogue/hardware.json")["gpus"]
    return gpus


def near_ranks(cluster: ClusterSpec) -> int:
    """Return how many consecutive ranks the links of a node connect: those of a node or of an NVLink domain.

    A job of more than one domain has a power of two of nodes in each, as its groups of ranks are powers of two: of an
    NVL72, 64 GPUs (Slurm: --segment=16).
    """
    domain = cluster.nvlink_domain
    if domain == "auto":
        domain = _catalogue()[full_name(cluster.gpu)].get("nvlink_domain", 0) if isinstance(cluster.gpu, str) else 0
    nodes = max(1, domain // cluster.gpus_per_node)
    return cluster.gpus_per_node * (nodes if nodes >= cluster.nodes else 1 << (nodes.bit_length() - 1))


def full_name(given: str) -> str:
    """Return the name of the catalogue that equals ``given``, or the only one that has all its parts.

    Raises UsageError if there is none, or more than one.
    """
    if given in _catalogue():
        return given
    parts = _parts(given)
    fitting = [name for name in _catalogue() if parts <= _parts(name)] if parts else []
    if len(fitting) == 1:
        return fitting[0]
    # No match, or the several ones in ``fitting``.
    known = accelerator_names()
    near = fitting or [near for near in (nearest_name(given, known, 0.6),) if near]
    code = "plan.ambiguous-device" if fitting else "plan.unknown-device-similar" if near else "plan.unknown-device"
    raise unknown_name("cluster.gpu", "plan.unknown-accelerator", given, code, known, near)


def unknown_name(key: str, error: str, given: str, code: str, known: list[str], near: object) -> UsageError:
    """Return the error for a name that no catalogue has: the code of the whole, and that of its problem."""
    shown = given.encode("unicode_escape").decode("ascii")[:80]
    reason = Reason(code, {"known": known} | ({"similar": near} if near else {}))
    problem = Problem.because("run spec", key, reason, shown)
    return UsageError(Reason(error, {"given": shown or "(an empty name)"}), (problem,))


def _parts(name: str) -> set[str]:
    """Return the parts of a name: ``NVIDIA H100 SXM5 80GB`` -> h100, sxm, 80gb."""
    plain = re.sub(r"sxm\d", "sxm", name.lower()).replace("rtx", " ")
    return set(re.split(r"[\s_\-]+", plain)) - {"", "nvidia", "amd", "geforce", "instinct", "tesla"}
