"""Ways in which a Hugging Face model can be another one in a pipeline than in one process."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from tests.mutants.harness import Check, Hit, Mutant
from tests.mutants.refusals import _lets_pass


def _begins_anew(original: Any, hit: Hit) -> Any:
    def here(self: Any) -> Tensor:
        if self.span.start:
            hit()
        return self.positions[:, : self.span.length]

    return here


def _turns_anew(original: Any, hit: Hit) -> Any:
    def call(self: Any, hidden: Tensor, places: Any, layer_type: str | None) -> tuple[Tensor, Tensor]:
        cos, sin = original(self, hidden, places, layer_type)
        if places.span.start:
            hit()
            from ds_terapipe.hf.positions import Places

            first = Places.__new__(Places)
            first.__dict__ |= {**vars(places), "span": type(places.span)(0, places.span.length, places.span.total)}
            cos, sin = original(self, hidden, first, layer_type)
        return cos, sin

    return call


def _looks_at_the_slice(original: Any, hit: Hit) -> Any:
    def call(self: Any, hidden: Tensor, places: Any, layer_type: str | None) -> tuple[Tensor, Tensor]:
        hit()
        return copy.deepcopy(self._module)(hidden, places.here, *([layer_type] if self._by_type else []))

    return call


def _sees_all(original: Any, hit: Hit) -> Any:
    def mask(self: Any) -> Tensor | None:
        if original(self) is not None:
            hit()
        return None

    return mask


def _has_no(name: str) -> Any:
    def replacement(original: Any, hit: Hit) -> Any:
        def attend(*args: Any, **options: Any) -> Any:
            if options.get(name) is not None:
                hit()
                options[name] = None
            return original(*args, **options)

        return attend

    return replacement


def _misses_gradients(original: Any, hit: Hit) -> Any:
    def add(self: Any, dk: Tensor, dv: Tensor, span: Any, first: int = 0) -> Any:
        if first:
            hit()
            dk[:, :, : span.start - first] = 0
        return original(self, dk, dv, span, first)

    return add


def _says_the_same_token(original: Any, hit: Hit) -> Any:
    def aligned(self: Any, labels: Tensor) -> Tensor:
        hit()
        return labels

    return aligned


def _forgets_the_last_of_a_slice(original: Any, hit: Hit) -> Any:
    def token_sum(self: Any, outputs: Tensor, labels: Tensor) -> Tensor:
        hit()
        labels = labels.clone()
        labels[:, -1] = -100
        return original(self, outputs, labels)

    return token_sum


def _counts_its_own(original: Any, hit: Hit) -> Any:
    def step_weight(self: Any, labels: Any) -> Tensor:
        hit()
        return original(self, labels[:1])

    return step_weight


def _caps_no_logits(original: Any, hit: Hit) -> Any:
    def capped(logits: Tensor, softcap: float | None) -> Tensor:
        if softcap is not None:
            hit()
        return logits

    return capped


ANEW = "learned positions begin anew with a slice"
TURNED = "rotary positions begin anew with a slice"
LONGEST = "rotary frequencies look at a slice"
DOCUMENTS = "padding and other documents are seen"
WINDOW = "a slice's attention has no window"
SOFTCAP = "a slice's attention has no soft cap"
BEFORE = "keys before a slice in its window get no gradient"
SHIFT = "a token is to say itself"
EDGE = "the last token of a slice is to say nothing"
WEIGHT = "the labels of a step are those of its first micro-batch"
LOGITS = "logits have no soft cap"
NUMBERED = "numbers of documents are read as ones"
ADAPTERS = "weights of adapters are written as a model's"

_TRAINED, _STEP = "Hugging Face, trained", "Hugging Face, mean over a step"
_MASK, _FOLDER = "Hugging Face, a mask of numbers", "Hugging Face, a checkpoint with adapters"
_POSITIONS, _LOSS = "ds_terapipe.hf.positions:", "ds_terapipe.hf.loss:CausalLMLoss."
_ATTEND = ("ds_terapipe.hf.attention:slice_attention",)

MUTANTS = (
    Mutant(ANEW, "Every slice's table of positions begins at 0.", (_POSITIONS + "Places.here",), _begins_anew, _TRAINED),
    Mutant(TURNED, "Every slice's rotation begins at 0.", (_POSITIONS + "Rotary.__call__",), _turns_anew, _TRAINED),
    Mutant(LONGEST, "Frequencies are those of a slice.", (_POSITIONS + "Rotary.__call__",), _looks_at_the_slice, _TRAINED),
    Mutant(DOCUMENTS, "No token is hidden but those behind.", (_POSITIONS + "Places.mask",), _sees_all, _TRAINED),
    Mutant(WINDOW, "All earlier tokens are seen.", _ATTEND, _has_no("window"), _TRAINED),
    Mutant(SOFTCAP, "Scores are as they come.", _ATTEND, _has_no("softcap"), _TRAINED),
    Mutant(BEFORE, "The first gradients of a window are lost.",
           ("ds_terapipe.pipeline.operators.buffers:AttentionState.add_gradients",), _misses_gradients, _TRAINED),
    Mutant(SHIFT, "Labels are not shifted.", (_LOSS + "aligned",), _says_the_same_token, _TRAINED),
    Mutant(EDGE, "A slice's last label is left out.", (_LOSS + "token_sum",), _forgets_the_last_of_a_slice, _TRAINED),
    Mutant(WEIGHT, "One micro-batch stands for all.", (_LOSS + "step_weight",), _counts_its_own, _STEP),
    Mutant(NUMBERED, "A mask's values are not looked at.", ("ds_terapipe.hf.batches:_check_mask",), _lets_pass, _MASK),
    Mutant(ADAPTERS, "Names of weights are not looked at.", ("ds_terapipe.hf.folder:_check_names",), _lets_pass, _FOLDER),
    Mutant(LOGITS, "Logits are as they come.", ("ds_terapipe.hf.layers:_capped",), _caps_no_logits, _TRAINED),
)  # fmt: skip

_REFUSED = (NUMBERED, ADAPTERS)
_ABOUT_TRAINING = tuple(mutant.name for mutant in MUTANTS if mutant.name not in (WEIGHT, *_REFUSED))
_REFUSES = "has only what is accepted"


def _refusal(name: str, test: str, case: str, catches: str) -> Check:
    blind = {mutant.name: "trains nothing" for mutant in MUTANTS if mutant.name != catches}
    return Check(name, "tests.mutants.claims:passes", (test, case), (catches,), blind)


CHECKS = (
    Check(
        _TRAINED,
        "tests.hf.test_pipeline:off_by",
        (),
        _ABOUT_TRAINING,
        {WEIGHT: "each micro-batch has its own mean", **dict.fromkeys(_REFUSED, _REFUSES)},
    ),
    Check(
        _STEP,
        "tests.hf.test_pipeline:off_by_over_a_step",
        (),
        (WEIGHT, SHIFT, EDGE),
        {name: "has nothing of it, or is about the loss only" for name in _ABOUT_TRAINING if name not in (SHIFT, EDGE)}
        | dict.fromkeys(_REFUSED, _REFUSES),
    ),
    _refusal(_MASK, "tests.hf.test_batches:test_what_is_no_batch_is_said", "numbers of documents", NUMBERED),
    _refusal(_FOLDER, "tests.hf.test_weights:test_a_checkpoint_with_adapters_is_no_folder", "lora_A", ADAPTERS),
)
