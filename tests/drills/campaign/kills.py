"""Ranks killed and preempted at random times, half of them inside a save: nothing is lost but time."""

import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaletrain_cli.launch.preparation import prepare_data
from scaletrain_cli.spec import RunSpec
from tests.drills.campaign.forked_attempts import Attempt, ForkedRun, strays
from tests.drills.training_runs import drill_spec
from tests.drills.vision_runs import vision_spec

_KILLS_PER_RUN = 5
_SLOW_SAVE = "slow-save seconds=0.15"


@dataclass
class Kills:
    """The counts of the kills and of violated claims."""

    kills: int = 0
    in_saves: int = 0
    failed_resumes: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


ZERO_STAGES: dict[str, dict[str, Any]] = {f"stage {stage}": {"layout__zero_stage": stage} for stage in range(4)}
_ROWS = {"data__source": "python-docstrings", "training__schedule": "{warmup_steps: 5}", "model__seq_len": 64}
_SFT = {**_ROWS, "training__objective": "sft", "data__truncation": "drop", "data__packing": "best_fit"}
_DPO = {**_ROWS, "training__objective": "dpo", "data__truncation": "keep_start"}
_LORA = {"model__adapter": "{name: lora, rank: 4, dropout: 0.0}", "training__trainable": "[{match: '*norm*'}]"}
_STAGES = "[{match: '*.mlp.*', end_step: 17}, {match: '*', start_step: 18}]"
FINE_TUNING: dict[str, dict[str, Any]] = {
    "SFT": _SFT,
    "SFT with LoRA, ZeRO-3": {**_SFT, **_LORA, "layout__zero_stage": 3},
    "SFT in two stages": {**_SFT, "training__trainable": _STAGES},
    "DPO with LoRA": {**_DPO, **_LORA},
}
_MUON = {"training__optimizer": "{name: muon, lr: 1.0e-3}"}
_GROUPS = {"training__local_sgd": "{groups: 2, inner_steps: 7}"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Muon, ZeRO-1": {**_MUON, "layout__zero_stage": 1},
    "Muon, ZeRO-3": {**_MUON, "layout__zero_stage": 3},
    "local SGD, ZeRO-0": {**_GROUPS, "layout__zero_stage": 0},
    "local SGD of Muon, ZeRO-2": {**_GROUPS, **_MUON},
}

_EMA = "{name: ema, every: 1, decay: 0.9}"
# By name the family and its settings. The micro-batches of CLIP share one InfoNCE loss (GradCache).
_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet with synchronized BatchNorm, EMA, mixup, a reader process, ZeRO-1": (
        "resnet",
        {"layout__zero_stage": 1, "training__averaging": _EMA, "data__loader__workers": 1},
    ),
    "ViT with layer decay, ZeRO-3": (
        "vit",
        {"layout__zero_stage": 3, "training__optimizer__layer_decay": 0.75, "training__micro_batch_size": 6},
    ),
    "CLIP with accumulation": ("clip", {}),
}


def text_specs(dataset: Path, kinds: Mapping[str, dict[str, Any]]) -> dict[str, RunSpec]:
    """Return the spec of each kind of run on text, from its overrides."""
    return {name: drill_spec(dataset, checkpoint__every=5, **overrides) for name, overrides in kinds.items()}


def vision_specs(pairs: Path) -> dict[str, RunSpec]:
    """Return the spec of each kind of run on images. ``pairs``: folder of ``draw_pairs``."""
    return {
        name: vision_spec(family, pairs, checkpoint__every=5, **overrides)
        for name, (family, overrides) in _VISION.items()
    }


def kill(specs: Mapping[str, RunSpec], kills: int, chance: random.Random) -> Kills:
    """Kill ranks ``kills`` times over all kinds of runs; each run is killed a few times and then finishes."""
    found = Kills()
    for name, spec in specs.items():
        wanted = found.kills + -(-kills // len(specs))
        prepare_data(spec)
        undisturbed = ForkedRun.create(spec)
        undisturbed.attempts_to_end(_SLOW_SAVE)
        took = undisturbed.seconds_of_first_attempt()
        while found.kills < wanted:
            _kill_one_run(ForkedRun.create(spec), undisturbed, took, found, chance)
            print(f"  {name}: {found.kills} kills, {found.in_saves} of them in a save", flush=True)
    return found


def _kill_one_run(run: ForkedRun, undisturbed: ForkedRun, took: float, found: Kills, chance: random.Random) -> None:
    for _ in range(_KILLS_PER_RUN):
        in_save, committed = chance.random() < 0.5, run.newest_step()
        strike = _Strike(chance, took, in_save)
        attempt = run.attempt(strike, _SLOW_SAVE)
        if not strike.struck:
            break  # it was through before
        found.kills += 1
        found.in_saves += strike.saw_save
        begun = [event["step"] for event in run.events("started", "resumed") if event.get("attempt") == attempt.number]
        if (begun and begun[0] < committed) or run.newest_step() < committed:
            found.failed_resumes.append(f"{run.run.run_id} attempt {attempt.number}: {committed}, then {begun}")
    run.attempts_to_end(_SLOW_SAVE)
    found.different += [f"{run.run.run_id}: {path}" for path in strays(run, undisturbed)]


class _Strike:
    """Send SIGKILL or SIGTERM to a random rank, at a random time of the run or of a save."""

    def __init__(self, chance: random.Random, took: float, in_save: bool) -> None:
        self._chance, self._took, self._in_save = chance, took, in_save
        self.struck = self.saw_save = False

    def __call__(self, attempt: Attempt) -> None:
        rank, number = self._chance.randrange(attempt.world_size), self._chance.choice((signal.SIGKILL, signal.SIGTERM))
        attempt.pids()
        if self._in_save:
            saves = self._chance.randrange(1, 4)
            seen: set[Path] = set()

            def saving() -> bool:
                seen.update(attempt.run.checkpoints.glob(f"attempt-{attempt.number:04d}.tmp/step-*"))
                return len(seen) >= saves

            self.saw_save = attempt.wait_for(saving)
            attempt.over.wait(self._chance.uniform(0, 0.2))
        else:
            attempt.over.wait(self._chance.uniform(0, self._took))
        if not attempt.over.is_set():
            self.struck = True
            attempt.send(number, rank)
