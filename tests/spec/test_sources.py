"""Sources, stages and steps of ``data``: what is accepted, and each contradiction at its key."""

import pytest

from scaletrain_cli.spec.data import ONLY_SOURCE
from scaletrain_cli.spec.sources import StageSpec
from tests.spec.samples import SPEC, error, load

SOURCES = "data.sources=[{name: web, path: /w, weight: 3}, {name: code, path: python-stdlib, weight: 1}]"
TWO = ("data.source=null", SOURCES)


def test_a_single_source_is_one_of_the_sources() -> None:
    (source,) = load(SPEC).data.all_sources
    assert (source.name, source.path, source.weight) == (ONLY_SOURCE, "python-stdlib", None)
    assert [each.name for each in load(SPEC, *TWO).data.all_sources] == ["web", "code"]


def test_a_stage_begins_at_a_step_or_after_a_share_of_the_run() -> None:
    spec = load(SPEC, *TWO, "data.stages=[{start: 4, weights: {code: 1}}, {start: 0.9, weights: {web: 1, code: 1}}]")
    assert [stage.first_step(spec.total_steps) for stage in spec.data.stages] == [4, 10]


@pytest.mark.parametrize(
    ("sets", "key", "said"),
    [
        (("data.source=null",), "data.source", "is required, or sources"),
        (("data.source=ftp://host/a.jsonl",), "data.source", "must be a local path, or begin with s3://, gs://, az://"),
        ((SOURCES,), "data.sources", "both name the data"),
        ((*TWO, "training.objective=sft"), "data.tokenizer.path", "is required with several sources of rows"),
        (("data.source=null", "data.sources=[{name: A, path: /w}]"), "data.sources.0.name", "must consist of a-z"),
        ((*TWO, "data.sources.1.name=web"), "data.sources.1.name", "is the name of an earlier source"),
        ((*TWO, "data.sources.1.epochs=2"), "data.sources.1.epochs", "and weight both set"),
        ((*TWO, "data.sources.1.weight=null"), "data.sources.1.weight", "or epochs is required"),
        ((*TWO, "data.sources.1.weight=0", "data.sources.0.weight=0"), "data.sources.0.weight", "above 0"),
        ((*TWO, "data.sources.1.path=python-docstrings"), "data.sources.1.path", "rows for sft"),
        ((*TWO, "data.sources.1.format=webdataset"), "data.sources.1.format", "is a format of images"),
        ((*TWO, "data.sources.1.fields.label=x"), "data.sources.1.fields", "names parts of images"),
        ((*TWO, "data.stages=[{start: 1.5, weights: {web: 1}}]"), "data.stages.0.start", "below 1"),
        ((*TWO, "data.stages=[{start: 1, weights: {web: 1}}]"), "data.stages.0.start", "step from 2"),
        ((*TWO, "data.stages=[{start: true, weights: {web: 1}}]"), "data.stages.0.start", "share of the run"),
        ((*TWO, "data.stages=[{start: 99, weights: {web: 1}}]"), "data.stages.0.start", "exceed the 10 steps"),
        ((*TWO, "data.stages=[{start: 2, weights: {wob: 1}}]"), "data.stages.0.weights", "Did you mean web?"),
        ((*TWO, "data.stages=[{start: 2, weights: {web: 0}}]"), "data.stages.0.weights", "above 0"),
        (
            (*TWO, "data.stages=[{start: 0.5, weights: {web: 1}}, {start: 6, weights: {code: 1}}]"),
            "data.stages.1.start",
            "is step 6, which must be after step 6",
        ),
        (
            (*TWO, "data.sources.1={name: code, path: /c, epochs: 2}", "data.stages=[{start: 2, weights: {web: 1}}]"),
            "data.sources.1.epochs",
            "Use weight",
        ),
        (("data.prepare=[{step: score, column: a}]",), "data.prepare.0.min", "is required unless max"),
        (("data.cache.size=999KB",), "data.cache.size", "must be at least 1 MiB"),
        (("data.prepare=[{step: langauge}]",), "data.prepare.0", "must have `step`"),
        (("data.prepare=[{step: normalization, only: [web]}]",), "data.prepare.0.only", "web is no source"),
    ],
)
def test_a_contradiction_is_named_at_its_key(sets: tuple[str, ...], key: str, said: str) -> None:
    problems = [(problem.key, str(problem)) for problem in error(SPEC, *sets).problems]
    assert any(found == key and said in text for found, text in problems), problems


@pytest.mark.parametrize(("start", "steps", "first"), [(0.29, 100, 30), (0.57, 100, 58), (0.9, 10, 10), (1e-9, 10, 1)])
def test_the_share_of_a_stage_counts_as_it_is_written(start: float, steps: int, first: int) -> None:
    assert StageSpec(start=start, weights={"web": 1}).first_step(steps) == first


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (("data.prepare=[{step: language, keep: [english]}]",), "data.prepare.0.keep.0"),
        (("data.prepare=[{step: identifiers, replace: [name]}]",), "data.prepare.0.replace.0"),
        (
            (
                "data.source=null",
                "data.sources=[{name: web, path: /w, weight: 3}, {name: web, path: /c, weight: 1}]",
                "data.prepare=[{step: normalization, only: [code]}]",
                "data.stages=[{start: 2, weights: {code: 1}}]",
            ),
            "data.sources.1.name",
        ),
    ],
)
def test_a_problem_that_another_one_causes_is_not_told(sets: tuple[str, ...], key: str) -> None:
    assert [problem.key for problem in error(SPEC, *sets).problems] == [key]


def test_a_list_that_must_not_be_empty_says_so() -> None:
    (problem,) = error(SPEC, "data.prepare=[{step: language, keep: []}]").problems
    assert (problem.key, problem.message) == ("data.prepare.0.keep", "must have 1 or more items.")
