import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scaletrain_cli.data.images.reading import open_images
from scaletrain_cli.data.pipeline import prepare as pipeline
from scaletrain_cli.data.pipeline.shards import seal_of
from scaletrain_cli.engine.data.dataset import open_source_dataset
from scaletrain_cli.rundir import shared_datasets
from scaletrain_cli.rundir.shared_datasets import building, built
from scaletrain_cli.safe_files import create_file
from scaletrain_cli.spec import DataSpec
from tests.cli.test_two_users import ALICE, BOB, TEAM, User
from tests.data.images.pictures import index, write_folder
from tests.prepared_text import prepared_text

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="two-users-"))
    folder.chmod(0o755)
    (folder / "texts.jsonl").write_text('{"text": "one two three four five six seven"}\n' * 40)
    root = folder / "runs"
    root.mkdir()
    os.chown(root, 0, TEAM)
    root.chmod(0o3775)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # threads do not outlive a fork
    monkeypatch.chdir(folder)
    open_source_dataset(prepared_text(data(folder), folder / "of-root"), 4)  # imports what the libraries import late
    yield root
    shutil.rmtree(folder)


def data(folder: Path) -> DataSpec:
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    return DataSpec.model_validate({"source": str(folder / "texts.jsonl"), "tokenizer": tokenizer})


def prepares(user: User, root: Path) -> Path:
    def prepare() -> str:
        folder = prepared_text(data(root.parent), root)
        open_source_dataset(folder, 4)
        return str(folder)

    return Path(user.does(prepare))


def refused(user: User, root: Path) -> str:
    def prepare() -> str:
        try:
            return str(prepared_text(data(root.parent), root))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return str(user.does(prepare))


@pytest.mark.parametrize("umask", [0o002, pytest.param(0o022, marks=pytest.mark.long), 0o027], ids=oct)
def test_another_user_reads_prepared_data_and_cannot_change_them(
    root: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepares(User(ALICE.uid, umask), root)
    assert first.stat().st_uid == ALICE.uid
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "train_tokenizer", lambda *_: pytest.fail("trained again"))
        assert prepares(BOB, root) == first
    assert [path.name for path in (root / "datasets").iterdir() if not path.name.startswith(".")] == [first.name]

    def change() -> list[str]:
        done = []
        for path in (first / "000000" / "train.bin", first / "dataset.json"):
            for attempt in (lambda path=path: path.open("r+b"), path.unlink, lambda: first.rename(root / "x")):
                try:
                    attempt()
                    done.append(str(path))
                except PermissionError:
                    pass
        return done

    assert BOB.does(change) == []


def test_private_data_are_prepared_again_for_another_user(root: Path) -> None:
    private = prepares(User(ALICE.uid, 0o077), root)
    assert private.stat().st_mode & 0o077 == 0
    own = prepares(BOB, root)
    assert own == private.with_name(f"{private.name}-{BOB.uid}")
    assert prepares(BOB, root) == own
    assert prepares(ALICE, root) == private


def plain_folder(path: Path, precious: Path) -> None:
    path.mkdir(mode=0o777)
    path.chmod(0o777)


PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "an empty folder": plain_folder,
    "a folder without data": lambda path, precious: (path / "train.bin").mkdir(parents=True),
    "a link to the victim's home": lambda path, precious: path.symlink_to(precious.parent),
    "a dangling link": lambda path, precious: path.symlink_to(precious.parent / "new"),
    "a FIFO": lambda path, precious: os.mkfifo(path),
}


def dataset_of(root: Path) -> Path:
    """Return where the data of the test are prepared, which depends on their content alone."""
    (known,) = (root.parent / "of-root" / "datasets").glob("*/dataset.json")
    return root / "datasets" / known.parent.name


def steps_of(root: Path) -> Path:
    return root / "datasets" / ".steps"


# In place of the shared name alone (1), or of the user's own one, too (2); the other rows are long.
SHORT = dict.fromkeys(PLANTS, ((1, dataset_of),)) | {"a link to the victim's home": ((1, dataset_of), (2, steps_of))}
SHORT |= {"an empty folder": ((1, steps_of), (2, dataset_of))}


@pytest.mark.parametrize(
    ("names", "place", "plant"),
    [
        pytest.param(names, place, plant, marks=() if (names, place) in SHORT.get(plant, ()) else pytest.mark.long)
        for names, place, plant in itertools.product((1, 2), (dataset_of, steps_of), PLANTS)
    ],
)
def test_what_is_planted_in_place_of_the_data_is_neither_used_nor_followed(
    root: Path, plant: str, place: Callable[[Path], Path], names: int
) -> None:
    precious = root.parent / "home" / ".bashrc"
    precious.parent.mkdir()
    precious.write_text("precious")
    for path in (precious, precious.parent):
        os.chown(path, ALICE.uid, TEAM)
    planted = [place(root), place(root).with_name(f"{place(root).name}-{ALICE.uid}")][:names]

    def do_plant() -> None:
        (root / "datasets").mkdir()
        (root / "datasets").chmod(0o3775)
        for path in planted:
            PLANTS[plant](path, precious)

    BOB.does(do_plant)
    outcome = refused(ALICE, root)
    folder = dataset_of(root)
    assert outcome in (str(folder), f"{folder}-{ALICE.uid}", f"{folder}-{ALICE.uid}-2"), outcome
    assert Path(outcome).lstat().st_uid == ALICE.uid
    assert precious.read_text() == "precious"
    assert [path.name for path in precious.parent.iterdir()] == [".bashrc"]


LOCKS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda lock, precious: lock.symlink_to(precious),
    "a FIFO": lambda lock, precious: os.mkfifo(lock),
    "held by its owner": lambda lock, precious: (lock.write_text(""), lock.chmod(0o666)),
}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_planted_lock_is_not_waited_for(root: Path, lock: str, caplog: pytest.LogCaptureFixture) -> None:
    precious = root.parent / "precious"
    precious.write_text("precious")
    os.chown(precious, ALICE.uid, TEAM)
    folder = root / "datasets" / "0123"

    def do_plant() -> None:
        (root / "datasets").mkdir()
        (root / "datasets").chmod(0o3775)
        LOCKS[lock](folder.with_name(f".{folder.name}.{ALICE.uid}.lock"), precious)

    def build() -> list[str]:
        done = built(folder, lambda staging: create_file(staging / "dataset.json", "{}"))
        return [str(done), caplog.text]

    BOB.does(do_plant)
    with contextlib.ExitStack() as held:
        if lock == "held by its owner":
            planted = held.enter_context(folder.with_name(f".{folder.name}.{ALICE.uid}.lock").open("rb"))
            fcntl.flock(planted, fcntl.LOCK_EX)
        done, said = ALICE.does(build)
    assert done == str(folder)
    assert "made by uid 61002" in said
    assert precious.read_text() == "precious"


def test_a_process_that_prepares_and_writes_nothing_more_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_datasets, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(shared_datasets, "_STALE_SECONDS", 0.1)
    folder = tmp_path / "datasets" / "0123"
    with building(folder) as stopped:
        built(folder, lambda staging: create_file(staging / "dataset.json", "{}"))
        create_file(stopped / "dataset.json", "{}")
    assert "another process of yours prepares" in caplog.text
    assert "has written nothing for" in caplog.text


def test_a_process_that_waits_goes_on_if_what_it_looks_at_is_renamed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_datasets, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(shared_datasets, "_STALE_SECONDS", 0.1)
    folder, looks = tmp_path / "datasets" / "0123", iter([[tmp_path / "renamed"]])
    with building(folder) as other:
        with monkeypatch.context() as renaming:
            renaming.setattr(shared_datasets, "_own_drafts", lambda folder: next(looks, []))
            built(folder, lambda staging: create_file(staging / "dataset.json", "{}"))
        create_file(other / "dataset.json", "{}")
    assert (folder / "dataset.json").is_file()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "junk in dataset.json": lambda folder: (folder / "dataset.json").write_bytes(b"\0junk"),
    "an empty dataset.json": lambda folder: (folder / "dataset.json").write_text("{}"),
    "a number as text": lambda folder: with_values(folder, train_documents="40"),
    "a number that is too large": lambda folder: with_values(folder, train_tokens=1 << 80),
    "another kind of value": lambda folder: with_values(folder, shards={"0": []}),
    "hashes in a FIFO": lambda folder: replaced(folder / "000000" / "train.bin.blake2b", os.mkfifo),
    "tokens in a FIFO": lambda folder: replaced(folder / "000000" / "train.bin", os.mkfifo),
    "hashes in a sparse file": lambda folder: os.truncate(folder / "000000" / "train.bin.blake2b", 1 << 40),
    "a sparse dataset.json": lambda folder: os.truncate(folder / "dataset.json", 1 << 40),
    "a file that was cut": lambda folder: os.truncate(folder / "000000" / "train.bin", 8),
    "a shard that is gone": lambda folder: shutil.rmtree(folder / "000000"),
}


def with_values(folder: Path, **values: object) -> None:
    document = json.loads((folder / "dataset.json").read_text()) | values
    (folder / "dataset.json").write_text(json.dumps(document | {"seal": seal_of(document)}))


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_others_damaged_data_are_redone_and_named(root: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = prepares(BOB, root)
    BOB.does(lambda: DAMAGES[damage](folder))
    own = folder.with_name(f"{folder.name}-{ALICE.uid}")
    made, said = ALICE.does(lambda: [str(prepared_text(data(root.parent), root)), caplog.text])
    assert made == str(own)
    assert f"not used: {folder}, made by uid 61002, is damaged" in said
    assert prepares(ALICE, root) == own


INDEX_DAMAGES: dict[str, Callable[[Path], object]] = {
    "junk in dataset.json": lambda index: (index / "dataset.json").write_bytes(b"\0junk"),
    "a file that was cut": lambda index: os.truncate(index / "train.samples.bin", 8),
    "a damaged note": lambda index: next(index.parent.glob(".steps/*/indexed.json")).write_bytes(b"\0junk"),
}


@pytest.mark.parametrize("damage", INDEX_DAMAGES)
def test_a_damaged_index_of_another_user_is_built_again(root: Path, damage: str) -> None:
    write_folder(root.parent / "images", ["a/1.png", "b/2.png"])
    of_another = Path(BOB.does(lambda: str(index(root.parent / "images", root))))
    BOB.does(lambda: INDEX_DAMAGES[damage](of_another))
    own = of_another if damage == "a damaged note" else of_another.with_name(f"{of_another.name}-{ALICE.uid}")
    for _ in range(2):
        made = Path(ALICE.does(lambda: str(index(root.parent / "images", root))))
        assert (made, len(open_images(made)["train"])) == (own, 2)


def test_an_unwritable_folder_of_data_is_reported_with_a_remedy(root: Path) -> None:
    (root / "datasets").mkdir(mode=0o755)
    (root / "datasets").chmod(0o2755)
    outcome = refused(BOB, root)
    assert outcome.startswith(
        f"UsageError: data cannot be prepared: {root / 'datasets'} cannot be written to by uid 61002"
    )
    assert f"chmod g+rwxs {root / 'datasets'}" in outcome
