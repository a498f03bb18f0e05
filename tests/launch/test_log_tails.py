"""The lines at the end of a log that are shown as the reason of a failure."""

from pathlib import Path

from scaletrain_cli.launch.logs import last_error

TRACEBACK = """step 3 loss 2.1
Traceback (most recent call last):
  File "/home/ada/train.py", line 12, in main
    batch = load(index)
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data.py", line 7, in fetch
    raise KeyError(index)
KeyError: 17

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/ada/train.py", line 14, in main
    report(index)
  File "/opt/venv/lib/python3.11/site-packages/wandb/sdk.py", line 99, in log
    raise ConnectionError("no route")
ConnectionError: no route
and a second line of it
[rank0]: some noise at exit
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "n1-00000.log"
    path.write_text(text)
    return path


def test_the_last_traceback_with_a_frame_of_the_users_code_is_shown(tmp_path: Path) -> None:
    lines = last_error(written(tmp_path, TRACEBACK)).splitlines()
    assert lines[:2] == ['File "/home/ada/train.py", line 14, in main', "report(index)"]
    assert lines[2:4] == ["ConnectionError: no route", "and a second line of it"]


def test_a_traceback_of_libraries_alone_shows_its_innermost_frame(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "/x/site-packages/a.py", line 1, in f\n    g()\nValueError: no\n'
    assert last_error(written(tmp_path, text)) == 'File "/x/site-packages/a.py", line 1, in f\ng()\nValueError: no'


def test_a_truncated_traceback_still_shows_its_location(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "/home/ada/a.py", line 1, in f\n    g()\n'
    assert last_error(written(tmp_path, text)) == 'File "/home/ada/a.py", line 1, in f\ng()'


def test_without_a_traceback_the_lines_with_an_error_are_shown(tmp_path: Path) -> None:
    text = "up\nslurmstepd: error: execve(): No such file or directory\nbye\n"
    assert last_error(written(tmp_path, text)) == "slurmstepd: error: execve(): No such file or directory"
    assert last_error(written(tmp_path, "a\nb\n")) == "a\nb"


def test_an_empty_or_missing_log_shows_nothing(tmp_path: Path) -> None:
    assert last_error(written(tmp_path, "")) == ""
    assert last_error(tmp_path / "none.log") == ""
