"""Secrets beside the code are not part of its snapshot, and what is private stays so in every copy."""

import base64
import random
import string
import tempfile
from pathlib import Path

import pytest

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.code import Snapshot, pack_snapshot, take_snapshot, write_snapshot
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import copy_file
from scaletrain_cli.spec.secrets import why_private
from tests.launch.code.test_snapshot import files_in, snapshot
from tests.launch.conftest import make_spec
from tests.launch.working_tree import WorkingTree

# Made here at each start, so that no scanner of repositories takes them for real.
_DRAWN = random.Random(7)


def drawn(count: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(_DRAWN.choice(letters) for _ in range(count - 1)) + "7"


BODY = "\n".join(drawn(64) for _ in range(4))
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BODY}\n-----END OPENSSH PRIVATE KEY-----\n"
TOKEN = "hf_" + drawn(34)
NAMES = (
    ".env .env.production prod.env id_rsa sub/id_ed25519 .netrc .aws/credentials server.pem tls.key .npmrc .pypirc "
    "kubeconfig .kube/config .git-credentials .pgpass .docker/config.json .vault-token credentials.json secrets.yaml "
    ".config/gcloud/legacy.db my-service-account-7.json store.p12 terraform.tfstate kaggle.json .ssh/known_hosts"
).split()
CONTENTS = {
    "a token in a program": f"login(token='{TOKEN}')\n",
    "a private key": KEY,
    "a key in JSON": '{"private_key": "' + KEY.replace("\n", "\\n") + '"}',
    "a key in base64": f"client-key-data: {base64.b64encode(KEY.replace('OPENSSH', 'RSA').encode()).decode()}",
    "UTF-16": f"key: {TOKEN}".encode("utf-16").decode("latin-1"),
    "a notebook": "{\"source\": [\"os.environ['OPENAI_API_KEY'] = 'sk-proj-" + drawn(40) + "'\"]}",
    "a storage key": f"AccountName=a;AccountKey={drawn(86)}==;EndpointSuffix=core.windows.net",
}
HARMLESS = {
    ".env.example": "HF_TOKEN=\nWANDB_API_KEY=your-key-here\n",
    "tests/test_login.py": "TOKENS = ['hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxx', 'AKIAIOSFODNN7EXAMPLE', 'ghp_' + 'a' * 36]\n",
    "pem.py": "HEAD = '-----BEGIN PRIVATE KEY-----'\nif HEAD in text: ...\n",
    "config.yaml": "tokenizer: gpt2\npad_token: <pad>\nmax_tokens: 4096\nurl: https://user:password@example.org\n",
    "uv.lock": f'hash = "sha256:{"0123456789abcdef" * 4}"\n',
    "secrets.py": "def password(): ...\n",
    ".env": "PYTHONPATH=src\nTOKENIZERS_PARALLELISM=false\n",
    "ca.pem": "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
    "id_rsa.pub": "ssh-rsa AAAAB3NzaC1yc2E ada@example.org\n",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_new_file_that_is_named_like_one_with_secrets_is_left_out_and_named(tree: WorkingTree, name: str) -> None:
    tree.write(name, "host: example\n")
    taken = snapshot(tree)
    assert name not in files_in(taken.archive)
    assert taken.patch == b""
    assert taken.record.uncommitted == 0
    (note,) = taken.notes
    assert f"without {name} (its name is that of a file with" in str(note)
    assert "!PATH in .scaletrainignore" in " ".join(note.remedies)


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_new_file_with_a_secret_in_it_is_left_out_and_a_tracked_one_is_refused(tree: WorkingTree, kind: str) -> None:
    tree.write("notes.txt", CONTENTS[kind])
    taken = snapshot(tree)
    assert "notes.txt" not in files_in(taken.archive)
    assert "notes.txt (it contains a" in str(taken.notes[0])
    assert taken.patch == b""
    tree.commit()
    with pytest.raises(UsageError, match=r"notes\.txt \(it contains a.*\.scaletrainignore") as refused:
        snapshot(tree)
    assert not any(part in str(refused.value) for part in (TOKEN, BODY[:20]))


def test_tracked_test_data_settings_and_markers_without_secrets_are_kept(tree: WorkingTree) -> None:
    for name, text in HARMLESS.items():
        tree.write(name, text)
    tree.commit()
    assert files_in(snapshot(tree).archive).keys() >= HARMLESS.keys()


@pytest.mark.parametrize(("name", "text"), [(".env", "DB_PASSWORD=correct-horse\n"), (".netrc", "machine a\n")])
def test_a_tracked_file_of_secrets_is_refused_until_it_is_ignored(tree: WorkingTree, name: str, text: str) -> None:
    tree.write(name, text)
    tree.commit()
    with pytest.raises(UsageError, match=rf"git tracks {name} \(it"):
        snapshot(tree)
    tree.write(".scaletrainignore", f"{name}\n")
    assert name not in files_in(snapshot(tree).archive)
    tree.write(".scaletrainignore", f"!{name}\n")
    assert files_in(snapshot(tree).archive)[name] == text


def test_a_patch_shows_no_secret_that_a_change_removes_or_deletes(tree: WorkingTree) -> None:
    tree.write("login.py", CONTENTS["a token in a program"])
    tree.commit()
    tree.write("login.py", "login()\n")
    with pytest.raises(UsageError, match=r"login\.py \(in its last commit it contains a Hugging Face token"):
        snapshot(tree)
    (tree.folder / "login.py").unlink()
    with pytest.raises(UsageError, match="in its last commit"):
        snapshot(tree)
    tree.write(".scaletrainignore", "login.py\n")
    assert TOKEN.encode() not in snapshot(tree).patch
    (tree.folder / ".scaletrainignore").unlink()
    tree.commit()
    assert snapshot(tree).patch == b""


def test_a_new_file_in_a_folder_that_only_its_owner_may_enter_is_left_out(tree: WorkingTree) -> None:
    tree.write("mine/below/notes.txt", "mine\n")
    (tree.folder / "mine").chmod(0o700)
    taken = snapshot(tree)
    assert "mine/below/notes.txt (only its owner may read it)" in str(taken.notes[0])
    assert "mine/below/notes.txt" not in files_in(taken.archive)


def test_a_new_file_that_only_its_owner_may_read_is_left_out_unless_all_are_such(tree: WorkingTree) -> None:
    tree.write("notes.txt", "mine\n", mode=0o600)
    taken = snapshot(tree)
    assert "notes.txt (only its owner may read it)" in str(taken.notes[0])
    assert "notes.txt" not in files_in(taken.archive)
    for path in tree.folder.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            path.chmod(path.stat().st_mode & 0o700)
    taken = snapshot(tree)
    assert "notes.txt" in files_in(taken.archive)
    assert taken.private


def test_a_link_with_another_name_does_not_bring_a_private_file(tree: WorkingTree) -> None:
    tree.write("data/.env", "A=b\n")  # which git ignores
    (tree.folder / "settings").symlink_to("data/.env")
    assert "settings" not in files_in(snapshot(tree).archive)
    tree.commit()
    tree.write("data/.env", "DB_PASSWORD=correct-horse\n")
    with pytest.raises(UsageError, match="git tracks settings"):
        snapshot(tree)


@pytest.mark.parametrize("kind", ["", "RSA ", "EC ", "DSA ", "OPENSSH ", "ENCRYPTED "])
def test_keys_of_all_kinds_are_recognized_in_plain_text_and_in_base64(kind: str) -> None:
    key = KEY.replace("OPENSSH ", kind).encode()
    for content in (key, key.replace(b"\n", b"\r\n"), base64.b64encode(key)):
        assert "private key" in str(why_private("notes.txt", content, tracked=True))


def modes(run: RunDir, taken: Snapshot) -> set[int]:
    run.path.mkdir(parents=True)
    return {path.stat().st_mode & 0o777 for path in write_snapshot(run, taken)}


def test_the_files_of_a_private_repository_are_private_in_each_copy(tree: WorkingTree, tmp_path: Path) -> None:
    tree.write("train.py", "print('two')\n")
    tree.folder.chmod(0o700)
    taken = snapshot(tree)
    assert modes(RunDir(tmp_path / "a"), taken) == {0o600}
    packed = tmp_path / "packed"
    packed.mkdir()
    for name, content in pack_snapshot(taken).items():
        (packed / name).write_bytes(content)
    again = take_snapshot(make_spec(f"code.path={packed}"))
    assert again == taken
    (archive,) = (tmp_path / "a" / "code").glob("*.tar.gz")
    copy_file(archive, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


def test_a_repository_that_others_may_read_is_kept_for_the_readers_of_the_run() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # not below pytest's own folder, which is closed to others
        Path(folder).chmod(0o755)
        (Path(folder) / "code").mkdir()
        taken = snapshot(WorkingTree(Path(folder) / "code"))
        assert modes(RunDir(Path(folder) / "run"), taken) == {0o640}
