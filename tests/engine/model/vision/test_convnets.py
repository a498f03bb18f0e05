"""ResNets and ConvNeXts compute what those of transformers compute, in evaluation and in training."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from scaletrain_cli.engine.compose import wrap_blocks
from scaletrain_cli.engine.model.materialization import named_weights
from scaletrain_cli.engine.model.vision.batch_norm import BatchNorm2d
from scaletrain_cli.plan.parameters import model_parameters, stored_shapes
from scaletrain_cli.spec.training import LayoutSpec
from tests.engine.model.vision.convnets import DIMS, fresh, gradients, images, spec_of, theirs

LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


@pytest.mark.parametrize("name", DIMS)
def test_three_steps_of_training_equal_those_of_transformers(name: str) -> None:
    model, expected = fresh(DIMS[name]), theirs(DIMS[name])
    model.load_state_dict(expected.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, expected)]
    model.train(), expected.train()
    for step in range(3):
        pixels = images(seed=step)
        logits, their_logits = model(pixels), expected(pixels).logits
        torch.testing.assert_close(logits, their_logits, atol=1e-5, rtol=1e-5)
        F.cross_entropy(logits, LABELS).backward()
        F.cross_entropy(their_logits, LABELS).backward()
        torch.testing.assert_close(gradients(model), gradients(expected), atol=2e-4, rtol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), atol=1e-5, rtol=1e-5)
    if DIMS[name]["family"] == "resnet":
        assert all(norm.num_batches_tracked == 10 for norm in model.modules() if isinstance(norm, BatchNorm2d))


@pytest.mark.parametrize("name", DIMS)
def test_names_and_order_are_those_of_transformers_and_of_the_planner(name: str) -> None:
    spec, model = spec_of(DIMS[name]), fresh(DIMS[name])
    assert set(model.state_dict()) == set(theirs(DIMS[name]).state_dict())
    assert [each.name for each in model_parameters(spec)] == [each for each, _ in model.named_parameters()]
    assert stored_shapes(spec) == named_weights(model)


@pytest.mark.parametrize("name", ["basic", "bottleneck", "convnext"])
def test_first_weights_have_the_spread_of_transformers(name: str) -> None:
    dims = {**DIMS[name], "hidden_sizes": [32, 64, 128]}
    model = fresh(dims)
    given = {key: value for key, value in dims.items() if key not in ("family", "image_size")}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "convnext":
            expected = transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**given, num_stages=3))
        else:
            expected = transformers.ResNetForImageClassification(transformers.ResNetConfig(**given))
    found = model.state_dict()
    for key, values in expected.state_dict().items():
        if values.ndim < 2 and not key.startswith("classifier"):
            assert torch.equal(found[key], values), key
        elif values.ndim > 1 and values.numel() > 1000:
            assert found[key].std() == pytest.approx(values.std().item(), rel=0.1), key
            assert found[key].mean().abs() < 0.1 * values.std(), key
    assert found["classifier.1.weight" if name != "convnext" else "classifier.weight"].abs().max() > 0


def test_first_weights_follow_from_seed_name_and_shape() -> None:
    one, same, other = (fresh(DIMS["basic"], seed).state_dict() for seed in (0, 0, 1))
    deeper = fresh({**DIMS["basic"], "depths": [2, 1, 3]}).state_dict()
    assert one
    for name, values in one.items():
        assert torch.equal(values, same[name])
        assert torch.equal(values, deeper[name])
        assert values.ndim < 2 or not torch.equal(values, other[name])


@pytest.mark.parametrize("name", ["basic", "bottleneck"])
def test_with_zero_init_residual_every_block_begins_as_the_identity_of_its_shortcut(name: str) -> None:
    model = fresh({**DIMS[name], "zero_init_residual": True}).eval()
    assert len(model.blocks) > 0
    for block in model.blocks.values():
        channels = next(block.parameters()).shape[1]
        x = torch.rand(2, channels, 8, 8)
        assert isinstance(block.shortcut, nn.Module)
        assert torch.equal(block(x), F.relu(block.shortcut(x)))


def test_group_norm_does_not_depend_on_the_other_images() -> None:
    dims = {**DIMS["basic"], "norm": "group", "embedding_size": 32, "hidden_sizes": [32, 32, 64]}
    model, pixels = fresh(dims), images()
    torch.testing.assert_close(model(pixels)[:2], model(pixels[:2]), atol=1e-6, rtol=1e-5)
    assert stored_shapes(spec_of(dims)) == named_weights(model)
    assert not any("running" in name for name in model.state_dict())


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous_format"])
def test_convolutions_get_images_in_the_memory_format_of_the_spec(memory_format: str) -> None:
    model = fresh({**DIMS["basic"], "memory_format": memory_format})
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels > 3:
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(images())
    assert seen
    assert all(each.is_contiguous(memory_format=getattr(torch, memory_format)) for each in seen)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_recomputed_blocks_update_the_statistics_once(compiled: bool) -> None:
    dims = DIMS["bottleneck"] | ({"hidden_sizes": [16], "depths": [1]} if compiled else {})
    plain, wrapped = fresh(dims), fresh(dims)
    wrap_blocks(wrapped, LayoutSpec(), "full", compiled=compiled)
    for step in range(2):
        for model in (plain, wrapped):
            F.cross_entropy(model(images(seed=step)), LABELS).backward()
    assert torch.equal(next(wrapped.buffers()), next(plain.buffers()))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(wrapped.get_buffer(name), buffer, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients(wrapped), gradients(plain), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_keeps_its_statistics_in_fp32(dtype: torch.dtype) -> None:
    cast, exact = fresh(DIMS["basic"], dtype=dtype).to(dtype), fresh(DIMS["basic"])
    for step in range(3):
        pixels = images(seed=step)
        assert cast(pixels.to(dtype)).dtype == dtype
        exact(pixels)
    for name, buffer in exact.named_buffers():
        found = cast.get_buffer(name)
        assert found.dtype == buffer.dtype
        if buffer.is_floating_point():
            assert not torch.equal(found, found.to(dtype).float()), "rounded to 16 bits"
            assert (found - buffer).abs().max() < 0.05 * buffer.abs().max()
    assert next(cast.parameters()).dtype == dtype


def test_paths_are_dropped_by_the_number_of_the_image() -> None:
    model = fresh({**DIMS["convnext"], "drop_path_rate": 0.6})
    pixels, numbers = images(), torch.arange(6)
    whole = model.train()(pixels, numbers)
    order = torch.tensor([4, 1, 5, 0, 2, 3])
    parts = [model(pixels[rows], numbers[rows]) for rows in order.split(2)]
    torch.testing.assert_close(torch.cat(parts), whole[order], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole, model(pixels, numbers + 6), atol=1e-3)
    assert torch.equal(model.eval()(pixels, numbers), model(pixels))


def test_the_rate_of_dropped_paths_rises_linearly_with_depth() -> None:
    expected = theirs({**DIMS["convnext"], "drop_path_rate": 0.6})
    rates = [
        getattr(layer.drop_path, "drop_prob", 0.0) for each in expected.convnext.encoder.stages for layer in each.layers
    ]
    model = fresh({**DIMS["convnext"], "drop_path_rate": 0.6})
    assert [block.drop_path.p for block in model.blocks.values()] == pytest.approx(rates)  # type: ignore[union-attr]
