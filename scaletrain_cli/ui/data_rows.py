"""The screen of `data show`: rows with the part in the loss marked, and counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from scaletrain_cli.text import counted, lost_text, percent_text, visible, whole_text
from scaletrain_cli.ui.console import line, plain, stdout_console

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
        head = f"row {row['row']}  {plain(row['where'])}{_STATES[row['state']]}"
        line(console, Text(head, "bold"))
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
    found = [
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
        found.append(f"  not in tokens  {plain(lost_text(counts['lost']))}")
    if answer["tokenizer_trained_on_rows"] is not None:
        rows = whole_text(answer["tokenizer_trained_on_rows"])
        found.append(f"The tokenizer was trained on the first {rows} rows for this view; the run's has other tokens.")
    return found


def show_samples(answer: Mapping[str, Any]) -> None:
    """Print the samples to stdout; without colors, what is in the loss stands between [[ and ]]."""
    console, layout = stdout_console(), answer["layout"]
    batch = "" if answer["batch"] == answer["step"] else f" (batch {whole_text(answer['batch'])} of the data)"
    of = "" if answer["rank"] is None else f" of rank {answer['rank']}"
    shown = len(answer["samples"])
    samples = f"{shown} of {counted(answer['samples_in_all'], 'sample')}{of}"
    line(console, Text(f"step {whole_text(answer['step'])}{batch}: {samples}", "bold"))
    line(
        console,
        Text(
            f"{counted(layout['gradient_accumulation_steps'], 'micro-batch', 'micro-batches')} of "
            f"{counted(layout['micro_batch_size'], 'sequence')} on {counted(layout['data_parallel'], 'replica')}; "
            f"sequences of {whole_text(answer['seq_len'])} tokens",
            "dim",
        ),
    )
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
