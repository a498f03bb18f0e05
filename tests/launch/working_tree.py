"""A small git repository of a user, from which snapshots are taken. An empty folder gets a few files first."""

import os
import subprocess
from pathlib import Path


class WorkingTree:
    """A small git repository of a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / ".git").exists():  # a copy of one
            return
        self.git("init", "--quiet", "--initial-branch=main")
        if list(folder.iterdir()) == [folder / ".git"]:
            self.write("train.py", "print('one')\n")
            self.write("src/my_model/__init__.py", "")
            self.write("run.sh", "#!/bin/sh\n", mode=0o755)
            self.write(".gitignore", "data/\n*.pyc\n")
            self.write("data/huge.bin", "not of the code")
        self.commit()

    def git(self, *arguments: str, sent: bytes = b"") -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(self.folder), *identity, *arguments]
        environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        done = subprocess.run(command, check=True, capture_output=True, input=sent, env=environment)
        return done.stdout.decode()

    def write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=work")
        return self.git("rev-parse", "HEAD").strip()
