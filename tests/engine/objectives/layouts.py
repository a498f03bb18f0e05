"""Fine-tuning in layouts: rows of the second table of ``make parity``, each against the same training on one rank."""

import tempfile
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from scaletrain_cli.engine.data.rows import RowSequences
from scaletrain_cli.spec import RunSpec
from tests.engine.objectives.rows import (
    LENGTH,
    STEPS,
    Course,
    Example,
    examples,
    largest_difference,
    pairs,
    row_sequences,
    spec_of,
    train,
)
from tests.engine.parity.table import Table
from tests.engine.ranks import on_ranks

LOSS, NORM = 1e-5, 1e-4  # relative, at each step

_SFT = ("training.objective=sft",)
_DPO = ("training.objective=dpo", "training.optimizer.lr=5.0e-4")
_DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
_EXPERTS = (
    *("model.num_experts=4", "model.num_experts_per_tok=2", "model.moe_intermediate_size=32"),
    *("model.router_aux_loss_coef=0.1", "model.router_z_loss_coef=0.01"),
)
# Frequencies of positions that depend on the length of each row.
_DYNAMIC = ("model.rope_scaling={rope_type: dynamic, factor: 4}", "model.max_position_embeddings=8")
KINDS: dict[str, tuple[str, ...]] = {
    "sft": _SFT,
    "sft weighted": _SFT,
    "sft weighted chunked": (*_SFT, "training.cross_entropy=chunked"),
    "sft packed": _SFT,
    "sft packed dropout": (*_SFT, *_DROPOUT),
    "sft experts": (*_SFT, *_EXPERTS),
    "sft packed experts": (*_SFT, *_EXPERTS, "model.capacity_factor=0.9"),
    "dpo": _DPO,
    "dpo chunked": (*_DPO, "training.cross_entropy=chunked"),
    "dpo robust": (*_DPO, "training.dpo.loss=robust", "training.dpo.label_smoothing=0.1"),
    "dpo ipo": (*_DPO, "training.dpo.loss=ipo"),
    "dpo by length": (*_DPO, "training.dpo.length_normalized=true"),
    "dpo by length dynamic": (*_DPO, "training.dpo.length_normalized=true", *_DYNAMIC),
}
LAYOUTS: dict[str, tuple[str, ...]] = {
    name: (f"layout.zero_stage={name[4]}", f"layout.activation_checkpointing={mode}", *sizes)
    for name, mode, sizes in (
        ("zero0 dp2", "none", ("layout.data_parallel=2",)),
        ("zero1 dp2", "full", ("layout.data_parallel=2",)),
        ("zero2 dp2", "selective", ("layout.data_parallel=2",)),
        ("zero3 dp2", "full", ("layout.data_parallel=2",)),
        ("zero0 tp2", "none", ("layout.tensor_parallel=2",)),
        ("zero1 pp2", "full", ("layout.pipeline_parallel=2",)),
        ("zero1 sp2", "selective", ("layout.sequence_parallel=2",)),
        ("zero3 tp2 sp2", "full", ("layout.tensor_parallel=2", "layout.sequence_parallel=2")),
        ("zero2 dp2 sp2", "none", ("layout.data_parallel=2", "layout.sequence_parallel=2")),
        ("zero1 pp2 sp2", "full", ("layout.pipeline_parallel=2", "layout.sequence_parallel=2")),
        ("zero2 dp2 cp2", "none", ("layout.data_parallel=2", "layout.context_parallel=2")),
        ("zero3 sp2 cp2", "full", ("layout.sequence_parallel=2", "layout.context_parallel=2")),
        (
            "zero1 tp2 pp2 sp2",
            "selective",
            ("layout.tensor_parallel=2", "layout.pipeline_parallel=2", "layout.sequence_parallel=2"),
        ),
    )
}


def rows_of(kind: str) -> RowSequences:
    if kind.startswith("dpo"):
        return row_sequences([[one] for pair in pairs(40) for one in pair], is_pairs=True)
    return row_sequences(packed() if "packed" in kind else [[one] for one in examples(40)], weights="weighted" in kind)


def packed() -> list[list[Example]]:
    rows: list[list[Example]] = [[]]
    for example in examples(60):
        if sum(len(one.tokens) for one in [*rows[-1], example]) > LENGTH:
            rows.append([])
        rows[-1].append(example)
    assert max(len(row) for row in rows) > 1
    return rows


@dataclass(frozen=True)
class FineTuningRow:
    kind: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.layout}"

    @property
    def ranks(self) -> int:
        sizes = [int(part[2:]) for part in self.layout.split() if part[:2] in ("dp", "tp", "pp", "sp", "cp")]
        ranks = 1
        for size in sizes:
            ranks *= size
        return ranks

    def spec(self, steps: int) -> RunSpec:
        return spec_of(
            *KINDS[self.kind], f"training.steps={steps}", f"cluster.gpus_per_node={self.ranks}", *LAYOUTS[self.layout]
        )


@cache
def alone(kind: str, steps: int) -> Course:
    spec = spec_of(*(key for key in KINDS[kind] if "cross_entropy" not in key), f"training.steps={steps}")
    return _course(1, spec, kind)


def differences(row: FineTuningRow, steps: int = STEPS) -> tuple[float, float]:
    """Return the largest relative differences of loss and gradient norm at a step."""
    found, expected = _course(row.ranks, row.spec(steps), row.kind), alone(row.kind, steps)
    for step, (measures, others) in enumerate(zip(found.measures, expected.measures, strict=True), start=1):
        for name, value in others.items():
            if step == 1 and name == "rewards/accuracies":  # every margin is 0, up to rounding
                continue
            assert abs(measures[name] - value) <= 1e-4 * max(1.0, abs(value)), (name, measures[name], value)
    return largest_difference(found.losses, expected.losses), largest_difference(found.norms, expected.norms)


def _course(ranks: int, spec: RunSpec, kind: str) -> Course:
    with tempfile.TemporaryDirectory() as folder:
        courses: list[Course] = on_ranks(ranks, train, spec, rows_of(kind), Path(folder))
    for other in courses[1:]:
        assert largest_difference(other.losses, courses[0].losses) < 1e-6, "ranks do not agree"
    return courses[0]


def fine_tuning_rows() -> list[FineTuningRow]:
    """Return every kind in every layout that the engine runs: context ranks attend to whole rows only."""
    rows = [FineTuningRow(kind, layout) for kind, layout in product(KINDS, LAYOUTS)]
    return [row for row in rows if not ("packed" in row.kind and "cp" in row.layout)]


def third_of_the_rows(kind: str) -> list[FineTuningRow]:
    """Return a third of the rows of a kind, so that three neighboring kinds have every layout; the page has all."""
    first, layouts = list(KINDS).index(kind), list(LAYOUTS)
    chosen = [layout for place, layout in enumerate(layouts) if (first + place) % 3 == 0]
    return [row for row in fine_tuning_rows() if row.kind == kind and row.layout in chosen]


def figures(row: FineTuningRow) -> tuple[list[str], bool]:
    loss, norm = differences(row)
    return [f"{loss:.1e}", f"{norm:.1e}"], loss <= LOSS and norm <= NORM


TABLE = Table(
    ("fine-tuning and layout", "ranks", "loss", "gradient norm"),
    fine_tuning_rows(),
    lambda row: str(row.name),
    figures,
    lambda rows, _: (
        f"""## Fine-tuning

{rows} kinds and layouts of fine-tuning, {STEPS} steps each in fp32, against the same on one rank: the \
largest relative difference of the loss ({LOSS:g} is allowed) and of the gradient norm ({NORM:g}).
"""
    ),
)
