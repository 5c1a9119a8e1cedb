"""The flight recorder: writing, reading and salvaging `.opusmon` files."""

from opusmon.recording.reader import Recording
from opusmon.recording.salvage import SalvageReport, salvage
from opusmon.recording.store import Mark, RecordingError, clean_text
from opusmon.recording.writer import Recorder, RecorderState
from opusmon.schema import conform

__all__ = [
    "Mark",
    "Recorder",
    "RecorderState",
    "Recording",
    "RecordingError",
    "SalvageReport",
    "clean_text",
    "conform",
    "salvage",
]
