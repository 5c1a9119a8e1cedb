"""The flight recorder: writing, reading and salvaging `.opusmon` files."""

from opusmon.recording.reader import Recording
from opusmon.recording.salvage import SalvageReport, salvage
from opusmon.recording.store import Mark, RecordingError
from opusmon.recording.writer import Recorder, RecorderState

__all__ = ["Mark", "Recorder", "RecorderState", "Recording", "RecordingError", "SalvageReport", "salvage"]
