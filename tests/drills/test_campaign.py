"""A short form of the campaign of `make drills`: a few kills, requests and damages of each kind."""

import random
import time
from pathlib import Path

import pytest

from scaletrain_cli.worker.checkpoint_commit import staging_path
from tests.drills.campaign.damages import damage_files
from tests.drills.campaign.elastic import reshard
from tests.drills.campaign.forked_attempts import Attempt, ForkedRun
from tests.drills.campaign.kills import FINE_TUNING, OPTIMIZERS, ZERO_STAGES, kill, text_specs
from tests.drills.campaign.requests import request
from tests.drills.conftest import Undisturbed
from tests.drills.training_runs import drill_spec

pytestmark = [pytest.mark.drill, pytest.mark.long]


KILLED = {"stage 2": ZERO_STAGES["stage 2"], **FINE_TUNING}
KILLED |= {name: OPTIMIZERS[name] for name in ("Muon, ZeRO-3", "local SGD of Muon, ZeRO-2")}


@pytest.mark.parametrize("kind", KILLED)
def test_kills_at_random_times_lose_nothing(kind: str, dataset: Path, chance: random.Random) -> None:
    found = kill(text_specs(dataset, {kind: KILLED[kind]}), 2, chance)
    assert found.kills >= 2
    assert found.failed_resumes == []
    assert found.different == []


def test_damaged_checkpoints_are_skipped_and_reported(undisturbed: Undisturbed, chance: random.Random) -> None:
    found = damage_files(undisturbed().run, 30, chance)
    assert found.damages == 30
    assert found.wrong_restores == []
    assert found.unreported == []


def test_a_save_file_made_while_the_last_save_runs_does_not_stay_behind(dataset: Path) -> None:
    run = ForkedRun.create(drill_spec(dataset, training__steps=6, checkpoint__every=6))

    def ask(attempt: Attempt) -> None:
        assert attempt.wait_for(staging_path(run.run.checkpoints, attempt.number, 6).is_dir)
        time.sleep(0.5)  # the training thread waits for the writer by now
        run.run.save_file.touch()

    assert run.attempt(ask, "slow-save seconds=4").exit_codes == [0, 0]
    assert not run.run.save_file.exists()


def test_save_requests_at_random_times_are_fulfilled(dataset: Path, chance: random.Random) -> None:
    found = request(dataset, 8, chance)
    assert found.requests == 8
    assert found.unanswered == []
    assert found.different == []


def test_runs_resumed_with_other_sizes_train_on_the_same_samples(dataset: Path) -> None:
    found = reshard(dataset)
    assert found.reshards == 10
    assert found.other_values == []
    assert found.other_samples == []
    assert found.loss < 1e-4


def test_a_run_with_muon_resumed_in_other_stages_keeps_every_value(dataset: Path) -> None:
    found = reshard(dataset, ["ZeRO 3, 1, 2"], training__optimizer="{name: muon, lr: 1.0e-3}")
    assert found.reshards == 2
    assert found.other_values == []
    assert found.other_samples == []
    assert found.loss < 1e-4
