"""Count the package's modules that one `QCFuseLLM.complete` runs and imports.

The model is the bundled default, the store a folder that another process has warmed, the method `auto`. A module is
touched if one of its functions runs between the call and its answer, in any thread.

    python scripts/count_modules.py [--json] [--list] [--max-touched N] [--max-imported N]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from types import FrameType

from qcfuse_rag.bundled import corpus, default_model

PACKAGES = ("qcfuse_rag", "llama_index.llms.qcfuse")
DOCUMENTS, NEAREST = 12, 4
QUESTION = "What is the name of the ambulance boat?"


def nodes() -> list[str]:
    return list(corpus().values())[:DOCUMENTS]


def warm(folder: str) -> None:
    from llama_index.core.schema import TextNode

    from llama_index.llms.qcfuse import QCFuseLLM, QCFuseWarmup

    llm = QCFuseLLM(model=default_model(), store=folder)
    QCFuseWarmup(llm)([TextNode(text=text) for text in nodes()])
    llm.close()


def ask(folder: str) -> dict[str, object]:
    touched: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            touched.add(frame.f_globals.get("__name__", ""))

    from llama_index.llms.qcfuse import QCFuseLLM

    threading.setprofile(note)
    sys.setprofile(note)
    llm = QCFuseLLM(model=default_model(), store=folder, max_new_tokens=8)
    llm.complete(QUESTION)  # the engine is loaded and has measured its machine
    touched.clear()
    answer = llm.complete("\n\n".join([*nodes()[:NEAREST], QUESTION]))
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    report = answer.raw["report"]
    llm.close()
    return {"touched": own(touched), "imported": own(set(sys.modules)), "report": report}


def own(names: set[str]) -> list[str]:
    return sorted(name for name in names if any(name == each or name.startswith(f"{each}.") for each in PACKAGES))


def in_another_process(step: str, folder: str) -> str:
    command = [sys.executable, __file__, "--step", step, "--folder", folder]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="name the modules")
    parser.add_argument("--max-touched", type=int, default=0, help="fail above this many")
    parser.add_argument("--max-imported", type=int, default=0, help="fail above this many")
    parser.add_argument("--step", choices=["warm", "ask"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step == "warm":
        warm(options.folder)
        return 0
    if options.step == "ask":
        print(json.dumps(ask(options.folder), default=str))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        in_another_process("warm", folder)
        counts = json.loads(in_another_process("ask", folder).splitlines()[-1])
    if options.json:
        print(json.dumps(counts))
    else:
        for name in ("touched", "imported"):
            packages = Counter(".".join(module.split(".")[:2]) for module in counts[name])
            print(f"{name}: {len(counts[name])}", ", ".join(f"{key} {count}" for key, count in packages.items()))
            if options.list:
                print(*(f"  {module}" for module in counts[name]), sep="\n")
    too_many = [
        f"{name}: {len(counts[name])} modules, more than {limit}"
        for name, limit in (("touched", options.max_touched), ("imported", options.max_imported))
        if limit and len(counts[name]) > limit
    ]
    print(*too_many, sep="\n", file=sys.stderr, end="\n" if too_many else "")
    return bool(too_many)


if __name__ == "__main__":
    sys.exit(main())
