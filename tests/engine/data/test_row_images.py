"""Rows with images: what is read, prepared, and given to a model, compared with the processor of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from scaletrain_cli.data.chunk_hashes import CorruptDataError
from scaletrain_cli.data.images.decode import BadImageError
from scaletrain_cli.engine.data.batches import BatchReader, MicroBatch
from scaletrain_cli.engine.data.loader import Loader
from scaletrain_cli.engine.data.prepared import open_data_of, prepare_rows
from scaletrain_cli.engine.data.row_dataset import RowsInfo
from scaletrain_cli.engine.data.rows import RowSequences
from scaletrain_cli.engine.data.splits import open_reader
from scaletrain_cli.engine.parallel.mesh import Axis, Mesh
from scaletrain_cli.errors import UsageError
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.row_examples import IMAGE_MARK
from tests.engine.data.test_batches import WHOLE
from tests.spec.samples import SPEC, load

tokenizers = pytest.importorskip("tokenizers")

IMAGE_TOKEN, COPIES, SIDE = 3, 16, 32  # of a trained tokenizer, and of the preset llava-tiny
COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "gray": (9, 9, 9)}
LLAVA_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% else %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% generation %}{{ content['text'] + '<|im_end|>'}}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def encoded(color: str, width: int = 40, height: int = 30) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), COLORS[color]).save(file, "PNG")
    return file.getvalue()


def chat(*colors: str, answer: str = "It is a color.") -> dict[str, Any]:
    """A row in the form of LLaVA's files: the first image, the question, and its answer, for each image."""
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Ask."}] if not colors else []
    for color in colors:
        turns += [{"from": "human", "value": f"<image>\nWhat is {color}?"}, {"from": "gpt", "value": answer}]
    images = {} if not colors else {"image": f"{colors[0]}.png" if len(colors) == 1 else [f"{c}.png" for c in colors]}
    return {"id": "-".join(colors), **images, "conversations": turns}


ROWS = [chat("red"), chat("blue", "red"), chat(), chat("green"), chat("red", answer="Red."), chat("gray", "blue")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for color in COLORS:
        (tmp_path / f"{color}.png").write_bytes(encoded(color))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    return tmp_path


def spec(folder: Path, *settings: str) -> RunSpec:
    return load(
        SPEC.replace("steps: 10", "steps: 10"),
        f"model={{preset: llava-tiny, image_token_index: {IMAGE_TOKEN}, text_config: {{seq_len: 96}}}}",
        f"data.source={folder}/rows.json",
        "data.tokenizer.vocab_size=300",
        "data.validation_split=0",
        *settings,
    )


def opened(given: RunSpec, root: Path) -> tuple[RowsInfo, RowSequences]:
    info, train, _ = open_data_of(given, prepare_rows(given, root))
    assert isinstance(info, RowsInfo)
    assert isinstance(train, RowSequences)
    return info, train


def reader(given: RunSpec, train: RowSequences, data: int = 1, rank: int = 0, size: int = 6) -> BatchReader:
    batch = 6
    layout = replace(
        WHOLE,
        world_size=data,
        data_parallel=data,
        micro_batch_size=size,
        gradient_accumulation_steps=batch // (size * data),
        global_batch_size=batch,
    )
    axis = Axis(data, rank)
    found = open_reader(given, train, layout, Mesh(data=axis, replicas=axis))
    assert isinstance(found, BatchReader)
    return found


def colors_of(images: torch.Tensor | None) -> list[str]:
    """Return the names of images that have one color."""
    assert images is not None
    names = {color: name for name, color in COLORS.items()}
    assert images.shape[1:] == (3, SIDE, SIDE)
    assert images.dtype == torch.uint8
    assert bool((images == images[:, :, :1, :1]).all())
    return [names[tuple(each)] for each in images[:, :, 0, 0].tolist()]


def asked(batch: MicroBatch, given: RunSpec, root: Path) -> list[str]:
    """Return the colors that the text of a batch asks for, row by row."""
    tokenizer = tokenizers.Tokenizer.from_file(str(prepare_rows(given, root) / "tokenizer.json"))
    found = []
    for row in batch.tokens.tolist():
        found += [part.partition("?")[0] for part in tokenizer.decode(row).split("What is ")[1:]]
    return found


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_images_come_in_the_order_of_their_tokens(packing: str, folder: Path) -> None:
    given = spec(folder, f"data.packing={packing}")
    info, train = opened(given, folder)
    assert (info.train_images, info.train_image_uses, info.tokens_per_image) == (4, 7, COPIES)
    assert info.train_image_bytes == sum(len(encoded(color)) for color in COLORS)
    assert (len(train) < len(ROWS)) == (packing == "best_fit")
    seen = []
    for batch in reader(given, train).read([[each] for each in range(len(train))]):
        assert asked(batch, given, folder) == colors_of(batch.images)
        assert int((batch.tokens == IMAGE_TOKEN).sum()) == COPIES * len(colors_of(batch.images))
        assert not bool((batch.labels == IMAGE_TOKEN).any())
        seen += colors_of(batch.images)
    assert sorted(seen) == sorted(["red", "blue", "red", "green", "red", "gray", "blue"])


def test_ranks_processes_and_resumes_read_the_same(folder: Path) -> None:
    given = spec(folder)
    _, train = opened(given, folder)
    whole = reader(given, train).batch(3).micro_batches()[0]
    for data, size in ((2, 3), (3, 1)):
        found: dict[int, list[str]] = {}
        for rank in range(data):
            for batch in reader(given, train, data, rank, size).batch(3).micro_batches():
                assert batch.images is not None
                counts = ((batch.tokens == IMAGE_TOKEN).sum(1) // COPIES).tolist()
                assert len(batch.images) == sum(counts)
                parts = torch.split(batch.images, counts)
                found |= {int(n): colors_of(part) for n, part in zip(batch.samples, parts, strict=True)}
        assert [color for number in sorted(found) for color in found[number]] == colors_of(whole.images)
    loader: Loader[Any] = Loader(reader(given, train).without_groups().batch, torch.device("cpu"), workers=1)
    try:
        for number in (1, 2, 3):
            batch = loader.take(number)
    finally:
        loader.close()
    again = batch.micro_batches()[0]
    assert torch.equal(again.tokens, whole.tokens)
    assert torch.equal(again.images, whole.images)


def test_bytes_and_parts_in_parquet_are_the_rows_of_trl(folder: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image, text = {"type": "image", "text": None}, {"type": "text", "text": "What is red?"}
    rows = [
        {
            "images": [{"bytes": encoded("red"), "path": None}, {"bytes": None, "path": "blue.png"}],
            "messages": [
                {"role": "user", "content": [image, text, image, {"type": "text", "text": "What is blue?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "Colors."}]},
            ],
        }
    ]
    parquet.write_table(arrow.Table.from_pylist(rows * 3), folder / "rows.parquet")
    given = spec(folder, f"data.source={folder}/rows.parquet")
    info, train = opened(given, folder)
    assert (info.format, info.train_images, info.train_image_uses) == ("messages", 2, 6)
    (batch,) = reader(given, train).read([[0, 1, 2]])
    assert colors_of(batch.images) == ["red", "blue"] * 3
    assert train.images is not None
    assert [train.images.read(number).place for number in (0, 1)] == [
        f"{folder}/rows.parquet, row 1, image 1",
        f"{folder}/blue.png",
    ]


def processor(folder: Path, template: str) -> Any:
    """LLaVA's processor of transformers, with the image of the preset llava-tiny, and its tokenizer in ``folder``."""
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token=IMAGE_MARK)
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=size)
    return transformers.LlavaProcessor(
        images,
        fast,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


@pytest.mark.parametrize("takes_parts", [True, False])
def test_tokens_and_pixels_are_those_of_the_processor_of_transformers(takes_parts: bool, folder: Path) -> None:
    """A template for parts, and one for text, in which the user writes the image token, give the same rows."""
    draw = np.random.default_rng(7)
    for color in COLORS:
        Image.fromarray(draw.integers(0, 256, (48, 64, 3), np.uint8)).save(folder / f"{color}.png")
    first = spec(folder)
    beside = folder / "tokenizer"
    beside.mkdir()
    (beside / "tokenizer.json").write_bytes((prepare_rows(first, folder) / "tokenizer.json").read_bytes())
    template = LLAVA_TEMPLATE
    if takes_parts:
        (beside / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    else:
        template = "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
        template += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    (beside / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    given = spec(folder, f"data.tokenizer={{kind: file, path: {beside}/tokenizer.json}}")
    theirs = processor(beside, template)
    _, train = opened(given, folder)
    batches = reader(given, train).read([[number] for number in range(len(ROWS))])
    for row, batch in zip(ROWS, batches, strict=True):
        messages = []
        for turn in row["conversations"]:
            role, (*marks, text) = {"human": "user", "gpt": "assistant"}[turn["from"]], turn["value"].split("<image>\n")
            parts = [{"type": "image"} for _ in marks] + [{"type": "text", "text": text}]
            messages.append({"role": role, "content": parts if takes_parts else turn["value"]})
        names = [row["image"]] if isinstance(row.get("image"), str) else row.get("image", [])
        pictures = [Image.open(folder / name) for name in names]
        rendered = theirs.apply_chat_template(messages, tokenize=False)
        expected = theirs(images=pictures or None, text=rendered, add_special_tokens=False, return_tensors="pt")
        assert batch.real is not None
        assert batch.tokens[batch.real].tolist() == expected["input_ids"][0].tolist()
        assert batch.images is not None
        assert len(batch.images) == len(pictures)
        if pictures:
            mean, std = given.data.images.normalization("llava", 3)
            ours = (batch.images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
            torch.testing.assert_close(ours, expected["pixel_values"].float(), atol=1e-5, rtol=0)


def test_only_the_answers_are_in_the_loss(folder: Path) -> None:
    given = spec(folder)
    _, train = opened(given, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(prepare_rows(given, folder) / "tokenizer.json"))
    (batch,) = reader(given, train).read([[1]])
    labels = batch.labels[batch.labels >= 0].tolist()
    assert tokenizer.decode(labels, skip_special_tokens=False) == "It is a color.<|im_end|>\n" * 2


@pytest.mark.parametrize(("length", "uses", "truncated", "left_out"), [(80, 7, 2, 0), (60, 5, 2, 0), (34, 0, 0, 5)])
def test_no_image_is_cut(length: int, uses: int, truncated: int, left_out: int, folder: Path) -> None:
    """Rows with two images have theirs at tokens 6 to 21 and 52 to 67, of 92; all answers follow an image."""
    given = spec(folder, f"model.text_config.seq_len={length}")
    info, train = opened(given, folder)
    assert (info.train_image_uses, info.rows_truncated, info.rows_without_target) == (uses, truncated, left_out)
    for batch in reader(given, train).read([[each] for each in range(len(train))]):
        assert batch.images is not None
        assert int((batch.tokens == IMAGE_TOKEN).sum()) == COPIES * len(batch.images)
        assert asked(batch, given, folder)[: len(batch.images)] == colors_of(batch.images)


def refused(folder: Path, row: Any, *settings: str) -> str:
    (folder / "rows.json").write_text(json.dumps([*ROWS[:2], row]))
    with pytest.raises(UsageError) as raised:
        prepare_rows(spec(folder, *settings), folder)
    return str(raised.value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"image": "red.png"}, "it has 2 places of images in its text and 1 images"),
    ({"image": None}, "it has 2 places of images in its text and 0 images"),
    ({"image": [1, 2]}, "the column image must be the path of an image, its bytes"),
    ({"image": ["red.png", "none.png"]}, "none.png: there is no such file. Set data.images.folder to the folder"),
    ({"image": ["red.png", "rows.json"]}, "not an image in one of the formats"),
]


@pytest.mark.parametrize(("changed", "said"), BAD)
def test_a_bad_row_is_named(changed: dict[str, Any], said: str, folder: Path) -> None:
    message = refused(folder, chat("red", "blue") | changed)
    assert f"{folder}/rows.json, row 3" in message
    assert said in message


def test_rows_with_bad_images_may_be_left_out(folder: Path) -> None:
    content = encoded("blue")
    (folder / "cut.png").write_bytes(content[: len(content) - 30])  # found by decoding alone
    rows = [*ROWS, chat("red") | {"image": "cut.png"}, chat("red") | {"image": "none.png"}]
    (folder / "rows.json").write_text(json.dumps(rows))
    skips = spec(folder, "data.on_bad=skip")
    info, train = opened(skips, folder)
    assert (info.rows_with_bad_images, len(train)) == (2, len(ROWS))
    assert [f"{folder}/rows.json, row {number}: " in info.bad_images for number in (6, 7, 8)] == [False, True, True]
    stops = spec(folder, f"data.source={prepare_rows(skips, folder)}")
    with pytest.raises(UsageError, match=r"lacks 2 rows with bad images, the first at .*row 7"):
        opened(stops, folder)
    (folder / "rows.json").write_text(json.dumps(rows[:-1]))
    _, train = opened(spec(folder), folder)
    with pytest.raises(BadImageError, match=r"cut\.png"):
        reader(spec(folder), train).read([list(range(7))])


def test_rows_of_another_image_token_or_size_are_refused(folder: Path) -> None:
    prepared = prepare_rows(spec(folder), folder)
    assert prepare_rows(spec(folder, "model.vision_config.image_size=16"), folder) != prepared
    for setting in ("model.vision_config.image_size=16", "model.image_token_index=4"):
        with pytest.raises(UsageError, match="has rows with 16 tokens for an image, with the id 3, and the model"):
            opened(spec(folder, f"data.source={prepared}", setting), folder)
    with pytest.raises(UsageError, match="is not one token of the tokenizer; <image> has the id 3"):
        prepare_rows(spec(folder, "model.image_token_index=299"), folder)


def test_damage_of_an_image_is_found_when_it_is_read(folder: Path) -> None:
    given = spec(folder)
    path = prepare_rows(given, folder) / "train.images.bin"
    _, train = opened(given, folder)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    with pytest.raises(CorruptDataError, match=r"train\.images\.bin"):
        reader(given, train).read([list(range(6))])


def pictures(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    draw = np.random.default_rng(1)
    return [Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)) for width, height in sizes]


@pytest.mark.parametrize("aspect", ["pad", "crop"])
def test_an_export_prepares_images_as_the_run_did(aspect: str, folder: Path) -> None:
    """By LLaVA's image processor of transformers with the exported settings."""
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    from scaletrain_cli.engine.checkpoint.tokenizer_export import image_files
    from scaletrain_cli.engine.data.images.reading import RowPixels

    given = spec(folder, f"data.images.aspect={aspect}")
    files = {name: json.loads(content) for name, content in image_files(given, {}).items()}
    assert files["processor_config.json"]["patch_size"] ** 2 * COPIES == SIDE**2
    theirs = LlavaImageProcessorPil(**files["preprocessor_config.json"])
    mean, std = (np.array(each) for each in given.data.images.normalization("llava", 3))
    for image in pictures([(40, 40), (60, 30), (34, 70), (50, 48)]):
        expected = theirs(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
        ours = (RowPixels.of(given).transform.evaluation(image) / 255 - mean) / std
        assert np.abs(ours - expected).max() < 1e-5
    assert RowPixels.of(given).transform.evaluation(Image.new("RGB", (9000, 4))).shape == (SIDE, SIDE, 3)


def test_shown_rows_and_samples_have_their_images(folder: Path) -> None:
    from scaletrain_cli.engine.data import show, step_view

    given = spec(folder, "evaluation.every=0", "training={global_batch_size: 6, steps: 2}")
    (folder / "spec.json").write_text(given.model_dump_json(by_alias=True))
    (folder / "red.png").write_bytes(encoded("red", 50, 20))
    arguments = [str(folder / "spec.json"), str(folder)]
    first, second = show.run_command([*arguments, "1", "2", ""])["rows"]
    red, blue = (
        {"place": f"{folder}/{c}.png", "width": w, "height": h} for c, w, h in (("red", 50, 20), ("blue", 40, 30))
    )
    assert (first["images"], second["images"]) == ([red], [blue, red])
    (document,) = second["documents"]
    assert sum(part["text"].count(IMAGE_MARK) for part in document["parts"]) == 2
    assert document["tokens"] == 92
    prepare_rows(given, folder)
    for sample in step_view.run_command([*arguments, "", "1", "", "", "6"])["samples"]:
        text = "".join(part["text"] for part in sample["texts"][0]["documents"][0]["parts"])
        named = [Path(image["place"]).stem for image in sample["images"]]
        assert [part.partition("?")[0] for part in text.split("What is ")[1:]] == named
        assert text.count(IMAGE_MARK) == len(named)


def test_the_estimate_of_a_preparation_has_the_images(folder: Path) -> None:
    from scaletrain_cli.engine.data.preparation import bytes_of_named_images

    assert bytes_of_named_images(spec(folder).data) == sum(len(encoded(color)) for color in COLORS)
    (folder / "rows.json").write_text(json.dumps(ROWS * 500))
    assert bytes_of_named_images(spec(folder).data) == pytest.approx(3 * sum(len(encoded(c)) for c in COLORS), rel=0.1)
    assert bytes_of_named_images(spec(folder, "data.source=none.json").data) == 0
