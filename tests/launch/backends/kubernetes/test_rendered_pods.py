"""The pods of each backend's manifest as processes, with its arguments and environment.

A minimal kubelet resolves fields and mounts, and expands nothing else. Host names are not resolved: pod 0 is this
machine.
"""

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.kubernetes.manifest import Manifest, documents_for, manifest
from scaletrain_cli.launch.backends.kubernetes.pod import AGENT_MODULE, DOCUMENTS_PATH
from scaletrain_cli.own_processes import python_words
from scaletrain_cli.rundir.paths import RunDir
from tests.forked import Forked, forking
from tests.launch.backends.kubernetes.pods import put_documents
from tests.launch.backends.kubernetes.rendering import BACKENDS, NEEDED, container_of
from tests.launch.conftest import ENGINE, MakeRun
from tests.launch.working_tree import WorkingTree
from tests.ports import OF_A_GANG, reserved_port

OPTIONS = (
    *NEEDED,
    "cluster.nodes=2",
    "cluster.kubernetes.runs.path=/volume",
    "secret_env=[HF_TOKEN]",
    "cluster.kubernetes.secrets={HF_TOKEN: {secret: hub-login, key: token}}",
)


def fields(backend: str, number: int) -> dict[str, str]:
    """Return the pods as the API server and the backend's controller create them."""
    index = {
        "volcano": {"metadata.labels['volcano.sh/task-index']": str(number)},
        "jobset": {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(number)},
    }
    gang = {
        "volcano": {"metadata.annotations['volcano.sh/job-version']": "3"},
        "jobset": {"metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "3"},
    }
    kind = "volcano" if backend == "volcano" else "jobset"
    return {**index[kind], **gang[kind], "spec.nodeName": f"gpu-{number}", "metadata.name": f"pod-{number}"}


def environment(made: Manifest, known: dict[str, str], secrets: dict[tuple[str, str], str]) -> dict[str, str]:
    found = {}
    for variable in container_of(made)["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            found[variable["name"]] = known[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            found[variable["name"]] = secrets[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
        else:
            found[variable["name"]] = variable["value"].replace("$$", "$")
    return found


# Mounts a folder at another one for one process and its children: root's, as in a container.
MOUNTED = ("unshare", "--mount", "--propagation", "private", "sh", "-ec", 'mount --bind "$1" "$2"; shift 2; exec "$@"')


def start_pod(
    made: Manifest,
    backend: str,
    number: int,
    folder: Path,
    port: int,
    engine: str | None = None,
    volume: Path | None = None,
) -> Any:
    """Start a pod; without an engine as a fork, which has the stand-in's, else by the command of its container.

    ``volume``: where the pod, with an engine, sees ``folder/volume``, if not there.
    """
    container = container_of(made)
    assert container["command"] == ["python", *python_words(AGENT_MODULE)]
    mounts = {"/volume": str(volume or folder / "volume"), DOCUMENTS_PATH: str(folder / "documents")}
    assert mounts.keys() < {mount["mountPath"] for mount in container["volumeMounts"]}
    pod_environment = environment(made, fields(backend, number), {("hub-login", "token"): "hf_0123"})
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = [*(mounts.get(word, word) for word in container["args"]), "--engine", engine or ENGINE]
    variables = {**os.environ, **pod_environment, **here}
    if engine is None:
        return Forked(AGENT_MODULE, arguments, forking(variables))
    mounted: list[str] = []
    if volume is not None:
        (folder / "volume").mkdir()
        mounted = [*MOUNTED, "sh", str(folder / "volume"), str(volume)]
    return subprocess.Popen(
        [*mounted, sys.executable, *container["command"][1:], *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def mount_documents(made: Manifest, folder: Path) -> None:
    """Write the files of the ConfigMap to where start_pod() mounts them."""
    config: dict[str, Any] = made.objects[0]
    binary = {name: base64.b64decode(text) for name, text in config.get("binaryData", {}).items()}
    put_documents({**config["data"], **binary}, folder / "documents")


def run_pods(made: Manifest, backend: str, folder: Path, engine: str | None = None) -> list[str]:
    """Run both pods as start_pod() does, require exit code 0, and return the output of each."""
    mount_documents(made, folder)
    port = reserved_port(OF_A_GANG)
    pods = [start_pod(made, backend, number, folder, port, engine) for number in (0, 1)]
    output = [pod.communicate() if engine is None else pod.communicate()[0] for pod in pods]
    assert [pod.wait() for pod in pods] == [0, 0], output
    return output


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_pods_of_a_manifest_train_its_run(backend: str, make_run: MakeRun, tmp_path: Path) -> None:
    note = 'it\'s $(HOME) $$5 \\ "and" so on'
    options = (*OPTIONS, f"cluster.kubernetes.backend={backend}")
    made_run = make_run(*options, env={"NOTE": note}, echo=["NOTE", "HF_TOKEN"])
    made = manifest(made_run.record, documents_for(made_run.run, made_run.record))
    output = run_pods(made, backend, tmp_path)
    (attempt,) = read_attempts(RunDir(tmp_path / "volume" / made_run.run.run_id))
    assert (attempt.job_id, attempt.reason, attempt.nodes) == (made.workload.id, "done", ("gpu-0", "gpu-1"))
    assert f"rank 0: NOTE={note!r}" in output[0]
    assert "rank 2: HF_TOKEN='hf_0123'" in output[1]
    assert "hf_0123" not in str(made.objects)


COMMAND = 'code.command=[sh, -c, "exec python3 train.py"]'


@pytest.mark.parametrize("program", ["code.engine=train", pytest.param(COMMAND, marks=pytest.mark.long)])
def test_pods_need_no_file_of_the_submitter(tree: WorkingTree, make_run: MakeRun, tmp_path: Path, program: str) -> None:
    tree.write("train.py", "import os\nprint('submitted, as', os.environ['RANK'])\n")
    made_run = make_run(*OPTIONS, f"code.path={tree.folder}", program)
    made = manifest(made_run.record, documents_for(made_run.run, made_run.record))
    tree.write("train.py", "raise SystemExit('newer')\n")
    output = run_pods(made, "jobset", tmp_path, ENGINE)
    assert "rank 0: submitted, as 0" in output[0]
    assert "rank 3: submitted, as 3" in output[1]
