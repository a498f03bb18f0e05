"""The screen of `data show`: rows with the part in the loss marked, and counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from scaletrain_cli.text import lost_text, percent_text, visible, whole_text
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
