"""TensorBoard: one event file per attempt in one folder, which its readers join into one run.

Each file begins with a ``SessionLog.START`` of the first step that it may hold: readers drop what earlier files hold
from this step on (``purge_step`` of torch's SummaryWriter writes the same). So a step that was trained again is shown
once, with its last values. The files are written without torch and without TensorFlow.
"""

import importlib
import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from scaletrain_cli.safe_files import expand_home, make_folder, open_new
from scaletrain_cli.tracking.base import OptionText, Outcome, TrackedRun, Tracker, TrackerOptions

_NUMBER = re.compile(r"events\.out\.tfevents\.(\d+)\.")


def _local(folder: str) -> str:
    if "://" in folder:
        raise ValueError("must be a folder: event files are not written to a store")
    return folder


class TensorboardOptions(TrackerOptions):
    """TensorBoard event files. ``dir: auto`` is ``tensorboard/`` in the run directory."""

    dir: Annotated[OptionText, AfterValidator(_local)] = Field(
        default="auto", description="folder in which a folder named after the run is made"
    )


class TensorboardTracker(Tracker[TensorboardOptions]):
    """Scalars are named as in metrics.jsonl; events are text under ``event/<name>``."""

    options_model = TensorboardOptions
    rewinds = True

    def start(self, run: TrackedRun) -> Mapping[str, int] | None:
        """Create the folder, and determine the number of the next event file. rewind() opens the first file."""
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        given = self.options.dir
        self._folder = run.folder / "tensorboard" if given == "auto" else expand_home(given) / run.run_id
        make_folder(self._folder)
        self._step = 0
        self._file: Any = None
        self._writer: Any = None
        return None

    def rewind(self, step: int) -> None:
        """Begin a new file that replaces all steps above ``step``."""
        self._close()
        self._step = step
        # Readers order files by name, and node clocks differ, so the number only increases.
        numbers = [int(match[1]) for path in self._folder.iterdir() if (match := _NUMBER.match(path.name))]
        number = max([int(time.time()), *(number + 1 for number in numbers)])
        path = self._folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}.scaletrain"
        self._file = open_new(path, replace=False)
        self._writer = self._records.RecordWriter(self._file)
        self._write(time.time(), file_version="brain.Event:2")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(time.time(), step=step + 1, session_log=start)

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._step = step
        value = self._summaries.Summary.Value
        scalars = [value(tag=name, simple_value=number) for name, number in values.items()]
        self._write(seconds, step=step, summary=self._summaries.Summary(value=scalars))

    def event(self, name: str, details: Mapping[str, Any], seconds: float) -> None:
        tensor = importlib.import_module("tensorboard.compat.proto.tensor_pb2").TensorProto
        types = importlib.import_module("tensorboard.compat.proto.types_pb2")
        metadata = self._summaries.SummaryMetadata
        text = "  \n".join(f"**{key}** {value}" for key, value in details.items()) or name
        value = self._summaries.Summary.Value(
            tag=f"event/{name}",
            metadata=metadata(plugin_data=metadata.PluginData(plugin_name="text")),
            tensor=tensor(dtype=types.DT_STRING, string_val=[text.encode()]),
        )
        self._write(seconds, step=self._step, summary=self._summaries.Summary(value=[value]))

    def finish(self, outcome: Outcome) -> None:
        self._close()

    def _write(self, seconds: float, **fields: Any) -> None:
        self._writer.write(self._events.Event(wall_time=seconds, **fields).SerializeToString())
        self._writer.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
