"""The screens of `data show`, rows with the part in the loss marked or images, and of `data stats` for images."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from scaletrain_cli.text import bytes_text, counted, listed, lost_text, percent_text, visible, whole_text
from scaletrain_cli.ui.console import line, plain, stdout_console

_MOST_CLASSES, _MOST_EXAMPLES, _BARS = 5, 5, 24


def show_images(answer: Mapping[str, Any]) -> None:
    """Print samples to stdout, one below the other."""
    console = stdout_console()
    if "step" in answer:
        shown, layout = len(answer["samples"]), answer["layout"]
        head = f"step {whole_text(answer['step'])} (batch {whole_text(answer['batch'])} of the data): "
        head += f"{shown} of {counted(answer['samples_in_all'], 'sample')}"
        line(console, Text(head, "bold"))
        size, replicas = layout["micro_batch_size"], layout["data_parallel"]
        line(console, Text(f"micro-batches of {size} on {counted(replicas, 'replica')}", "dim"))
    else:
        amounts = (f"{counted(count, 'image')} of {plain(name)}" for name, count in answer["images"].items())
        line(console, Text(f"{answer['split']}: {', '.join(amounts)}", "bold"))
    console.print()
    for sample in answer["samples"]:
        for text in _described(sample):
            line(console, text)
        console.print()
    if answer["png"] is not None:
        line(console, Text(f"wrote {plain(answer['png'])}", "dim"))


def _described(sample: Mapping[str, Any]) -> Iterator[Text | str]:
    width, height = sample["size"]
    about = f"  {plain(sample['source'])}  {width} x {height} pixels, {bytes_text(sample['bytes'])}"
    yield Text.assemble((f"image {whole_text(sample['number'])}", "bold"), about)
    yield f"  {plain(sample['place'])}"
    if "sample" in sample:
        micro, replica = whole_text(sample["micro_batch"]), sample["replica"]
        yield f"  sample {whole_text(sample['sample'])} of the run, micro-batch {micro}, replica {replica}"
    if sample["class"] is not None:
        words = sample["class"] if isinstance(sample["class"], str) else ", ".join(sample["class"]) or "none"
        yield Text.assemble("  class ", (plain(words), "green"))
    elif sample["label"] is not None:
        yield f"  target {plain(str(sample['label']))}"
    if sample["caption"] is not None:
        cut = ", cut" if sample["cut"] else ""
        yield Text.assemble(
            "  ", (plain(sample["caption"]), "green"), f"  ({whole_text(sample['tokens'])} tokens{cut})"
        )
    if mix := sample.get("mix"):
        other = mix["with"] if isinstance(mix["with"], str) else ", ".join(mix["with"] or ())
        yield f"  {mix['kind']}: {percent_text(mix['share'])} of this image, the rest of one of class {plain(other)}"


def show_image_report(report: Mapping[str, Any]) -> None:
    """Print the report of prepared images to stdout."""
    console = stdout_console()
    for source in report["sources"]:
        line(console, Text.assemble((plain(source["source"]), "bold"), f"  {plain(source['dataset'])}"))
        for text in _facts(source, report["image_size"]):
            line(console, f"  {text}")
        console.print()
    _show_duplicates(console, report["duplicates"])
    if mixture := report["mixture"]:
        for source in mixture["sources"]:
            share = f"{percent_text(source['share'])} of the samples of the run, {source['epochs'] or 0:.2f} epochs"
            line(console, f"  {plain(source['source'])}: {share}")


def _facts(source: Mapping[str, Any], image_size: int | None) -> Iterator[str]:
    images, size = source["images"], source["bytes"]
    yield (
        f"{counted(images['train'], 'image')} to train on ({bytes_text(size['train'])}), "
        f"{whole_text(images['validation'])} to validate on ({bytes_text(size['validation'])})"
    )
    if left := source["left_out"]["samples"]:
        yield f"{counted(left, 'bad sample')} left out"
    if (quantiles := source["bytes_per_image"]) is not None:
        yield f"bytes per image: median {bytes_text(quantiles['median'])}, {_range(quantiles, bytes_text)}"
    sides = source["short_side"]
    if sides["quantiles"] is not None:
        quantiles = sides["quantiles"]
        yield f"shorter side in pixels: median {whole_text(quantiles['median'])}, {_range(quantiles, whole_text)}"
        if image_size is not None and sides["smaller"]:
            yield f"{percent_text(sides['smaller'])} are smaller than the {image_size} pixels of the model"
        yield from (f"  {text}" for text in _histogram(sides["images"]))
    if source["classes"] is not None:
        yield from _class_facts(source["classes"])
    if source["captions"] is not None:
        yield from _caption_facts(source["captions"])


def _range(sizes: Mapping[str, float], shown: Any) -> str:
    return f"80 % from {shown(sizes['tenth'])} to {shown(sizes['nine_tenths'])}, all to {shown(sizes['most'])}"


def _histogram(images: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each octave of the shorter side, with a bar by its share of the images."""
    octaves: dict[int, int] = {}
    for side, count in images.items():
        octave = int(side).bit_length()
        octaves[octave] = octaves.get(octave, 0) + count
    most = max(octaves.values(), default=1)
    for octave, count in sorted(octaves.items()):
        low, high = 1 << (octave - 1), (1 << octave) - 1
        bar = "█" * round(_BARS * count / most) or "▏"
        yield f"{low:>6} to {high:<6} {whole_text(count):>12}  {bar}"


def _class_facts(classes: Mapping[str, Any]) -> Iterator[str]:
    entries: Sequence[Mapping[str, Any]] = classes["classes"]
    there = sorted((entry for entry in entries if entry["train"]), key=lambda entry: (-entry["train"], entry["name"]))
    yield f"{counted(len(entries), 'class', 'classes')}; the largest has {classes['imbalance'] or 0:.1f} x the smallest"
    for name, some in (("largest", there[:_MOST_CLASSES]), ("smallest", there[::-1][:_MOST_CLASSES])):
        shown = (
            f"{plain(entry['name'])} {whole_text(entry['train'])} + {whole_text(entry['validation'])}" for entry in some
        )
        yield f"{name} (training + validation): {', '.join(shown)}"
    if missing := classes["without_training"]:
        yield f"without an image to train on: {plain(listed(missing, _MOST_CLASSES))}"


def _caption_facts(captions: Mapping[str, Any]) -> Iterator[str]:
    if (lengths := captions["tokens"]) is None:
        lengths = captions["bytes"]
        yield f"captions: median {bytes_text(lengths['median'])}, {_range(lengths, bytes_text)}"
        return
    yield (
        f"captions: median {whole_text(lengths['median'])} tokens, {_range(lengths, whole_text)} "
        f"(of {whole_text(captions['counted'])} captions)"
    )
    if captions["cut"] is not None:
        yield f"{percent_text(captions['cut'])} of the captions are longer than the model reads, and cut"


def _show_duplicates(console: Console, facts: Mapping[str, Any]) -> None:
    line(console, Text("duplicates", "bold"))
    line(
        console,
        f"  {whole_text(facts['train'])} images to train on and {whole_text(facts['validation'])} to validate on have "
        "the bytes of another one of their split",
    )
    if facts["other_labels"]:
        line(console, f"  {counted(facts['other_labels'], 'image')} with different labels in its copies")
    leak = f"  {counted(facts['leaked'], 'image')} to validate on is also trained on"
    if facts["leaked"] != 1:
        leak = f"  {whole_text(facts['leaked'])} images to validate on are also trained on"
    line(console, Text(leak, "yellow" if facts["leaked"] else ""))
    for pair in facts["examples"][:_MOST_EXAMPLES]:
        names = (f"{pair[split]['source']}: {pair[split]['image']}" for split in ("validation", "train"))
        line(console, f"    {plain(' = '.join(names))}")


_STATES = {
    "whole": "",
    "truncated": ", truncated",
    "without_target": ", left out: no token in the loss",
    "too_long": ", left out: longer than model.seq_len",
    "unusable": ", left out: cannot be used",
}


def show_rows(answer: Mapping[str, Any]) -> None:
    """Print the rows to stdout; without colors, what is in the loss stands between [[ and ]]."""
    console = stdout_console()
    for row in answer["rows"]:
        line(console, Text(f"row {row['row']}  {plain(row['where'])}{_STATES[row['state']]}", "bold"))
        for document in row["documents"]:
            name = "" if document["name"] == "text" else f"{document['name']}: "
            counts = f"{whole_text(document['tokens'])} tokens, {whole_text(document['target_tokens'])} in the loss"
            line(console, Text(f"{name}{counts}", "dim"))
            console.print(marked(document["parts"], console), soft_wrap=True)
            console.print()
        for image in row.get("images", ()):
            line(console, image_line(image))
    for text in _counts(answer):
        line(console, text)


def image_line(image: Mapping[str, Any]) -> Text:
    """Return the place of an image, and its size or what is wrong with it."""
    size = image.get("problem") or f"{image['width']} x {image['height']} pixels"
    return Text(f"image: {plain(image['place'])}, {size}", "dim")


def marked(parts: list[Mapping[str, Any]], console: Console) -> Text:
    """Return parts of a text, those in the loss in color, or between [[ and ]] without colors."""
    colors = console.color_system is not None
    text = Text()
    for part in parts:
        content, weight = visible(part["text"]), part["weight"]
        if not weight:
            text.append(content, "dim")
        elif colors:
            text.append(content, "green" if weight == 1 else "yellow")
        else:
            text.append(f"[[{content}]]" if weight == 1 else f"[[{weight:g}: {content}]]")
    return text


def _counts(answer: Mapping[str, Any]) -> list[str]:
    counts = answer["counted"]
    share = counts["target_tokens"] / counts["tokens"] if counts["tokens"] else 0.0
    lines = [
        f"format {answer['format']}; of the first {whole_text(counts['rows'])} rows:",
        f"  in the loss    {whole_text(counts['target_tokens'])} of {whole_text(counts['tokens'])} tokens "
        f"({percent_text(share)})",
        f"  truncated      {whole_text(counts['truncated'])} to {whole_text(answer['seq_len'])} tokens",
        f"  left out       {whole_text(counts['without_target'])} without a token in the loss, "
        f"{whole_text(counts['too_long'])} for their length, {whole_text(counts['unusable'])} that cannot be used",
        f"  sequences      {whole_text(counts['sequences'])} of {whole_text(answer['seq_len'])} tokens, "
        f"{percent_text(counts['filled'])} filled (data.packing: {answer['packing']})",
    ]
    if counts["lost"]:
        lines.append(f"  not in tokens  {plain(lost_text(counts['lost']))}")
    if answer["tokenizer_trained_on_rows"] is not None:
        rows = whole_text(answer["tokenizer_trained_on_rows"])
        lines.append(f"The tokenizer was trained on the first {rows} rows for this view; the run's has other tokens.")
    return lines


def show_samples(answer: Mapping[str, Any]) -> None:
    """Print the samples to stdout; without colors, what is in the loss stands between [[ and ]]."""
    console, layout = stdout_console(), answer["layout"]
    batch = "" if answer["batch"] == answer["step"] else f" (batch {whole_text(answer['batch'])} of the data)"
    of = "" if answer["rank"] is None else f" of rank {answer['rank']}"
    shown = len(answer["samples"])
    samples = f"{shown} of {counted(answer['samples_in_all'], 'sample')}{of}"
    line(console, Text(f"step {whole_text(answer['step'])}{batch}: {samples}", "bold"))
    batches = counted(layout["gradient_accumulation_steps"], "micro-batch", "micro-batches")
    size = f"{counted(layout['micro_batch_size'], 'sequence')} on {counted(layout['data_parallel'], 'replica')}"
    line(console, f"{batches} of {size}; sequences of {whole_text(answer['seq_len'])} tokens", "dim")
    console.print()
    for sample in answer["samples"]:
        _show_sample(console, sample)
    mark = "green" if console.color_system is not None else "in [[ ]]"
    line(console, Text(f"Text {mark} is in the loss.", "dim"))


def _show_sample(console: Console, sample: Mapping[str, Any]) -> None:
    line(
        console,
        Text.assemble(
            (f"sample {whole_text(sample['sample'])}", "bold"),
            f"  {plain(sample['source'])}, sequence {whole_text(sample['sequence'])}; "
            f"micro-batch {whole_text(sample['micro_batch'])}, replica {sample['replica']}",
        ),
    )
    for text in sample["texts"]:
        name = "" if text["name"] == "text" else f"{text['name']}, "
        for document in text["documents"]:
            first, last = document["positions"]
            end = document["first"] + document["tokens"] - 1
            places = f"tokens {whole_text(document['first'])} to {whole_text(end)}"
            line(console, Text(f"{name}{places}, positions {whole_text(first)} to {whole_text(last)}", "dim"))
            console.print(marked(document["parts"], console), soft_wrap=True)
        if text["follows"] is not None:
            line(console, Text("the next token, of which only the loss is computed", "dim"))
            console.print(marked([text["follows"]], console), soft_wrap=True)
        if text["padding"]:
            line(console, Text(f"{name}{counted(text['padding'], 'token')} of padding", "dim"))
    for image in sample.get("images", ()):
        line(console, image_line(image))
    console.print()
