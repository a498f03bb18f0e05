"""Each finding on a synthesized run that has the ill, and none on runs that only look like it."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import scaletrain_cli.diagnosis
from scaletrain_cli.diagnosis.case import Case, Dataset
from scaletrain_cli.diagnosis.checks import CHECKS, TEXTS, diagnose
from scaletrain_cli.diagnosis.history import Validation
from scaletrain_cli.plan.result import MeasuredError, Range, Ranges
from scaletrain_cli.rundir.goodput import Goodput
from scaletrain_cli.rundir.measured import Figure, Measured, StageFigures
from tests.diagnosis.histories import IMAGES, Values, case, falling, findings, observed, planned

LN_V = math.log(32000)
NAN = [{"event": "rolled-back", "cause": "nan", "from_step": 400, "to_step": 200, "steps": [400]}]
CORRUPTION = {"event": "corruption", "attempt": 1, "ranks": [3], "code": "engine.replica-differs", "params": {}}
HANG = {"event": "hang", "attempt": 1, "code": "launch.hung", "params": {"silent_seconds": 6}}


def noisy(value: float, noise: float = 0.01, seed: int = 3) -> Values:
    chance = random.Random(seed)
    return lambda step: value * (1 + chance.gauss(0, noise))


def fine_tuned(*overrides: str, **given: Any) -> Case:
    return case("model.weights=/weights", *overrides, **given)


def spikes_of_norm(step: int) -> float:
    return 30.0 if step % 60 == 0 else noisy(0.5, 0.05, step)(step)


def rises_at_the_start(step: int) -> float:
    return 10.4 + 3.0 * min(1.0, step / 30) if step < 300 else 8.0


STEP = planned()[1].time.step
RANK: Mapping[str, float | Values] = {
    "step_seconds": STEP,
    "communication_seconds": 0.1 * STEP,
    "own_seconds": 0.8 * STEP,
    "host_seconds": 0.2 * STEP,
    "data_wait_seconds": 0.001 * STEP,
    "memory_bytes": 2e10,
    "noise_scale": 60.0,
    "mfu": planned()[1].time.mfu,
}
GPU: Mapping[str, float | Values] = {
    "utilization": 0.97,
    "sm_clock_hertz": 1.9e9,
    "sm_clock_max_hertz": 1.98e9,
    "power_watts": 680.0,
    "temperature_celsius": 65.0,
    "throttled_by_heat": 0.0,
    "throttled_by_hardware": 0.0,
    "throttled_by_power": 0.2,
    "uncorrected_errors": 2.0,
    "pcie_replays": 7.0,
}
NODE: Mapping[str, float | Values] = {
    "cpu_utilization": 0.3,
    "cpu_throttled": 0.01,
    "memory_used_bytes": 2e11,
    "memory_available_bytes": 8e11,
}
LAYER: Mapping[str, float | Values] = {
    "gradient_norm": 0.2,
    "weight_norm": 20.0,
    "update_ratio": 0.003,
    "activation_rms": 1.5,
    "dead_share": 0.1,
}
WIDE = (
    *("model.hidden_size=4096", "model.num_attention_heads=32", "model.intermediate_size=11008"),
    *("training.micro_batch_size=2", "model.seq_len=2048"),
)
BLOCKS = [f"layers.{number}.mlp" for number in range(4)]


def watched(
    *overrides: str,
    rank: Mapping[str, float | Values] | None = None,
    gpu: Mapping[str, float | Values] | None = None,
    node: Mapping[str, float | Values] | None = None,
    layer: Mapping[str, float | Values] | None = None,
    both: Mapping[str, float | Values] | None = None,
    **columns: Values,
) -> Case:
    """Return a healthy run with telemetry; rank 1, GPU 1, the node or layer 2 differ. ``both``: of both ranks."""
    ranks = [{**RANK, **(both or {})}, {**RANK, **(both or {}), **(rank or {})}]
    layers = {name: {**LAYER, **((layer or {}) if name == BLOCKS[2] else {})} for name in BLOCKS}
    return observed(
        case(*overrides, **columns), ranks=ranks, gpus=[GPU, {**GPU, **(gpu or {})}], node={**NODE, **(node or {})},
        layers=layers,
    )  # fmt: skip


def text_of(tokens: int, entropy: float | None = 7.0, repeated: float | None = 0.02) -> Dataset:
    """Return a dataset with these figures, which are otherwise those of a sample of its files."""
    made = Dataset(tokens, "uint16", (), f"{tokens} {entropy} {repeated}")
    made.__dict__.update(token_entropy=entropy, repeated_share=repeated)
    return made


def on_text(dataset: Dataset, **columns: Any) -> Case:
    return replace(case(**columns), dataset=dataset)


EPOCH = 64 * 512  # tokens of a step


def in_stairs(step: int) -> float:
    return falling(10.4, 4.0, 0.004, step)(step) * (1 - 0.1 * ((step - 1) // 300))


def again_after_resume(step: int) -> float:
    return falling(10.4, 4.0, 0.004, step)(step) * (0.85 if 600 < step <= 680 else 1.0)


def swings(step: int) -> float:
    return falling(10.4, 6.0, 0.002, step)(step) + 0.7 * math.sin(2 * math.pi * step / 24)


def stands(level: float) -> Values:
    return lambda step: level + max(0.0, 10.4 - level) * math.exp(-step / 15) + random.Random(step).gauss(0, 0.02)


HEALTHY = {
    "a hang before this attempt": case(events=[HANG, {"event": "resumed", "attempt": 2, "step": 0}]),
    "a corrupt rank before this attempt": case(events=[CORRUPTION, {"event": "resumed", "attempt": 2, "step": 0}]),
    "pre-training": case(),
    "at its beginning": case(steps=range(1, 40)),
    "no steps yet": case(steps=()),
    "logged every 50 steps": case(steps=[1, *range(50, 2001, 50)]),
    "validated": case(validations=(4.2, 3.9, 3.8, 3.75, 3.7)),
    "fine-tuning that starts low": fine_tuned(loss=falling(1.4, 1.2), more={"learning_rate": lambda step: 2e-5}),
    "fine-tuning that stays level": fine_tuned(loss=noisy(1.2, 0.05), more={"learning_rate": lambda step: 2e-5}),
    "images": case(text=IMAGES, loss=falling(7.0, 3.0, 0.03)),
    "images that start elsewhere": case(text=IMAGES, loss=falling(9.0, 3.0, 0.03)),
    "a wide model": case("model.hidden_size=4096", "model.num_attention_heads=32", loss=falling(LN_V + 0.82, 3.2)),
    "with telemetry": watched(),
    "with telemetry, throttled by power alone": watched(gpu={"throttled_by_power": 0.9}),
    "text read twice": replace(case(validations=(4.2, 3.9, 3.8)), dataset=text_of(600 * EPOCH)),
    "one hard batch": case(loss=lambda step: 8.0 if step == 600 else falling(10.4, 3.2, 0.0)(step)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_warning(name: str) -> None:
    serious = [str(each.reason) for each in findings(HEALTHY[name]).values() if each.severity != "note"]
    assert serious == []


ILL: dict[str, tuple[Case, str]] = {
    "first loss high": (case(loss=falling(15, 3)), "first-loss-high"),
    "first loss low": (case(loss=falling(2.0, 1.0)), "first-loss-low"),
    "diverging": (
        case(loss=lambda step: 10.4 - 0.01 * step if step < 400 else 12.0 + 0.001 * step),
        "loss-above-start",
    ),
    "a fine-tuning that diverges": (
        fine_tuned(loss=lambda step: 1.4 if step < 500 else 1.4 + (step - 500) / 500),
        "loss-above-start",
    ),
    "rising": (case(loss=lambda step: 10.4 * step**-0.2 if step < 500 else 3.0 + (step - 500) / 250), "loss-rising"),
    "flat": (case(loss=noisy(10.37, 0.002)), "loss-flat"),
    "images that are not learned": (case(text=IMAGES, loss=noisy(6.9, 0.002)), "loss-flat"),
    "oscillating": (case(loss=lambda step: 6.0 + 0.6 * (-1) ** step - step / 1000), "loss-oscillating"),
    "many spikes": (
        case(loss=lambda step: 9.0 if step % 50 < 2 and step > 200 else falling(10.4, 3.2, 0.01, step)(step)),
        "loss-spikes",
    ),
    "a spike that stays": (
        case(loss=lambda step: 7.5 if step > 900 else falling(10.4, 3.2, 0.01, step)(step)),
        "loss-spikes",
    ),
    "nan": (case(events=NAN), "not-finite"),
    "learning rate too high": (case("training.optimizer.lr=0.2", loss=rises_at_the_start), "learning-rate-too-high"),
    "no warm-up": (case("training.schedule.warmup_steps=0", loss=rises_at_the_start), "warm-up-too-short"),
    "learning rate too low": (
        case("training.optimizer.lr=2.0e-6", loss=lambda step: 10.4 - 0.0003 * step),
        "learning-rate-too-low",
    ),
    "clipped": (case("training.gradient_clipping=0.05"), "always-clipped"),
    "norm grows": (case(grad_norm=lambda step: 0.3 + (step / 300) ** 4), "gradient-norm-grows"),
    "norm vanishes": (
        case(loss=falling(10.4, 7.0), grad_norm=lambda step: 1.0 if step < 400 else 1e-5),
        "gradient-vanishes",
    ),
    "norm spikes": (case(grad_norm=spikes_of_norm), "gradient-norm-spikes"),
    "dead": (case(events=[{"event": "dead-gradients", "step": 300, "norms": [0.0, 0.0, 0.0]}]), "gradients-dead"),
    "fp16": (
        case(
            "training.precision=fp16",
            more={
                "loss_scale": lambda step: max(1.0, 2.0 ** (16 - step // 20)),
                "skipped": lambda step: float(step % 20 == 0),
            },
        ),
        "loss-scale-collapses",
    ),
    "fp16 that ended the run early": (
        case(
            "training.precision=fp16",
            steps=range(1, 50),
            events=[{"event": "loss-scale-collapsed", "step": 23, "loss_scale": 4.0}],
            more={"loss_scale": lambda step: max(1.0, 2.0 ** (16 - step)), "skipped": lambda step: 1.0},
        ),
        "loss-scale-collapses",
    ),
    "overfitting": (case(validations=(4.2, 3.9, 4.1, 4.3, 4.6)), "overfitting"),
    "a fine-tuning that overfits": (
        fine_tuned(loss=falling(1.4, 0.2), validations=(1.3, 1.2, 1.5, 1.7, 1.9)),
        "overfitting",
    ),
    "a source that is not learned": (
        case(more={"loss/web": falling(10.4, 3.0), "loss/noise": noisy(7.0, 0.01)}),
        "source-stands-still",
    ),
    "waits for data": (case(data_wait=lambda step: 0.05, step_seconds=lambda step: 0.2), "data-wait"),
    "slow rank": (
        case(events=[{"event": "stragglers", "step": 40, "rank": 1, "seconds": 0.5, "others_seconds": 0.1}]),
        "slow-rank",
    ),
    "slower than planned": (case(step_seconds=lambda step: 2 * planned()[1].time.step), "slower-than-plan"),
    "slowing down": (case(step_seconds=lambda step: planned()[1].time.step * (1 + (step > 500))), "slowing-down"),
    "leak": (case(memory_bytes=lambda step: 2e10 + step * 4e7), "memory-grows-full"),
    "slow saves": (
        case(events=[{"event": "checkpoint", "step": 20 * n, "seconds": 90, "blocked_seconds": 80} for n in range(9)]),
        "saves-slow",
    ),
    "swings": (case(loss=swings), "loss-swings"),
    "labels unshifted": (case(loss=stands(0.2), validations=(0.4, 0.3, 0.25)), "targets-visible"),
    "labels shifted twice": (on_text(text_of(10**9), loss=stands(6.7)), "order-not-learned"),
    "copies": (on_text(text_of(10**9, repeated=0.8)), "data-duplicated"),
    "a little text": (on_text(text_of(100 * EPOCH)), "data-repeated"),
    "an overfitted text": (on_text(text_of(300 * EPOCH), loss=in_stairs), "loss-stairs"),
    "a sampler that begins anew": (
        case(loss=again_after_resume, events=[{"event": "resumed", "step": 600, "attempt": 2}]),
        "loss-falls-at-resume",
    ),
    "other validation data": (case(validations=(8.5, 8.2, 8.0)), "validation-far-above"),
    "other validation data in the first epoch": (
        on_text(text_of(10**9), validations=(8.0, 8.4, 8.8, 9.2, 9.6)),
        "validation-far-above",
    ),
    "underfitting": (
        on_text(text_of(10**9), loss=stands(6.0), validations=(6.05, 6.02, 6.0, 6.0, 6.0)),
        "underfitting",
    ),
    "a batch too large": (watched(both={"noise_scale": 2.0}), "batch-too-large"),
    "a dead layer": (watched(layer={"gradient_norm": 0.0}), "layer-dead"),
    "a silent layer": (watched(layer={"dead_share": 0.9}), "layer-silent"),
    "an exploding layer": (watched(layer={"activation_rms": 800.0}), "layer-exploding"),
    "an exploding gradient": (watched(layer={"gradient_norm": 90.0}), "layer-exploding"),
    "large updates": (watched(layer={"update_ratio": 0.2}), "update-ratio"),
    "host": (
        watched("training.micro_batch_size=1", both={"host_seconds": 0.98 * STEP}, gpu={"utilization": 0.2}),
        "host-bound",
    ),
    "a slow link": (watched(both={"communication_seconds": 0.6 * STEP}), "communication-bound"),
    "a rank with slow work": (
        watched(both={"communication_seconds": 0.6 * STEP}, rank={"communication_seconds": 0.02 * STEP}),
        "slow-rank",
    ),
    "a rank that is slow again": (
        replace(
            watched(both={"communication_seconds": 0.6 * STEP}, rank={"communication_seconds": 0.02 * STEP}),
            events=[
                {"event": "stragglers", "rank": 1, "seconds": 1.0, "others_seconds": 0.1},
                {"event": "stragglers", "rank": None},
            ],
        ),
        "slow-rank",
    ),
    "tiny micro-batches": (case("training.micro_batch_size=1"), "micro-batches-small"),
    "recomputation": (
        observed(case("layout.activation_checkpointing=full", *WIDE), ranks=[{**RANK, "memory_reserved_bytes": 1e10}]),
        "recomputation-needless",
    ),
    "low MFU": (watched(both={"mfu": 0.01, "forward_seconds": 0.7 * STEP}), "utilization-low"),
    "heat": (watched(gpu={"throttled_by_heat": 0.3, "temperature_celsius": 91.0}), "gpu-hot"),
    "a power brake": (watched(gpu={"throttled_by_hardware": 0.1}), "gpu-slowed-by-hardware"),
    "a slow clock": (watched(gpu={"sm_clock_hertz": 1.2e9}), "gpu-slow-clock"),
    "power": (watched(gpu={"throttled_by_power": 0.9}), "gpu-at-power-limit"),
    "ECC": (watched(gpu={"uncorrected_errors": lambda step: 2.0 + (step > 500)}), "gpu-errors"),
    "PCIe": (watched(gpu={"pcie_replays": lambda step: 7.0 + step}), "pcie-replays"),
    "a CPU limit": (watched(node={"cpu_throttled": 0.4}), "cpu-throttled"),
    "a node short of memory": (watched(node={"memory_available_bytes": 4e9}), "node-memory-short"),
    "a leak on rank 1": (watched(rank={"memory_bytes": lambda step: 2e10 + step * 4e7}), "memory-grows-full"),
    "a hang": (case(events=[HANG]), "hung"),
    "a corrupt rank": (case(events=[CORRUPTION]), "state-corrupted"),
    "restarts": (
        replace(
            case(events=[{"event": "started", "attempt": n, "step": 0} for n in (1, 2, 3)]),
            goodput=Goodput(2000, 0, 0, 900, 0, 0, 500, 300, 0),
        ),
        "restarts",
    ),
}


@pytest.mark.parametrize("name", ILL)
def test_an_ill_is_named_first_or_second_with_a_figure_and_a_change(name: str) -> None:
    given, code = ILL[name]
    found = findings(given)
    assert code in list(found)[:2], {each: str(finding.reason) for each, finding in found.items()}
    finding = found[code]
    assert any(character.isdigit() for character in str(finding.reason))
    assert finding.causes
    for cause in finding.causes:
        assert not str(cause.reason).startswith("diagnosis."), cause.reason
        if cause.change is not None:
            assert cause.change.place.startswith(("run.yaml:", "--set")), cause.change
    json.dumps(diagnose("r", given).to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("optimizer", "keys"),
    [
        ("{name: adamw, lr: 1.0e-3}", ["lr", "betas"]),
        ("{name: adamw, lr: 1.0e-3, betas: [0.95, 0.99]}", ["betas", "lr"]),
        ("{name: lion, lr: 1.0e-3}", ["lr", "betas"]),
        ("{name: momentum, lr: 0.1}", ["lr", "momentum"]),
        ("{name: momentum, lr: 0.1, momentum: 0.99}", ["momentum", "lr"]),
        ("{name: muon, lr: 0.02}", ["momentum", "lr"]),
        ("{name: sgd, lr: 0.1}", ["lr"]),
    ],
)
def test_a_loss_that_swings_has_momentum_as_a_cause_where_the_optimizer_reads_it(
    optimizer: str, keys: list[str]
) -> None:
    causes = findings(case(f"training.optimizer={optimizer}", loss=swings))["loss-swings"].causes
    assert [cause.change and cause.change.key.rpartition(".")[2] for cause in causes] == keys


@pytest.mark.parametrize(
    ("validations", "flagged"), [((7.2, 6.9, 6.6), False), ((6.8, 6.75, 6.7), True), ((6.6,), True)]
)
def test_a_model_that_leaves_the_token_frequencies_learns(validations: tuple[float, ...], flagged: bool) -> None:
    found = findings(on_text(text_of(10**9), loss=stands(6.7), validations=validations))
    assert ("order-not-learned" in found) == flagged


NOT_FOR_FINE_TUNING = (
    *("first-loss-high", "first-loss-low", "loss-above-uninformed", "loss-flat", "learning-rate-too-low"),
    *("targets-visible", "order-not-learned", "data-repeated", "underfitting"),
)


@pytest.mark.parametrize("loss", [0.3, 2.0, 14.0])
@pytest.mark.parametrize("overrides", [("model.weights=/weights",), ("model.adapter.name=lora",)], ids=str)
def test_given_weights_and_adapters_get_no_alarm_of_a_new_model(loss: float, overrides: tuple[str, ...]) -> None:
    rates = {"learning_rate": lambda step: 1e-6}
    given = case(
        *overrides, "training.optimizer.lr=1.0e-6", loss=noisy(loss, 0.001), validations=(loss,) * 5, more=rates
    )
    found = findings(replace(given, dataset=text_of(50 * EPOCH, entropy=loss)))
    assert not found.keys() & set(NOT_FOR_FINE_TUNING)


@pytest.mark.parametrize("loss", [1.0, 14.0])
def test_images_get_no_alarm_about_the_vocabulary(loss: float) -> None:
    found = findings(case(text=IMAGES, loss=falling(loss, loss / 3)))
    assert not found.keys() & {"first-loss-high", "first-loss-low", "learning-rate-too-low"}


def test_images_above_the_loss_of_equal_outputs_are_reported() -> None:
    """ln 1000 = 6.91, for the classes of ImageNet."""
    found = findings(case(text=IMAGES, loss=lambda step: max(8.0, 9.5 - step / 100)))
    assert found["loss-above-uninformed"].reason.params["uninformed"] == pytest.approx(math.log(1000))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (case(validations=(4.2, 3.9, 3.95, 3.94, 3.93)), "overfitting"),
        (case(validations=(4.2, 3.9, 4.6, 3.9, 3.8)), "overfitting"),
        (case(data_wait=lambda step: 0.0002, step_seconds=lambda step: 0.0015), "slower-than-plan"),
        (case(memory_bytes=lambda step: 2e10 + min(step, 300) * 4e7), "memory-grows"),
        # measured: 26 % in 1,200 steps, and malloc_trim then returned more than had come
        (case("cluster.gpu=cpu", memory_bytes=lambda step: 5.77e8 + 1.1e5 * step), "memory-grows"),
        (case("training.optimizer.name=adamw", grad_norm=noisy(1.5)), "always-clipped"),
        (case(more={"loss/web": falling(10.4, 3.0), "loss/code": falling(9.0, 2.0)}), "source-stands-still"),
        (case(more={"loss/web": falling(10.4, 3.0), "loss/code": falling(5.0, 2.5)}), "source-stands-still"),
        (case(events=[{"event": "stragglers", "rank": 1, "seconds": 1.0, "others_seconds": 0.1},
                      {"event": "stragglers", "rank": None}]), "slow-rank"),
        (case("training.precision=fp16", more={"loss_scale": lambda step: 2.0**15, "skipped": lambda step: 0.0}),
         "loss-scale-collapses"),
        (case("cluster.gpu=cpu", step_seconds=lambda step: 100.0), "slower-than-plan"),
        (case("training.optimizer.lr=2.0e-6", steps=range(1, 120)), "learning-rate-too-low"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_only_looks_like_an_ill_is_not_reported(given: Case, code: str) -> None:
    assert code not in findings(given)


@pytest.mark.parametrize(("p90", "severity"), [(1.2, "warning"), (2.0, "note")])
def test_steps_slower_than_planned_are_no_warning_within_the_range_of_the_plan(p90: float, severity: str) -> None:
    given = case(step_seconds=lambda step: 1.8 * planned()[1].time.step)
    seconds, error = given.plan.time.step, MeasuredError(True, "deepspeed", "one node", "hopper")
    ranges = Ranges(error, error, step_seconds=Range(0.9 * seconds, p90 * seconds))
    found = findings(replace(given, plan=replace(given.plan, ranges=ranges)))
    assert found["slower-than-plan"].severity == severity


def test_a_short_wait_for_data_is_a_note_and_clipping_is_serious_with_sgd() -> None:
    short = findings(case(data_wait=lambda step: 0.0005, step_seconds=lambda step: 0.002))
    assert short["data-wait"].severity == "note"
    clipped = ("training.gradient_clipping=0.05", "training.optimizer={name: sgd, lr: 0.1}")
    assert findings(case(clipped[0]))["always-clipped"].severity == "note"
    assert findings(case(*clipped))["always-clipped"].severity == "warning"


def test_memory_is_compared_with_its_capacity_and_its_plan() -> None:
    plan = planned()[1].memory
    figures = {"reserved": Figure(plan.reserved, plan.capacity), "activations": Figure(10**9, 3 * 10**9)}
    measured = Measured(1, 2, 2, "cuda", 0, (StageFigures(0, figures),))
    found = findings(replace(case(), measured=measured))
    assert found["memory-nearly-full"].severity == "warning"
    assert "3.00 GB" in str(found["memory-above-plan"].reason)


def test_growth_on_a_cpu_is_reported_only_if_memory_becomes_full_and_with_low_confidence() -> None:
    """Resident memory includes free blocks of the C library; what torch counts on a GPU does not."""
    on_gpu = findings(case(memory_bytes=lambda step: 5.77e8 + 1.1e5 * step))["memory-grows"]
    assert (on_gpu.severity, on_gpu.confidence) == ("note", "medium")
    full = 1.01 * planned(overrides=("cluster.gpu=cpu",))[1].memory.capacity / 2000
    on_cpu = findings(case("cluster.gpu=cpu", memory_bytes=lambda step: full * step))["memory-grows-full"]
    assert (on_cpu.severity, on_cpu.confidence) == ("warning", "low")
    assert on_cpu.causes[0].reason.code == "diagnosis.cause-free-blocks"
    assert "diagnosis.cause-free-blocks" not in [cause.reason.code for cause in on_gpu.causes]


ENDED = {"event": "attempt-ended", "reason": "nan", "params": {"failure": {"params": {"step": 700}}}}


@pytest.mark.parametrize(("share", "severity"), [(0.5, "note"), (0.8, "warning")])
def test_half_of_a_step_in_collectives_is_no_warning_on_a_cpu(share: float, severity: str) -> None:
    ranks = [{**RANK, "step_seconds": 0.1, "communication_seconds": 0.1 * share}] * 2
    assert findings(observed(case("cluster.gpu=cpu"), ranks=ranks))["communication-bound"].severity == severity


def test_the_number_of_workers_is_that_of_the_event_if_the_spec_leaves_it_open() -> None:
    waits = {"data_wait": lambda step: 0.05, "step_seconds": lambda step: 0.2}
    event = {"event": "data-wait", "step": 1000, "share": 0.3, "rank": 1, "workers": 6, "prefetch": 2}
    chosen = findings(case(more=waits))["data-wait"].causes[0]
    assert chosen.reason.code == "diagnosis.cause-chosen-workers"
    known = findings(case(events=[event], more=waits))["data-wait"]
    assert (known.reason.params["rank"], known.causes[0].reason.params["workers"]) == (1, 6)
    change = findings(case("data.loader.workers=4", more=waits))["data-wait"].causes[0].change
    assert change is not None
    assert (change.given, change.to) == (4, 8)


def test_values_that_are_not_finite_are_an_error_until_training_goes_on() -> None:
    stopped = findings(case(steps=range(1, 700), events=[ENDED]))["not-finite"]
    assert (stopped.severity, stopped.reason.params["step"]) == ("error", 700)
    assert stopped.causes[0].reason.code == "diagnosis.cause-bad-batch"
    assert findings(case(events=[ENDED]))["not-finite"].severity == "warning"
    grown = case(steps=range(1, 700), events=[ENDED], grad_norm=lambda step: 0.4 if step < 696 else 20.0)
    exploded = findings(grown)["not-finite"]
    assert exploded.causes[0].reason.code == "diagnosis.cause-rate-too-high"


@pytest.mark.parametrize(("rate", "proposed"), [(6e-4, 2e-4), (1e6, 1e-3)])
def test_a_lower_learning_rate_is_a_third_and_never_above_usual_ones(rate: float, proposed: float) -> None:
    assert case(f"training.optimizer.lr={rate}").lower_rate == proposed


def test_runs_of_few_steps_have_no_warning_for_what_they_have_no_time_for() -> None:
    short = ("training.steps=60", "training.schedule.warmup_steps=6", "evaluation.every=15")
    made = case(*short, steps=range(1, 61), loss=lambda step: max(8.6, 10.4 - 0.1 * step))
    validated = [Validation(step, 8.65, 64, {}) for step in (15, 30, 45, 60)]
    found = findings(replace(made, history=replace(made.history, validations=validated)))
    assert "underfitting" not in found
    slow = findings(
        case(*short, "training.optimizer.lr=1.0e-4", steps=range(1, 61), loss=lambda step: 10.4 - step / 80)
    )
    rate = slow["learning-rate-too-low"]
    assert (rate.severity, rate.causes[0].reason.code) == ("note", "diagnosis.cause-few-steps")
    assert {one.severity for one in (*found.values(), *slow.values())} <= {"note"}


def test_the_use_of_limited_cores_is_null_where_it_is_not_measured() -> None:
    throttled = {"cpu_throttled": 0.4}
    unknown = findings(observed(case(), ranks=[RANK], node=throttled))["cpu-throttled"]
    assert unknown.reason.params["utilization"] is None
    known = findings(observed(case(), ranks=[RANK], node={**throttled, "cpu_utilization": 0.9}))["cpu-throttled"]
    assert known.reason.params["utilization"] == pytest.approx(0.9)


def test_a_loss_that_a_program_logged_as_nan_is_an_error_until_training_goes_on() -> None:
    made = case(steps=range(1, 700))
    stopped = findings(replace(made, history=replace(made.history, not_finite=[650, 700, 701])))["not-finite"]
    assert (stopped.severity, stopped.reason.params["step"], stopped.reason.params["count"]) == ("error", 700, 3)
    went_on = findings(replace(made, history=replace(made.history, not_finite=[650])))["not-finite"]
    assert (went_on.severity, went_on.reason.params["step"]) == ("warning", 650)


def test_the_interval_of_checkpoints_is_compared_with_the_best_one() -> None:
    saves = [
        {"event": "checkpoint", "step": step, "seconds": 30, "blocked_seconds": 20, "bytes": 1e9}
        for step in range(5, 200, 5)
    ]
    slow = case("cluster.mean_time_between_interruptions=1h", events=saves, step_seconds=lambda step: 2.0)
    finding = findings(slow)["checkpoint-interval"]
    change = finding.causes[0].change
    assert change is not None
    assert change.to > 5 * 5
    assert finding.reason.params["excess"] > 0.5
    best = [save | {"step": (number + 1) * change.to} for number, save in enumerate(saves)]
    assert "checkpoint-interval" not in findings(
        case("cluster.mean_time_between_interruptions=1h", events=best, step_seconds=lambda step: 2.0)
    )


def test_a_damaged_event_does_not_end_the_diagnosis() -> None:
    events: list[dict[str, Any]] = [
        {"event": "data-wait", "step": 1000, "share": "much"},
        {"event": "rolled-back", "cause": "spike"},
    ]
    events += [{"event": "checkpoint", "step": [1], "seconds": None}] * 5 + [{"event": "stragglers", "rank": {}}]
    found = diagnose("r", case(events=events, grad_norm=spikes_of_norm))
    assert "diagnosis.gradient-norm-spikes" in [finding.code for finding in found.findings]
    assert "diagnosis.check-failed" in [reason.code for reason in found.not_concluded]


def test_every_finding_has_a_case_here_and_every_text_is_used() -> None:
    folder = Path(scaletrain_cli.diagnosis.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    assert {code for code in TEXTS if f'"diagnosis.{code}"' not in source} == set()
    shown = {code for _, code in ILL.values()} | {"memory-grows", "memory-nearly-full", "memory-above-plan"}
    shown |= {"checkpoint-interval", "loss-above-uninformed", "saves-block"}
    shown |= {"mirror-behind", "mirror-failing"}  # tests/launch/node/test_mirroring.py
    found = {code for code in TEXTS if not code.startswith("cause-") and f'Reason("diagnosis.{code}"' in source}
    unseen = set("few-steps sampled not-from-scratch not-text no-validation on-cpu check-failed elsewhere".split())
    unseen |= {code for code in TEXTS if code.startswith("no-")}
    assert found - shown - unseen - {"rate-needs-trial"} == set()
    assert len(CHECKS) > 40


def test_the_loss_of_equal_outputs_is_not_that_of_given_weights() -> None:
    assert case().uninformed_loss == pytest.approx(LN_V)
    assert fine_tuned().uninformed_loss is None
    assert case("training.objective=dpo", "data.source=python-docstrings").uninformed_loss is None
