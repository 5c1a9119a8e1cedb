"""Turn a recording made by record_demo.sh into the bundled demo: bookmark each phase of the load.

    python make_demo.py OUT_FOLDER/h200x2.opusmon OUT_FOLDER/truth.json opusmon/demo/h200x2.opusmon

The rows are not touched. The text of a bookmark is the phase and what the load itself measured.
"""

import argparse
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

UNITS = {
    "hbm_bps": "HBM {:.2f} TB/s",
    "peer_bps": "{:.0f} GB/s each way",
    "tflops": "{:.0f} TFLOP/s",
    "launches_per_s": "{:.0f} launches/s",
}
SCALE = {"hbm_bps": 1e12, "peer_bps": 1e9, "tflops": 1, "launches_per_s": 1}


def words(phase):
    """The bookmark's text."""
    figures = [text.format(phase[key] / SCALE[key]) for key, text in UNITS.items() if key in phase]
    return ": ".join([phase["phase"], *figures])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("truth", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    shutil.copyfile(args.recording, args.out)
    phases = json.loads(args.truth.read_text())
    with closing(sqlite3.connect(args.out)) as db, db:
        db.executemany(
            "insert into mark(t0, t1, kind, text) values (?, ?, 'bookmark', ?)",
            [(phase["t0"], phase["t1"], words(phase)) for phase in phases],
        )
    with closing(sqlite3.connect(args.out)) as db:
        db.execute("vacuum")
    args.out.chmod(0o644)


if __name__ == "__main__":
    main()
