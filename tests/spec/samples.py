"""Sample specs, and functions that load them or return their problems. No tests here."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest

from scaletrain_cli.errors import Problem, SpecError
from scaletrain_cli.spec import RunSpec, parse_spec
from scaletrain_cli.spec.json_schema import json_schema

PROJECT = Path(__file__).parent.parent.parent
FIXTURES = Path(__file__).parent / "hugging_face"
RECIPES = sorted((PROJECT / "recipes").glob("*.yaml"))

SPEC = """\
schema: scaletrain/v1
name: sample
model:
  family: llama
  hidden_size: 64
  num_hidden_layers: 2
  num_attention_heads: 4
  intermediate_size: 128
  vocab_size: 512
  seq_len: 32
data:
  source: python-stdlib
  tokenizer: {kind: bpe, vocab_size: 512}
training:
  global_batch_size: 8
  steps: 10
  precision: fp32
"""


@functools.cache
def schema_validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json_schema())


def load(text: str = SPEC, *overrides: str, base_dir: Path = FIXTURES) -> RunSpec:
    """Return the spec in ``text``, which errors call run.yaml, as read in ``base_dir``."""
    before = Path.cwd()
    os.chdir(base_dir)
    try:
        return parse_spec(text, file="run.yaml", base_dir=base_dir, overrides=overrides)
    finally:
        os.chdir(before)


def error(text: str = SPEC, *overrides: str, base_dir: Path = FIXTURES) -> SpecError:
    with pytest.raises(SpecError) as caught:
        load(text, *overrides, base_dir=base_dir)
    return caught.value


def problems(text: str = SPEC, *overrides: str, base_dir: Path = FIXTURES) -> Sequence[Problem]:
    """Everything that is wrong with it."""
    return error(text, *overrides, base_dir=base_dir).problems


def problem(text: str = SPEC, *overrides: str, base_dir: Path = FIXTURES) -> str:
    """The only thing that is wrong with it, as a line."""
    found = problems(text, *overrides, base_dir=base_dir)
    assert len(found) == 1, [str(one) for one in found]
    return str(found[0])


def line_of(text: str, part: str) -> int:
    """Number of the first line that holds ``part``."""
    return next(number for number, line in enumerate(text.splitlines(), start=1) if part in line)
