import hashlib
import io
import json
import random
import re
import string
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.errors import SpecError
from scaletrain_cli.secret_text import hide_values
from scaletrain_cli.spec import RunSpec, override_spec, parse_spec
from scaletrain_cli.spec.secrets import clear_secrets
from tests.cli.command_line import scaletrain

PROJECT = Path(__file__).parent.parent.parent
SMALL = (PROJECT / "tests" / "cli" / "small.yaml").read_text(encoding="utf-8")
# Made here at each start, so that no scanner of repositories takes them for real.
_DRAWN = random.Random(7)


def drawn(count: int, letters: str = string.ascii_letters + string.digits) -> str:
    return "".join(_DRAWN.choice(letters) for _ in range(count - 1)) + "7"


TOKENS = {
    "Hugging Face": "hf_" + drawn(34),
    "OpenAI": "sk-proj-" + drawn(40),
    "GitHub": "ghp_" + drawn(36),
    "GitHub, fine-grained": "github_pat_" + drawn(60),
    "GitLab": "glpat-" + drawn(20),
    "Slack": "xoxb-" + drawn(40),
    "AWS": "AKIA" + drawn(16, string.ascii_uppercase + string.digits),
    "Google": "AIza" + drawn(35),
    "a JSON Web Token": f"eyJ{drawn(20)}.eyJ{drawn(30)}.{drawn(43)}",
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----",
    "a URL with a password": f"https://ada:{drawn(12)}@proxy.example.org:3128",
    "a signed URL": f"https://store.example.org/a.jsonl?X-Amz-Expires=60&X-Amz-Signature={drawn(12)}",
    "a shared access signature": f"az://container/web.jsonl?sv=2026-01-01&sig={drawn(12)}",
    "a token in a URL": f"s3://bucket/a.jsonl?token={drawn(12)}",
    "an authorization header": f"Authorization: Bearer {drawn(24)}",
    "a password beside its name": f"user=ada;password={drawn(10)}",
    "npm": "npm_" + drawn(36),
    "PyPI": "pypi-AgEIcHlwaS5vcmc" + drawn(60),
    "Stripe": "sk_live_" + drawn(24),
    "DigitalOcean": "dop_v1_" + drawn(64, "0123456789abcdef"),
    "an Azure account key": f"AccountName=a;AccountKey={drawn(86)}==",
    "SendGrid": f"SG.{drawn(22)}.{drawn(43)}",
    "Databricks": "dapi" + drawn(32, "0123456789abcdef"),
    "Vault": "hvs." + drawn(40),
    "Telegram": f"7{drawn(8, string.digits)}:AA{drawn(33)}",
    "Groq": "gsk_" + drawn(48),
    "random letters": drawn(44),
}
NAMES = (
    "HF_TOKEN WANDB_API_KEY DB_PASSWORD my_secret AWS_SECRET_ACCESS_KEY GCP_CREDENTIALS OPENAI_API_KEY APIKEY "
    "PGPASSWORD MYSQL_PWD MY_PASS SSHPASS TOKEN1 GITHUB_TOKEN_2 DB_PASSWORD_PROD GITHUB_PAT accessToken AUTHTOKEN"
).split()
HARMLESS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "HF_TOKEN_PATH": "/home/ada/.cache/huggingface/token",
    "GOOGLE_APPLICATION_CREDENTIALS": "/etc/gcp/key.json",
    "WANDB_API_KEY_FILE": "x",
    "MAX_TOKEN": "4096",
    "MAX_TOKENS": "about 4096",
    "PWD": "work of ada",
    "FORWARD_PASS": "2",
    "BYPASS": "proxies",
    "PARTITION_KEY": "user_id_and_day_of_the_year_2026",
    "USE_TOKEN": "true",
    "GIT_COMMIT": hashlib.sha1(b"a").hexdigest(),
    "DATA_SHA256": "sha256:" + hashlib.sha256(b"a").hexdigest(),
    "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_3:1,mlx5_4:1,mlx5_5:1",
    "NCCL_SOCKET_IFNAME": "^docker0,lo",
    "LD_LIBRARY_PATH": "/opt/amazon/efa/lib64:/opt/AWS-OFI-nccl/lib:/usr/local/Cuda-12.4/lib64",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:512",
    "RUN_NOTE": "TheSeventhRunOfLlama70BWithLongerWarmupAndLowerRate2026",
    "PROXY": "http://proxy.example.org:3128",
    "IMAGE": "nvcr.io/nvidia/pytorch@sha256:" + "0123456789abcdef" * 4,
    "UUID": "GPU-8f6f0d3e-2b1c-4c4e-9d2a-0a1b2c3d4e5f",
    "SSH": "ssh://git@example.org:22/repo",
    "PAD_TOKEN": "<pad>",
    "EOS_TOKEN": "<|endoftext|>",
    "MASK_TOKEN": "[MASK]",
    "RUN_NAME": "Llama3-8B-Instruct-DPO-Lr5e6-Beta01-Run42",
    "S3": "s3://bucket-Name0/Folder1/SubFolder2/File3.parquet",
    "GLOB": "s3://bucket/part-0?.jsonl",
    "URL": "https://example.org/search?page=2&tokens=4096",
}


def parsed(*overrides: str) -> RunSpec:
    return parse_spec(SMALL, file="run.yaml", base_dir=PROJECT / "tests" / "cli", overrides=overrides)


def refused(text: str, overrides: Sequence[str] = ()) -> SpecError:
    with pytest.raises(SpecError) as raised:
        parse_spec(text, file="run.yaml", base_dir=PROJECT / "tests" / "cli", overrides=overrides)
    return raised.value


def everything(error: SpecError) -> str:
    return f"{error}{error.to_json()}{error!r}"


@pytest.mark.parametrize("kind", TOKENS)
def test_a_value_that_looks_like_a_secret_is_rejected_anywhere_and_not_shown(kind: str) -> None:
    value = TOKENS[kind]
    places = {
        "env.NOTE": f"env: {{NOTE: {json.dumps(value)}}}",
        "name": f"name: {json.dumps(value)}",
        "tracking.wandb.project": f"tracking: {{wandb: {{project: {json.dumps(value)}}}}}",
        "cluster.slurm.extra.comment": f"cluster: {{slurm: {{extra: {{comment: {json.dumps(f'a {value}')}}}}}}}",
        "data.source": f"data: {{source: {json.dumps(value)}}}",
    }
    for key, line in places.items():
        if kind == "random letters" and "comment" in key:
            continue  # a word among others
        section = line.partition(":")[0]
        kept = "\n".join(row for row in SMALL.splitlines() if not row.startswith(f"{section}:"))
        error = refused(f"{kept}\n{line}\n")
        (problem,) = [each for each in error.problems if each.key == key and "as plain text" in str(each)]
        assert problem.where == f"run.yaml:{len(kept.splitlines()) + 1}"
        assert value not in everything(error)


def test_a_variable_of_a_container_is_judged_by_its_name() -> None:
    env = "env: [{name: ON, value: correct horse}, {name: DB_PASSWORD, value: correct horse}]"
    pod = f"{{spec: {{initContainers: [{{name: a, image: b:1, {env}}}]}}}}"
    error = refused(SMALL, (f"cluster.kubernetes.pod_overrides={pod}",))
    (problem,) = error.problems
    assert problem.key == "cluster.kubernetes.pod_overrides.spec.initContainers.0.env.1.value"
    assert "correct horse" not in everything(error)


@pytest.mark.parametrize("name", NAMES)
def test_a_variable_named_like_a_secret_is_rejected_with_a_remedy(name: str) -> None:
    error = refused(f"{SMALL}\nenv: {{{name}: correct horse}}\n")
    (problem,) = error.problems
    assert problem.key == f"env.{name}"
    assert f"secret_env: [{name}]" in str(problem)
    assert "horse" not in everything(error)
    numeric = refused(f"{SMALL}\nenv: {{DB_PASSWORD: 12345}}\n")
    assert "12345" not in everything(numeric)


def test_values_that_only_resemble_a_secret_are_accepted() -> None:
    spec = parsed(*(f"env.{name}={json.dumps(value)}" for name, value in HARMLESS.items()))
    assert spec.env == HARMLESS


def test_a_url_of_data_with_any_query_is_rejected_and_not_shown() -> None:
    error = refused(SMALL.replace("source: python-stdlib", "source: https://example.org/a.jsonl?grant=blue-horse"))
    (problem,) = error.problems
    assert problem.key == "data.source"
    assert "has a query, which could be a signature" in str(problem)
    assert "credentials from the environment" in str(problem)
    assert "horse" not in everything(error)


def test_the_whole_of_a_private_key_is_hidden_in_a_text() -> None:
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{drawn(64)}\n{drawn(40)}\n-----END RSA PRIVATE KEY-----"
    assert hide_values(f"before {key} after", ()) == "before (not shown)----- after"


@pytest.mark.parametrize(
    "text",
    [
        *('{"api_key": "SECRET"}', "{'password': 'SECRET'}", "secret_key='SECRET'", "aws_secret_access_key = SECRET"),
        *(
            "Authorization: Basic SECRET=",
            "{'Authorization': 'token SECRET'}",
            "fetch https://SECRET@git.example.org/a",
        ),
    ],
)
def test_a_secret_that_an_error_of_a_library_quotes_is_hidden(text: str) -> None:
    for secret in (drawn(40), f"{drawn(15)}/{drawn(16)}/{drawn(8)}"):
        if "/" not in secret or "access_key" in text:
            assert not set(secret.split("/")) & set(re.split(r"\W", hide_values(text.replace("SECRET", secret), ())))


def test_a_secret_in_an_invalid_override_is_not_shown() -> None:
    value = TOKENS["Hugging Face"]
    for overrides in (
        [f"env.HF_TOKEN={value}"],
        ["env.HF_TOKEN=[correct horse]"],
        ["env.HF_TOKEN={correct horse"],
        [f"env.{value}=1"],
        [f"cluster.nodes={value}"],
        [f"{value}"],
        [f"env.A={value}", "training.steps=-1"],
        [f"env=[{value}]"],
    ):
        error = refused(SMALL, overrides)
        assert value not in everything(error), overrides
        assert "horse" not in everything(error), overrides
    twice = refused(f"{SMALL}\nenv: {{HF_TOKEN: correct horse, HF_TOKEN: battery staple}}\n")
    assert "horse" not in everything(twice)
    assert "staple" not in everything(twice)
    with pytest.raises(SpecError) as again:
        override_spec(parsed(), [f"env.HF_TOKEN={value}"], file="run.json")
    assert value not in everything(again.value)


def test_no_verb_prints_and_no_file_contains_a_rejected_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = TOKENS["GitHub"]
    spec = tmp_path / "run.yaml"
    spec.write_text(f"{SMALL}\nenv: {{MY_VARIABLE: {value}}}\n")
    monkeypatch.chdir(tmp_path)
    for verb in (["validate"], ["plan"], ["submit", "--yes"], ["submit", "--dry-run"], ["train"]):
        for more in ([], ["--json"]) if verb[0] != "train" else ([],):
            out, err = io.StringIO(), io.StringIO()
            with redirect_stdout(out), redirect_stderr(err):
                ended = scaletrain(*verb, spec, *more)
            assert ended.code == 2, verb
            assert value not in f"{ended.out}{ended.err}{out.getvalue()}{err.getvalue()}", verb
            assert "secret_env" in f"{ended.out}{ended.err}", verb
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != spec]
    assert not any(value in path.read_text(errors="replace") for path in written)


@given(st.text(alphabet=string.ascii_letters + string.digits, min_size=17, max_size=60), st.text(max_size=20))
def test_a_token_within_any_text_is_found_and_removed(body: str, around: str) -> None:
    value = f"hf_{body}"
    raw = {"env": {"A": f"{around} {value}"}}
    assert [secret.key for secret in clear_secrets(raw)] == [("env", "A")]


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_clear_secrets_accepts_any_data(data: object) -> None:
    found = clear_secrets({"env": data, "name": data})
    assert list(found) == list(clear_secrets({"env": data, "name": data})), "the same data are judged alike"
