"""Texts about what ranks and GPUs measure, on the screens of `status` and `watch`."""

from __future__ import annotations

from scaletrain_cli.diagnosis.hardware import Hardware, Spread
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.text import bytes_text, counted, percent_text, seconds_text

_MANY = 2  # from which on the worst of several is named
_PART_NAMES = {
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimizer",
    "communication_seconds": "communication",
    "data_wait_seconds": "data wait",
}
_THROTTLE_NAMES = {
    "throttled_by_power": "power",
    "throttled_by_heat": "heat",
    "throttled_by_hardware": "the hardware",
}
_LEAST_THROTTLED = 0.01


def rank_memory_text(memory: Spread, plan: RunPlan) -> str:
    """Return ``rank 3 61.2 GB, median 60.1 GB of 8 ranks; planned 62.0 GB of 80.0 GB``.

    Of very many ranks a part is read, which the text tells: ``of 512 ranks (of 4,096)``.
    """
    world = plan.layout.world_size
    part = f" (of {world:,})" if memory.count < world else ""
    worst = f"{memory.highest_name} {bytes_text(memory.highest)}"
    others = (
        f", median {bytes_text(memory.median)} of {counted(memory.count, 'rank')}{part}" if memory.count > 1 else ""
    )
    return f"{worst}{others}; planned {bytes_text(plan.memory.peak)} of {bytes_text(plan.memory.capacity)}"


def gpu_text(hardware: Hardware) -> str:
    """Return ``97 % used (gpu07/0 80 %), 1.98 GHz, up to 71 °C (gpu07/0), 650 W each``; empty without GPUs."""
    parts = []
    if (use := hardware.gpu_spreads.get("utilization")) is not None:
        parts.append(f"{percent_text(use.median)} used{_named(use.lowest_name, percent_text(use.lowest), use)}")
    if (clock := hardware.gpu_spreads.get("sm_clock_hertz")) is not None:
        slowest = _named(clock.lowest_name, f"{clock.lowest / 1e9:.2f}", clock)
        parts.append(f"{clock.median / 1e9:.2f} GHz{slowest}")
    if (heat := hardware.gpu_spreads.get("temperature_celsius")) is not None:
        parts.append(f"up to {heat.highest:.0f} °C{f' ({heat.highest_name})' if heat.count >= _MANY else ''}")
    if (power := hardware.gpu_spreads.get("power_watts")) is not None:
        parts.append(f"{power.median:,.0f} W each" if power.count >= _MANY else f"{power.median:,.0f} W")
    for column, name in _THROTTLE_NAMES.items():
        share = hardware.throttled.get(column)
        if share is not None and share.highest >= _LEAST_THROTTLED:
            parts.append(f"{share.highest_name} throttled by {name} {percent_text(share.highest)} of the time")
    return ", ".join(parts)


def step_parts_text(hardware: Hardware) -> str:
    """Return ``420 ms: forward 120 ms, backward 260 ms, communication 40 ms``, means of the same latest steps.

    Empty if no rank measures its parts.
    """
    parts = {_PART_NAMES[name]: seconds for name, seconds in hardware.step_parts.items()}
    text = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items())
    return text if not parts or hardware.step_seconds is None else f"{seconds_text(hardware.step_seconds)}: {text}"


def planned_parts_text(plan: RunPlan) -> str:
    """Return the planned parts of a step that take at least 0.5 % of it, largest first."""
    time = plan.time
    parts = {
        "compute": time.compute,
        "communication": time.exposed_communication,
        "bubble": time.bubble,
        "optimizer": time.optimizer,
        "data wait": time.data_wait,
    }
    named = sorted(parts, key=lambda name: -parts[name])
    return ", ".join(f"{name} {seconds_text(parts[name])}" for name in named if parts[name] >= 0.005 * time.step)


def _named(name: str, text: str, spread: Spread) -> str:
    return f" ({name} {text})" if spread.count >= _MANY and spread.lowest < 0.95 * spread.median else ""
