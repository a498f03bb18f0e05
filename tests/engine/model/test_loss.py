"""The loss of the head: torch's formula, also in chunks, without whole logits, and under every ZeRO stage."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from scaletrain_cli.engine.deepspeed_engine import prepare_deepspeed
from scaletrain_cli.engine.model.loss import LanguageModelHead, choose_cross_entropy
from scaletrain_cli.engine.parallel.mesh import Axis, ShardSpec
from scaletrain_cli.engine.parallel.tensor import VocabularyLoss
from scaletrain_cli.errors import InfeasibleError
from tests.engine.ranks import on_ranks

CPU = torch.device("cpu")
SIZE, VOCAB, TOKENS = 16, 51, 40  # an odd vocabulary: one of two ranks has a token less
KINDS = ("plain", "weighted", "by row")
every_kind = pytest.mark.parametrize("tokens_at_once", [None, 7, 64], ids=["whole", "chunks", "one chunk"])


def head(tokens_at_once: int | None = None, label_smoothing: float = 0.0, dtype: torch.dtype = torch.float32) -> Any:
    made = LanguageModelHead(SIZE, VOCAB).to(dtype)
    nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(1))
    made.tokens_at_once, made.label_smoothing = tokens_at_once, label_smoothing
    return made


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, TOKENS // 4, SIZE, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (4, TOKENS // 4), generator=generator)
    labels[0, :6] = -100
    return hidden, labels


def loss_and_gradients(
    made: LanguageModelHead, dtype: torch.dtype = torch.float32, divisor: Tensor | None = None
) -> Any:
    hidden, labels = batch(dtype)
    loss = made(hidden, labels, divisor)
    loss.backward()
    return loss, hidden.grad, made.weight.grad


@every_kind
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_loss_and_gradients_are_those_of_torch(tokens_at_once: int | None, label_smoothing: float) -> None:
    hidden, labels = batch()
    made = head()
    expected = F.cross_entropy(
        (hidden @ made.weight.t()).flatten(0, 1), labels.flatten(), label_smoothing=label_smoothing
    )
    expected.backward()
    found = loss_and_gradients(head(tokens_at_once, label_smoothing))
    torch.testing.assert_close(found, (expected, hidden.grad, made.weight.grad))


@every_kind
def test_a_divisor_replaces_the_count_of_tokens(tokens_at_once: int | None) -> None:
    mean, *of_mean = loss_and_gradients(head(tokens_at_once))
    divided, *of_divided = loss_and_gradients(head(tokens_at_once), divisor=torch.tensor(68.0))  # 34 tokens count
    torch.testing.assert_close([2 * divided, *(2 * g for g in of_divided)], [mean, *of_mean])


@every_kind
def test_no_token_that_counts_makes_no_loss_and_no_gradient(tokens_at_once: int | None) -> None:
    made, (hidden, labels) = head(tokens_at_once), batch()
    loss = made(hidden, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0
    assert not made.weight.grad.any()


def weights_of(labels: Tensor) -> Tensor:
    return torch.rand(labels.shape, generator=torch.Generator().manual_seed(3)) * (labels != -100)


@every_kind
def test_weights_are_factors_of_the_losses_of_tokens(tokens_at_once: int | None) -> None:
    made, (hidden, labels) = head(), batch()
    weights = weights_of(labels)
    logits = (hidden @ made.weight.t()).flatten(0, 1)
    losses = F.cross_entropy(logits, labels.flatten(), reduction="none") * weights.flatten()
    (losses.sum() / 20).backward()
    found, (again, _) = head(tokens_at_once), batch()
    loss = found(again, labels, torch.tensor(20.0), weights)
    loss.backward()
    torch.testing.assert_close(
        (loss, again.grad, found.weight.grad), (losses.sum() / 20, hidden.grad, made.weight.grad)
    )


@every_kind
def test_rows_have_the_summed_log_probabilities_of_their_labels(tokens_at_once: int | None) -> None:
    made, (hidden, labels) = head(), batch()
    chosen = (hidden @ made.weight.t()).log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    expected = (chosen * (labels != -100)).sum(1)
    factors = torch.tensor([0.5, -1.0, 2.0, 3.0])
    (expected * factors).sum().backward()
    found, (again, _) = head(tokens_at_once, label_smoothing=0.1), batch()  # smoothing changes losses only
    rows = found(again, labels, by_row=True)
    (rows * factors).sum().backward()
    torch.testing.assert_close((rows, again.grad, found.weight.grad), (expected, hidden.grad, made.weight.grad))


@every_kind
@pytest.mark.parametrize("by_row", [False, True])
def test_a_frozen_head_gets_no_gradient(tokens_at_once: int | None, by_row: bool) -> None:
    frozen, trained = head(tokens_at_once), head(tokens_at_once)
    frozen.weight.requires_grad_(False)
    gradients = []
    for made in (frozen, trained):
        hidden, labels = batch()
        made(hidden, labels, by_row=by_row).sum().backward()
        gradients.append(hidden.grad)
    assert torch.equal(*gradients)
    assert frozen.weight.grad is None


@every_kind
def test_gradients_accumulate_over_micro_batches(tokens_at_once: int | None) -> None:
    made = head(tokens_at_once)
    _, _, once = loss_and_gradients(made)
    once = once.clone()
    _, _, twice = loss_and_gradients(made)
    torch.testing.assert_close(twice, 2 * once)


def test_chunks_sum_a_16_bit_gradient_in_32_bits() -> None:
    exact = loss_and_gradients(head().to(torch.bfloat16).to(torch.float32))[2]
    whole, chunked = (loss_and_gradients(head(n, dtype=torch.bfloat16), torch.bfloat16)[2] for n in (None, 1))
    error_whole, error_chunked = ((g.float() - exact).norm() / exact.norm() for g in (whole, chunked))
    assert error_chunked < 1.3 * error_whole < 0.02


class MostAlive(TorchDispatchMode):
    """Return the largest number of elements in memory at once, of tensors that operations created."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes() // tensor.element_size()
        self._made = {storage: numel for storage, numel in self._made.items() if not storage.expired()}
        self.numel = max(self.numel, sum(self._made.values()))
        return made


def test_chunks_never_hold_all_logits() -> None:
    alive = {}
    for tokens_at_once in (None, 10):
        made, hidden = LanguageModelHead(4, 100), torch.randn(10, 40, 4, requires_grad=True)
        made.tokens_at_once = tokens_at_once
        with MostAlive() as most:
            made(hidden, torch.zeros(10, 40, dtype=torch.int64)).backward()
        alive[tokens_at_once] = most.numel
    logits, chunk, hidden_and_weight = 400 * 100, 10 * 100, 400 * 4 + 100 * 4
    assert alive[None] > 3 * logits
    assert alive[10] < 2 * hidden_and_weight + 5 * chunk


def test_evaluation_in_chunks_computes_no_gradient() -> None:
    made, (hidden, labels) = head(2), batch()
    with torch.no_grad():
        loss = made(hidden, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, head()(hidden, labels).detach())


def test_liger_is_rejected_on_a_cpu_and_with_a_sharded_vocabulary() -> None:
    with pytest.raises(InfeasibleError, match="needs a CUDA device, not cpu"):
        choose_cross_entropy(head(), "liger", 0.0, CPU)
    cut = head()
    cut.token_loss = lambda *_: torch.zeros(())
    with pytest.raises(InfeasibleError, match="whole vocabulary"):
        choose_cross_entropy(cut, "liger", 0.0, torch.device("cuda"))


class Model(nn.Module):
    def __init__(self, tied: bool, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, SIZE)
        self.layer = nn.Linear(SIZE, SIZE)
        self.lm_head = head()
        if tied:
            self.lm_head.weight = self.embed.weight
        choose_cross_entropy(self.lm_head, kind, 0.1, CPU)
        if kind == "chunked":
            self.lm_head.tokens_at_once = 3

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.lm_head(self.layer(self.embed(tokens)).tanh(), labels)  # type: ignore[no-any-return]


def train(stage: int, tied: bool, kind: str) -> list[float]:
    """Return the losses of 6 steps of 2 micro-batches."""
    prepare_deepspeed(CPU)
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    model = Model(tied, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(6 * 2):
        loss = engine(*torch.randint(VOCAB, (2, 2, 8), generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_every_way(tied: bool) -> dict[tuple[int, str], list[float]]:
    return {(stage, kind): train(stage, tied, kind) for stage in (0, 1, 2, 3) for kind in ("whole", "chunked")}


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.long), True], ids=["own weight", "tied"])
def test_whole_and_chunked_losses_train_equally_in_every_zero_stage(tied: bool) -> None:
    for found in on_ranks(2, train_every_way, tied):
        reference = found.pop((0, "whole"))
        assert reference[-1] < reference[0] - 0.1
        for way, losses in found.items():
            torch.testing.assert_close(losses, reference, rtol=0, atol=1e-5, msg=f"{way}: {losses}, not {reference}")


def test_the_head_pads_its_rows_on_a_gpu_except_for_liger() -> None:
    made = head()
    for device, kind, multiple in (("cpu", "whole", 1), ("cuda", "whole", 64), ("cuda", "chunked", 64)):
        choose_cross_entropy(made, kind, 0.0, torch.device(device))
        assert made.multiple == multiple


@pytest.mark.parametrize("kind", KINDS)
@every_kind
def test_rows_that_are_added_for_the_kernels_of_a_gpu_change_nothing(tokens_at_once: int | None, kind: str) -> None:
    padded = head(tokens_at_once, 0.1)
    padded.multiple = 64
    torch.testing.assert_close(of_kind(padded, kind), of_kind(head(tokens_at_once, 0.1), kind))


def over_a_cut_vocabulary(tokens_at_once: int | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return loss, weighted loss and log-probabilities of rows, each with its gradients."""
    axis, found = Axis(2, dist.get_rank(), dist.group.WORLD), []
    for kind in KINDS:
        made = head(tokens_at_once, 0.1)
        made.weight = nn.Parameter(ShardSpec(0, 2, axis.rank).take(made.weight.detach()))
        made.token_loss = VocabularyLoss(axis, VOCAB)
        made.token_losses, made.multiple = made.token_loss.each, 8
        found.append(of_kind(made, kind))
    return found


def of_kind(made: Any, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    hidden, labels = batch()
    weights = weights_of(labels) if kind == "weighted" else None
    loss = made(hidden, labels, None, weights, by_row=kind == "by row")
    (loss * torch.arange(1.0, 1.0 + loss.numel())).sum().backward()
    return loss.detach(), hidden.grad, made.weight.grad  # type: ignore[return-value]


def test_chunks_of_a_sharded_vocabulary_equal_those_of_a_whole_one() -> None:
    for tokens_at_once in (None, 7):
        for rank, found in enumerate(on_ranks(2, over_a_cut_vocabulary, tokens_at_once)):
            for kind, parts in zip(KINDS, found, strict=True):
                expected, of_hidden, of_weight = of_kind(head(None, 0.1), kind)
                torch.testing.assert_close(parts, (expected, of_hidden, ShardSpec(0, 2, rank).take(of_weight)))
