"""The real SmolLM2 from its GGUF file in float16 and int8: the same numbers in less memory than its float32 weights."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from qcfuse_rag.bundled import default_model
from qcfuse_rag.models import load
from qcfuse_rag.models.gguf_cache import SWITCH
from qcfuse_rag.models.load import load_model
from qcfuse_rag.models.weights.formats import LINEARS, HeldFormat, round_weights

pytestmark = pytest.mark.real

PROGRAM = """
import json, sys, torch, transformers
from pathlib import Path
import gguf, transformers.models.llama.modeling_llama
from qcfuse_rag.models.load import load_model
status = lambda key: next(int(x.split()[1]) for x in Path("/proc/self/status").open() if x.startswith(key))
before = status("VmRSS")
model = load_model(sys.argv[1], device="cpu", weights=sys.argv[2]).model
kb, shared = status("VmHWM") - before, model.lm_head.weight.numel()  # the output has the weights of the embeddings
whole = 4 * (sum(x.numel() for x in model.state_dict().values()) - shared)
print(json.dumps({"kb": kb, "whole_kb": whole // 1024}))
"""


@pytest.fixture(scope="module")
def loaded_whole() -> PreTrainedModel:
    model, _ = load._load_source(default_model(), torch.float32)
    return model


@pytest.mark.parametrize("weights", list(LINEARS))
def test_the_numbers_are_those_of_the_model_loaded_as_a_whole(
    weights: HeldFormat, loaded_whole: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")
    model = load_model(default_model(), device="cpu", weights=weights).model
    whole = copy.deepcopy(loaded_whole)
    round_weights(whole, weights)
    expected = whole.state_dict()
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])] == []
    assert list(model.state_dict()) == list(expected)
    ids = torch.arange(100, 140)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, whole(ids).logits)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_neither_the_first_nor_a_later_load_holds_a_rounded_copy_beside_the_whole_model(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_ASSETS_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    for _ in ("first", "later"):
        out = subprocess.run(
            [sys.executable, "-c", PROGRAM, default_model(), "int8"],
            check=True, capture_output=True, text=True, env=environment,
        ).stdout  # fmt: skip
        memory = json.loads(out.splitlines()[-1])
        assert memory["kb"] < 1.2 * memory["whole_kb"], "float32 and a rounded copy take 1.3 times it"
    assert list(tmp_path.rglob("packed.safetensors"))
