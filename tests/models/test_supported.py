"""The list of supported models is true of the installed transformers."""

from __future__ import annotations

import subprocess
import sys
from difflib import ndiff
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from tests.support.families import FAMILIES

LISTED = Path(__file__).parent / "supported.txt"
SCRIPT = Path(__file__).parents[2] / "scripts" / "list_models.py"


@pytest.mark.slow
def test_the_verdict_on_each_class_of_transformers_is_as_listed() -> None:
    """On another one, the failure is what has changed: read it, and run the script again."""
    (title, *listed) = LISTED.read_text().splitlines()
    if Version(transformers.__version__) < Version(title.split()[-1]):
        pytest.skip(f"the list is of {title}")
    found = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in ndiff(listed, found[1:]) if line[0] in "+-"] == []


def test_the_list_has_what_the_golden_tests_run() -> None:
    accepted = {line.split(" | ")[1] for line in LISTED.read_text().splitlines() if line.endswith("| accepted")}
    assert accepted >= {model_type for model_type, _ in FAMILIES.values()}
