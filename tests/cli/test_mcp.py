"""`scaletrain mcp`, driven by a client of the mcp library over stdin and stdout of a real process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.worker.checkpoint_commit import MANIFEST
from tests.cli.command_line import PROJECT, SMALL, scaletrain
from tests.tiny_program import settings
from tests.waiting import wait_until

mcp = pytest.importorskip("mcp", reason="needs mcp, of the extra mcp")
PAGE = PROJECT / "docs" / "agents.md"
# The rank saves step 2 and runs until it gets a signal; when it is resumed, it saves step 4 and ends.
PROGRAM = """
import os, sys, time
from scaletrain_cli.worker import ExitCode, Rank

rank = Rank.start(sys.argv[1])

def train():
    resumed = rank.checkpoints.latest() is not None
    step = 4 if resumed else 2
    rank.checkpoints.open()
    rank.record_event("resumed" if resumed else "started", step=step)
    rank.heartbeat.beat(step, "step")
    rank.log_metrics(step, loss=1.0 / step)
    print("step", step, "by process", os.getpid(), flush=True)
    staged = rank.checkpoints.stage(step)
    with staged.file("state") as file:
        file.write(str(step).encode())
    rank.checkpoints.commit(step, staged.digests)
    while not resumed and not rank.preemption.raised:
        rank.heartbeat.beat(step, "step")
        time.sleep(0.05)
    rank.record_event("finished" if resumed else "preempted", step=step)
    return ExitCode.DONE if resumed else ExitCode.PREEMPTED

rank.run(train)
"""


def drive(session: Callable[[Any], Awaitable[None]], mode: str = "auto") -> None:
    """Start the server, let ``session`` speak with it, and end it."""
    names = ("SCALETRAIN_RUNS", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
    environment = {name: os.environ[name] for name in names} | {"PYTHONPATH": str(PROJECT)}
    words = ["-m", "scaletrain_cli", "mcp"]
    server = mcp.StdioServerParameters(command=sys.executable, args=words, env=environment)

    async def connected() -> None:
        async with mcp.Client(server, mode=mode) as client:
            await session(client)

    asyncio.run(connected())


async def answer(client: Any, tool: str, argument: object, **more: object) -> dict[str, Any]:
    """Call a tool that must succeed, and return its document."""
    name = "spec" if tool in ("plan", "submit") else "run"
    result = await client.call_tool(tool, {name: str(argument), **more})
    assert not result.is_error, result.content
    assert result.structured_content["schema"] == f"scaletrain.{tool}/v1"
    return dict(result.structured_content)


def verbs_about(run: str) -> list[list[str]]:
    """The command lines of the verbs that a server has started for this run."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if line[-2:] == ["--", run]]


def test_a_client_lists_tools_plans_and_reads_a_clear_error(caplog: pytest.LogCaptureFixture) -> None:
    async def session(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        reads = {"plan", "validate", "status", "explain", "diagnose", "logs", "list_runs"}
        assert {name for name, tool in tools.items() if tool.annotations.read_only_hint} == reads
        assert {name for name, tool in tools.items() if tool.annotations.destructive_hint} == tools.keys() - reads
        assert tools.keys() - reads == {"submit", "resume", "cancel"}
        rows = re.findall(r"^\| `(\w+)` \| `\w+` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
        documented = {name: re.findall(r"`(\w+)`", arguments) for name, arguments in rows}
        assert documented == {name: [*tool.input_schema["properties"]] for name, tool in tools.items()}
        assert all(tool.description and "\n " not in tool.description for tool in tools.values())
        planned = await answer(client, "plan", SMALL, overrides=["training.steps=50"])
        assert planned == scaletrain("plan", SMALL, "--set", "training.steps=50", "--json", code=0).data
        wrong = await client.call_tool("plan", {"spec": str(SMALL), "overrides": ["training.stps=1"]})
        assert wrong.is_error
        assert wrong.content[0].text.startswith(f"exit code 2: error: {SMALL}: 1 problem in the run spec\n")
        assert "training.stps: unknown key. Did you mean steps?" in wrong.content[0].text
        assert wrong.structured_content["error"]["code"] == "spec"
        misspelled = await client.call_tool("submit", {"spec": str(SMALL), "dryrun": True})
        assert misspelled.is_error
        assert "dryrun" in misspelled.content[0].text
        assert not runs_root().exists()

    drive(session, mode="legacy")  # the handshake by initialize
    assert [record.getMessage() for record in caplog.records if record.name.startswith("mcp")] == []


@pytest.mark.long
def test_a_client_submits_a_run_that_is_killed_explains_resumes_and_cancels_another(tmp_path: Path) -> None:
    overrides = [*settings(tmp_path / "program", steps=4), "restarts.crash=0"]
    (tmp_path / "program" / "tiny.py").write_text(PROGRAM)
    saved = [RunDir(runs_root() / name).checkpoints / "step-00000002" / MANIFEST for name in ("killed", "stopped")]

    async def first_session(client: Any) -> None:
        rendered = await answer(client, "submit", SMALL, overrides=overrides, run_id="killed", dry_run=True)
        assert "supervisor" in rendered["would_send"]
        assert not runs_root().exists()
        created = await answer(client, "submit", SMALL, overrides=overrides, run_id="killed")
        assert created["run_id"] == "killed"
        assert not (await answer(client, "submit", SMALL, overrides=overrides, run_id="killed"))["created"]
        wait_until(saved[0].exists, "a checkpoint")
        (line,) = (await answer(client, "logs", "killed"))["lines"]
        os.kill(int(re.fullmatch(r"step 2 by process (\d+)", line["text"])[1]), signal.SIGKILL)  # type: ignore[index]
        failed = await client.call_tool("status", {"run": "killed", "wait": "1h"})
        assert failed.is_error
        assert failed.content[0].text.startswith("exit code 1: ")
        assert failed.structured_content["state"] == "failed"
        explained = await answer(client, "explain", "killed")
        assert [finding["code"] for finding in explained["findings"]] == ["launch.exit-killed"]
        assert (await answer(client, "diagnose", "killed"))["last_step"] == 2
        await answer(client, "resume", "killed")
        ended = await answer(client, "status", "killed", wait="1h")
        assert (ended["state"], ended["step"], len(ended["attempts"])) == ("finished", 4, 2)
        await answer(client, "submit", SMALL, overrides=overrides, run_id="stopped")
        wait_until(saved[1].exists, "a checkpoint")

    async def second_session(client: Any) -> None:
        """The server that submitted the run has ended; the run has not. A call that is given up ends its verb."""
        place = str(runs_root() / "stopped")
        waiting = asyncio.create_task(client.call_tool("status", {"run": place, "wait": "1h"}))
        while not verbs_about(place):
            await asyncio.sleep(0.05)
        waiting.cancel()
        while verbs_about(place):
            await asyncio.sleep(0.05)
        assert (await answer(client, "cancel", "stopped"))["cancelled"]
        refused = await client.call_tool("resume", {"run": "killed"})
        assert refused.content[0].text.startswith("exit code 2: error: killed ")
        stopped = await client.call_tool("status", {"run": "stopped", "wait": "1h"})
        assert stopped.structured_content["state"] == "cancelled"
        listed = (await client.call_tool("list_runs", {"limit": 1})).structured_content
        assert ([run["run_id"] for run in listed["runs"]], listed["not_shown"]) == (["stopped"], 1)

    try:
        drive(first_session)
        drive(second_session)
    except BaseException:
        for name in ("killed", "stopped"):  # each of their ranks runs until it gets a signal
            scaletrain("cancel", name)
        raise


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    monkeypatch.setitem(sys.modules, "mcp", None)
    ended = scaletrain("mcp", code=ExitCode.USAGE)
    assert ended.err.startswith("error: mcp is not installed. Run pip install -c constraints.txt '.[mcp]' in ")
