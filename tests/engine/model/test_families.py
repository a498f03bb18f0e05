"""Each family computes what transformers computes: logits, gradients, and again after training and export."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from scaletrain_cli.engine.checkpoint.export import export, stored_layout
from scaletrain_cli.engine.model import outline
from scaletrain_cli.engine.model.attention import TokenContext
from scaletrain_cli.engine.model.base import CausalLM
from scaletrain_cli.engine.model.materialization import matrices_of, stored_buffers
from scaletrain_cli.engine.model.safetensors import HuggingFaceFolder
from scaletrain_cli.errors import UsageError
from tests.engine.checkpoint.test_export import NO_TEXT, checkpoint_of
from tests.engine.checkpoint.test_export import spec_of as run_spec_of
from tests.engine.model.families import FAMILIES, LENGTH, loaded, logits, reference, spec_of, tokens_of

NO_ROUTER_LOSS = {"router_aux_loss_coef": 0.0}  # transformers adds it only with output_router_logits
LONG = {"deepseek v2", "llama2", "qwen2_moe windows"}  # others have what these have
families = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in FAMILIES]
)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def by_name(model: CausalLM, values: dict[nn.Parameter, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return values of the parameters as matrices by name: those of stacked experts are several."""
    return {
        matrix.name: values[parameter].flatten()[matrix.start : matrix.stop].view(matrix.shape)
        for parameter, matrices in matrices_of(model).items()
        for matrix in matrices
        if parameter in values
    }


def gradients_as_stored(model: CausalLM, model_type: str) -> dict[str, torch.Tensor]:
    """Return our gradients under the names, and in the form, of the architecture's files."""
    found = by_name(model, {p: p.grad for p in model.parameters() if p.grad is not None})
    shapes = {name: tuple(values.shape) for name, values in found.items()}
    layout = stored_layout(shapes, model.spec, {"model_type": model_type})
    return {name: stored.joined(found.__getitem__, torch.float32) for name, stored in layout.items()}


def trained(model: CausalLM, steps: int = 3) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        tokens = (tokens_of() + step) % 64
        optimizer.zero_grad()
        model(tokens, tokens.roll(-1, 1)).backward()
        optimizer.step()
    values: dict[nn.Parameter, torch.Tensor] = {parameter: parameter.detach() for parameter in model.parameters()}
    return {matrix.name: buffer for buffer, matrix in stored_buffers(model)} | by_name(model, values)


@families
def test_a_family_equals_transformers_before_and_after_training(name: str, tmp_path: Path) -> None:
    theirs = reference(name, tmp_path / "base")
    spec = spec_of(tmp_path / "base", **NO_ROUTER_LOSS)
    ours, tokens = loaded(spec, tmp_path / "base"), tokens_of()
    with torch.no_grad():
        for length in (7, LENGTH):  # within the windows and the original contexts, and beyond
            close(logits(ours, tokens[:, :length]), theirs(tokens[:, :length]).logits)
    labels = tokens.roll(-1, 1)
    ours(tokens, labels).backward()
    nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    expected = gradients(theirs)
    found = gradients_as_stored(ours, "gpt_oss") if name == "gpt-oss" else gradients(ours)
    for parameter, gradient in found.items():
        close(gradient, expected[parameter])
    weights = trained(ours)
    run = run_spec_of(spec.model_dump())
    saved = checkpoint_of(tmp_path / "step-00000001", weights)
    written = export([saved], run, tmp_path / "out", torch.float32, NO_TEXT)
    assert written["parameters"] == sum(p.numel() for p in ours.parameters())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert again.config.model_type == theirs.config.model_type
    assert spec_of(tmp_path / "out", **NO_ROUTER_LOSS) == spec
    with torch.no_grad():
        close(logits(ours, tokens), again(tokens).logits)
        assert not torch.allclose(theirs(tokens).logits, again(tokens).logits, atol=1e-2)


def test_a_deepseek_with_another_number_of_layers_or_rotation_is_refused(tmp_path: Path) -> None:
    """transformers states one layer that predicts further tokens by default, also where the files have none."""
    reference("deepseek v3", tmp_path, num_hidden_layers=3, num_nextn_predict_layers=1)
    spec = spec_of(tmp_path)
    for changes in ({"num_hidden_layers": 2}, {"rope_interleave": False}):
        with pytest.raises(UsageError, match=f"{next(iter(changes))} = (3|true): the spec has (2|false)."):
            HuggingFaceFolder(tmp_path, outline(spec.model_copy(update=changes)))
        written = json.loads((tmp_path / "config.json").read_text())
        written.pop("rope_interleave", None)
        (tmp_path / "config.json").write_text(json.dumps(written))


@pytest.mark.parametrize("name", ["llama dynamic", "phi4-mini"])
def test_frequencies_of_a_row_follow_its_length_beside_any_other_row(name: str, tmp_path: Path) -> None:
    """Log-probabilities are those of the row alone, and logits those of transformers for a batch of one row."""
    theirs = reference(name, tmp_path)
    ours, tokens = loaded(spec_of(tmp_path), tmp_path), tokens_of()

    def log_probabilities(tokens: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        context = TokenContext(torch.arange(tokens.shape[1]), torch.arange(len(tokens)), real=real)
        labels = torch.where(real, tokens, -100)
        return ours(tokens, labels, context, output=lambda model, hidden: model.row_log_probabilities(hidden, labels))

    lengths = (10, 20)  # within the original context, and beyond it
    real = torch.arange(LENGTH) < torch.tensor(lengths).unsqueeze(1)
    with torch.no_grad():
        found = logits(ours, tokens, TokenContext(torch.arange(LENGTH), torch.arange(2), real=real))
        together = log_probabilities(tokens, real)
        for row, length in enumerate(lengths):
            part = tokens[row : row + 1, :length]
            close(found[row : row + 1, :length], theirs(part).logits)
            alone = log_probabilities(part, torch.ones_like(part, dtype=torch.bool))
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "phi4-mini", "deepseek dense", "gpt-oss"])
def test_packed_documents_are_computed_as_transformers_computes_them(name: str, tmp_path: Path) -> None:
    """Windows end at documents; one position beyond the original context changes the frequencies of all documents."""
    theirs = reference(name, tmp_path)
    ours, tokens = loaded(spec_of(tmp_path), tmp_path), tokens_of(rows=1)
    for lengths in ((10, 14), (20, 4)):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        numbers = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None]
        context = TokenContext(positions, torch.arange(1), numbers)
        with torch.no_grad():
            if name == "gpt-oss":  # transformers does not see documents here, and its frequencies are constant
                expected = torch.cat([theirs(part).logits for part in tokens.split(lengths, 1)], 1)
            else:
                expected = theirs(tokens, position_ids=positions, use_cache=False).logits
            close(logits(ours, tokens, context), expected)
            assert not torch.allclose(logits(ours, tokens), expected, atol=1e-2)
