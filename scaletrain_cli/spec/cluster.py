"""The cluster section: which scheduler, how many nodes of which accelerator, and on what terms."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from scaletrain_cli.spec.kubernetes import KubernetesSpec
from scaletrain_cli.spec.quantities import (
    AutoBytesPerSecond,
    AutoWhole,
    BytesPerSecond,
    FlopsPerSecond,
    PositiveBytes,
    PositiveSeconds,
    Seconds,
    Text,
    or_word,
)
from scaletrain_cli.spec.section import LEFT_OUT, Section, used_when, where
from scaletrain_cli.spec.slurm import SlurmSpec

MOST_NODES = 100_000


def _price(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e6:
        raise PydanticCustomError("price", "must be US dollars per GPU and hour")
    return float(value)


Price = Annotated[
    float | Literal["auto"],
    or_word("auto", _price),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"const": "auto"}]}),
]


class AcceleratorSpec(Section):
    """An accelerator that is not in the catalogue. Rates are dense, per device; bandwidths per direction."""

    name: Text
    memory: PositiveBytes
    fp8_flops: FlopsPerSecond | None = None
    fp16_flops: FlopsPerSecond | None = None
    bf16_flops: FlopsPerSecond | None = None
    fp32_flops: FlopsPerSecond
    memory_bandwidth: BytesPerSecond
    intra_node_bandwidth: BytesPerSecond
    host_bandwidth: BytesPerSecond | None = Field(default=None, description="PCIe 4.0 x16 where it is not given")


def _name_or_table(value: Any) -> str | None:
    if isinstance(value, str):
        return "name"
    return "table" if isinstance(value, dict | AcceleratorSpec) else None


Accelerator = Annotated[
    Annotated[str, Tag("name")] | Annotated[AcceleratorSpec, Tag("table")],
    Discriminator(
        _name_or_table,
        custom_error_type="gpu",
        custom_error_message="must be a name in the hardware catalogue, cpu, or a table that describes one",
    ),
]


class ClusterSpec(Section):
    """Nodes, accelerators, links, interruptions and price. ``gpu: cpu`` makes every rank a CPU process.

    Bandwidths in bytes/s and per direction: intra-node and host (PCIe) per GPU, inter-node per GPU, storage and NVMe
    per node.
    """

    scheduler: Literal["local", "slurm", "kubernetes"] = "local"
    nodes: Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)] = 1
    gpus_per_node: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    cpus_per_gpu: AutoWhole = "auto"
    gpu: Accelerator = "cpu"
    intra_node_bandwidth: AutoBytesPerSecond = "auto"
    network: Text | None = Field(default=None, description="between nodes: a name in the network catalogue")
    inter_node_bandwidth: AutoBytesPerSecond = "auto"
    network_oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    host_bandwidth: AutoBytesPerSecond = "auto"
    storage_bandwidth: AutoBytesPerSecond = "auto"
    nvme_bandwidth: AutoBytesPerSecond = "auto"
    spot: bool = False
    mean_time_between_interruptions: PositiveSeconds | None = None
    per_node_mtbf: Annotated[
        PositiveSeconds | None,
        used_when(where("cluster.spot", True), where("cluster.mean_time_between_interruptions", None)),
    ] = None
    grace_seconds: Seconds = 120.0
    price_per_gpu_hour: Price = "auto"
    spot_price_per_gpu_hour: Price = "auto"
    slurm: SlurmSpec = LEFT_OUT
    kubernetes: KubernetesSpec = LEFT_OUT

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        """(key, message) for each setting that contradicts another one."""
        if self.scheduler == "local" and self.nodes != 1:
            yield "nodes", "must be 1 with scheduler: local, which runs on this machine alone."
        warning = max(60.0, self.grace_seconds)  # what the job asks of Slurm before its end; Slurm looks twice a minute
        if self.slurm.time is not None and self.slurm.time < warning + 120:
            yield (
                "slurm.time",
                f"must be at least {warning + 120:.0f} s: the ranks are warned {warning:.0f} s before the end "
                "(grace_seconds, 60 at the least) and would leave before they began.",
            )
        for key, message in self.slurm.inconsistencies():
            yield f"slurm.{key}", message
        for key, message in self.kubernetes.inconsistencies():
            yield f"kubernetes.{key}", message
