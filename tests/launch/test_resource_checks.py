"""Every external resource of a spec has a row in docs/checks.md, and every row is checked as described."""

import importlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from scaletrain_cli.errors import ExitCode, UsageError, WrongNodesError
from scaletrain_cli.launch.resource_checks.checks import check_external, check_on_node, has_login
from scaletrain_cli.launch.resource_checks.files import class_file_problems, tokenizer_problem
from scaletrain_cli.launch.resource_checks.view import View
from scaletrain_cli.launch.resource_checks.weights import damage_of
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.spec import load_spec
from scaletrain_cli.spec.data import FieldsSpec
from scaletrain_cli.spec.hugging_face import read_config
from scaletrain_cli.spec.images import ImageFieldsSpec
from scaletrain_cli.spec.json_schema import json_schema
from scaletrain_cli.spec.preparation import IDENTIFIERS
from scaletrain_cli.spec.presets import SourceError
from scaletrain_cli.spec.weight_files import DamagedHeaderError, read_headers
from tests.cli.command_line import PROJECT, SMALL, Ended, scaletrain
from tests.launch.conftest import MakeRun
from tests.launch.working_tree import WorkingTree


class Row(NamedTuple):
    """A row of the table of docs/checks.md: a key of the spec, and the code that checks it."""

    key: str
    module: str
    name: str


def rows_of_page() -> list[Row]:
    _, _, rest = (PROJECT / "docs" / "checks.md").read_text(encoding="utf-8").partition("<!-- table -->\n")
    lines = rest.partition("<!-- end of table -->")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == 6 and all((row[0], *row[1:4], row[5])) for row in cells)
    return [Row(row[0].strip("`"), *row[5].strip("`").split("` `")) for row in cells]


# Text of a spec that names nothing outside it.
NAMES_NOTHING = {
    **dict.fromkeys(("model.adapter.targets", "model.adapter.targets.*"), "names of modules of the model"),
    **dict.fromkeys(("training.trainable.*.match", "training.trainable.*.match.*"), "names of parameters"),
    "name": "the run's own",
    "cluster.slurm.activate_arguments.*": "words for that script",
    **{
        f"data.fields.{name}": "a column, which the check of data.source looks for"
        for name in FieldsSpec.model_fields
        if name != "roles"
    },
    **{
        f"{section}.{name}": "a column or suffix, see data.source"
        for section in ("data.images.fields", "data.sources.*.fields")
        for name in ImageFieldsSpec.model_fields
    },
    "data.chat_template_date": "a date",
    "data.tokenizer.pattern": "a regular expression",
    "data.tokenizer.special_tokens.*": "a token",
    **dict.fromkeys(("data.sources.*.name", "data.prepare.*.only.*"), "names of sources"),
    "data.sources.*.field": "a column, which the check of the source looks for",
    **dict.fromkeys(("data.prepare.*.fields.*", "data.prepare.*.column"), "columns"),
    **{
        f"data.prepare.*.{key}": "texts to look for, or to write"
        for key in (
            *("keep.*", "stop_words.*", "bullets.*", "end_marks.*", "line_phrases.*", "document_phrases.*"),
            *(f"placeholders.{kind}" for kind in IDENTIFIERS),
        )
    },
    "env.*": "values of variables",
    "checkpoint.keep_best": "a metric of an evaluation of this spec, which loading the spec checks",
    **{
        f"model.text_config.{key}": "what loading the spec reads or rejects: llava has weights of the whole model"
        for key in ("hf_config", "weights", "adapter.weights", "adapter.targets", "adapter.targets.*")
    },
    "training.early_stopping.metric": "a metric of the validation of this spec, which loading the spec checks",
    **{
        f"evaluation.tasks.*.{key}": "text or names for the program that runs the task"
        for key in ("name", "prompts.*", "tasks.*", "batch_size")
    },
    "evaluation.zero_shot.templates.*": "prompts",
    "notify.*.events.*": "names of events, which loading the spec checks",
    "tracking.*": "the name of a tracker, which loading the spec checks",
}
# The files whose tests hold the checks of schedulers and nodes; what check_external looks at is in CASES.
HELD_BY = {
    "tests/cli/test_before_a_run.py": "model.preset cluster.kubernetes.image",
    "tests/data/images/test_zero_shot_source.py": "evaluation.zero_shot.source evaluation.zero_shot.classes",
    "tests/data/remote/test_remote_checks.py": "data.cache.path",
    "tests/engine/vision/test_weights_of_parts.py": "model.vision_weights model.text_weights",
    "tests/launch/backends/kubernetes/test_api.py": "cluster.kubernetes.context",
    "tests/launch/backends/kubernetes/test_code_store.py": "cluster.kubernetes.code_store",
    "tests/launch/backends/kubernetes/test_preflight.py": " ".join(
        f"cluster.kubernetes.{key}"
        for key in (
            *("queue", "priority", "pod_priority", "service_account", "runs.claim", "backend", "namespace"),
            *("gpu_resource", "rdma_resource", "gpu_product", "node_selector.*", "topology.key", "volumes.*.claim"),
            *("secrets.*.secret", "secrets.*.key", "pull_secrets.*"),
        )
    ),
    "tests/launch/backends/kubernetes/test_preparation.py": " ".join(
        f"cluster.kubernetes.preparation.{key}"
        for key in ("queue", "node_selector.*", "tolerations.*.key", "tolerations.*.value")
    ),
    "tests/launch/backends/slurm/test_preflight.py": " ".join(
        f"cluster.slurm.{key}"
        for key in (
            *("partition", "account", "qos", "reservation", "exclude", "nodelist"),
            *("gres_type", "gres.*", "memory_per_node"),
        )
    ),
    "tests/launch/backends/slurm/test_script.py": "cluster.slurm.modules.* cluster.slurm.container.python",
    "tests/launch/code/test_snapshot.py": "code.path",
    "tests/launch/node/test_code.py": "code.on_nodes",
    "tests/launch/node/test_inspection.py": "cluster.gpus_per_node",
    "tests/launch/test_row_checks.py": "data.validation_source data.sources.*.validation_path data.images.folder "
    "data.chat_template",
    "tests/launch/test_source_checks.py": "data.sources.*.path data.prepare.*.files.* data.prepare.*.bad_words",
    "tests/plan": "cluster.network",
    "tests/slurm_cluster": "cluster.slurm.constraint cluster.slurm.licenses cluster.slurm.preparation.partition "
    "cluster.slurm.extra.*",
    "tests/spec/test_errors.py": "cluster.gpu cluster.gpu.name",
    "tests/spec/test_kubernetes_section.py": " ".join(
        f"cluster.kubernetes.{key}"
        for key in (
            *("runs.path", "runs.sub_path", "volumes.*.path", "volumes.*.sub_path"),
            *("tolerations.*.key", "tolerations.*.value"),
        )
    ),
    "tests/spec/test_model_sources.py": "model.hf_config",
    "tests/tracking/test_prometheus.py": "tracking.prometheus.textfile tracking.prometheus.address",
    "tests/tracking/test_spec.py": "tracking.wandb.entity tracking.mlflow.uri tracking.mlflow.experiment "
    "tracking.tensorboard.dir",
}
ON_SLURM = "cluster.scheduler=slurm"
_IMAGES = (
    "model={family: resnet, embedding_size: 8, hidden_sizes: [16], depths: [1], num_channels: 1, image_size: 8}",
    "data.source=sklearn-digits",
)
_ONLINE = "tracking.wandb.mode=online"
_EVALUATION = "evaluation.tasks=[{kind: lm_eval, name: a, tasks: [b], %s}]"


class Case(NamedTuple):
    """A refused spec: its row, what is set, what is said, and the key that is named if it is not that of the row."""

    row: str
    sets: tuple[str, ...]
    said: str
    key: str = ""


CASES = (
    Case("data.images.classes", (*_IMAGES, "data.images.classes=no.txt"), "cannot be read: No such file or directory"),
    # What a file may have wrong: tests/launch/test_source_checks.py.
    *(
        Case("data.source", tuple(sets), said)
        for said, *sets in (
            ("no such file or folder", "data.source=nowhere"),
            ("no such file or folder", "data.source=~nobody-of-this-name/a.txt"),
            ("holds 13 bytes, too few for one sequence of 128", "data.source=short.jsonl"),
            ("is a link to a file that does not exist", "data.source=link.txt"),
            ("train.bin holds 4 tokens, and dataset.json says 5", "data.source=prepared"),
            ("no such file or folder", "data.source=nowhere", ON_SLURM),
        )
    ),
    Case(
        "data.source",
        ("data.source=tree", "data.tokenizer.vocab_size=5000"),
        "must not exceed model.vocab_size = 4096, since a tokenizer is trained",
        "data.tokenizer.vocab_size = 5000",
    ),
    Case("data.tokenizer.path", ("data.tokenizer={kind: file, path: no.json}",), "cannot be read: No such file"),
    Case("data.tokenizer.path", ("data.tokenizer={kind: file, path: other.jsonl}",), "is not a tokenizer.json"),
    Case("model.adapter.weights", ("model.adapter={name: lora, weights: nowhere}",), "nowhere does not exist"),
    Case("model.weights", ("model.weights=nowhere",), "does not exist"),
    Case("model.weights", ("model.weights=.",), "holds neither model.safetensors nor"),
    Case("model.weights", ("model.weights=weights",), "holds 36 bytes, and its header says 40"),
    Case("model.weights", ("model.weights=other",), "has rope_theta = 500000.0, and the spec has 10000.0"),
    Case("code.engine", ("code.engine=t.py",), "Set code.engine to t."),
    Case("code.engine", ("code.engine=no_such.module",), "it is not installed"),
    Case("code.engine", ("code={path: tree, engine: trian}",), "the snapshot of tree holds no such module"),
    Case("code.engine", ("code={path: tree, engine: trian}", ON_SLURM), "holds no such module"),
    Case("code.command.*", ("code.command=[no-such-program, a]",), "there is no such program on PATH"),
    Case("code.command", ("code={path: tree, command: [./go.sh]}",), "the snapshot of tree has no such file"),
    Case(
        "code.command.*",
        ("code={path: tree, command: [python3, local.py]}",),
        "the file is in the working tree, and not in the snapshot",
    ),
    Case("code.import_root", ("code={path: tree, engine: train, import_root: lib}",), "no such folder"),
    *(
        Case("evaluation.tasks.*.source", (f"evaluation.tasks=[{{kind: loss, name: a, source: {source}}}]",), said)
        for source, said in (("nowhere", "no such file or folder"), ("cut.parquet", "cannot be read as a table"))
    ),
    Case("evaluation.tasks.*.include_path", (_EVALUATION % "include_path: nowhere",), "there is no such folder"),
    Case("evaluation.tasks.*.command.*", (_EVALUATION % "command: [no-such-program]",), "is not on PATH"),
    Case("checkpoint.dir", ("checkpoint.dir=/etc/hostname/a",), "is not a folder"),
    Case("checkpoint.mirror.to", ("checkpoint.mirror.to=/etc/hostname/a",), "is not a folder"),
    Case("secret_env.*", ("secret_env=[NOT_SET_ANYWHERE]",), "is not set here"),
    Case("notify.*.webhook", ("notify=[{webhook: NOT_SET}]",), "NOT_SET is not set for the run. Export NOT_SET."),
    Case("notify.*.webhook", ("notify=[{webhook: PATH}]",), "PATH is not a URL that begins with https"),
    Case("notify.*.webhook", (ON_SLURM, "notify=[{webhook: PATH}]"), "PATH is not set for the run"),
    Case("notify.*.command.*", ("notify=[{command: [no-such-program]}]",), "is not found"),
    Case("tracking.wandb.project", (_ONLINE,), "no API key for Weights & Biases", "tracking.wandb.mode"),
    Case(
        "tracking.wandb.project",
        (_ONLINE, ON_SLURM),
        "Export WANDB_API_KEY and name it in secret_env",
        "tracking.wandb.mode",
    ),
    Case("cluster.slurm.activate", (ON_SLURM, "cluster.slurm.activate=/home/nobody/x"), "no such"),
    Case(
        "cluster.slurm.container.image",
        (ON_SLURM, "cluster.slurm.container={image: /home/no.sif, runtime: apptainer}"),
        "there is no such file",
    ),
    Case(
        "cluster.slurm.container.mounts.*",
        (ON_SLURM, "cluster.slurm.container={image: 'docker://a', mounts: ['/home/no:/data']}"),
        "/home/no does not exist",
        "cluster.slurm.container.mounts.0",
    ),
)


@pytest.fixture(autouse=True)
def things(made_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(made_once, tmp_path / "work", symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("NETRC", raising=False)
    return folder


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with every defect that a check finds."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "link.txt").symlink_to("gone")
    (folder / "short.jsonl").write_text('{"text": "a"}')
    (folder / "cut.parquet").write_bytes(b"PAR1" + bytes(40))
    (folder / "other.jsonl").write_text('{"content": "a"}\n')
    (folder / "prepared").mkdir()
    (folder / "prepared" / "train.bin").write_bytes(bytes(8))
    (folder / "prepared" / "validation.bin").write_bytes(b"")
    reported = {"dtype": "uint16", "train_tokens": 5, "validation_tokens": 0, "vocab_size": 300}
    (folder / "prepared" / "dataset.json").write_text(json.dumps(reported))
    (folder / "weights").mkdir()
    (folder / "weights" / "model.safetensors").write_bytes(safetensors('{"w":{"data_offsets":[0,4]}}'))
    (folder / "other").mkdir()
    (folder / "other" / "model.safetensors").write_bytes(safetensors('{"w":{"data_offsets":[0,0]}}'))
    (folder / "other" / "config.json").write_text('{"model_type": "llama", "rope_theta": 500000.0}')
    tree = folder / "tree"
    tree.mkdir()
    (tree / "train.py").write_text("print('it runs')\n")
    (tree / "local.py").touch()
    (tree / ".gitignore").write_text("local.py\n")
    WorkingTree(tree)
    return folder


def safetensors(header: str) -> bytes:
    """Return a safetensors file without data."""
    return len(header).to_bytes(8, "little") + header.encode()


def submit(*sets: str, verb: str = "submit", options: tuple[str, ...] = ("--dry-run",)) -> Ended:
    return scaletrain(verb, SMALL, *options, *(word for one in sets for word in ("--set", one)))


def text_keys(node: dict[str, Any], definitions: dict[str, Any], key: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the dotted keys whose value may be free text, neither an enumeration nor a quantity."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    options = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    kinds = {kind for one in (node, *options) for kind in ([one["type"]] if isinstance(one.get("type"), str) else ())}
    if "string" in kinds and not kinds & {"integer", "number"}:
        texts = [one for one in (node, *options) if one.get("type") == "string"]
        if not all("enum" in one or "const" in one for one in texts):
            yield ".".join(key)
    for option in options:
        if option.get("type") != "string":
            yield from text_keys(option, definitions, key)
    for name, field in node.get("properties", {}).items():
        yield from text_keys(field, definitions, (*key, name))
    for field in (node.get("additionalProperties"), *node.get("patternProperties", {}).values(), node.get("items")):
        if isinstance(field, dict):
            yield from text_keys(field, definitions, (*key, "*"))


def test_each_key_that_names_an_external_resource_has_a_row() -> None:
    schema = json_schema()
    found = {key for key in text_keys(schema, schema["$defs"]) if key}
    assert len(found) > 50
    rows = {row.key for row in rows_of_page()}
    without = found - rows - NAMES_NOTHING.keys()
    assert not without, f"give these a row in docs/checks.md, or say in NAMES_NOTHING why they need none: {without}"
    assert found >= NAMES_NOTHING.keys()
    others = {"cluster.gpus_per_node", "cluster.gpu", "cluster.slurm.memory_per_node", "cluster.slurm.extra.*"}
    others |= {"cluster.kubernetes.backend", "model.preset"}
    assert rows <= found | others, f"no such keys: {rows - found - others}"


def test_each_row_names_an_existing_function_and_is_held_by_a_test() -> None:
    held = {key: path for path, keys in HELD_BY.items() for key in keys.split()}
    for row in rows_of_page():
        assert hasattr(importlib.import_module(f"scaletrain_cli.{row.module}"), row.name), row
        assert (row.key in {case.row for case in CASES}) != (row.key in held), (
            f"{row.key} is held by no test, or by two"
        )
    assert [path for path in HELD_BY if not (PROJECT / path).exists()] == []


@pytest.mark.parametrize("case", CASES, ids=[f"{case.row}-{number}" for number, case in enumerate(CASES)])
def test_a_missing_resource_is_refused_before_any_run(case: Case) -> None:
    refused = submit(*case.sets)
    assert refused.code == ExitCode.USAGE, refused
    assert f"--set {case.key or case.row.removesuffix('.*').replace('*', '0')}" in refused.err
    assert case.said in refused.err
    assert refused.out == ""
    assert not runs_root().exists()


def test_validate_and_every_verb_that_starts_a_run_check(things: Path) -> None:
    text = SMALL.read_text().replace("source: python-stdlib", "source: nowhere")
    Path("run.yaml").write_text(text)
    for verb, options in (("submit", ("--yes",)), ("submit", ("--sweep", "training.seed=1,2")), ("train", ())):
        refused = scaletrain(verb, "run.yaml", *options, code=ExitCode.USAGE)
        assert "run.yaml:15 data.source = nowhere: no such file or folder." in refused.err
    assert not runs_root().exists()
    wrong = scaletrain("validate", "run.yaml", code=ExitCode.USAGE)
    assert "run.yaml:15 data.source = nowhere: no such file or folder." in wrong.err
    found = scaletrain("validate", "run.yaml", "--json", code=ExitCode.USAGE)
    document = json.JSONDecoder().raw_decode(found.out)[0]
    assert not document["valid"]
    assert [(each["key"], each["where"]) for each in document["missing"]] == [("data.source", "run.yaml:15")]


def test_json_has_the_code_of_each_problem_and_of_each_warning() -> None:
    refused = submit("data.source=nowhere", "model.weights=nowhere", options=("--dry-run", "--json"))
    error = refused.data["error"]
    assert error["reason"] == {"code": "checks.spec-unusable", "params": {"problems": 2}}
    assert [problem["reason"]["code"] for problem in error["problems"]] == [
        "checks.no-source",
        "checks.weights-missing",
    ]
    elsewhere = scaletrain("validate", SMALL, "--set", ON_SLURM, "--set", "data.source=/tmp-of-nodes/x", "--json").data
    (warning,) = elsewhere["not_checked_reasons"]
    assert (warning["code"], warning["params"]["keys"]) == ("checks.not-checked", ["data.source = /tmp-of-nodes/x"])
    assert elsewhere["not_checked"][0].startswith("not checked here: data.source = /tmp-of-nodes/x; ")


def test_a_resume_checks_again_but_no_initial_weights_after_a_checkpoint(make_run: MakeRun, things: Path) -> None:
    Path("corpus.txt").write_text("some text\n")
    Path("first").mkdir()
    made = make_run("data.source=corpus.txt", "model.weights=first", run_id="r1")
    Path("corpus.txt").unlink()
    refused = scaletrain("resume", "r1", "--dry-run", code=ExitCode.USAGE)
    assert "data.source = corpus.txt: no such file" in refused.err
    assert "model.weights = first: holds neither model.safetensors nor" in refused.err
    with made.run.events.open("a") as events:
        events.write('{"time": 1.0, "event": "checkpoint", "step": 5}\n')
    assert "model.weights" not in scaletrain("resume", "r1", "--dry-run").err


def test_a_warning_names_what_only_the_nodes_see() -> None:
    pods = ("cluster.scheduler=kubernetes", "cluster.kubernetes={image: a@sha256:%s, runs: {claim: c}}" % ("0" * 64))
    for sets in (
        (*pods, "data.source=/data/*.jsonl", "model.weights=/data/w"),
        (ON_SLURM, "data.source=/scratch-of-nodes/*.jsonl", "model.weights=/tmp/of-a-node/w"),
        (ON_SLURM, "cluster.slurm.container={image: a}", "data.source=/data/x", "model.weights=/data/w"),
    ):
        taken = submit(*sets)
        assert taken.code == 0, taken.err
        reported = " ".join(taken.err.split())
        assert "not checked here: data.source = /" in reported
        assert "model.weights = /" in reported
        assert "Each node checks it before it starts a rank." in reported


def test_a_node_checks_before_it_starts_ranks(make_run: MakeRun, start_agent: Callable[..., Any], things: Path) -> None:
    Path("corpus.txt").write_text("some text\n")
    made = make_run("data.source=corpus.txt", run_id="r1")
    Path("corpus.txt").unlink()
    agent = start_agent(made)
    assert agent.wait() == ExitCode.USAGE
    assert list((made.run.attempt(1) / "logs").glob("*.log")) == []


@pytest.mark.parametrize(
    ("scheduler", "begun", "error"),
    [("kubernetes", False, UsageError), ("kubernetes", True, WrongNodesError), ("slurm", False, WrongNodesError)],
)
def test_a_resource_that_other_nodes_may_have_rejects_only_this_node(
    make_run: MakeRun, scheduler: str, begun: bool, error: type[Exception]
) -> None:
    made = make_run("model.weights=/data/w", "data.source=/data/x", "checkpoint.dir=/no-root-folder/c")
    if begun:
        made.run.events.write_text('{"time": 1.0, "event": "checkpoint", "step": 5}\n')
    spec = made.record.spec
    cluster = spec.cluster.model_copy(update={"scheduler": scheduler})
    record = record_with(made.record, cluster=cluster)
    with pytest.raises(error) as raised:
        check_on_node(made.run, record, 0, None)
    assert "data.source = /data/x" in str(raised.value)
    assert ("model.weights" in str(raised.value)) is not begun
    if not begun:
        with pytest.raises(error) as raised:  # rank 0 alone prepares the data
            check_on_node(made.run, record, 1, None)
        assert "data.source" not in str(raised.value)


@pytest.mark.parametrize(
    ("named", "begun", "error"),
    [(True, False, UsageError), (True, True, WrongNodesError), (False, False, WrongNodesError)],
)
def test_a_cache_that_the_spec_names_is_the_same_on_every_node(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool, begun: bool, error: type[Exception]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    monkeypatch.setattr("scaletrain_cli.launch.resource_checks.sources._is_in_a_store", lambda path: True)
    made = make_run(*([f"data.cache.path={tmp_path}/file"] if named else []))
    if begun:
        made.run.events.write_text('{"time": 1.0, "event": "checkpoint", "step": 5}\n')
    cluster = made.record.spec.cluster.model_copy(update={"scheduler": "slurm"})
    with pytest.raises(error, match=r"data\.cache\.path.*Not a directory"):
        check_on_node(made.run, record_with(made.record, cluster=cluster), 1, None)


def record_with(record: RunRecord, **changes: Any) -> RunRecord:
    import dataclasses

    return dataclasses.replace(record, spec=record.spec.model_copy(update=changes))


def test_a_module_in_the_submitted_code_or_installed_is_found() -> None:
    for sets in (("code={path: tree, engine: train}",), ("code.engine=json.tool",), ("code.engine=unittest",)):
        assert submit(*sets).code == 0, sets


def test_a_program_that_only_the_nodes_may_have_is_a_note() -> None:
    found = check_external(load_spec(SMALL, ["code.command=[no-such-program]", ON_SLURM]))
    assert found.problems == ()
    assert sum("no-such-program on PATH here" in str(note) for note in found.warnings) == 1


def test_a_program_in_the_path_of_the_spec_is_found(things: Path) -> None:
    (things / "my-lm-eval").write_text("#!/bin/sh")
    (things / "my-lm-eval").chmod(0o755)
    task = "evaluation.tasks=[{kind: lm_eval, name: a, tasks: [b], command: [my-lm-eval]}]"
    assert submit(task).code == 2
    assert submit(task, f"env.PATH={things}").code == 0


def test_a_module_in_the_python_path_of_the_spec_is_found(things: Path) -> None:
    (things / "mine.py").write_text("")
    assert submit("code.engine=mine").code == 2
    assert submit("code.engine=mine", f"env.PYTHONPATH={things}").code == 0


@pytest.mark.parametrize(
    "sets",
    [
        ("model.weights=pipe",),
        ("data.tokenizer={kind: file, path: pipe/model.safetensors}",),
        ("model={hf_config: HERE/pipe/model.safetensors, seq_len: 64}",),
    ],
)
def test_a_pipe_in_place_of_a_file_blocks_no_verb(things: Path, sets: tuple[str, ...]) -> None:
    (things / "pipe").mkdir()
    os.mkfifo(things / "pipe" / "model.safetensors")
    writer = os.open(things / "pipe" / "model.safetensors", os.O_RDWR)  # otherwise a failure would never end
    rescue = threading.Timer(600, os.close, (writer,))
    rescue.daemon = True
    rescue.start()
    reported = submit(*(one.replace("HERE", str(things)) for one in sets))
    assert rescue.is_alive()
    rescue.cancel()
    os.close(writer)
    assert reported.code == 2
    assert "not a regular file" in " ".join(reported.err.split())


def test_the_wandb_key_is_found_where_wandb_looks_for_it(things: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_spec(SMALL, ["tracking.wandb.mode=online"])
    on_slurm = load_spec(SMALL, ["tracking.wandb.mode=online", ON_SLURM])
    named = load_spec(SMALL, ["tracking.wandb.mode=online", ON_SLURM, "secret_env=[WANDB_API_KEY]"])
    home = {"HOME": str(things.parent)}
    assert not has_login(spec, home, things)
    assert has_login(spec, {**home, "WANDB_API_KEY": "k"}, things)
    assert not has_login(on_slurm, {**home, "WANDB_API_KEY": "k"}, things)  # the job would not get it
    assert has_login(named, {**home, "WANDB_API_KEY": "k"}, things)
    (things.parent / ".netrc").write_text("machine wandb.example.org login user password k\n")
    assert not has_login(spec, home, things)
    assert has_login(on_slurm, {**home, "WANDB_BASE_URL": "https://wandb.example.org"}, things)
    settings = things.parent / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    assert has_login(spec, home, things)
    pods = "cluster.kubernetes.secrets.WANDB_API_KEY={secret: a, key: b}"
    in_pods = ["tracking.wandb.mode=online", "cluster.scheduler=kubernetes"]
    assert not has_login(load_spec(SMALL, in_pods), {**home, "WANDB_API_KEY": "k"}, things)
    assert has_login(load_spec(SMALL, [*in_pods, pods]), home, things)


def test_a_tokenizer_needs_an_end_of_text_token_and_ids_within_the_vocabulary(tmp_path: Path) -> None:
    spec, path = load_spec(SMALL), tmp_path / "tokenizer.json"

    def problem(vocabulary: object, added: list[dict[str, object]]) -> str:
        path.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
        return str(tokenizer_problem(path, spec) or "")

    end = {"content": "</s>", "id": 2}
    assert problem({"a": 0, "b": 1}, [end]) == ""
    assert problem([["a", 0.0], ["b", 0.0]], [end]) == ""  # as Unigram has it
    assert "no end-of-text token" in problem({"a": 0}, [])
    assert "has token ids up to 4096, and model.vocab_size is 4096" in problem({"a": 4096}, [end])
    assert "is not a tokenizer.json" in problem({"a": "b"}, [{}])


def test_pointers_of_git_lfs_are_named(tmp_path: Path) -> None:
    spec, path = load_spec(SMALL), tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(DamagedHeaderError) as damaged:
        read_headers(path)
    with pytest.raises(SourceError) as refused:
        read_config(path)
    for said in (str(damage_of(damaged.value)), str(tokenizer_problem(path, spec)), str(refused.value)):
        assert "is a pointer of Git LFS, and not the file" in said


def test_files_that_are_never_read_are_a_warning(things: Path) -> None:
    (things / "corpus").mkdir()
    for name in ("a.txt", "b.pdf", "c.pdf", "README.md"):
        (things / "corpus" / name).write_text("text " * 100)
    reported = submit("data.source=corpus")
    assert reported.code == 0
    assert "these files are not read: 2 .pdf" in " ".join(reported.err.split())


def test_checks_write_nothing(things: Path) -> None:
    before = sorted(things.parent.rglob("*"))
    assert check_external(load_spec(SMALL, ["data.source=prepared", "model.weights=weights"])).problems
    assert sorted(things.parent.rglob("*")) == before
    assert RunDir(runs_root()).path.exists() is False


def test_a_file_of_class_names_must_be_readable_and_have_a_name_for_each_label(tmp_path: Path) -> None:
    def problems(name: str, *sets: str) -> list[str]:
        model = "model={family: resnet, hidden_sizes: [64], depths: [1], num_labels: 2}"
        spec = load_spec(SMALL, [model, "data={source: images}", f"data.images.classes={name}", *sets])
        return [str(problem) for problem in class_file_problems(View(spec, tmp_path, {}))]

    (tmp_path / "two.txt").write_text("cat\n\ndog\n", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert problems("two.txt") == []
    for name, said in (("no.txt", "No such file"), ("latin.txt", "can't decode")):
        (problem,) = problems(name)
        assert f"data.images.classes = {name}" in problem
        assert said in problem
    (problem,) = problems("two.txt", "model.num_labels=3")
    assert "has 2 names, and model.num_labels is 3" in problem
