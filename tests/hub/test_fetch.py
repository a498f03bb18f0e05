import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from scaletrain_cli.hub import client
from scaletrain_cli.hub.cache import HubSettings, cached_commit
from scaletrain_cli.hub.reference import HubError, parse_reference
from scaletrain_cli.launch.hub_fetch import Fetch, FetchError, FetchProgress, FetchStopped, fetch
from scaletrain_cli.launch.node.processes import process_state
from scaletrain_cli.spec.hub_files import HubUse, local_path
from tests.hub import tiny
from tests.hub.conftest import forget
from tests.hub.server import Hub, blob_id, is_large

WEIGHTS = HubUse("model.weights", f"hf://{tiny.MODEL}", "weights")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def commit(hub: Hub) -> str:
    """The commit of the model, which is published."""
    return tiny.publish(hub)[0]


def settings() -> HubSettings:
    return HubSettings.from_environment(os.environ)


def run_fetch(commit: str, use: HubUse = WEIGHTS, **environment: str) -> FetchProgress:
    """Fetch in a process of its own, as the node agent does."""
    return fetch([use], {use.text: commit}, {**os.environ, **environment})


def fetch_here(commit: str, use: HubUse = WEIGHTS, **options: float) -> FetchProgress:
    """Fetch in this process, which is faster."""
    return Fetch(settings(), **options).run([use], {use.text: commit})


def folder(commit: str) -> Path:
    return Path(local_path(WEIGHTS, settings(), commit))


def test_a_second_fetch_sends_no_request(hub: Hub, commit: str) -> None:
    done = run_fetch(commit)
    assert (done.state, done.received_bytes) == ("done", done.total_bytes)
    assert all(len(hub.downloads(name)) == 1 for name in (*SHARDS, "tokenizer.json"))
    assert not hub.downloads("pytorch_model.bin")
    assert not hub.downloads("modeling_custom.py")
    hub.log.clear()
    assert run_fetch(commit).files == 0
    assert not hub.log


@pytest.mark.long
def test_the_library_finds_the_files_offline(hub: Hub, commit: str) -> None:
    fetch_here(commit)
    hub.status = 500
    script = "import sys, huggingface_hub; print(huggingface_hub.hf_hub_download(*sys.argv[1:], local_files_only=True))"
    for name in SHARDS:
        path = subprocess.check_output([sys.executable, "-c", script, tiny.MODEL, name], text=True).strip()
        assert Path(path).read_bytes() == dict(tiny.shards())[name]


@pytest.mark.long
def test_files_fetched_by_another_program_are_verified_and_not_fetched_again(hub: Hub, commit: str) -> None:
    script = "import sys, huggingface_hub; huggingface_hub.snapshot_download(sys.argv[1], ignore_patterns=['*.bin'])"
    subprocess.check_call([sys.executable, "-c", script, tiny.MODEL])
    hub.log.clear()
    assert fetch_here(commit).received_bytes == 0
    assert not [one for one in hub.log if one.method == "GET" and "/api/" not in one.path]


def test_a_moved_branch_does_not_change_what_a_commit_gives(hub: Hub, commit: str) -> None:
    moved = hub.add(tiny.MODEL, tiny.model_files(seed=1))
    fetch_here(commit)
    assert (folder(commit) / SHARDS[0]).read_bytes() == dict(tiny.shards())[SHARDS[0]]
    assert client.resolve(WEIGHTS.reference, settings()).commit == moved


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library writes 10 MB at a time."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)


def test_a_cut_download_continues_where_it_ended(hub: Hub, commit: str, small_chunks: None) -> None:
    hub.chunk_bytes, hub.cut = 1000, {SHARDS[0]: 40_000}
    fetch_here(commit)
    first, second = hub.downloads(SHARDS[0])
    size = len(dict(tiny.shards())[SHARDS[0]])
    assert (first.range, first.sent) == (None, 40_000)
    assert (second.range, second.sent) == ("bytes=40000-", size - 40_000)


@pytest.mark.long
def test_a_killed_fetch_continues_in_the_next_one(hub: Hub) -> None:
    size = 45_000_000
    commit = hub.add(tiny.MODEL, {"config.json": b"{}", "model.safetensors": os.urandom(size)})
    hub.chunk_bytes, hub.delay_seconds = 1_000_000, 0.05
    parts = settings().repo_folder(WEIGHTS.reference) / "blobs"

    def received() -> int:
        return sum(path.stat().st_size for path in parts.glob("*-incomplete"))

    with pytest.raises(FetchStopped):
        fetch([WEIGHTS], {WEIGHTS.text: commit}, os.environ, is_stopped=lambda: received() > 15_000_000)
    there = received()
    assert 15_000_000 < there < size
    hub.delay_seconds = 0.0
    done = run_fetch(commit)
    last = hub.downloads("model.safetensors")[-1]
    assert (last.range, last.sent) == (f"bytes={there}-", size - there)
    assert done.received_bytes <= size - there + len("{}")


def test_ctrl_c_does_not_reach_the_process_that_fetches_which_its_caller_ends(commit: str) -> None:
    others, sessions = set(psutil.Process().children()), set[int]()

    def is_stopped() -> bool:
        sessions.update(os.getsid(child.pid) for child in set(psutil.Process().children()) - others)
        return True

    with pytest.raises(FetchStopped):
        fetch([WEIGHTS], {WEIGHTS.text: commit}, os.environ, is_stopped=is_stopped)
    assert len(sessions) == 1
    assert os.getsid(0) not in sessions
    assert set(psutil.Process().children()) <= others


def test_a_server_without_ranges_sends_the_file_again(hub: Hub, commit: str) -> None:
    hub.ranges, hub.chunk_bytes, hub.cut = False, 1000, {SHARDS[0]: 40_000}
    fetch_here(commit)
    assert (folder(commit) / SHARDS[0]).read_bytes() == dict(tiny.shards())[SHARDS[0]]


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json"])
def test_a_file_with_another_hash_is_refused_and_removed(hub: Hub, commit: str, name: str) -> None:
    hub.corrupt = {name}
    with pytest.raises(HubError, match=f"{name} of .* differs from the .* after 3 downloads"):
        fetch_here(commit)
    assert len(hub.downloads(name)) == 3
    assert not (folder(commit) / name).exists()
    content = tiny.model_files()[name]
    blob = hashlib.sha256(content).hexdigest() if is_large(name) else blob_id(content)
    assert not list(settings().cache.rglob(f"{blob}*-incomplete"))  # other files may still arrive
    hub.corrupt = set()
    fetch_here(commit)
    assert (folder(commit) / name).read_bytes() == tiny.model_files()[name]


def test_damage_and_loss_in_the_cache_are_repaired(hub: Hub, commit: str) -> None:
    fetch_here(commit)
    blob = (folder(commit) / SHARDS[0]).resolve()
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")  # the same size
    (folder(commit) / SHARDS[1]).resolve().unlink()
    hub.log.clear()
    fetch_here(commit)
    assert all((folder(commit) / name).read_bytes() == dict(tiny.shards())[name] for name in SHARDS)
    assert [len(hub.downloads(name)) for name in (*SHARDS, "tokenizer.json")] == [1, 1, 0]


def test_files_that_another_program_has_fetched_are_complete_without_a_request(
    hub: Hub, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import snapshot_download

    client.resolve(WEIGHTS.reference, settings())  # keeps the list of files
    snapshot_download(tiny.MODEL, revision=commit, cache_dir=settings().cache, endpoint=settings().endpoint)
    forget()
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_fetch(commit).files == 0
    assert not hub.log


def test_offline_needs_a_full_cache_and_names_the_rest(hub: Hub, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_here(commit)
    forget()
    hub.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert client.resolve(WEIGHTS.reference, settings()).commit == commit
    assert run_fetch(commit).files == 0
    (folder(commit) / SHARDS[1]).unlink()
    with pytest.raises(HubError, match=f"HF_HUB_OFFLINE is set, and the cache .* lacks 1 file of .*{SHARDS[1]}"):
        run_fetch(commit)
    forget()
    with pytest.raises(HubError, match="does not contain acme/other@main"):
        client.resolve(parse_reference("hf://acme/other"), settings())
    assert not hub.log


@pytest.mark.long
def test_a_partial_snapshot_of_another_program_is_refused_offline(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, huggingface_hub; huggingface_hub.snapshot_download(sys.argv[1], allow_patterns=sys.argv[2:])"
    some = ("config.json", "model.safetensors.index.json", SHARDS[0])
    subprocess.check_call([sys.executable, "-c", script, tiny.MODEL, *some])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=f"lacks {SHARDS[1]}, which model.safetensors.index.json names"):
        fetch_here(commit)


@pytest.mark.parametrize("unreachable", [False, True], ids=["offline", "unreachable"])
def test_a_part_of_the_data_in_the_cache_of_another_program_is_not_taken_for_all(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, *, unreachable: bool
) -> None:
    """huggingface_hub keeps no list of the files of a repository."""
    from huggingface_hub import hf_hub_download

    names = [f"data/train-{number:05d}-of-00003.txt" for number in range(3)]
    commit = hub.add(tiny.DATA, {**dict.fromkeys(names, b"text"), "more/a.txt": b"more"}, kind="dataset")
    cache = {"cache_dir": settings().cache, "repo_type": "dataset", "revision": commit}
    hf_hub_download(tiny.DATA, names[0], **cache, endpoint=hub.url)  # type: ignore[arg-type]
    one = HubUse("data.source", f"hf://datasets/{tiny.DATA}@{commit}/{names[0]}", "source")
    for use, expected in (
        (one, None),
        (HubUse("data.source", f"hf://datasets/{tiny.DATA}@{commit}/data/*.txt", "source"), names[1]),
        (HubUse("data.source", f"hf://datasets/{tiny.DATA}@{commit}", "source"), names[1]),
    ):
        forget()
        if unreachable:
            hub.status = 503
        else:
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(HubError, match=expected) if expected else contextlib.nullcontext() as caught:
            fetch_here(commit, use)
        assert caught is None or "lacks 2 files" in str(caught.value)
    (folder_of(one, commit) / names[0]).rename(folder_of(one, commit) / "data/a.txt")
    forget()
    with pytest.raises(HubError, match=r"1 file of .* without the list of all its files"):
        fetch_here(commit, HubUse("data.source", f"hf://datasets/{tiny.DATA}@{commit}/data/*", "source"))


def folder_of(use: HubUse, commit: str) -> Path:
    return settings().snapshot(use.reference, commit)


def test_without_the_network_the_cache_answers(hub: Hub, commit: str) -> None:
    fetch_here(commit)
    forget()
    hub.status = 503
    assert client.resolve(WEIGHTS.reference, settings()).commit == commit
    with pytest.raises(HubError, match="answers HTTP 503"):
        client.resolve(parse_reference("hf://acme/other"), settings())


def test_an_unreachable_hub_is_an_error_that_names_the_mirror(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"http://127\.0\.0\.1:9 cannot be reached") as caught:
        client.resolve(WEIGHTS.reference, settings())
    assert caught.value.temporary


@pytest.mark.parametrize(
    ("token", "options", "expected"),
    [
        (None, {"gated": True}, r"is gated, and a reader without a token may not read it \(HTTP 401\)"),
        ("hf_good", {"gated": True}, r"is gated, and the account of the token may not read it \(HTTP 403\)"),
        (None, {"private": True}, r"no repository acme/tiny-llama that a reader without a token may read \(HTTP 401\)"),
        ("hf_revoked", {}, r"refuses the token in use \(HTTP 401\)"),
        ("hf_accepted", {"gated": True}, ""),
    ],
)
def test_each_refusal_has_its_own_error(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None, options: dict[str, bool], expected: str
) -> None:
    hub.tokens |= {"hf_accepted"}
    commit, _ = tiny.publish(hub, **options)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    if not expected:
        assert fetch_here(commit).state == "done"
        return
    with pytest.raises(HubError, match=expected) as caught:
        fetch_here(commit)
    assert "hf_" not in str(caught.value)


def test_missing_repositories_revisions_and_files_are_told_apart(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    tiny.publish(hub)
    for text, expected in (
        ("hf://acme/other", r"no repository acme/other that the account of the token may read \(HTTP 404\)"),
        (f"hf://{tiny.MODEL}@v9", "has no branch, tag or commit v9"),
        (f"hf://{tiny.MODEL}@main/sub", "has no file sub/tokenizer.json"),
    ):
        use = HubUse("data.tokenizer.path", text, "tokenizer")
        with pytest.raises(HubError, match=expected):
            fetch_here(client.resolve(use.reference, settings()).commit, use)


def test_a_token_that_is_revoked_between_two_files_ends_the_fetch(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens |= {"hf_accepted"}
    commit, _ = tiny.publish(hub, gated=True)
    monkeypatch.setenv("HF_TOKEN", "hf_accepted")
    client.resolve(WEIGHTS.reference, settings())
    hub.tokens.clear()
    with pytest.raises(HubError, match="refuses the token") as caught:
        fetch_here(commit)
    assert not caught.value.temporary


def test_the_token_goes_to_the_hub_alone(hub: Hub, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    fetch_here(commit)
    assert {one.token for one in hub.log if "/cdn/" in one.path} == {None}
    assert {one.token for one in hub.log if "/resolve/" in one.path} == {"hf_good"}
    assert not [path for path in settings().cache.rglob("*") if path.is_file() and b"hf_good" in path.read_bytes()]


def test_the_disk_is_checked_before_the_fetch(hub: Hub, commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**8}))
    with pytest.raises(HubError, match=r"have to be fetched to .*, and 100 MB are free there"):
        fetch_here(commit)
    assert not hub.downloads(SHARDS[0])


def test_two_fetches_at_a_time_download_once(hub: Hub, commit: str) -> None:
    hub.chunk_bytes, hub.delay_seconds = 8192, 0.1
    results: list[FetchProgress] = []
    seen: set[str] = set()

    def one() -> None:
        results.append(
            fetch([WEIGHTS], {WEIGHTS.text: commit}, os.environ, on_progress=lambda found: seen.add(found.state))
        )

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert all(len(hub.downloads(name)) == 1 for name in (*SHARDS, "config.json"))
    assert "fetching" in seen


def test_the_lock_of_a_process_that_is_stopped_blocks_for_a_limited_time(commit: str) -> None:
    lock = settings().repo_folder(WEIGHTS.reference) / ".scaletrain.lock"
    lock.parent.mkdir(parents=True)
    holder = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.flock(f, 2); print(1, flush=1); time.sleep(100_000)"
    )
    with subprocess.Popen([sys.executable, "-c", holder, str(lock)], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            assert fetch_here(commit, stale_seconds=1.0).state == "done"
            assert process_state(process.pid) == "T"
        finally:
            process.kill()


def test_a_process_that_dies_in_the_fetch_is_an_error_to_retry(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(FetchError, match="ended with 1"):
        run_fetch(commit)


@pytest.mark.long
def test_settings_follow_the_rules_of_the_library(tmp_path: Path) -> None:
    """huggingface_hub reads the variables when it is imported, so it is asked in a process for each environment."""
    script = (
        "import json; from huggingface_hub import constants as c, get_token; "
        "print(json.dumps([c.HF_HUB_CACHE, c.ENDPOINT, c.HF_HUB_OFFLINE, get_token()]))"
    )
    (tmp_path / "token").write_text("hf_of_the_file\n")
    base = {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
    for given in (
        {},
        {"HF_HOME": "~/x", "HF_HUB_OFFLINE": "1", "HF_TOKEN": " hf_a\n"},
        {"HF_HOME": "$HOME/y", "HF_HUB_CACHE": "~/z", "HF_TOKEN_PATH": str(tmp_path / "token")},
        {"XDG_CACHE_HOME": str(tmp_path), "HUGGINGFACE_HUB_CACHE": "/c", "HF_ENDPOINT": "http://mirror/"},
        {"HF_HOME": str(tmp_path), "TRANSFORMERS_OFFLINE": "yes"},
    ):
        said = subprocess.check_output([sys.executable, "-c", script], env={**base, **given}, text=True)
        ours = HubSettings.from_environment({**base, **given})
        assert [str(ours.cache), ours.endpoint, ours.offline, ours.token] == json.loads(said), given


def test_the_commit_of_a_branch_is_noted_only_with_its_files(hub: Hub, commit: str) -> None:
    """Another program that works offline finds the older files, which are there, and not the newer ones."""
    fetch_here(commit)
    forget()
    hub.add(tiny.MODEL, {**tiny.model_files(), "config.json": b"{}"})
    client.resolve(WEIGHTS.reference, settings())
    assert cached_commit(settings(), WEIGHTS.reference) == commit
