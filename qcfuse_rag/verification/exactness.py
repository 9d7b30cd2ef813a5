"""Compare the engine with the model's own code on a few tokens before the model is trusted."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

import qcfuse_rag
from qcfuse_rag.errors import UnsupportedModel
from qcfuse_rag.fusion.method import Method
from qcfuse_rag.fusion.pipeline import fuse_prompt
from qcfuse_rag.ingestion.prefill import PrefillTarget
from qcfuse_rag.ingestion.warm_job import WarmJob
from qcfuse_rag.models.recurrence import MixerCall
from qcfuse_rag.models.result_cache import CachedResult
from qcfuse_rag.models.rope import cache_argument, decoder_of
from qcfuse_rag.prompts.segments import Prompt, Role, Segment
from qcfuse_rag.runtime.attention.dispatch import ATTENTION_NAME, chosen_backends, dense_attention_name
from qcfuse_rag.runtime.forward import forward_step
from qcfuse_rag.runtime.kernels.support import unavailable_reason
from qcfuse_rag.runtime.language_model import LanguageModel
from qcfuse_rag.runtime.model_views import model_view
from qcfuse_rag.runtime.runner import ModelRunner
from qcfuse_rag.store.backends.memory import MemoryStore
from qcfuse_rag.store.key import BLIND

LOG = logging.getLogger(__name__)

SEGMENT_TOKENS = 12
MAX_CHECK_TOKENS = {"cpu": 160, "cuda": 4600}
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
ROUNDING_ERRORS = 3.0
"""The engine's logits may differ from the model's by this multiple of the model's distance to its float32 logits."""


@dataclass(frozen=True, slots=True)
class ExactnessCheck:
    """Largest difference between the engine's logits and the model's own, as a fraction of their standard deviation."""

    all_rows: float  # every row computed, against the model's plain forward
    question_rows: float  # the question's rows over moved chunks, against caches the model computed in place
    step: float  # the last row as a decode step computes it, against the model's plain forward
    tolerance: float  # the largest difference that the model's dtype and rounding errors allow

    @property
    def largest(self) -> float:
        """The largest of the three differences; infinite if the engine's logits are not numbers."""
        return max(self.all_rows, self.question_rows, self.step)

    @property
    def passed(self) -> bool:
        """Whether all differences are within the tolerance."""
        return math.isfinite(self.largest) and self.largest <= self.tolerance

    def to_dict(self) -> dict[str, float | bool | None]:
        """Return plain data for JSON; an infinite difference is None."""
        figures = {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}
        return {**figures, "passed": self.passed}


@torch.inference_mode()
def measure_exactness(lm: LanguageModel) -> ExactnessCheck:
    """Compare the engine's two extremes, all rows and the question's rows, with the model's own forward.

    Not safe while other threads use the model: its own attention is switched on for the comparison.
    """
    vocabulary = lm.model.get_input_embeddings().num_embeddings
    length = _segment_tokens(lm)
    tokens = [(7 + 31 * i) % vocabulary for i in range(4 * length)]
    parts = [tuple(tokens[i : i + length]) for i in range(0, len(tokens), length)]
    roles = (Role.SYSTEM_PREFIX, Role.CHUNK, Role.CHUNK, Role.QUESTION)
    prompt = Prompt(tuple(Segment(role, ids, "") for role, ids in zip(roles, parts, strict=True)), prefix_ids=parts[0])
    store = MemoryStore()
    WarmJob(PrefillTarget(lm, store, prompt.prefix_ids), parts[1:3], bases=(BLIND,)).run()
    runner = ModelRunner(lm, store, overlap=False)
    full = fuse_prompt(runner, prompt, Method("full", base=None))
    step = forward_step(lm, [prompt.ids[-1]], [len(prompt) - 1], [full.buffer])[0]
    fused_reuse = fuse_prompt(runner, prompt, Method("reuse", base=BLIND)).logits
    with stock_attention(lm):
        plain = lm.model(input_ids=torch.tensor([prompt.ids], device=lm.device)).logits[0, -1].float()
        naive = naive_concatenation(lm, [torch.tensor(ids, device=lm.device) for ids in parts])[-1]
    tolerance = TOLERANCE.get(lm.dtype, 1e-3)
    differences = _difference(full.logits, plain), _difference(fused_reuse, naive), _difference(step, plain)
    if max(differences) > tolerance and lm.dtype != torch.float32:
        tolerance = max(tolerance, ROUNDING_ERRORS * _rounding_error(lm, prompt.ids, plain))
    return ExactnessCheck(*differences, tolerance)


def check_exact(lm: LanguageModel) -> ExactnessCheck:
    """Run `measure_exactness`; raise `UnsupportedModel` if a difference exceeds the tolerance."""
    check = measure_exactness(lm)
    if not check.passed:
        raise UnsupportedModel(
            f"the engine does not reproduce {type(lm.model).__name__}: logits differ from the model's own by "
            f"{check.all_rows:.3g} (all rows), {check.question_rows:.3g} (reused rows) and {check.step:.3g} (a decode "
            f"step) standard deviations, allowed are {check.tolerance:g}"
        )
    return check


@contextmanager
def stock_attention(lm: LanguageModel) -> Iterator[None]:
    """Switch the model to transformers' attention, for comparisons."""
    lm.model.set_attn_implementation(lm.stock_attention)
    try:
        with chosen_backends(lm.device):
            yield
    finally:
        lm.model.set_attn_implementation(ATTENTION_NAME)


def naive_concatenation(lm: LanguageModel, segments: Sequence[Tensor]) -> Tensor:
    """Compute position-only reuse with nothing but the model's own forward.

    Every segment of `[n]` int64 token ids but the last is run alone at its positions in the whole prompt. The caches
    are joined, and the last segment is run over them; its `[n, vocabulary]` float32 logits are returned. Slow, and
    independent of all other code in this library.
    """
    joined, earlier = _caches(lm), {layer.mixer: list[Tensor]() for layer in lm.recurrent.values()}
    start = 0
    for ids in segments[:-1]:
        alone = _caches(lm)
        positions = torch.arange(start, start + len(ids), device=ids.device)[None]
        with _behind(lm, earlier, joined=False):
            decoder_of(lm.model)(
                input_ids=ids[None], position_ids=positions, use_cache=True, **{cache_argument(): alone}
            )
        for index in lm.attention_layers:
            joined.update(alone.layers[index].keys, alone.layers[index].values, index)
        start += len(ids)
    positions = torch.arange(start, start + len(segments[-1]), device=segments[-1].device)[None]
    with _behind(lm, earlier, joined=True):
        out = lm.model(
            input_ids=segments[-1][None], position_ids=positions, use_cache=True, **{cache_argument(): joined}
        )
    return out.logits[0].float()  # type: ignore[no-any-return]


def _caches(lm: LanguageModel) -> Cache:
    attention = lm.attention_layers
    return Cache(layers=[DynamicLayer() if n in attention else LinearAttentionLayer() for n in range(lm.n_layers)])


@contextmanager
def _behind(lm: LanguageModel, earlier: dict[str, list[Tensor]], *, joined: bool) -> Iterator[None]:
    """Have the mixers of recurrent layers compute whole texts, without a cache, and note their hidden states.

    The text is what the pass computes or, if `joined`, stands behind all earlier ones.
    """

    def before(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = MixerCall.of(args, kwargs)
        earlier[name].append(call.hidden)
        return (torch.cat(earlier[name], 1) if joined else call.hidden,), call.options

    with ExitStack() as hooks:
        for name in earlier:
            mixer = decoder_of(lm.model).get_submodule(name)
            hook = mixer.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
            )
            hooks.callback(hook.remove)
            hook = mixer.register_forward_hook(lambda _, __, out, name=name: out[:, -earlier[name][-1].shape[1] :])
            hooks.callback(hook.remove)
        yield


class _Float32Layers:
    """Computes each layer in float32, with a copy of its weights for as long as it takes."""

    def run(self, layer: int, inner: nn.Module, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return functional_call(inner, _in_float32(inner), (hidden, *args), kwargs)


def _in_float32(module: nn.Module) -> dict[str, Tensor]:
    # Without those of layers that are computed by a layer runner.
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    return {name: x.float() for name, x in tensors.items() if x.is_floating_point() and ".inner." not in name}


def _rounding_error(lm: LanguageModel, ids: Sequence[int], plain: Tensor) -> float:
    """Return the difference of the model's logits from those it computes in float32; 0 if it cannot.

    Its layers are converted one at a time, so that a large model fits.
    """
    view = model_view(lm.model, decoder_of(lm.model), _Float32Layers())
    inputs = {"input_ids": torch.tensor([ids], device=lm.device)}
    try:
        with stock_attention(lm):
            logits = functional_call(view, _in_float32(view), (), inputs).logits[0, -1].float()
    except Exception as error:  # some formats of weights convert to nothing else
        LOG.info("the model does not run in float32: %s: %s", type(error).__name__, error)
        return 0.0
    difference = _difference(plain, logits)
    return difference if math.isfinite(difference) else 0.0


def _segment_tokens(lm: LanguageModel) -> int:
    # Long enough for four segments to cross a sliding window, where that is affordable.
    crossing = [window // 4 + SEGMENT_TOKENS for window in lm.sliding if window is not None]
    wanted = max([SEGMENT_TOKENS, *crossing])
    limit = min(MAX_CHECK_TOKENS.get(lm.device.type, MAX_CHECK_TOKENS["cpu"]), lm.context_window.tokens)
    return wanted if 4 * wanted <= limit else SEGMENT_TOKENS


def _difference(ours: Tensor, theirs: Tensor) -> float:
    difference = float((ours - theirs).abs().max() / theirs.std().clamp_min(1e-6))
    return math.inf if math.isnan(difference) else difference


def check_exact_once(lm: LanguageModel) -> ExactnessCheck:
    """Return the cached result of a `check_exact` that has passed; without one, check and cache the result."""
    result = CachedResult("checks", "exactness.json", _check_identity(lm))
    with suppress(ValueError, TypeError, KeyError, AttributeError):  # no such result, or none that can be read
        cached = ExactnessCheck(**{name: float(value) for name, value in (result.read() or {})["check"].items()})
        if cached.passed:
            return cached
    check = check_exact(lm)
    result.write(check=asdict(check))
    return check


def _check_identity(lm: LanguageModel) -> dict[str, Any]:
    return {
        "fingerprint": lm.fingerprint.digest,
        "architecture": type(lm.model).__name__,
        "weights": lm.weight_format,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "qcfuse-rag": qcfuse_rag.__version__,
        "device": torch.cuda.get_device_name(lm.device) if lm.device.type == "cuda" else str(lm.device.type),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "kernels": unavailable_reason(lm.device, lm.dtype, lm.widest_head) or "used",
        "attention": dense_attention_name(lm.device, lm.dtype),
    }
