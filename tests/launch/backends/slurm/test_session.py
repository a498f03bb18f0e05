"""The step of `scaletrain exec` beside that of the agents, and the options of Pyxis for both."""

import shlex
from pathlib import Path

import pytest

from scaletrain_cli.errors import SpecError
from scaletrain_cli.launch.backends.slurm.backend import overlap_options
from scaletrain_cli.launch.backends.slurm.script import session_srun_words, srun_words
from scaletrain_cli.spec import ClusterSpec
from tests.launch.conftest import make_spec

RUN = Path("/runs/a-1")


def cluster(container: str) -> ClusterSpec:
    return make_spec("cluster.scheduler=slurm", f"cluster.slurm.container={container}").cluster


def words(container: str) -> list[str]:
    return [word for text in srun_words(cluster(container), RUN) for word in shlex.split(text)]


def session_words(container: str) -> list[str]:
    return [word for text in session_srun_words(cluster(container), RUN) for word in shlex.split(text)]


def test_a_step_shares_what_the_agents_hold_and_waits_for_nothing() -> None:
    assert list(overlap_options((24, 11))) == ["--overlap"]
    assert list(overlap_options((22, 5))) == ["--overlap"]
    assert list(overlap_options(None)) == ["--overlap"]
    assert list(overlap_options((21, 8))) == ["--overlap", "--gres=none", "--mem=0"]  # before 22.05 it would wait


@pytest.mark.parametrize(
    "image",
    [
        "docker://nvcr.io#nvidia/pytorch:25.01-py3",
        "nvcr.io#nvidia/pytorch:25.01-py3",
        "user@registry.example#team/train:1",
        "ubuntu:24.04",
        "/images/train.sqsh",
        "./train.sqsh",
    ],
)
def test_every_form_of_an_image_of_pyxis_is_one_word_of_srun(image: str) -> None:
    assert words(f"{{image: '{image}'}}") == [
        f"--container-image={image}",
        "--container-mounts=/runs:/runs",
        "--container-env=MASTER_ADDR,MASTER_PORT",
    ]


def test_options_of_pyxis_are_those_of_srun() -> None:
    options = (
        "{no-container-mount-home: true, container-writable: true, container-workdir: /w, container-entrypoint: false}"
    )
    assert words(f"{{image: /i.sqsh, options: {options}}}")[3:] == [
        "--container-workdir=/w",
        "--container-writable",
        "--no-container-mount-home",
    ]


def test_a_session_enters_the_container_of_the_ranks_if_it_has_a_name() -> None:
    named = "{image: /i.sqsh, options: {container-name: train, container-writable: true}}"
    assert "--container-name=train" in words(named)
    assert session_words(named) == ["--container-name=train:exec"]
    assert session_words("{image: /i.sqsh}") == words("{image: /i.sqsh}")
    assert session_words("{image: /i.sif, runtime: apptainer}") == []


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ("{image: x, options: {container-image: y}}", "options.container-image = y: is set by the launcher or by"),
        ("{image: x, options: {container-env: A}}", "options.container-env = A: is set by the launcher or by"),
        ("{image: x, options: {exclusive: true}}", "options.exclusive = true: is no option of Pyxis"),
        ("{image: x, runtime: apptainer, options: {container-writable: true}}", "is an option of Pyxis, and the"),
        ("{image: images/x.sqsh}", "image = images/x.sqsh: is a name in a registry for Pyxis, not a file; give"),
    ],
)
def test_an_option_that_pyxis_does_not_have_and_a_relative_image_are_refused(container: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        cluster(container)
    assert said in "\n".join(map(str, refused.value.problems))
