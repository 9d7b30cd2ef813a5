"""Fail if a package has more lines, or the documentation more words, than its budget in budgets.toml.

python scripts/check_budgets.py [--show]
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lines_under(path: Path) -> int:
    """Count the lines of Python under a folder, of one file, or of a folder's own files if it ends in `*`."""
    if path.name == "*":
        files: Iterable[Path] = path.parent.glob("*.py*")
    else:
        files = path.rglob("*.py*") if path.is_dir() else [path]
    return sum(len(file.read_text("utf-8").splitlines()) for file in files if file.suffix in {".py", ".pyi"})


def words_under(path: Path) -> int:
    """Count the words of Markdown under a folder or of one file, as `wc -w` does."""
    files = path.rglob("*.md") if path.is_dir() else [path]
    return sum(len(file.read_text("utf-8").split()) for file in files)


def main() -> int:
    """Print what is above its budget, or everything, and return the exit status."""
    budgets = tomllib.loads((ROOT / "budgets.toml").read_text("utf-8"))
    above = 0
    for unit, count in (("lines", lines_under), ("words", words_under)):
        for name, budget in budgets[unit].items():
            used = sum(count(ROOT / part) for part in name.split(" + "))
            above += used > budget
            if used > budget or "--show" in sys.argv:
                print(f"{name}: {used:,} of {budget:,} {unit}" + (": above its budget" * (used > budget)))
    packages = {path.name for path in (ROOT / "qcfuse_rag").iterdir() if (path / "__init__.py").exists()}
    missing = packages - {name.split("/")[1] for name in budgets["lines"] if name.startswith("qcfuse_rag/")}
    if missing:
        print(f"no budget in budgets.toml: {', '.join(sorted(missing))}")
    if above:
        print("Take something away, or raise the budget in budgets.toml and say why in the commit.")
    return 1 if above or missing else 0


if __name__ == "__main__":
    sys.exit(main())
