"""The cluster section: scheduler, nodes, accelerators, links, interruptions and price."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, PydanticKnownError

from scaletrain_cli.errors import UsageError
from scaletrain_cli.plugins import PluginError
from scaletrain_cli.spec.backend_traits import BUILT_IN, DEFAULT, BackendTraits, backend_names, backend_traits
from scaletrain_cli.spec.kubernetes import KubernetesSpec
from scaletrain_cli.spec.quantities import (
    AutoBytesPerSecond,
    AutoWhole,
    BytesPerSecond,
    FlopsPerSecond,
    PositiveBytes,
    PositiveSeconds,
    Seconds,
    SomeShare,
    Text,
    not_a_switch,
    or_word,
)
from scaletrain_cli.spec.section import (
    LEFT_OUT,
    BackendSection,
    OpenSection,
    Section,
    nested_error,
    plugin_broken,
    used_when,
    where,
)
from scaletrain_cli.spec.slurm import SlurmSpec

MOST_NODES = 100_000
LEAST_IDLE_SECONDS = 10.0
MOST_SIZES = 256  # of a range of nodes: each is planned, which takes a tenth of a second to a second


def _price(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e6:
        raise PydanticCustomError("price", "must be US dollars per GPU and hour")
    return float(value)


Price = Annotated[
    float | Literal["auto"],
    or_word("auto", _price),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"const": "auto"}]}),
]


LatencySeconds = Annotated[float, BeforeValidator(not_a_switch), Field(ge=0, le=1)]


class AcceleratorSpec(Section):
    """An accelerator that is not in the catalogue. Rates are dense, per device; bandwidths per direction."""

    name: Text
    memory: PositiveBytes
    fp8_flops: FlopsPerSecond | None = None
    fp4_flops: FlopsPerSecond | None = None
    fp16_flops: FlopsPerSecond | None = None
    bf16_flops: FlopsPerSecond | None = None
    fp32_flops: FlopsPerSecond
    memory_bandwidth: BytesPerSecond
    intra_node_bandwidth: BytesPerSecond
    host_bandwidth: BytesPerSecond | None = Field(
        default=None, description="between host and device; null: that of PCIe 4.0 x16"
    )


class EfficiencySpec(Section):
    """Shares of the device's rates that large kernels reach in a long run; null: those of the planner's catalogue."""

    matmul: SomeShare | None = Field(default=None, description="of the peak FLOP/s of the precision: matrix products")
    attention: SomeShare | None = Field(default=None, description="the same: the forward pass of fused attention")
    memory: SomeShare | None = Field(default=None, description="of the memory bandwidth: memory-bound kernels")


class NetworkFigures(Section):
    """Measured figures of the links between nodes; null: those of ``cluster.network`` in the planner's catalogue."""

    all_reduce: SomeShare | None = Field(
        default=None, description="bus bandwidth of an all-reduce over all nodes, as a share of inter_node_bandwidth"
    )
    all_gather: SomeShare | None = Field(default=None, description="the same for all-gather and reduce-scatter")
    point_to_point: SomeShare | None = Field(default=None, description="the same for a send between two GPUs")
    latency: LatencySeconds | None = Field(default=None, description="that one more node adds to a collective")
    message_latency: LatencySeconds | None = Field(default=None, description="of one message between two nodes")


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


def _backend_name(value: Any, info: ValidationInfo) -> str:
    """Return the name of an installed back end. Raises a validation error for any other value.

    What was recorded is accepted as it is: a run can be listed where its back end is not installed.
    """
    if not isinstance(value, str):
        raise PydanticKnownError("string_type")
    if (info.context or {}).get("recorded"):
        return value
    if value not in BUILT_IN and value not in backend_names():
        names = [repr(name) for name in backend_names()]
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(names[:-1])} or {names[-1]}"})
    try:
        backend_traits(value)
    except PluginError as error:
        raise plugin_broken(error) from error
    return value


BackendName = Annotated[str, PlainValidator(_backend_name), WithJsonSchema({"enum": [*BUILT_IN]})]


NodeCount = Annotated[int, Field(strict=True, ge=1, le=MOST_NODES)]


class NodeRange(Section):
    """The sizes between which the number of nodes of a run may change (``cluster.nodes: {min: 2, max: 8}``)."""

    min: NodeCount = Field(description="fewest nodes on which the run starts")
    max: NodeCount = Field(description="most nodes that it requests")
    grow: bool = Field(default=True, description="restart on more nodes when they are idle and it pays")
    check_every: PositiveSeconds = Field(default=300.0, description="time between two checks for idle nodes")
    grow_every: Seconds = Field(default=1800.0, description="least time between two restarts on more nodes")
    planned: NodeCount | None = Field(default=None, description="written by the launcher: nodes of the current plan")

    @property
    def sizes(self) -> range:
        """Return every number of nodes in the range."""
        return range(self.min, self.max + 1)


class _OrRange:
    """Metadata of ``cluster.nodes``: its JSON Schema admits a table, too, which the section takes apart."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [handler(schema), NodeRange.model_json_schema()]}


def _range_error(detail: Any) -> InitErrorDetails:
    """Return an error of the table as one of ``cluster.nodes``."""
    if detail["type"] != "extra_forbidden":
        return nested_error("nodes", detail)
    known = ", ".join(name for name in NodeRange.model_fields if name != "planned")
    kind = PydanticCustomError("node_range_key", "unknown key; known keys: {known}", {"known": known})
    return InitErrorDetails(type=kind, loc=("nodes", *detail["loc"]), input=detail["input"])


class ClusterSpec(OpenSection):
    """Nodes, accelerators, links, interruptions and price. ``gpu: cpu`` makes every rank a CPU process.

    Bandwidths in bytes/s and per direction: intra-node and host (PCIe) per GPU, inter-node per GPU, storage and NVMe
    per node.
    """

    scheduler: BackendName = DEFAULT
    nodes: Annotated[NodeCount, _OrRange()] = 1
    # The range, where ``nodes`` was given as one; ``nodes`` is then the size of the current plan, at first the largest.
    node_range: SkipJsonSchema[NodeRange | None] = Field(default=None, exclude=True)
    spare_nodes: Annotated[int, Field(strict=True, ge=0, le=MOST_NODES)] = Field(
        default=0, description="nodes of the job beyond those, one of which replaces a node that fails"
    )
    gpus_per_node: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    cpus_per_gpu: AutoWhole = "auto"
    gpu: Accelerator = "cpu"
    intra_node_bandwidth: AutoBytesPerSecond = "auto"
    nvlink_domain: AutoWhole = Field(
        default="auto",
        description="GPUs that NVLink connects beyond a node, such as 72; auto: as in the GPU's catalogue",
    )
    network: Text | None = Field(default=None, description="between nodes: a name in the network catalogue")
    inter_node_bandwidth: AutoBytesPerSecond = "auto"
    network_figures: NetworkFigures = LEFT_OUT
    network_oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    host_bandwidth: AutoBytesPerSecond = "auto"
    storage_bandwidth: AutoBytesPerSecond = "auto"
    nvme_bandwidth: AutoBytesPerSecond = "auto"
    efficiency: EfficiencySpec = LEFT_OUT
    spot: bool = False
    mean_time_between_interruptions: PositiveSeconds | None = None
    per_node_mtbf: Annotated[
        PositiveSeconds | None,
        used_when(where("cluster.spot", True), where("cluster.mean_time_between_interruptions", None)),
    ] = None
    grace_seconds: Seconds = 120.0
    idle_timeout: PositiveSeconds | None = Field(
        default=None, description="time after which a run that does nothing is ended, its state saved; null: never"
    )
    price_per_gpu_hour: Price = "auto"
    spot_price_per_gpu_hour: Price = "auto"
    slurm: SlurmSpec = LEFT_OUT
    kubernetes: KubernetesSpec = LEFT_OUT

    @model_validator(mode="before")
    @classmethod
    def _take_node_range(cls, value: Any) -> Any:
        """Split ``nodes: {min: 2, max: 8}`` into the range and the planned number of nodes."""
        if not isinstance(value, dict):
            return value
        if "node_range" in value:
            error = InitErrorDetails(type="extra_forbidden", loc=("node_range",), input=value["node_range"])
            raise ValidationError.from_exception_data(cls.__name__, [error])
        given = value.get("nodes")
        if not isinstance(given, dict):
            return value
        try:
            nodes = NodeRange.model_validate(given)
        except ValidationError as error:
            details = [_range_error(detail) for detail in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(cls.__name__, details) from error
        planned = nodes.max if nodes.planned is None or nodes.planned not in nodes.sizes else nodes.planned
        return {**value, "nodes": planned, "node_range": nodes.model_copy(update={"planned": None})}

    @model_serializer(mode="wrap")
    def _write_flat(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write the range and the planned number of nodes as one key again, which one override replaces."""
        data: dict[str, Any] = handler(self)
        plugins: dict[str, Any] = data.pop("plugins")
        if self.node_range is not None and "nodes" in data:
            data["nodes"] = self.node_range.model_dump(mode="json") | {"planned": self.nodes}
        return data | plugins

    @property
    def allocated_nodes(self) -> int:
        """The nodes that the job holds, with the spare ones."""
        return self.nodes + self.spare_nodes

    @classmethod
    def plugin_model(cls, name: str) -> type[BackendSection] | None:
        return backend_traits(name).section if name in backend_names() else None

    @classmethod
    def plugin_names(cls) -> list[str]:
        return backend_names()[len(BUILT_IN) :]

    @property
    def traits(self) -> BackendTraits:
        """Return the traits of the back end; the defaults if it is not installed here (recorded runs)."""
        try:
            return backend_traits(self.scheduler)
        except UsageError:
            return BackendTraits(self.scheduler, self.scheduler, "")

    @property
    def section(self) -> BackendSection:
        """Return the options of the back end that runs the job; an empty section if it has none."""
        own, given = getattr(self, self.scheduler, None), self.plugins.get(self.scheduler)
        section = next((one for one in (own, given) if isinstance(one, BackendSection)), None)
        return self.traits.section() if section is None else section

    @property
    def place(self) -> str:
        """Return the target of the job as text: ``on Slurm, partition gpu``."""
        return f"on {self.traits.display_name}{self.section.summary}"

    @property
    def gpu_name(self) -> str:
        """The name of the accelerator, or ``cpu``."""
        return self.gpu if isinstance(self.gpu, str) else self.gpu.name

    @property
    def gpu_slice(self) -> tuple[int, int] | None:
        """The compute slices (of eight) and the GiB of memory of a part of a GPU (MIG); None for whole GPUs.

        Profiles as ``1g.10gb`` in NVIDIA's Multi-Instance GPU User Guide.
        """
        match = re.search(r"(\d)g\.(\d+)gb", self.section.gpu_kind) if self.gpu != "cpu" else None
        return None if match is None else (int(match[1]), int(match[2]))

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        most = self.traits.max_nodes
        if most is not None and self.nodes > most:
            where = f", which runs on {self.traits.display_name} only" if most == 1 else ""
            yield "nodes", f"must be {'1' if most == 1 else f'at most {most}'} with scheduler: {self.scheduler}{where}."
        elif self.node_range is not None:
            given = self.node_range
            if given.min >= given.max:
                yield "nodes.min", f"must be below nodes.max = {given.max}. For one size, write nodes: {given.max}."
            elif len(given.sizes) > MOST_SIZES:
                least = given.max - MOST_SIZES + 1
                yield "nodes.min", f"must be at least {least} with nodes.max = {given.max}: each size is planned."
            if not self.traits.takes_node_range:
                why = self.traits.no_node_range_because
                yield "nodes", f"must be one number with scheduler: {self.scheduler}{f', {why}' if why else ''}."
        if self.spare_nodes and not self.traits.takes_spare_nodes:
            where = f"with scheduler: {self.scheduler}, whose jobs have no spare nodes"
            yield "spare_nodes", f"must be 0 {where}."
        if self.idle_timeout is not None and self.idle_timeout < LEAST_IDLE_SECONDS:
            yield "idle_timeout", f"must be at least {LEAST_IDLE_SECONDS:.0f} s, or null. Typical: 30m."
        sections = {name: getattr(self, name) for name in BUILT_IN if hasattr(self, name)} | {**self.plugins}
        for name, section in sections.items():
            if isinstance(section, BackendSection):
                of_cluster = section.cluster_inconsistencies(grace_seconds=self.grace_seconds)
                yield from ((f"{name}.{key}", message) for key, message in (*of_cluster, *section.inconsistencies()))
