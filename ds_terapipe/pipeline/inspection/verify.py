"""Verification of slices: every layer runs once whole and once sliced, and all its tensors are compared.

Only a run can tell: positions made inside the model, attention written by hand, convolutions, pooling and the like
silently train wrongly when the sequence is cut. Each layer's slices start from the whole run's input, so a difference
is the layer's own, and rounding does not add up over layers. It is no proof: one batch shows the model's behaviour for
these data. A layer that mixes tokens only for other data, or not yet at these weights, passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ds_terapipe.errors import ConfigError
from ds_terapipe.pipeline.inspection.advice import SliceDiagnosis
from ds_terapipe.pipeline.inspection.differences import (
    TOLERANCE,
    Difference,
    Record,
    difference,
    differences,
    first_above,
    largest,
)
from ds_terapipe.pipeline.inspection.gradients import LayerGradients, standing_in
from ds_terapipe.pipeline.inspection.precision import in_fp32, wide
from ds_terapipe.pipeline.inspection.sequence_dims import SequenceDims
from ds_terapipe.pipeline.layer_range import modules_of
from ds_terapipe.pipeline.operators.context import SliceContext, refuse_model
from ds_terapipe.pipeline.operators.weight_gradients import WeightGradients
from ds_terapipe.pipeline.slicing import Span, TensorCut, as_tuple, copy_of, like, part_of, tensors_in
from ds_terapipe.pipeline.token_shares import whole_gradients
from ds_terapipe.schedule import Unit

Gather = Callable[[Any], list[Any]]
# above it a difference that positions explain is no rounding, also in 16 bits
_CLOSE = 4e-3
_CURED = 0.25  # part of such a difference that is left once positions are right
_SMALL = 1e-3  # of a parameter's numbers: gates and scales begin so that what they let through is rounding
_LIKELY = 0.5  # about as large as what a layer adds to hidden states, also where 16 bits round
_NOT_REPEATED = (
    'it also differs from itself when the slice runs again, so it draws random numbers or has a state; use "verify": false if '
    'each slice may have its own, otherwise "slices": 1'
)
_MOST = 0.3  # difference of gradients, of layers in 16 bits
_BACKWARD = (
    "hooks and autograd functions must change a gradient token by token, and loss_fn must add all losses; use "
    '"slices": 1 otherwise'
)
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")  # operators of ATen


class _Rounding(TorchDispatchMode):
    """Mode that finds the tolerance of the least precise output type of an operator since the last reset.

    A layer may compute in fewer bits than its inputs and outputs have: under autocast, or between its own casts.
    """

    supports_higher_order_operators = True  # torch.cond, flex_attention

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tolerance = 0.0
        self.is_quantized = False  # whether an output had 8 bits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.tolerance = max(self.tolerance, TOLERANCE.get(tensor.dtype, 0.0))
            self.is_quantized |= tensor.dtype.itemsize == 1 and tensor.is_floating_point()
        return result


@contextmanager
def _no_dropout() -> Iterator[None]:
    """Context manager that disables dropout in its operators; the modules' train and eval state stays.

    TorchScript calls these operators too; a torch-function mode does not see it, and is called for every attribute of a tensor.
    """
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradCUDA"):
        for name in _DROPOUTS:
            library.impl(name, _kept, key)
            library.impl(f"{name}_", _kept, key)
        library.impl("native_dropout", _kept_with_mask, key)  # called by a script that was differentiated before
    try:
        yield
    finally:
        library._destroy()


def _kept(tensor: Tensor, p: float, train: bool) -> Tensor:
    return tensor


def _kept_with_mask(tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return tensor, torch.ones_like(tensor, dtype=torch.bool)


@contextmanager
def _nonzero(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager that gives trained parameters of zeros, or of small numbers, others: positions and gates begin there.

    Behind these slices would make no difference yet.
    """
    parameters = dict.fromkeys(p for part in parts for p in part.parameters() if p.requires_grad)
    # fake ones, which are only counted, have no values
    real = (p for p in parameters if p.is_floating_point() and p.numel() and not isinstance(p, FakeTensor))
    saved = {p: p.detach().clone() for p in real if max(map(abs, map(float, p.aminmax()))) < _SMALL}
    try:
        for parameter in saved:
            parameter.normal_(std=_LIKELY)
        yield
    finally:
        for parameter, values in saved.items():
            parameter.copy_(values)


@contextmanager
def _restored(modules: Sequence[nn.Module], others: Sequence[Any] = ()) -> Iterator[None]:
    """Context manager that restores buffers and attributes of modules, and attributes of ``others``: caches and counters."""
    found = (getattr(holder, "__dict__", None) for holder in (*modules, *others))
    attributes = [(present, dict(present)) for present in found if isinstance(present, dict)]
    buffers = [(m._buffers, name, buffer) for m in modules for name, buffer in m._buffers.items()]
    values = {id(buffer): buffer.clone() for *_, buffer in buffers if buffer is not None}
    try:
        yield
    finally:
        for of_module, name, buffer in buffers:
            of_module[name] = buffer if buffer is None else buffer.copy_(values[id(buffer)])
        for present, before in attributes:
            for name in present.keys() - before.keys():
                del present[name]
            present.update(before)


@contextmanager
def draws_kept() -> Iterator[None]:
    """Context manager that restores the random states of Python, NumPy and PyTorch."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])


@contextmanager
def undisturbed(parts: Mapping[SliceContext, nn.Module], loss_fn: Any = None) -> Iterator[None]:
    """Context manager for a trial run without gradients and dropout; random states, buffers and attributes are restored.

    Args:
        parts: modules that run, by their context. All at once, for PyTorch 2.11 lets only one library override an operator.
        loss_fn: loss that runs with them; a method's object, or a function, may count its calls.
    """
    modules = [m for part in parts.values() for m in part.modules()]
    dropouts = [m for m in modules if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    kept = _restored(modules, [getattr(loss_fn, "__self__", loss_fn)])
    # functions that layers compile run as they are written: no graph is whole under the modes of this run
    eager = torch.compiler.set_stance("force_eager")
    with draws_kept(), torch.no_grad(), _no_dropout(), _nonzero(parts.values()), kept, eager:
        for context in parts:
            context.dropout = False
        for dropout in dropouts:
            dropout.training = False
        try:
            yield
        finally:
            for dropout in dropouts:
                dropout.training = True
            for context in parts:
                context.dropout = True
                context.clear()


class _Recorder:
    """Hooks on every submodule that collect the calls of one run of one layer."""

    def __init__(self, root: nn.Module, skip: Sequence[nn.Module]) -> None:
        self.records: list[Record] = []
        self.rounding = _Rounding()
        self._handles = []
        inside = {id(module) for outside in skip for module in outside.modules()}
        for name, module in root.named_modules():
            if name and id(module) not in inside:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True))
                self._handles.append(module.register_forward_hook(partial(self._after, name)))

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.add(name, "input", (args, kwargs))

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.add(name, "output", output)

    def add(self, module: str, what: str, value: Any) -> None:
        """Record clones of the tensors in ``value``, since modules may reuse their buffers; not those within a ``vmap``."""
        if torch._C._are_functorch_transforms_active():
            return
        tensors = tuple(t.detach().clone() for t in tensors_in(value))
        self.records.append(Record(module, what, tensors, self.rounding.tolerance))

    def take(self) -> list[Record]:
        """Return the records since the last call, and forget the types since then."""
        records, self.records = self.records, []
        self.rounding.tolerance = 0.0
        return records

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def verify_stage(
    root: Any,
    layers: Any,
    context: SliceContext,
    inputs: Any,
    dims: SequenceDims,
    spans: Sequence[Span],
    skip: Sequence[nn.Module] = (),
    *,
    trains: bool = False,
    gather: Gather = lambda value: [value],
    keeper: WeightGradients | None = None,
) -> tuple[Any, list[str]]:
    """Run the layers of a stage whole and sliced and compare them.

    Args:
        root: the module that the layers are parts of.
        layers: of the stage.
        context: the engine's slice context.
        inputs: of the stage, whole.
        dims: how the tensors between its layers are cut.
        spans: the slices.
        skip: modules that run differently in a slice (adapted attention); only their inputs and outputs are compared.
        trains: whether the gradients of the layers' inputs and parameters are compared, too.
        gather: returns a value of all ranks that share the layers. One that failed alone would leave the others in a
            collective, so all have the same differences.
        keeper: makes those of weights, if they are made once per micro-batch.

    Returns:
        The stage's outputs, whole, and the names of statistics that are written by every slice.

    Raises:
        ConfigError: a module's result changes when its sequence is cut; with its name and the difference.
    """
    recorder = _Recorder(root, skip)
    written: list[str] = []
    try:
        for index, (layer, (cuts, after)) in enumerate(
            zip(layers.functions, pairwise((*dims.layers, dims.outputs)), strict=True)
        ):
            number = layers.first + index
            run = partial(_run, layer, number, context, recorder, cuts, after)
            one = _OneLayer(layers.text(number), run, recorder, gather)
            inside = [module for owner in modules_of(layer) for module in owner.modules()]
            with _restored(inside):  # in training slices do not find a table that the whole sequence has extended
                outputs, state = one.run_whole(inputs, spans[0].total), _statistics(layer, number)
            one.compare_all(inputs, cuts, spans)
            written += _changed(state, _statistics(layer, number))
            precisely = one.compare_in_fp32(inputs, cuts, spans, inside)
            if trains:
                precision = in_fp32(inside) if precisely else nullcontext()
                with precision, _restored(inside), standing_in(modules_of(layer)) as parameters:
                    gradients = LayerGradients(run, context, cuts, after, parameters, whole_gradients(root), keeper)
                    one.compare_gradients(gradients, wide(inputs) if precisely else inputs, spans)
            context.clear()
            inputs = outputs
    finally:
        recorder.close()
    return inputs, written


def _statistics(layer: Any, number: int) -> dict[str, Any]:
    """Return copies of a layer's statistics by name: buffers that a checkpoint has, and numbers in attributes."""
    owners = list(modules_of(layer))
    buffers = [each for owner in owners for each in owner.named_buffers()]
    saved = {name for owner in owners for name in owner.state_dict()} if buffers else set()
    found: dict[str, Any] = {name: buffer.clone() for name, buffer in buffers if name in saved}
    for path, module in (each for owner in owners for each in owner.named_modules()):
        numbers = {key: value for key, value in vars(module).items() if type(value) in (int, float)}
        found |= {f"{path}.{key}".lstrip("."): value for key, value in numbers.items()}
    return {f"{number}.{name}": value for name, value in found.items()}


def _changed(whole: dict[str, Any], parts: dict[str, Any]) -> list[str]:
    """Return the names of statistics that are others after all slices than after the whole sequence."""
    return [name for name, value in whole.items() if name in parts and _is_other(value, parts[name])]


def _is_other(whole: Any, part: Any) -> bool:
    if not isinstance(whole, Tensor):
        return bool(part > whole)  # a count: of all slices it is more, the length of a table is less
    return whole.shape == part.shape and difference(whole, part, None) > TOLERANCE.get(part.dtype, 0.0)


class _OneLayer:
    """A layer that runs whole first, and then slice by slice."""

    def __init__(self, text: str, run: Callable[[Any, Span], Any], recorder: _Recorder, gather: Gather) -> None:
        self._text, self._run, self._recorder, self._gather = text, run, recorder, gather
        self._expected: list[Record] = []

    def run_whole(self, inputs: Any, total: int) -> Any:
        """Run the layer on a copy of its inputs, all ``total`` tokens, and return its outputs."""
        self._recorder.rounding.is_quantized = False
        with self._recorder.rounding:
            outputs = self._run(copy_of(inputs), Span(0, total, total))
        self._expected = self._recorder.take()
        return outputs

    def compare_all(self, inputs: Any, cuts: Sequence[TensorCut], spans: Sequence[Span]) -> None:
        """Run the layer on all slices. Raises ConfigError if one differs from the whole."""
        batch = _batch_size(as_tuple(inputs), cuts)
        for span in spans:
            self.compare(part_of(inputs, cuts, span), span, batch)

    def compare_in_fp32(
        self, inputs: Any, cuts: Sequence[TensorCut], spans: Sequence[Span], modules: Sequence[nn.Module]
    ) -> bool:
        """Compare a layer that computes in 16 bits, and none in 8, in fp32 too; return whether this could be done."""
        expected = self._expected
        if expected[-1].tolerance <= TOLERANCE[torch.float32] or self._recorder.rounding.is_quantized:
            return False
        try:
            with in_fp32(modules), _restored(modules):
                self.run_whole(wide(inputs), spans[0].total)
            with in_fp32(modules), _restored(modules):
                self.compare_all(wide(inputs), cuts, spans)
            return True
        except ConfigError:
            raise
        except Exception:  # no memory for it, or operators of 16 bits alone
            self._recorder.take()
        self._expected = expected
        return False

    def compare(self, inputs: Any, span: Span, batch: int) -> None:
        """Run the layer on a slice. Raises ConfigError if it differs from the whole, with advice if available."""

        def compared(expected: list[Record], got: list[Record]) -> list[Difference]:
            return largest(self._gather(differences(self._text, expected, got, span, batch)))

        again = copy_of(inputs)
        self._run(inputs, span)
        got = self._recorder.take()
        found = compared(self._expected, got)
        worst = first_above(found) or first_above(found, _CLOSE)
        if worst is None:
            return
        if worst.is_certain:
            self._run(copy_of(again), span)
            if first_above(compared(got, self._recorder.take())) is not None:
                raise refuse_model(worst.text, _NOT_REPEATED)
        diagnosis = SliceDiagnosis(span)
        # if the layer fails with shifted positions, it is still refused for the difference
        with suppress(Exception), diagnosis:
            self._run(again, span)
        shifted = compared(self._expected, self._recorder.take())
        if worst.is_certain:
            raise refuse_model(worst.text, diagnosis.advice(positions_are_all=first_above(shifted) is None))
        after = next((each.error for each in shifted if each.place == worst.place), worst.error)
        if diagnosis.positions and after < _CURED * worst.error:
            raise refuse_model(worst.text, diagnosis.advice(positions_are_all=True))

    def compare_gradients(self, gradients: LayerGradients, inputs: Any, spans: Sequence[Span]) -> None:
        """Run the layer forward and backward, whole and sliced. Raises ConfigError if the gradients that it makes differ."""
        what, error = max(self._gather(gradients.difference(inputs, spans, difference)), key=itemgetter(1))
        self._recorder.take()
        output = self._expected[-1]
        tolerance = max(output.tolerance, *(TOLERANCE.get(tensor.dtype, 0.0) for tensor in output.tensors))
        if error > min(10 * tolerance, _MOST):
            where = f"between slices and whole sequence (tokens 0 to {spans[-1].stop})"
            raise refuse_model(f"the gradient of {what} of {self._text} differs by {error:.1e} {where}", _BACKWARD)


def _run(
    layer: Callable[..., Any],
    number: int,
    context: SliceContext,
    recorder: _Recorder,
    cuts: Sequence[TensorCut],
    after: Sequence[TensorCut],
    inputs: Any,
    span: Span,
) -> Any:
    """Run a layer and record its inputs and outputs, with the tokens of all ranks that share them."""
    with context.forward(Unit(0, 0), span):
        context.enter_layer(number)
        recorder.add("", "input", _whole(inputs, cuts))
        output = layer(inputs)
        recorder.add("", "output", _whole(output, after))
    return output


def _whole(value: Any, cuts: Sequence[TensorCut]) -> Any:
    if not any(cut.shares for cut in cuts):
        return value
    return like(value, [cut.whole(tensor) for cut, tensor in zip(cuts, as_tuple(value), strict=True)])


def _batch_size(tensors: Sequence[Tensor], cuts: Sequence[TensorCut]) -> int:
    for tensor, cut in zip(tensors, cuts, strict=True):
        if cut.row is not None and tensor.dim() > 1:
            return tensor.shape[1 if cut.row == 0 else 0]
    return 1
