"""Every benchmark beside this file, one after the other; then a table of their figures, and `bench.json`.

One that fails does not stop the others; its name is said at the end, and the exit code is 1.

python benchmarks/all.py [--only engine,weights] [--out bench.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(script: Path) -> tuple[list[dict[str, Any]], int]:
    """Its figures, shown as they come, and its exit code."""
    figures = []
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                figures.append({"benchmark": script.stem, **json.loads(line)})
    return figures, process.returncode


def table(figures: list[dict[str, Any]]) -> str:
    rows = [(row["figure"], f"{row['value']:g}", row["unit"]) for row in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit}" for name, value, unit in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of benchmarks, with commas between them")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    arguments = parser.parse_args()
    names = sorted(path.stem for path in HERE.glob("*.py") if path != Path(__file__))
    chosen = arguments.only.split(",") if arguments.only else names
    unknown = [name for name in chosen if name not in names]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names)}")
    figures: list[dict[str, Any]] = []
    failed = []
    for name in chosen:
        print(f"benchmarks/{name}.py", flush=True)
        found, code = run(HERE / f"{name}.py")
        figures += found
        failed += [f"{name} (exit {code})"] if code else []
    arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    if figures:
        print("\n" + table(figures))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
