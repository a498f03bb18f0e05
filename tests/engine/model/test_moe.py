"""MoE layers compute their formulas, token by token, and their losses do not depend on how a batch is split."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from scaletrain_cli.engine.model.moe import MoELayer, _Biased, _Product, routing_measures, scale_router_losses
from scaletrain_cli.spec import ModelSpec
from tests.model_sizes import model_sizes

HIDDEN, INTERMEDIATE, EXPERTS, TOP = 16, 8, 4, 2


def mixture(shared: nn.Module | None = None, **settings: float | bool) -> MoELayer:
    spec = ModelSpec(
        **model_sizes(
            hidden=HIDDEN,
            layers=1,
            heads=1,
            kv_heads=1,
            head_dim=HIDDEN,
            intermediate=INTERMEDIATE,
            vocab=32,
            seq_len=12,
            positions=12,
        ),
        family="llama",
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        **{"router_aux_loss_coef": 0.0, **settings},
    )
    made = MoELayer(spec, shared)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.0, 0.5, generator=generator)
    return made


def batch(sequences: int = 3, length: int = 12) -> Tensor:
    return torch.randn(sequences, length, HIDDEN, generator=torch.Generator().manual_seed(2), requires_grad=True)


def one_by_one(made: MoELayer, x: Tensor, renormalise: bool, capacity: int) -> Tensor:
    """Return the outputs, computed token by token; capacity 0 means no limit."""
    rows = []
    for sequence in x:
        used = [0] * EXPERTS
        for token in sequence:
            probabilities = torch.softmax(made.gate.weight @ token, 0)
            experts = sorted(range(EXPERTS), key=lambda expert: -probabilities[expert].item())[:TOP]
            total = sum(probabilities[expert] for expert in experts) if renormalise else 1.0
            mixed = torch.zeros(HIDDEN)
            for expert in experts:
                used[expert] += 1
                if capacity and used[expert] > capacity:
                    continue
                gate, up = (made.experts.gate_up_proj[expert] @ token).chunk(2)
                mixed = mixed + probabilities[expert] / total * (made.experts.down_proj[expert] @ (F.silu(gate) * up))
            rows.append(mixed)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("factor", "capacity"), [(0.0, 0), (0.75, 5), (0.1, 1)])  # capacity: factor x 24 / 4
def test_tokens_pass_through_their_most_likely_experts(renormalise: bool, factor: float, capacity: int) -> None:
    made, x = mixture(norm_topk_prob=renormalise, capacity_factor=factor), batch()
    mixed, expected = made(x), one_by_one(made, x, renormalise, capacity)
    torch.testing.assert_close(mixed, expected, rtol=1e-5, atol=1e-5)
    toward = batch().detach().flip(0)
    inputs = (x, *made.parameters())
    gradients, rights = (torch.autograd.grad(result, inputs, toward) for result in (mixed, expected))
    for gradient, right in zip(gradients, rights, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-5 * right.abs().max().item())
    assert (routing_measures(made).dropped > 0) == bool(capacity)


def test_an_expert_that_no_token_chose_has_a_gradient_of_zero() -> None:
    made = mixture()
    with torch.no_grad():
        made.gate.weight[0] = 0.0
        made.gate.weight[1:] = 1.0
    made(batch().abs()).square().sum().backward()
    assert made.experts.down_proj.grad[0].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_any_row_return_none_and_have_gradients_of_zero(dtype: torch.dtype) -> None:
    """Tokens of a sequence rank that has padding only."""
    rows = torch.zeros(0, 16, dtype=dtype, requires_grad=True)
    weights, biases = (torch.randn(4, 24, *rest, dtype=dtype).requires_grad_() for rest in ((16,), ()))
    ends = torch.zeros(4, dtype=torch.int32)
    result = _Biased.apply(_Product.apply(rows, weights, ends), biases, ends)
    assert result.shape == (0, 24)
    for source, gradient in zip(
        (rows, weights, biases), torch.autograd.grad(result.sum(), (rows, weights, biases)), strict=True
    ):
        assert gradient.shape == source.shape
        assert gradient.is_contiguous()
        assert not gradient.any()


def test_experts_save_their_parameters_and_no_view_of_them() -> None:
    """Autograd saves a reference to a parameter, which ZeRO-3 may empty and gather again, but all values of a view."""
    made, saved = mixture(), []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        made(batch())
    assert len(list(made.experts.parameters())) == 2
    for weight in made.experts.parameters():
        held = [tensor for tensor in saved if tensor.untyped_storage().data_ptr() == weight.data_ptr()]
        assert held
        assert all(tensor is weight for tensor in held)


def losses_by_formula(made: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2 (arXiv:2405.04434), equations 23 to 25, and ST-MoE (arXiv:2202.08906), equation 5, over sequences."""
    balance, z = [], []
    for sequence in x:
        logits = sequence @ made.gate.weight.T
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(TOP).indices.tolist()
        times = torch.tensor([sum(expert in token for token in chosen) for expert in range(EXPERTS)])
        balance.append((EXPERTS / (TOP * len(sequence)) * times * probabilities.mean(0)).sum())
        z.append(logits.exp().sum(-1).log().square().mean())
    return torch.stack(balance).mean(), torch.stack(z).mean()


def test_the_gradient_of_the_router_includes_its_own_losses() -> None:
    made, x = mixture(router_aux_loss_coef=0.3, router_z_loss_coef=0.02), batch()
    scale_router_losses(made, 0.25)
    balance, z = losses_by_formula(made, x)
    (wanted,) = torch.autograd.grad(0.25 * (0.3 * balance + 0.02 * z), made.gate.weight)
    mixed = made(x)
    (gradient,) = torch.autograd.grad(mixed, made.gate.weight, torch.zeros_like(mixed))  # the model's loss says nothing
    torch.testing.assert_close(gradient, wanted)
    measured = routing_measures(made)
    torch.testing.assert_close((measured.balance_loss, measured.z_loss), (balance.detach(), z.detach()))


def test_recomputation_adds_the_router_losses_once() -> None:
    made, x = mixture(router_aux_loss_coef=0.3), batch()
    (plain,) = torch.autograd.grad(made(x).sum(), made.gate.weight)
    (again,) = torch.autograd.grad(checkpoint(made, x, use_reentrant=False).sum(), made.gate.weight)
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_accumulated_micro_batches_give_the_gradient_of_the_batch(factor: float) -> None:
    made, x = mixture(router_aux_loss_coef=0.3, router_z_loss_coef=0.02, capacity_factor=factor), batch(4)
    (whole,) = torch.autograd.grad(made(x).square().mean(), made.gate.weight)
    scale_router_losses(made, 1 / 4)
    parts = [torch.autograd.grad(made(part).square().mean() / 4, made.gate.weight)[0] for part in x.split(1)]
    torch.testing.assert_close(sum(parts), whole)


def test_a_model_without_experts_measures_nothing() -> None:
    assert routing_measures(nn.Linear(2, 2)) is None


@pytest.mark.parametrize("factor", [0.0, 0.75])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_padding_changes_neither_losses_nor_gradients_and_takes_no_capacity(factor: float, scoring: str) -> None:
    settings = {"router_aux_loss_coef": 0.3, "router_z_loss_coef": 0.02, "capacity_factor": factor}
    made, rows = mixture(**settings, scoring_func=scoring), batch().detach()
    lengths = torch.tensor([5, 12, 8])
    found = []
    for longest in (12, 12, 16):
        x = torch.cat((rows, torch.randn(3, longest - 12, HIDDEN)), dim=1)
        real = torch.arange(longest) < lengths.unsqueeze(1)
        x = torch.where(real.unsqueeze(-1), x, torch.randn_like(x)).requires_grad_()
        mixed = made(x, real)
        assert not mixed[~real].any()
        gradients = torch.autograd.grad(mixed.square()[real].sum(), (x, *made.parameters()))
        found.append((mixed[real], gradients[0][real], *gradients[1:], *routing_measures(made)))
    alone = [made(row[None, :length]) for row, length in zip(rows, lengths, strict=True)]
    torch.testing.assert_close(found[0][0], torch.cat([row[0] for row in alone]), rtol=1e-5, atol=1e-5)
    for other in found[1:]:
        for ours, right in zip(other, found[0], strict=True):
            assert (ours - right).abs().max() <= 1e-6 * right.abs().max()
    assert (routing_measures(made).dropped > 0) == bool(factor)


def test_the_balance_loss_without_padding_is_that_of_transformers_over_the_experts_per_token() -> None:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import load_balancing_loss_func

    made, x = mixture(router_aux_loss_coef=0.3), batch(1).detach()
    mask = torch.arange(12) < 7
    made(x, mask[None])
    theirs = load_balancing_loss_func((made.gate(x)[0],), EXPERTS, TOP, mask[None].long())
    torch.testing.assert_close(TOP * routing_measures(made).balance_loss, theirs.detach())
