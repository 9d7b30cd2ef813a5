"""The measurement `peer`: the same tokens on both sides, and answers of the lengths asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from benchmarks import peer
from benchmarks.runner import Run as Records
from qcfuse_rag import FusionEngine, LanguageModel, MemoryStore, QCFuseError
from qcfuse_rag.bundled import default_model
from tests.support.cli import Run


@pytest.mark.real
def test_all_sides_answer(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr("benchmarks.peer.WAIT_S", 0)  # no figure here is compared
    out = tmp_path / "peer.json"
    run.text(
        "peer",
        "--context",
        64,
        "--answers",
        "3",
        "--repeats",
        1,
        "--ratios",
        ".05,.2",
        "--formats",
        "file,q8_0",
        "--json",
        out,
    )
    result = json.loads(out.read_text())
    assert 64 < result["about"]["prompt_tokens"] < 192
    ours = [row["side"] for row in result["rows"] if "llama.cpp" not in row["side"]]
    assert (ours, len(result["rows"])) == (["full", "auto, 5 %", "auto, 20 %"], 7)
    assert "AVX2" in result["about"]["llama.cpp"]
    assert all(row["first_token_s"] > 0 and list(row["answer_s"]) == ["3"] for row in result["rows"])


@pytest.mark.real
@pytest.mark.parametrize(("name", "bits", "error"), [("bf16", 16, 2**-8), ("q8_0", 8.5, 2**-6), ("q4_0", 4.5, 2**-2)])
def test_weights_in_another_format_are_near_the_given_ones(
    name: str, bits: float, error: float, tmp_path: Path
) -> None:
    given = Path(default_model())
    file = peer.requantized(given, name, tmp_path)
    pairs = zip(GGUFReader(given).tensors, GGUFReader(file).tensors, strict=True)
    for old, new in pairs:
        before, after = (dequantize(tensor.data, tensor.tensor_type) for tensor in (old, new))
        assert abs(after - before).max() <= abs(before).max() * error
        assert old.name == new.name
    assert 8 * file.stat().st_size / sum(int(t.n_elements) for t in GGUFReader(file).tensors) < bits + 0.5


@pytest.mark.real
def test_prompts_have_the_length_asked_for_and_share_what_their_names_say(smollm2: LanguageModel) -> None:
    texts, prompts = peer._prompts(FusionEngine(smollm2, MemoryStore()), 700)
    sizes = [len(smollm2.tokenizer(text)["input_ids"]) for text in texts]
    assert abs(sum(sizes) - 700) < 5
    shared = _shared(prompts.measured, prompts.same_order)
    assert 700 < shared < len(prompts.measured)
    assert _shared(prompts.measured, prompts.other_order) < shared - sum(sizes[1:])


def _shared(first: peer.Ids, second: peer.Ids) -> int:
    return next(i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])


def test_a_side_that_was_not_timed_yet_has_empty_cells() -> None:
    run = Records("peer", about={"model": "m", "prompt_tokens": 9, "threads": 1, "dtype": "float32"})
    for length, side, seconds in ((1, "full", 2.0), (1, "auto", 1.0), (11, "full", 3.0)):
        run.add(("answer", length, side, 0), {"seconds": seconds})
    full, auto = peer.report(run).tables[0].rows
    assert (full, auto) == (["full", "2.00 s", "100.0 ms", "3.00 s"], ["auto", "1.00 s", "", ""])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": Path("model.safetensors")}, "needs a GGUF file"),
        ({"answers": "1,32"}, "at least 2 tokens"),
        ({"formats": "q3_x"}, "no format"),
        ({"llama_cpp": Path("nowhere")}, "holds no llama-server"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_timed(options: dict[str, object], says: str) -> None:
    with pytest.raises(QCFuseError, match=says):
        peer.measure(peer.Options(**{"model": Path("model.gguf"), **options}), Records("peer"))  # type: ignore[arg-type]
