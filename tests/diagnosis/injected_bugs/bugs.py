"""Injected training bugs: runs with one injected bug each, and the finding that has to name it. No tests here."""

from dataclasses import dataclass

from tests.diagnosis.injected_bugs.runs import Trial
from tests.diagnosis.injected_bugs.specs import NOISE


@dataclass(frozen=True)
class Bug:
    """A trial with a bug, the codes that name it, a key that they have to change, and the step at which it shows."""

    trial: Trial
    codes: tuple[str, ...]
    key: str = ""
    shows: int = 1


def _text(*overrides: str, fault: str = "", injected: str = "", attempts: int = 1) -> Trial:
    return Trial("text", overrides, fault, injected, attempts)


def _images(*overrides: str, injected: str = "") -> Trial:
    return Trial("images", overrides, injected=injected)


_RATE, _WARM_UP, _BETAS = "training.optimizer.lr", "training.schedule.warmup_steps", "training.optimizer.betas"
_CLIPPING = "training.gradient_clipping"
_TWO = "cluster.gpus_per_node=2"
_GPT = (
    "model={family: gpt, hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 384, seq_len: 32}"
)
_SMALL = (
    *("model.hidden_size=16", "model.num_attention_heads=2", "model.num_hidden_layers=1", "model.seq_len=8"),
    "model.intermediate_size=16",
)
# Rows of nodes around a validation or a save do not count, which in a run of seconds are most of them.
_NO_PAUSES = ("evaluation.every=0", "checkpoint.every=1000")
_FP16 = ("training.precision=fp16", "training.loss_scale.window=20")
_KILLS = "; ".join(f"sigkill step=50 attempt={attempt}" for attempt in (1, 2, 3))
BUGS: dict[str, Bug] = {
    "learning rate x 300": Bug(_text(f"{_RATE}=1.5"), ("learning-rate-too-high",), _RATE),
    "learning rate / 300": Bug(_text(f"{_RATE}=1.6e-5"), ("learning-rate-too-low",), _RATE),
    "no warm-up": Bug(
        _text(_GPT, f"{_RATE}=0.1", f"{_WARM_UP}=0", f"{_BETAS}=[0.9, 0.999]", "training.gradient_clipping=0"),
        ("warm-up-too-short",),
        _WARM_UP,
    ),
    "clipping at 0.01": Bug(_text(f"{_CLIPPING}=0.01"), ("always-clipped",), _CLIPPING),
    "first weights x 25": Bug(_text("model.initializer_range=0.5"), ("first-loss-high",), "model.initializer_range"),
    "weight decay of 16": Bug(
        _text("training.optimizer.weight_decay=16", "training.steps=240"),
        ("underfitting",), "training.optimizer.weight_decay"
    ),
    "labels shifted twice": Bug(_text(injected="labels-twice"), ("order-not-learned",), "data"),
    "labels not shifted": Bug(_text(injected="labels-unshifted"), ("targets-visible",), "data"),
    "classes by chance": Bug(_images(injected="class-of-chance"), ("loss-flat",), "data"),
    "one class for all images": Bug(_images(injected="one-class"), ("targets-visible",), "data"),
    "a little text, validated": Bug(
        _text("data.source=little.txt", "data.validation_split=0.3", "training.steps=320"),
        ("overfitting",),
        "data",
        120,
    ),
    "a little text, not validated": Bug(
        _text("data.source=little.txt", "training.steps=240", "evaluation.every=0"), ("data-repeated",), "data"
    ),
    "twenty copies of a text": Bug(_text("data.source=copies.txt"), ("data-duplicated",), "data"),
    "a source of noise": Bug(
        _text("data.source=null", NOISE, "training.steps=240"), ("source-stands-still",), "data.sources"
    ),
    "validation data of another tokenizer": Bug(
        _text("evaluation.every=20", injected="other-validation"), ("validation-far-above",), "data", 60
    ),
    "a spike": Bug(_text(fault="spike step=100-104 factor=20"), ("loss-spikes",), "data", 100),
    "a batch that gives NaN": Bug(
        _text("guard.nan=rollback", "checkpoint.every=10", fault="nan step=60"), ("not-finite",), "data", 60
    ),
    "fp16 that overflows": Bug(
        _text(*_FP16, injected="large-gradients 20000"), ("loss-scale-collapses",), "training.precision"
    ),
    "a dead block": Bug(_text(injected="dead-layer"), ("layer-dead",)),
    "an exploding block": Bug(_text("training.steps=80", injected="exploding-layer 30"), ("layer-exploding",)),
    "a batch far too large": Bug(
        _text(
            *_SMALL, "training.global_batch_size=256", "training.micro_batch_size=64", "training.steps=260",
            f"{_RATE}=2.0e-4", "training.schedule.name=constant",
        ),
        ("batch-too-large",),
        "training.global_batch_size",
        200,
    ),
    "micro-batches of 1": Bug(
        _text("training.global_batch_size=32", "training.micro_batch_size=1", "training.steps=60"),
        ("micro-batches-small",),
        "training.micro_batch_size",
    ),
    "a slow disk": Bug(_text("training.steps=100", injected="slow-reads 0.15"), ("data-wait",), "data.loader.workers"),
    "a slow rank": Bug(_text(_TWO, "training.steps=120", fault="slow-rank rank=1 seconds=0.03"), ("slow-rank",)),
    "a rank stopped in part": Bug(_text(_TWO, "training.steps=120", injected="stopped 0.8"), ("slow-rank",)),
    "a niced rank among busy cores": Bug(_text(_TWO, "training.steps=60", injected="niced 12"), ("slow-rank",)),
    "a link of 40 Mbit/s": Bug(_text(_TWO, "training.steps=120", injected="slow-link 40"), ("communication-bound",)),
    "a third of a core": Bug(_text("training.steps=200", *_NO_PAUSES, injected="cpu-limit 0.33"), ("cpu-throttled",)),
    "memory that grows on rank 1": Bug(
        _text(_TWO, "training.steps=20000", injected="leak 1e6; preempted 200"), ("memory-grows-full",)
    ),
    "slow saves": Bug(
        _text("checkpoint.every=10", "checkpoint.async=false", fault="slow-save seconds=0.2"),
        ("saves-block", "saves-slow"),
        "checkpoint.async",
    ),
    "a checkpoint at every step": Bug(_text("checkpoint.every=1"), ("saves-block",), "checkpoint.every"),
    "restarts": Bug(_text("checkpoint.every=60", fault=_KILLS, attempts=4), ("restarts",)),
}  # fmt: skip
