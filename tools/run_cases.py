"""Judge a folder of labelled kernels with the real workbench and say where the verdicts differ from the labels.

    python tools/run_cases.py tests/cases [--level L1] [--json]

The folder holds `labels.json`, and case files in `kernels/` or `cases/` whose `problem` is relative to the case file.
Exit 0: no false accept and no false reject.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from optiml.settings import read_settings
from optiml.workbench import Workbench


def judge_case(bench: Workbench, path: Path, level: str) -> dict[str, Any]:
    """Verdict of one case file, as plain values."""
    case = json.loads(path.read_text(encoding="utf-8"))
    problem = json.loads((path.parent / case["problem"]).read_text(encoding="utf-8"))
    started = time.monotonic()
    verdict = bench.verify(case["kernel"], problem, level=level)
    return {
        "status": verdict.status,
        "reason": verdict.reason,
        "detail": verdict.detail,
        "seconds": round(time.monotonic() - started, 2),
    }


def agreement(label: dict[str, Any], found: dict[str, Any]) -> str:
    """`right`, `unverified`, `false accept`, `false reject` or `other reason`."""
    wanted = {label["status"], *label.get("status_also_ok", [])}
    if label.get("neutralised_ok"):
        wanted.add("accepted")
    if found["status"] == "unverified":
        return "right" if "unverified" in wanted else "unverified"
    if found["status"] not in wanted:
        return "false accept" if found["status"] == "accepted" else "false reject"
    if found["status"] == "rejected" and found["reason"] not in {label["reason"], *label.get("also_ok", [])}:
        return "other reason"
    return "right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--level", default="L1")
    parser.add_argument("--only", nargs="*", default=None, help="case names")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    labels = json.loads((options.folder / "labels.json").read_text(encoding="utf-8"))["cases"]
    folder = next(item for item in (options.folder / "kernels", options.folder / "cases") if item.is_dir())
    rows = []
    with tempfile.TemporaryDirectory() as home, Workbench(read_settings(home=home, roots=(Path("/"),))) as bench:
        for path in sorted(folder.glob("*.json")):
            if options.only and path.stem not in options.only:
                continue
            label = labels[path.stem]
            found = judge_case(bench, path, options.level)
            row = {"case": path.stem, "original": label["original"], **found, "agreement": agreement(label, found)}
            row["expected"] = label.get("reason") or label["status"]
            row["needs"] = label.get("needs", [])
            rows.append(row)
            if not options.json:
                shown = found["reason"] or found["status"]
                line = f"{row['case']} {row['original']:16} {row['agreement']:13} {shown:18} {row['seconds']:6.2f} s"
                print(f"{line}  {row['detail'] or ''}"[:200])
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["agreement"]] = counts.get(row["agreement"], 0) + 1
    times = sorted(row["seconds"] for row in rows)
    summary = {"counts": counts, "seconds": round(sum(times), 1), "median_s": times[len(times) // 2] if times else None}
    print(json.dumps({"summary": summary, "cases": rows} if options.json else summary, indent=2))
    return 1 if counts.get("false accept") or counts.get("false reject") else 0


if __name__ == "__main__":
    sys.exit(main())
