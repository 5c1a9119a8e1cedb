"""Bookmark what the loads of incident.sh say they did in the recording made beside them: the bundled demo.

    python make_incident.py FOLDER opusmon/demo/incident.opusmon

FOLDER holds demo.opusmon, planted.jsonl, chat.jsonl and hog.jsonl. The rows are not touched.
"""

import argparse
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def marks(folder):
    """Range and text of each thing that was done."""
    for line in lines(folder / "chat.jsonl"):
        if "step" in line:
            yield line["t0"], line["t0"], f"chat load: {line['step']} at a time"
    for line in lines(folder / "hog.jsonl"):
        bps = line["n"] * line["b"] / (line["t1"] - line["t0"]) * 1e9
        what = {
            "copy": f"copies on GPU 0: {2 * bps / 1e12:.2f} TB/s",
            "peer": f"GPU 0 to 1: {bps / 1e9:.0f} GB/s",
        }
        yield line["t0"], line["t1"], what[line["name"]]
    for line in lines(folder / "planted.jsonl"):
        if "count" in line:
            more = line.get("how") or line.get("call") or ""
            yield line["t0"], line["t1"], f"planted on GPU 1: {line['count']} {line['kind']} {more}".strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    shutil.copyfile(args.folder / "demo.opusmon", args.out)
    args.out.chmod(0o644)
    with closing(sqlite3.connect(args.out)) as db, db:
        db.executemany(
            "insert into mark(t0, t1, kind, text) values (?, ?, 'bookmark', ?)", sorted(marks(args.folder))
        )
    with closing(sqlite3.connect(args.out)) as db:
        db.execute("vacuum")


if __name__ == "__main__":
    main()
