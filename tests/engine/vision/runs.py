"""Small networks for images: trained by the engine on ranks, and by a plain loop over the models of transformers."""

from __future__ import annotations

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
from scaletrain_cli.spec import RunSpec, parse_spec, to_hugging_face
from scaletrain_cli.spec.weight_files import stored_name
from tests.engine.parity.comparison import Difference
from tests.engine.parity.layouts import local_pieces

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

    def __str__(self) -> str:
        words = [self.family, f"ZeRO-{self.zero}", f"{self.ranks} ranks"]
        words += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        words += [f"checkpointing {self.checkpointing}"] if self.checkpointing != "none" else []
        words += [f"trains {', '.join(self.trainable)}"] if self.trainable else []
        return ", ".join([*words, *self.overrides])

    @property
    def micro_batch_size(self) -> int:
        return BATCH // (self.ranks * self.accumulation)

    def spec(self) -> RunSpec:
        text = _SPEC.format(
            model=MODELS[self.family],
            batch=BATCH,
            micro=self.micro_batch_size,
            steps=STEPS,
            rate=RATE,
            eps=EPS,
            zero=self.zero,
            checkpointing=self.checkpointing,
            ranks=self.ranks,
        )
        chosen = ", ".join(f'{{match: "*{word}*"}}' for word in self.trainable)
        overrides = (*self.overrides, f"training.trainable=[{chosen}]") if chosen else self.overrides
        return parse_spec(text, file="images.yaml", base_dir=None, overrides=overrides)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Trained:
    """By step the loss and the gradient norm; the weights and running statistics by name after the last step."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def global_batch(family: str, step: int) -> ImageMicroBatch:
    """The samples of a step: images with a pattern of their class, or of their caption."""
    draw = torch.Generator().manual_seed(step)
    classes = torch.randint(5, (BATCH,), generator=draw)
    images = torch.randint(100, (BATCH, 3, 16, 16), generator=draw)
    images[torch.arange(BATCH), classes % 3, 3 * classes] += 150
    samples = torch.arange(step * BATCH, (step + 1) * BATCH)
    if family != "clip":
        return ImageMicroBatch(images.to(torch.uint8), samples, targets=classes)
    words = torch.randint(1, 38, (BATCH, 8), generator=draw)
    words[:, 1] = classes
    words[torch.arange(BATCH), torch.randint(3, 8, (BATCH,), generator=draw)] = 39
    return ImageMicroBatch(images.to(torch.uint8), samples, tokens=words)


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
    assert batch.divisor is not None
    assert batch.weights is not None
    assert batch.images is not None
    return batch._replace(
        tokens=batch.tokens[chosen],
        labels=batch.labels[chosen],
        samples=batch.samples[chosen],
        divisor=batch.divisor / losses,
        weights=batch.weights[chosen],
        images=batch.images[before : before + own],
    )


def part(batch: ImageMicroBatch, first: int, count: int) -> ImageMicroBatch:
    return ImageMicroBatch(*[None if each is None else each[first : first + count] for each in batch])  # type: ignore[arg-type]


def train_rank(row: Row) -> Trained:
    """One rank's part of a run, without data preparation and checkpoints."""
    spec = row.spec()
    layout = make_plan(spec).layout
    assert (layout.zero_stage, layout.gradient_accumulation_steps) == (row.zero, row.accumulation)
    mesh, device = build_mesh(layout), torch.device("cpu")
    composed = compose(spec, layout, mesh, device, trained=trained_at(spec, 1))
    stepper = build_stepper(composed, mesh, device, spec.training)
    losses: list[float] = []
    norms: list[float] = []
    size = row.micro_batch_size
    for step in range(1, STEPS + 1):
        set_rates(composed.optimizer, step, RATE)
        firsts = [(micro * row.ranks + mesh.data.rank) * size for micro in range(row.accumulation)]
        batches: list[Any]
        if row.family == "llava":
            batches = [rows_of(conversations(step), first, size, row.ranks * row.accumulation) for first in firsts]
        else:
            batches = [part(global_batch(row.family, step), first, size) for first in firsts]
        result = stepper.train(batches)
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    return Trained(losses, norms, whole_weights(composed, layout))


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
    width = row.micro_batch_size * row.ranks
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
            module.eval()
    for step in range(1, STEPS + 1):
        if row.family == "llava":
            rows = conversations(step)
            assert rows.images is not None
            assert rows.weights is not None
            found = model(input_ids=rows.tokens, pixel_values=(rows.images / 255 - mean) / std)
            each = F.cross_entropy(found.logits.transpose(1, 2), rows.labels, reduction="none")
            loss = (each * rows.weights).sum() / rows.weights.sum()
            loss.backward()
            losses.append(loss.item())
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            continue
        whole, total = global_batch(row.family, step), 0.0
        chunks = [part(whole, first, width) for first in range(0, BATCH, width)]
        if row.family == "clip":
            pixels = (whole.images / 255 - mean) / std
            found = model(input_ids=whole.tokens, pixel_values=pixels)
            targets = torch.arange(BATCH)
            logits = found.logits_per_image
            loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
            loss.backward()
            total = loss.item()
        else:
            for chunk in chunks:
                found = model(pixel_values=(chunk.images / 255 - mean) / std)
                loss = F.cross_entropy(found.logits, chunk.targets) / len(chunks)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if row.family == "clip":
            with torch.no_grad():
                model.logit_scale.clamp_(0, 2.7)
    files = under_file_names(model)
    names = {name: stored_name(name, files) or name for name in first_weights(row)}
    return Trained(losses, norms, {name: files[stored] for name, stored in names.items()})


def first_weights(row: Row) -> dict[str, Tensor]:
    """The weights and running statistics that a run begins with."""
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
    """The model of transformers with the same dimensions and weights."""
    kind, config = reference_config(family, spec)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        files = under_file_names(kind(config)) if family == "llava" else weights
        tensors = {stored_name(name, files) or name: value.contiguous() for name, value in weights.items()}
        save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
        model, about = kind.from_pretrained(folder, output_loading_info=True)
    assert not {*about["missing_keys"], *about["unexpected_keys"]}, about
    return model


def reference_config(family: str, spec: RunSpec) -> tuple[Any, Any]:
    """The class and the config of the model of transformers."""
    import transformers

    own: Any = spec.model
    if family == "resnet":
        config = transformers.ResNetConfig(
            embedding_size=own.embedding_size,
            hidden_sizes=list(own.hidden_sizes),
            depths=list(own.depths),
            num_labels=own.num_labels,
        )
        return transformers.ResNetForImageClassification, config
    if family == "convnext":
        config = transformers.ConvNextConfig(
            hidden_sizes=list(own.hidden_sizes),
            depths=list(own.depths),
            patch_size=own.patch_size,
            image_size=own.image_size,
            num_stages=len(own.depths),
            num_labels=own.num_labels,
            layer_scale_init_value=own.layer_scale_init_value,
        )
        return transformers.ConvNextForImageClassification, config
    if family == "vit":
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size")
        config = transformers.ViTConfig(
            **{name: getattr(own, name) for name in (*names, "patch_size", "num_labels", "layer_norm_eps")},
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return transformers.ViTForImageClassification, config
    if family == "llava":
        return transformers.LlavaForConditionalGeneration, transformers.LlavaConfig(**to_hugging_face(own))
    config = transformers.CLIPConfig(
        vision_config=own.vision_config.model_dump(),
        text_config=own.text_config.model_dump() | {"bos_token_id": 0, "pad_token_id": 1},
        projection_dim=own.projection_dim,
    )
    return transformers.CLIPModel, config


def difference(found: Trained, expected: Trained) -> Difference:
    """The largest differences: of the loss, of the gradient norm (relative), and of any weight or statistic."""
    assert found.weights.keys() == expected.weights.keys()
    return Difference(
        loss=max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)),
        norm=max(abs(a - b) / b for a, b in zip(found.norms, expected.norms, strict=True)),
        weight=max((found.weights[name] - each).abs().max().item() for name, each in expected.weights.items()),
    )
