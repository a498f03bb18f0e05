"""Small networks for images: trained by the engine on ranks, and by a plain loop over the models of transformers."""

import copy
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scaletrain_cli.engine.compose import Composed, compose
from scaletrain_cli.engine.data.batches import MicroBatch
from scaletrain_cli.engine.data.images.batches import ImageMicroBatch
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.materialization import materialize, stored_buffers
from scaletrain_cli.engine.optim.optimizers import set_rates
from scaletrain_cli.engine.parallel.mesh import build_mesh
from scaletrain_cli.engine.stages import trained_at
from scaletrain_cli.engine.step import build_stepper
from scaletrain_cli.plan import make_plan
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.spec.weight_files import stored_name
from tests.engine.parity.comparison import Difference
from tests.engine.parity.layouts import local_pieces
from tests.vision_of_transformers import class_and_config

STEPS, RATE, BATCH = 20, 5.0e-4, 16
EPS = 1.0e-4  # the gradient of a bias of keys is 0: Adam would make steps of its rounding errors
MODELS = {
    "resnet": "{family: resnet, embedding_size: 8, hidden_sizes: [16, 32], depths: [1, 2], num_labels: 5,"
    " image_size: 16, memory_format: contiguous_format}",
    "convnext": "{family: convnext, hidden_sizes: [8, 16], depths: [1, 2], patch_size: 2, num_labels: 5,"
    " image_size: 16, layer_scale_init_value: 0.1}",
    "vit": "{family: vit, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,"
    " image_size: 16, patch_size: 4, num_labels: 5}",
    "clip": "{family: clip, projection_dim: 16, max_logit_scale: 2.7,"
    " vision_config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,"
    " image_size: 16, patch_size: 4},"
    " text_config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,"
    " vocab_size: 40, max_position_embeddings: 8, eos_token_id: 39}}",
    "llava": "{family: llava, image_token_index: 39,"
    " vision_config: {hidden_size: 32, num_hidden_layers: 3, num_attention_heads: 2, intermediate_size: 64,"
    " image_size: 16, patch_size: 8},"
    " text_config: {family: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4,"
    " num_key_value_heads: 2, intermediate_size: 64, vocab_size: 40, seq_len: 16, max_position_embeddings: 32}}",
}
# By name the settings of a loss; the reference is in ``_plain_loss``.
LOSSES = {
    "smoothing": ("training.label_smoothing=0.1",),
    "bce": ("training.loss={name: bce, pos_weight: 2.0}",),
    "mse": ("training.objective=regression", "training.loss=mse"),
    "mae": ("training.objective=regression", "training.loss=mae"),
    "huber": ("training.objective=regression", "training.loss={name: huber, delta: 0.3}"),
    "nt_xent": (
        "training.objective=contrastive",
        "training.loss={name: nt_xent, temperature: 0.5}",
        "evaluation.every=0",
    ),
    "sigmoid": ("training.loss=sigmoid",),
}
_SPEC = """
schema: scaletrain/v1
name: images
model: {model}
data: {{source: images}}
training: {{global_batch_size: {batch}, micro_batch_size: {micro}, steps: {steps}, precision: fp32,
           gradient_clipping: 1.0, optimizer: {{lr: {rate}, weight_decay: 0.1, eps: {eps}}}}}
layout: {{zero_stage: {zero}, activation_checkpointing: {checkpointing}}}
cluster: {{gpu: cpu, gpus_per_node: {ranks}}}
"""


@dataclass(frozen=True)
class Row:
    """A family in a layout."""

    family: str
    zero: int
    ranks: int = 1
    accumulation: int = 1
    checkpointing: str = "none"
    overrides: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()  # parts of the names of what trains; empty: everything
    loss: str = ""  # of LOSSES; empty: the default one of the family
    steps: int = STEPS

    def __str__(self) -> str:
        words = [self.family, *([self.loss] if self.loss else []), f"ZeRO-{self.zero}", f"{self.ranks} ranks"]
        words += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        words += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        words += [f"trains {', '.join(self.trainable)}"] if self.trainable else []
        return ", ".join([*words, *self.overrides])

    @property
    def micro_batch_size(self) -> int:
        return BATCH // (self.ranks * self.accumulation)

    @property
    def joins_samples(self) -> bool:
        """Return True if the loss compares all samples of a step."""
        return self.family == "clip" or self.loss == "nt_xent"

    def spec(self) -> RunSpec:
        text = _SPEC.format(
            model=MODELS[self.family],
            batch=BATCH,
            micro=self.micro_batch_size,
            steps=self.steps,
            rate=RATE,
            eps=EPS,
            zero=self.zero,
            checkpointing=self.checkpointing,
            ranks=self.ranks,
        )
        chosen = ", ".join(f'{{match: "*{word}*"}}' for word in self.trainable)
        overrides = (*LOSSES.get(self.loss, ()), *self.overrides)
        if self.loss == "nt_xent" and self.family == "vit":  # else all features are alike, and their rounding counts
            overrides = ("model.initializer_range=0.2", *overrides)
        if self.loss == "sigmoid":
            overrides = ("model.logit_bias_init_value=-10", "model.logit_scale_init_value=2.302585", *overrides)
        overrides = (*overrides, f"training.trainable=[{chosen}]") if chosen else overrides
        return parse_spec(text, file="images.yaml", base_dir=None, overrides=overrides)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Trained:
    """By step the loss and the gradient norm; the weights and running statistics by name after the last step.

    ``gradients``: those of the first step before clipping.
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def global_batch(row: Row, step: int) -> ImageMicroBatch:
    """The samples of a step: images with a pattern of their class or of their caption, [views, samples, 3, 16, 16]."""
    draw = torch.Generator().manual_seed(step)
    classes = torch.randint(5, (BATCH,), generator=draw)
    views = 2 if row.loss == "nt_xent" else 1
    images = torch.randint(100, (views, BATCH, 3, 16, 16), generator=draw)
    images[:, torch.arange(BATCH), classes % 3, 3 * classes] += 150
    images, samples = images.to(torch.uint8), torch.arange(step * BATCH, (step + 1) * BATCH)
    if row.loss == "nt_xent":
        return ImageMicroBatch(images, samples)
    if row.family != "clip":
        targets = classes
        if row.loss == "bce":  # one to three classes of each image
            targets = (F.one_hot(classes, 5) + F.one_hot((classes * samples) % 5, 5)).clamp(max=1).float()
        elif row.loss in ("mse", "mae", "huber"):
            targets = F.one_hot(classes, 5) * 0.5 + torch.rand(BATCH, 5, generator=draw)
        return ImageMicroBatch(images, samples, targets=targets)
    words = torch.randint(1, 38, (BATCH, 8), generator=draw)
    words[:, 1] = classes
    words[torch.arange(BATCH), torch.randint(3, 8, (BATCH,), generator=draw)] = 39
    return ImageMicroBatch(images, samples, tokens=words)


def conversations(step: int) -> MicroBatch:
    """The rows of a step with 0 to 2 images each, and none in four successive rows; labels have weights."""
    draw = torch.Generator().manual_seed(step)
    tokens, counts = torch.randint(39, (BATCH, 17), generator=draw), torch.randint(3, (BATCH,), generator=draw)
    first = 4 * (step % 4)
    counts[first : first + 4] = 0
    for row, count in enumerate(counts.tolist()):
        for number in range(count):
            tokens[row, 1 + 6 * number : 5 + 6 * number] = 39
    images = torch.randint(256, (int(counts.sum()), 3, 16, 16), generator=draw).to(torch.uint8)
    tokens[:, 16] = counts  # to be learned
    labels, weights = tokens[:, 1:].clone(), torch.rand(BATCH, 16, generator=draw)
    labels[(labels == 39) | (torch.arange(16) < 4)] = -100
    weights = weights * (labels != -100)
    samples = torch.arange(step * BATCH, (step + 1) * BATCH)
    return MicroBatch(tokens[:, :-1], labels, torch.arange(16), samples, weights.sum(), weights=weights, images=images)


def rows_of(batch: MicroBatch, first: int, count: int, losses: int) -> MicroBatch:
    """Rows of a step with their images; ``losses``: of the step, of which the mean is taken."""
    images = (batch.tokens == 39).sum(1) // 4
    before, own = int(images[:first].sum()), int(images[first : first + count].sum())
    chosen = slice(first, first + count)
    return batch._replace(
        tokens=batch.tokens[chosen],
        labels=batch.labels[chosen],
        samples=batch.samples[chosen],
        divisor=batch.divisor / losses,
        weights=batch.weights[chosen],
        images=batch.images[before : before + own],
    )


def part(batch: ImageMicroBatch, first: int, count: int) -> ImageMicroBatch:
    cut = [None if each is None else each[first : first + count] for each in batch[1:]]
    return ImageMicroBatch(batch.images[:, first : first + count].flatten(0, 1), *cut)  # type: ignore[arg-type]


def train_rank(row: Row) -> Trained:
    """One rank's part of a run, without data preparation and checkpoints."""
    spec = row.spec()
    layout = make_plan(spec).layout
    assert (layout.zero_stage, layout.gradient_accumulation_steps) == (row.zero, row.accumulation)
    mesh, device = build_mesh(layout), torch.device("cpu")
    composed = compose(spec, layout, mesh, device, trained=trained_at(spec, 1))
    stepper: Any = build_stepper(composed, mesh, device, spec.training)
    losses: list[float] = []
    norms: list[float] = []
    size, update = row.micro_batch_size, stepper._update
    gradients: dict[str, Tensor] = {}

    def noting_update() -> Any:
        gradients.update(gradients or _whole_gradients(composed))
        return update()

    stepper._update = noting_update
    for step in range(1, row.steps + 1):
        set_rates(composed.optimizer, step, RATE)
        firsts = [(micro * row.ranks + mesh.data.rank) * size for micro in range(row.accumulation)]
        batches: list[Any]
        if row.family == "llava":
            batches = [rows_of(conversations(step), first, size, row.ranks * row.accumulation) for first in firsts]
        else:
            batches = [part(global_batch(row, step), first, size) for first in firsts]
        result = stepper.train(batches)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    return Trained(losses, norms, whole_weights(composed, layout), gradients)


def _whole_gradients(composed: Composed) -> dict[str, Tensor]:
    """The mean gradients over the ranks by name, before clipping. Collective."""
    from deepspeed.utils import safe_get_full_grad

    sharded = composed.engine.zero_optimization_stage() > 0
    found = {}
    for name, parameter in composed.model.named_parameters():
        if parameter.requires_grad:
            gradient = safe_get_full_grad(parameter) if sharded else parameter.grad
            found[name] = gradient.detach().float().clone().view(gradient.shape)
    return found


def whole_weights(composed: Composed, layout: Any) -> dict[str, Tensor]:
    """The parameters, those of ZeRO-3 gathered, and the running statistics. Collective."""
    found = {name: piece.values for name, piece in local_pieces(composed.model, 0, layout).items()}
    return found | {matrix.name: buffer.clone() for buffer, matrix in stored_buffers(composed.model)}


def train_plainly(row: Row) -> Trained:
    """The same run in one process: a model of transformers, torch's AdamW, and the losses written out."""
    spec = row.spec()
    model = reference_model(row.family, spec, first_weights(row))
    if row.trainable:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(word in name for word in row.trainable))
    optimizer = torch.optim.AdamW(decay_groups(model), lr=RATE, betas=spec.training.optimizer.betas, eps=EPS)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in normalization(row.family))
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    width = BATCH if row.joins_samples else row.micro_batch_size * row.ranks
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
            module.eval()
    for step in range(1, row.steps + 1):
        total, chunks = 0.0, list[Any]()
        if row.family == "llava":
            chunks = [conversations(step)]
        else:
            whole = global_batch(row, step)
            chunks = [part(whole, first, width) for first in range(0, BATCH, width)]
        for chunk in chunks:
            loss = plain_loss(row, model, (chunk.images / 255 - mean) / std, chunk) / len(chunks)
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients = gradients or _plain_gradients(model)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if row.family == "clip":
            with torch.no_grad():
                model.logit_scale.clamp_(0, 2.7)
    files = under_file_names(model)
    names = {name: stored_name(name, files) or name for name in first_weights(row)}
    weights = {name: files[stored] for name, stored in names.items()}
    return Trained(
        losses, norms, weights, {name: gradients[stored] for name, stored in names.items() if stored in gradients}
    )


def plain_loss(row: Row, model: Any, pixels: Tensor, batch: Any) -> Tensor:
    """The loss of a micro-batch as torch and the papers have it."""
    if row.family == "llava":
        found = model(input_ids=batch.tokens, pixel_values=pixels)
        each = F.cross_entropy(found.logits.transpose(1, 2), batch.labels, reduction="none")
        return (each * batch.weights).sum() / batch.weights.sum()
    if row.family == "clip":
        found = model(input_ids=batch.tokens, pixel_values=pixels)
        logits, count = found.logits_per_image, len(batch.samples)
        if row.loss == "sigmoid":  # arXiv:2303.15343, algorithm 1
            signs = 2 * torch.eye(count) - 1
            return -F.logsigmoid(signs * (logits + model.logit_bias)).sum() / count
        targets = torch.arange(count)
        return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
    outputs = model(pixel_values=pixels).logits
    if row.loss == "nt_xent":  # arXiv:2002.05709, algorithm 1
        features, count = F.normalize(outputs), len(batch.samples)
        similarities = features @ features.T / 0.5
        similarities = similarities.masked_fill(torch.eye(2 * count, dtype=torch.bool), -torch.inf)
        return F.cross_entropy(similarities, (torch.arange(2 * count) + count) % (2 * count))
    if row.loss == "bce":
        return F.binary_cross_entropy_with_logits(outputs, batch.targets, pos_weight=torch.full((5,), 2.0))
    if row.loss in ("mse", "mae"):
        return (F.mse_loss if row.loss == "mse" else F.l1_loss)(outputs, batch.targets)
    if row.loss == "huber":
        return F.huber_loss(outputs, batch.targets, delta=0.3)
    return F.cross_entropy(outputs, batch.targets, label_smoothing=0.1 if row.loss == "smoothing" else 0.0)


def _plain_gradients(model: Any) -> dict[str, Tensor]:
    """The gradients under the names of the weights in Hugging Face files."""
    copied = copy.deepcopy(model)
    trained = {}
    for parameter, source in zip(copied.parameters(), model.parameters(), strict=True):
        parameter.data = torch.full_like(source, torch.nan) if source.grad is None else source.grad.clone()
    for name, gradient in under_file_names(copied).items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")) and not gradient.isnan().any():
            trained[name] = gradient
    return trained


def first_weights(row: Row) -> dict[str, Tensor]:
    spec = row.spec()
    ours = outline(spec.model)
    materialize(ours, ours.first_weights(spec.training.seed, torch.device("cpu")), torch.device("cpu"))
    return ours.state_dict()


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices and convolutions, but not for positions and class tokens."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        plain = parameter.dim() > 1 and not any(word in name for word in ("position_embedding", "cls_token"))
        (decayed if plain else others).append(parameter)
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def normalization(family: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if family in ("clip", "llava"):
        return (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    if family == "vit":
        return (0.5,) * 3, (0.5,) * 3
    return (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def under_file_names(model: Any) -> dict[str, Tensor]:
    """The weights under the names of Hugging Face files, which modules of transformers 5 no longer have."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found: dict[str, Tensor] = load_file(f"{folder}/model.safetensors")
    return found


def reference_model(family: str, spec: RunSpec, weights: dict[str, Tensor]) -> Any:
    kind, config = class_and_config(spec.model)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        files = under_file_names(kind(config)) if family == "llava" else weights
        own = {name: value for name, value in weights.items() if name != "logit_bias"}
        tensors = {stored_name(name, files) or name: value.contiguous() for name, value in own.items()}
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        model, about = kind.from_pretrained(folder, output_loading_info=True)
    assert not {*about["missing_keys"], *about["unexpected_keys"]}, about
    if "logit_bias" in weights:  # transformers has it in SigLIP alone
        model.logit_bias = nn.Parameter(weights["logit_bias"].clone())
    return model


@dataclass(frozen=True)
class ImageDifference(Difference):
    """``gradient``: of any element in the first step, relative to the largest one of all."""

    gradient: float = 0.0

    def within(self, limit: Difference) -> bool:
        return super().within(limit) and self.gradient <= getattr(limit, "gradient", torch.inf)


def difference(found: Trained, expected: Trained) -> ImageDifference:
    """The largest differences: of the loss, of the gradient norm (relative), and of any weight or statistic."""
    assert found.weights.keys() == expected.weights.keys()
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(each.abs().max().item() for each in expected.gradients.values())
    return ImageDifference(
        loss=max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)),
        norm=max(abs(a - b) / b for a, b in zip(found.norms, expected.norms, strict=True)),
        weight=max((found.weights[name] - each).abs().max().item() for name, each in expected.weights.items()),
        gradient=max((found.gradients[name] - each).abs().max().item() for name, each in expected.gradients.items())
        / largest,
    )
