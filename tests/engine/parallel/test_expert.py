from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from scaletrain_cli.engine.compose import Composed, compose
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.moe import update_correction_biases
from scaletrain_cli.engine.parallel.expert import is_sharded_over_experts, shard_experts, with_expert_groups
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh, build_mesh
from scaletrain_cli.engine.step import Stepper, build_stepper
from scaletrain_cli.plan.result import Layout
from scaletrain_cli.spec import RunSpec, parse_spec
from tests.engine.fresh_model import build_model
from tests.engine.plain_layout import plain_layout
from tests.engine.ranks import on_ranks

STEPS, BATCH, LENGTH, VOCAB, CLIP = 4, 8, 16, 64, 0.5
CPU = torch.device("cpu")

# Clipping binds at every step; experts are chosen very unequally, and the router's own losses weigh much. eps is large
# enough that an element whose gradient is nothing but rounding is not moved as far as any other.
SPEC = f"""
schema: scaletrain/v1
name: experts
model: {{family: llama, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 24,
        vocab_size: {VOCAB}, seq_len: {LENGTH}, initializer_range: 0.2, num_experts: 4, num_experts_per_tok: 2,
        moe_intermediate_size: 16, shared_expert_intermediate_size: 8,
        router_aux_loss_coef: 0.05, router_z_loss_coef: 0.01}}
data: {{source: none, tokenizer: {{vocab_size: {VOCAB}}}}}
training: {{global_batch_size: {BATCH}, steps: {STEPS}, precision: fp32, gradient_clipping: {CLIP},
           optimizer: {{lr: 1.0e-3, eps: 1.0e-6}}}}
cluster: {{gpu: cpu}}
"""


@dataclass(frozen=True)
class Run:
    zero: int
    data: int = 1
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 2
    accumulation: int = 1
    padded: bool = False
    overrides: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.data * self.sequence * self.tensor * self.pipeline

    @property
    def spec(self) -> RunSpec:
        return parse_spec(SPEC, file="experts.yaml", base_dir=Path(), overrides=list(self.overrides))

    @property
    def layout(self) -> Layout:
        others = {"tensor_parallel": self.tensor, "pipeline_parallel": self.pipeline, "expert_parallel": self.expert}
        others |= {"sequence_parallel": self.sequence, "world_size": self.ranks, "zero_stage": self.zero}
        return plain_layout(BATCH, self.data, self.accumulation, **others)


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]


def tokens(step: int) -> Tensor:
    return torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def real_tokens() -> Tensor:
    """Return the mask of rows of which some leave a sequence rank without a token."""
    lengths = torch.tensor([3, LENGTH, 8, 9, LENGTH - 1, 1, 12, 7])
    return torch.arange(LENGTH) < lengths.unsqueeze(1)


def train_alone(spec: RunSpec, padded: bool) -> Trained:
    torch.set_num_threads(1)
    model, settings = build_model(spec.transformer, spec.training.seed), spec.training.optimizer
    parameters = list(model.parameters())
    decay = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay}]
    others = [{"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay + others, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    losses, norms = [], []
    context = TokenContext(torch.arange(LENGTH), torch.arange(BATCH), real=real_tokens() if padded else None)
    for step in range(STEPS):
        rows = tokens(step)
        loss = model(rows[:, :-1], rows[:, 1:], context)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).item())
        optimizer.step()
        update_correction_biases(model)
        losses.append(loss.item())
    return Trained(losses, norms)


def composed(run: Run, seed: int = 0) -> tuple[Composed, Stepper, Mesh]:
    mesh = build_mesh(run.layout)
    training = run.spec.training.model_copy(update={"seed": seed} if seed else {})
    spec = run.spec.model_copy(update={"training": training})
    made = compose(spec, run.layout, mesh, CPU)
    return made, build_stepper(made, mesh, CPU, spec.training), mesh


def train(drive: Stepper, mesh: Mesh, run: Run, steps: range) -> Trained:
    done = [drive.train(batches(run, mesh, step)) for step in steps]
    return Trained([float(step.loss) for step in done], [float(step.grad_norm) for step in done])


def batches(run: Run, mesh: Mesh, step: int) -> list[MicroBatch]:
    positions = torch.arange(LENGTH).chunk(run.sequence)[mesh.sequence.rank]
    parts, real = (
        rows.chunk(run.data)[mesh.data.rank].chunk(run.accumulation) for rows in (tokens(step), real_tokens())
    )
    return [
        MicroBatch(
            *(part[:, positions], part[:, positions + 1], positions, torch.arange(len(part)), None),
            real=mask[:, positions] if run.padded else None,
        )
        for part, mask in zip(parts, real, strict=True)
    ]


def train_rank(run: Run) -> Trained:
    _, drive, mesh = composed(run)
    return train(drive, mesh, run, range(STEPS))


CAPACITY = "model.capacity_factor=0.8"
UPDATED = ("model.scoring_func=sigmoid", "model.topk_method=noaux_tc", "model.bias_update_speed=0.05")
RUNS = {
    "ZeRO-2, two replicas": Run(2, data=4, accumulation=2),
    "ZeRO-3": Run(3, data=2, overrides=UPDATED),
    "ZeRO-3 and tensor": Run(3, data=2, tensor=2, overrides=UPDATED),
    "sequence, some tokens dropped": Run(2, sequence=2, accumulation=4, overrides=(CAPACITY,)),
    "sequence, padded": Run(2, sequence=2, accumulation=4, padded=True, overrides=(CAPACITY,)),
    "pipeline, padded": Run(1, data=2, pipeline=2, accumulation=4, padded=True, overrides=UPDATED),
}


SHORT = ("ZeRO-3 and tensor", "sequence, padded")


@pytest.mark.parametrize(
    "run", [pytest.param(run, id=name, marks=[] if name in SHORT else pytest.mark.long) for name, run in RUNS.items()]
)
def test_experts_over_ranks_train_as_in_one_process(run: Run) -> None:
    alone, *over_ranks = train_alone(run.spec, run.padded), *on_ranks(run.ranks, train_rank, run)
    assert all(report == over_ranks[0] for report in over_ranks)
    assert over_ranks[0].losses == pytest.approx(alone.losses, rel=0, abs=1e-5)
    assert over_ranks[0].norms == pytest.approx(alone.norms, rel=1e-4)


def cut_model(mesh: Mesh) -> torch.nn.Module:
    model = outline(Run(0).spec.transformer)
    shard_experts(model, mesh)
    return model


def test_expert_and_tensor_ranks_share_every_expert_weight_once() -> None:
    def sizes(model: torch.nn.Module) -> int:
        return sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)

    whole = sizes(cut_model(Mesh.alone()))
    assert sizes(cut_model(Mesh(tensor=Axis(2, 1)))) * 2 == whole
    assert sizes(cut_model(Mesh(expert=Axis(4, 3)))) * 4 == whole


def test_optimizer_groups_separate_experts_and_keep_their_options() -> None:
    expert, dense, bias = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    expert.allreduce, expert.group_name = False, "experts"
    assert is_sharded_over_experts(expert)
    assert not is_sharded_over_experts(dense)
    groups = [{"params": [dense, expert], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    assert [len(group["params"]) for group in with_expert_groups(groups)] == [1, 1, 1]
    assert with_expert_groups(groups)[-1] == {"params": [expert], "weight_decay": 0.1, "moe": True, "name": "experts"}
