"""A plan for people: does it fit, how fast, what does it cost, and why this layout. Computes nothing but widths."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from scaletrain_cli.plan.result import Alternative, Layout, Memory, RunPlan, Time
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.ui.bars import waterfall
from scaletrain_cli.ui.console import answer, plain, show, speaks_unicode, talk, words
from scaletrain_cli.ui.units import (
    binary_bytes_text,
    bytes_text,
    count_text,
    dollars_text,
    percent_text,
    seconds_text,
    whole_text,
)

_LABEL = 11
_PART = 22
_AMOUNT = 9
_LONGEST_BAR = 48
_FEW_ALTERNATIVES = 5


def show_plan(spec: RunSpec, plan: RunPlan, *, everything: bool = False, console: Console | None = None) -> None:
    """The whole plan; ``everything`` adds every layout considered and every assumption."""
    console = console or answer()
    table = Table.grid(padding=(0, 0, 0, 0), expand=False)
    table.add_column(width=_LABEL, style="bold")
    table.add_column(ratio=1, overflow="fold")
    for label, content in _sections(spec, plan, console, everything):
        table.add_row(label, content)
    show(console, Group(headline(spec, plan), "", table))


def show_plan_summary(spec: RunSpec, plan: RunPlan) -> None:
    """The plan in five lines, on stderr: what is about to be submitted."""
    console = talk()
    table = Table.grid(padding=(0, 0, 0, 0), expand=False)
    table.add_column(width=_LABEL, style="bold")
    table.add_column(ratio=1, overflow="fold")
    table.add_row("Layout", _layout(plan.layout))
    table.add_row("Memory", _memory_total(plan))
    table.add_row("Time", Group(_time_total(plan.time), _whole_run(spec, plan.time)))
    if plan.cost.price_per_gpu_hour is not None:
        table.add_row("Cost", words(_cost(plan)))
    if plan.warnings:
        table.add_row("Warnings", Group(*(words(f"• {warning}", "yellow") for warning in plan.warnings)))
    show(console, Group(headline(spec, plan), table))


def headline(spec: RunSpec, plan: RunPlan) -> Text:
    """One line: what, on what, and the verdict."""
    cluster = spec.cluster
    device = cluster.gpu if isinstance(cluster.gpu, str) else cluster.gpu.name
    if device == "cpu":
        device = "CPU processes" if spec.world_size > 1 else "CPU process"
        where = str(spec.world_size)
    else:
        where = f"{cluster.nodes} × {cluster.gpus_per_node}" if cluster.nodes > 1 else f"{cluster.gpus_per_node} ×"
    verdict = ("fits", "bold green") if plan.memory.fits else ("does not fit", "bold red")
    size = f"{count_text(plan.model.parameters)} parameters"
    if plan.model.active_parameters != plan.model.parameters:
        size += f" ({count_text(plan.model.active_parameters)} active)"
    return Text.assemble((plain(spec.name), "bold"), f", {size}, on {where} {plain(device)}: ", verdict)


def _sections(spec: RunSpec, plan: RunPlan, console: Console, everything: bool) -> Iterator[tuple[str, RenderableType]]:
    bar = min(_LONGEST_BAR, console.width - _LABEL - _PART - _AMOUNT - 3)
    yield "Layout", _layout(plan.layout)
    yield "Memory", _memory(plan, bar, speaks_unicode(console))
    if not plan.memory.fits:
        return  # how fast it would be is no answer
    yield "Time", _time(spec, plan.time, bar, speaks_unicode(console))
    yield "Network", words(_network(plan))
    yield "Durability", words(_durability(spec, plan))
    yield "Cost", words(_cost(plan))
    if plan.warnings:
        yield "Warnings", Group(*(words(f"• {warning}", "yellow") for warning in plan.warnings))
    if plan.alternatives:
        shown = plan.alternatives if everything else plan.alternatives[:_FEW_ALTERNATIVES]
        yield "Considered", _alternatives(plan.layout, shown, hidden=len(plan.alternatives) - len(shown))
    if everything:
        yield "Assumes", Group(*(words(f"• {assumption}", "dim") for assumption in plan.assumptions))


def _layout(layout: Layout) -> RenderableType:
    axes = {
        "data": layout.data_parallel,
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "sequence": layout.sequence_parallel,
        "context": layout.context_parallel,
    }
    used = [f"{name} {degree}" for name, degree in axes.items() if degree > 1] or ["one rank"]
    extras = [f"ZeRO-{layout.zero_stage}"]
    if layout.expert_parallel > 1:
        extras.append(f"expert {layout.expert_parallel}")
    if layout.virtual_pipeline > 1:
        extras.append(f"{layout.virtual_pipeline} virtual stages")
    extras.append(f"activation checkpointing {layout.activation_checkpointing}")
    if layout.offload != "none":
        extras.append(f"offload {layout.offload}")
    batch = (
        f"{whole_text(layout.global_batch_size)} sequences per step = micro-batch {layout.micro_batch_size} "
        f"× accumulation {layout.gradient_accumulation_steps} × data {layout.data_parallel}"
    )
    return Group(words(f"{' × '.join(used)}, {', '.join(extras)}"), words(batch))


def _memory(plan: RunPlan, bar: int, unicode: bool) -> RenderableType:
    memory = plan.memory
    style = "green" if memory.fits else "red"
    parts = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer states": memory.optimizer_states,
        "activations": memory.activations,
        "logits and loss": memory.logits,
        "communication buffers": memory.communication_buffers,
        "framework": memory.framework,
        "fragmentation": memory.fragmentation,
    }
    rest = memory.capacity - memory.peak
    rows = {**parts, "free": rest} if rest >= 0 else parts
    bars = waterfall(list(map(float, rows.values())), max(memory.capacity, memory.peak), bar, unicode=unicode)
    lines = [
        _part(name, bytes_text(size), drawn, "dim" if name == "free" else style)
        for (name, size), drawn in zip(rows.items(), bars, strict=True)
        if size
    ]
    if rest < 0:
        lines.append(_part("too much", bytes_text(-rest), "", "red"))
    return Group(_memory_total(plan), *lines, *_stages(memory))


def _memory_total(plan: RunPlan) -> Text:
    memory = plan.memory
    rank = "per rank" if plan.layout.pipeline_parallel == 1 else "on the fullest stage"
    return Text.assemble(
        (bytes_text(memory.peak), "bold green" if memory.fits else "bold red"),
        f" of {bytes_text(memory.capacity)} ({percent_text(memory.peak / memory.capacity)}) {rank}",
        (f" · {binary_bytes_text(memory.peak)} of {binary_bytes_text(memory.capacity)}", "dim"),
    )


def _stages(memory: Memory) -> Iterator[Text]:
    if len(memory.by_stage) > 1:
        yield words(f"  by pipeline stage: {', '.join(bytes_text(stage.peak) for stage in memory.by_stage)}")


def _time(spec: RunSpec, time: Time, bar: int, unicode: bool) -> RenderableType:
    parts = {
        "compute": time.compute,
        "exposed communication": time.exposed_communication,
        "pipeline bubble": time.bubble,
        "optimizer": time.optimizer,
        "waiting for data": time.data_wait,
    }
    bars = waterfall(list(parts.values()), max(time.step, sum(parts.values())), bar, unicode=unicode)
    lines = [
        _part(name, seconds_text(seconds), drawn, "blue")
        for (name, seconds), drawn in zip(parts.items(), bars, strict=True)
        if seconds
    ]
    return Group(_time_total(time), *lines, _whole_run(spec, time))


def _time_total(time: Time) -> Text:
    hardware = f" (HFU {percent_text(time.hfu)})" if f"{time.hfu:.2f}" != f"{time.mfu:.2f}" else ""
    rates = f"{count_text(time.tokens_per_second)} tokens/s ({count_text(time.tokens_per_second_per_gpu)} per rank)"
    return Text.assemble(
        (seconds_text(time.step), "bold"), f" per step, MFU {percent_text(time.mfu)}{hardware}, {rates}"
    )


def _whole_run(spec: RunSpec, time: Time) -> Text:
    seen = count_text(spec.total_steps * spec.training.global_batch_size * spec.units_per_sample)
    return words(f"{seconds_text(time.to_train)} for all {whole_text(spec.total_steps)} steps ({seen} {spec.unit})")


def _part(name: str, amount: str, bar: str, style: str) -> Text:
    return Text.assemble(f"  {name:<{_PART}}{amount:>{_AMOUNT}} ", (bar, style))


def _network(plan: RunPlan) -> str:
    sent = {name: size for name, size in vars(plan.network.per_step_bytes).items() if size}
    if not sent:
        return "no traffic between ranks"
    listed = ", ".join(f"{name} {bytes_text(size)}" for name, size in sent.items())
    if len(sent) == 1:
        return f"each rank sends {bytes_text(sum(sent.values()))} per step, for {next(iter(sent))} parallelism"
    return f"each rank sends {bytes_text(sum(sent.values()))} per step: {listed}"


def _durability(spec: RunSpec, plan: RunPlan) -> str:
    durability = plan.durability
    grace = "within" if durability.grace_ok else "NOT within"
    return (
        f"checkpoint of {bytes_text(durability.checkpoint_bytes)} every {whole_text(durability.interval_steps)} steps "
        f"({seconds_text(durability.interval_seconds)}), saved in {seconds_text(durability.save_seconds)}, {grace} "
        f"the {seconds_text(spec.cluster.grace_seconds)} of grace; expected goodput {_goodput(plan)}"
    )


def _goodput(plan: RunPlan) -> str:
    """Two nines must not read as 100 %."""
    return f"{min(plan.durability.expected_goodput, 0.9999) * 100:.4g} %"


def _cost(plan: RunPlan) -> str:
    cost = plan.cost
    if cost.price_per_gpu_hour is None:
        return cost.price_source
    sums = {"on demand": cost.on_demand_usd, "spot": cost.spot_usd, "expected with interruptions": cost.expected_usd}
    listed = ", ".join(f"{dollars_text(amount)} {name}" for name, amount in sums.items() if amount is not None)
    return f"{listed}; {dollars_text(cost.price_per_gpu_hour)} per GPU and hour ({cost.price_source})"


def _alternatives(chosen: Layout, shown: tuple[Alternative, ...], hidden: int) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    columns = _columns([chosen, *(alternative.layout for alternative in shown)])
    for name in columns:
        table.add_column(name, no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("why not", overflow="fold")
    table.add_row(*(Text(name, "dim") for name in (*columns, "step", "memory", "why not")))
    for alternative in shown:
        table.add_row(
            *(str(getattr(alternative.layout, field)) for field in columns.values()),
            seconds_text(alternative.step_seconds),
            Text(bytes_text(alternative.peak_bytes), "" if alternative.fits else "red"),
            words(alternative.why if alternative.fits else "does not fit"),
        )
    more = [words(f"and {hidden} more; --all shows them", "dim")] if hidden else []
    return Group(table, *more)


def _columns(layouts: list[Layout]) -> dict[str, str]:
    """Column titles and fields; of the parallel axes only those in which the layouts differ."""
    axes = {
        "data": "data_parallel",
        "tensor": "tensor_parallel",
        "pipe": "pipeline_parallel",
        "seq": "sequence_parallel",
        "context": "context_parallel",
        "expert": "expert_parallel",
    }
    differ = {name: field for name, field in axes.items() if len({getattr(layout, field) for layout in layouts}) > 1}
    return {**differ, "ZeRO": "zero_stage", "micro": "micro_batch_size", "recompute": "activation_checkpointing"}
