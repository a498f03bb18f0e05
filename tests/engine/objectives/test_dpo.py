"""The losses of preference pairs as formulas, and the reference file: computed once, continued, verified, required."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from scaletrain_cli.engine.compose import compose
from scaletrain_cli.engine.data.batches import BatchReader
from scaletrain_cli.engine.objectives import OBJECTIVES, OF_IMAGES
from scaletrain_cli.engine.objectives.dpo import first_loss, preference_loss
from scaletrain_cli.engine.objectives.reference import ReferenceFile, ReferencePass, reference_key
from scaletrain_cli.engine.parallel.mesh import build_mesh
from scaletrain_cli.engine.process_group import RankConsensus
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.engine.trainer import LoopState, Trainer
from scaletrain_cli.errors import DoNotRequeueError
from scaletrain_cli.plan import make_plan
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.training import DPOSpec, TrainingSpec
from tests.engine.alone import context_of
from tests.engine.objectives.rows import pairs, row_sequences, spec_of
from tests.engine.ranks import on_ranks

COUNT = 13  # pairs; not a multiple of the micro-batches of all ranks
DPO = "training.objective=dpo"
CHOSEN, REJECTED = torch.tensor([3.0, -2.0, 0.5]), torch.tensor([1.0, 4.0, 0.5])


def test_conservative_and_robust_losses_are_those_of_their_papers() -> None:
    x, e = 0.3 * (CHOSEN - REJECTED), 0.2
    right, swapped = -F.logsigmoid(x), -F.logsigmoid(-x)
    conservative = DPOSpec(beta=0.3, loss="conservative", label_smoothing=e)
    torch.testing.assert_close(preference_loss(conservative, CHOSEN, REJECTED), (1 - e) * right + e * swapped)
    robust = DPOSpec(beta=0.3, loss="robust", label_smoothing=e)
    unbiased = ((1 - e) * right - e * swapped) / (1 - 2 * e)
    torch.testing.assert_close(preference_loss(robust, CHOSEN, REJECTED), unbiased)
    # The mean over swaps of a share e of the answers is the loss without swaps.
    other = preference_loss(robust, REJECTED, CHOSEN)
    torch.testing.assert_close((1 - e) * unbiased + e * other, right)


@pytest.mark.parametrize("loss", ["sigmoid", "robust", "conservative", "ipo"])
def test_a_model_that_equals_its_reference_has_a_known_loss(loss: Any) -> None:
    smoothing = 0.1 if loss in ("robust", "conservative") else 0.0
    settings = DPOSpec(beta=0.25, loss=loss, label_smoothing=smoothing)
    zero = torch.zeros(2)
    expected = first_loss(settings)
    assert preference_loss(settings, zero, zero).tolist() == pytest.approx([expected] * 2)
    assert expected == (4.0 if loss == "ipo" else pytest.approx(math.log(2)))


def test_every_objective_of_the_spec_is_in_the_registry() -> None:
    assert list(TrainingSpec.model_fields["objective"].annotation.__args__) == [*OBJECTIVES, *OF_IMAGES]  # type: ignore[union-attr]


def a_pass(folder: Path, spec: RunSpec, turns: int | None = None) -> tuple[ReferencePass, BatchReader]:
    """Return a rank's reference pass over the pairs; ``turns``: of micro-batches before a preemption signal."""
    layout, device = make_plan(spec).layout, torch.device("cpu")
    mesh = build_mesh(layout)
    stepper = build_stepper(compose(spec, layout, mesh, device), mesh, device, spec.training)
    rows = row_sequences([[one] for pair in pairs(COUNT) for one in pair], is_pairs=True)
    left = [turns]

    def goes_on() -> bool:
        if left[0] is None:
            return True
        left[0] -= 1
        return left[0] >= 0

    consensus, record = RankConsensus(600.0), SimpleNamespace(spec=spec)
    made = ReferencePass(
        context_of(RunDir(folder), record, consensus=consensus), mesh, stepper, {"data": ("tokens",)}, goes_on
    )
    return made, BatchReader(rows, layout, mesh, spec.training.seed, False)


def interrupted_and_continued(folder: Path, spec: RunSpec) -> dict[str, Any]:
    """Return the values of a pass without interruption, and of one that was preempted, with what it left."""
    undisturbed, reader = a_pass(folder / "whole", spec)
    whole = undisturbed.with_reference(reader, "train", 0)
    first, reader = a_pass(folder / "cut", spec, turns=1)
    assert first.with_reference(reader, "train", 0) is None
    dist.barrier()
    part = ReferenceFile.read(folder / "cut" / "reference" / "train")
    again, reader = a_pass(folder / "cut", spec)
    continued = again.with_reference(reader, "train", 0)
    return {"whole": whole.reference, "part": len(part.values), "continued": continued.reference}


@pytest.mark.parametrize(
    "layout", [("layout.data_parallel=2",), ("layout.zero_stage=1", "layout.pipeline_parallel=2")], ids=["dp2", "pp2"]
)
def test_an_interrupted_reference_continues_with_the_same_bits(layout: tuple[str, ...], tmp_path: Path) -> None:
    spec = spec_of(DPO, "cluster.gpus_per_node=2", *layout)
    ranks = on_ranks(2, interrupted_and_continued, tmp_path, spec)
    for found in ranks:
        assert 0 < found["part"] < COUNT
        assert np.array_equal(found["whole"], found["continued"])
        assert (found["whole"] < 0).all()
    assert np.array_equal(ranks[0]["whole"], ranks[1]["whole"])


def resumed(folder: Path, spec: RunSpec, damage: str, step: int) -> tuple[bool, str]:
    """Return whether a second attempt after ``step`` steps read the file that the first one wrote, and its error."""
    first, reader = a_pass(folder, spec)
    assert first.with_reference(reader, "train", 0) is not None
    path = folder / "reference" / "train"
    before = path.stat().st_mtime_ns
    if damage == "missing":
        path.unlink()
    elif damage == "a flipped bit":
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    elif damage == "other weights":
        spec = spec.model_copy(update={"training": spec.training.model_copy(update={"seed": 7})})
    second, reader = a_pass(folder, spec)
    try:
        found = second.with_reference(reader, "train", step)
        if step == 0:
            second.check(found.batch(1).micro_batches())
    except DoNotRequeueError as error:
        return False, str(error)
    return path.stat().st_mtime_ns == before, ""


@pytest.mark.parametrize("damage", ["none", "missing", "a flipped bit", "other weights"])
def test_a_reference_is_reused_or_computed_again_before_the_first_step(damage: str, tmp_path: Path) -> None:
    ((reused, error),) = on_ranks(1, resumed, tmp_path, spec_of(DPO), damage, 0)
    assert error == ""
    assert reused == (damage == "none")


@pytest.mark.parametrize("damage", ["none", "missing", "a flipped bit"])
def test_a_missing_reference_after_the_first_step_ends_the_run(damage: str, tmp_path: Path) -> None:
    ((reused, error),) = on_ranks(1, resumed, tmp_path, spec_of(DPO), damage, 4)
    assert reused == (damage == "none")
    if damage != "none":
        assert "reference/train: the reference log-probabilities are missing or damaged, " in error
        assert "and after 4 steps the weights are no longer those of the reference" in error


def test_a_reference_file_is_read_only_if_its_header_and_values_are_those_that_were_written(tmp_path: Path) -> None:
    path, values = tmp_path / "train", np.arange(6, dtype=np.float32).reshape(3, 2)
    ReferenceFile({"dataset": ["a"]}, 5, values).write(path)
    line, data = path.read_bytes().split(b"\n", 1)
    header = json.loads(line)

    def read(changes: dict[str, Any], content: bytes = data) -> ReferenceFile | None:
        path.write_bytes(json.dumps({**header, **changes}).encode() + b"\n" + content)
        return ReferenceFile.read(path)

    found = read({})
    assert (found.pairs, found.key, found.values.tolist()) == (5, {"dataset": ["a"]}, values.tolist())
    assert read({"pairs": 6}) is None
    assert read({"key": {"dataset": ["b"]}}) is None
    assert read({}, data[:-8]) is None
    sealed = header.pop("seal")
    assert read({}) is None
    assert read({"seal": sealed[::-1]}) is None
    for wrong in ({"pairs": 2}, {"pairs": "5"}, {"pairs": None}, {"key": []}, {"sha256": 1}):
        assert read(wrong) is None
    path.write_bytes(b"[]\n" + data)
    assert ReferenceFile.read(path) is None


def test_running_out_of_memory_while_the_reference_is_computed_is_reported(tmp_path: Path) -> None:
    run, plan = RunDir(tmp_path), make_plan(spec_of(DPO))
    run.new_attempt()

    def resume() -> LoopState:
        return LoopState(0, 1, False, [])

    def prepare_batches(step: int) -> bool:
        raise MemoryError

    trainer = Trainer.__new__(Trainer)
    context = context_of(run, SimpleNamespace(plan=plan))
    vars(trainer).update(context=context, composed=None, resume=resume, prepare_batches=prepare_batches)
    with pytest.raises(MemoryError) as caught:
        trainer.fit()
    assert "Rank 0 was planned to need" in caught.value.__notes__[0]
    assert (run.attempt(1) / "memory" / "rank-00000.json").is_file()


def with_wrong_values(folder: Path, spec: RunSpec, change: float) -> str:
    """Return the error of a check of values that differ from those of the model by a share of their size."""
    made, reader = a_pass(folder, spec)
    found = made.with_reference(reader, "train", 0)
    try:
        made.check(replace(found, reference=found.reference * np.float32(1 + change)).batch(1).micro_batches())
    except DoNotRequeueError as error:
        return str(error)
    return ""


def test_a_reference_of_other_weights_is_rejected_at_step_0(tmp_path: Path) -> None:
    (error,) = on_ranks(1, with_wrong_values, tmp_path, spec_of(DPO), 1e-3)
    assert "differ from those of the model at step 0" in error
    assert on_ranks(1, with_wrong_values, tmp_path, spec_of(DPO), 1e-6) == [""]


def test_the_key_of_a_reference_depends_on_data_weights_length_and_precision(tmp_path: Path) -> None:
    base = spec_of(DPO)
    (tmp_path / "model.safetensors").write_bytes(b"1")
    changed = [
        spec_of(DPO, "training.seed=1"),
        spec_of(DPO, "training.precision=bf16"),
        spec_of(DPO, "model.seq_len=16"),
        spec_of(DPO, f"model.weights={tmp_path}"),
    ]
    keys = [json.dumps(reference_key(spec, ("tokens",))) for spec in (base, *changed)]
    keys.append(json.dumps(reference_key(base, ("others",))))
    (tmp_path / "model.safetensors").write_bytes(b"22")
    keys.append(json.dumps(reference_key(changed[-1], ("tokens",))))
    assert len(set(keys)) == len(keys)
    assert json.dumps(reference_key(spec_of(DPO, "training.steps=99"), ("tokens",))) == keys[0]
