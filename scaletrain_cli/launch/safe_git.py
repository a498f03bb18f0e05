"""git as a reader of repositories that somebody else may have configured: it starts no program that they name.

A repository's own configuration and attributes can name programs for file system monitoring, hooks, filters, diffs and
transports. Knows nothing of runs and snapshots.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaletrain_cli.own_processes import absolute_paths

# Over the configuration of the repository and of the user. No transport: a partial clone would fetch what it lacks.
_SETTINGS = (
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.pager=cat",
    "core.askPass=",
    "core.sshCommand=false",
    "core.gitProxy=",
    "credential.helper=",
    "diff.external=",
    "diff.ignoreSubmodules=dirty",
    "diff.submodule=short",
    "protocol.allow=never",
    "safe.bareRepository=explicit",
    "submodule.recurse=false",
)
_FILTER_OFF = ("clean=", "smudge=", "process=", "required=false")
_ENVIRONMENT = {
    "GIT_ALLOW_PROTOCOL": "",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
# The user's own file of settings, wherever it is. All other variables may be those of a hook or an alias that this
# process runs in: they would mean another repository, other paths or other programs.
_KEPT_VARIABLES = {"GIT_CONFIG_GLOBAL"}
_MOST_SECONDS = 600.0  # a .gitignore that is a FIFO or on a dead file system never answers


class GitError(Exception):
    """git ended with an error, or did not end; the text is what it said."""


class Git:
    """Calls git in one folder. ``filters`` holds the names of the content filters that are switched off."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.filters: tuple[str, ...] = ()
        self.filters = self._configured_filters()

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None, sent: bytes = b"") -> bytes:
        """Return what git prints. ``sent`` is its input. Raises GitError."""
        import subprocess

        settings = [*_SETTINGS, *(f"filter.{name}.{key}" for name in self.filters for key in _FILTER_OFF)]
        words = [word for setting in settings for word in ("-c", setting)]
        try:
            done = subprocess.run(
                ["git", "-C", str(self._folder), *words, *arguments],
                env=_environment(os.environ) | dict(environment or {}),
                input=sent,
                capture_output=True,
                timeout=_MOST_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise GitError(f"nothing for {_MOST_SECONDS:.0f} s") from error
        if done.returncode:
            raise GitError(" ".join(done.stderr.decode(errors="replace").split()) or f"exit code {done.returncode}")
        return done.stdout

    def filtered(self, paths: Sequence[str]) -> dict[str, str]:
        """Return the filter that the attributes give each path, for those that have one. Raises GitError."""
        if not self.filters or not paths:
            return {}
        sent = b"\0".join(map(os.fsencode, paths))
        told = self.run("check-attr", "-z", "--stdin", "filter", sent=sent).split(b"\0")
        entries = zip(told[0::3], told[2::3], strict=False)  # path, attribute, value
        return {os.fsdecode(path): os.fsdecode(name) for path, name in entries if os.fsdecode(name) in self.filters}

    def _configured_filters(self) -> tuple[str, ...]:
        """Return the names of the filters in all settings that git reads here. Raises GitError."""
        names = set()
        for entry in self.run("config", "--null", "--name-only", "--list").split(b"\0"):
            section, _, rest = os.fsdecode(entry).partition(".")
            name, dot, _ = rest.rpartition(".")
            if section.lower() != "filter" or not dot:
                continue
            if "=" in name or "\n" in name:  # no option of git's command line could switch it off
                raise GitError(f"the filter {name!r} of its configuration has a name that cannot be switched off")
            names.add(name)
        return tuple(sorted(names))


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in environment.items() if name[:4] != "GIT_" or name in _KEPT_VARIABLES}
    own.pop("SSH_ASKPASS", None)
    return absolute_paths(own) | _ENVIRONMENT
