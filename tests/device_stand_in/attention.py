"""PyTorch's fused attention operators, computed by their definition on the host; dropout is left out."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

OPERATORS = {
    f"{name}{direction}"
    for direction in ("", "_backward")
    for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention")
} | {f"{name}_{way}" for way in ("forward", "backward") for name in ("_flash_attention", "_efficient_attention")}


class _Call(NamedTuple):
    """A call in one layout: fp32, [batch, heads, rows, head size], the causal mask aligned at the lower right."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    hidden: Tensor
    scale: float

    def scores(self) -> Tensor:
        scores = self.query @ _repeated(self.key, self.query).transpose(-1, -2) * self.scale
        scores = scores if self.bias is None else scores + self.bias.float()
        return scores.masked_fill(self.hidden, float("-inf"))


def _repeated(key: Tensor, query: Tensor) -> Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def compute(name: str, arguments: dict[str, Any], outputs: Any, host: Callable[[Any], Any]) -> None:
    """Write what the operator, one of `OPERATORS`, would have written into the ``outputs`` that it returned.

    ``arguments``, tensors of the device, have the schema's names; ``host`` gives the host's view of one.
    """
    given, written = ({key: host(value) for key, value in arguments.items()}, [host(output) for output in outputs])
    if given.get("cum_seq_q") is None:
        _compute(name, given, written)
        return
    ends = given["cum_seq_q"].tolist(), given["cum_seq_k"].tolist()
    for q0, q1, k0, k1 in zip(ends[0], ends[0][1:], ends[1], ends[1][1:], strict=False):
        q1, k1 = min(q1, q0 + given["max_q"]), min(k1, k0 + given["max_k"])  # a kernel has no threads for more
        queries, keys = ((lambda t, a=q0, b=q1: t[None, a:b]), (lambda t, a=k0, b=k1: t[None, a:b]))  # [1, length, heads, d]
        of_keys = {part: keys(given[part]) for part in ("key", "value")}
        of_queries = {part: queries(given[part]) for part in ("query", "grad_out", "out") if part in given}
        if "backward" in name:
            parts = [queries(written[0]), *map(keys, written[1:3])]
        else:
            parts = [queries(written[0]), written[1][None, ..., q0:q1]]
        _compute(name, {**given, **of_keys, **of_queries}, parts)


def _compute(name: str, arguments: dict[str, Any], outputs: Any) -> None:
    heads_first = name.startswith("_scaled")

    def turned(tensor: Tensor) -> Tensor:  # to heads first, and back
        return tensor if heads_first else tensor.transpose(1, 2)

    call = _call(name, arguments, turned)
    if "backward" in name:
        gradient = arguments["grad_out_"] if "grad_out_" in arguments else arguments["grad_out"]
        results = _backward(call, turned(gradient).float())
        pairs = list(zip(outputs[:3], map(turned, results), strict=False))
    else:
        output, log_sum = _forward(call)
        pairs = [(outputs[0], turned(output))]
        if outputs[1].numel():
            outputs[1][..., : log_sum.shape[-1]].copy_(log_sum)
    for written, result in pairs:
        if written is not None and written.numel():
            written.copy_(result)


def _call(name: str, given: dict[str, Any], turned: Callable[[Tensor], Tensor]) -> _Call:
    query, key, value = (turned(given[part]).float() for part in ("query", "key", "value"))
    causal = bool(given["is_causal"] if "is_causal" in given else given["custom_mask_type"])
    rows, columns = query.shape[-2], key.shape[-2]
    all_hidden = torch.ones(rows, columns, dtype=torch.bool)
    hidden = all_hidden.triu(columns - rows + 1) if causal else ~all_hidden
    left = given.get("window_size_left")
    if left is not None:
        hidden = hidden | all_hidden.tril(columns - rows - left - 1)
    scale, bias = given.get("scale"), given.get("attn_bias", given.get("bias"))
    return _Call(query, key, value, bias, hidden, query.shape[-1] ** -0.5 if scale is None else scale)


def _forward(call: _Call) -> tuple[Tensor, Tensor]:
    scores = call.scores()
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a row that sees nothing
    return weights @ _repeated(call.value, call.query), torch.logsumexp(scores, -1)


def _backward(call: _Call, gradient: Tensor) -> list[Tensor]:
    weights = torch.softmax(call.scores(), -1).nan_to_num(0.0)
    for_weights = gradient @ _repeated(call.value, call.query).transpose(-1, -2)
    for_scores = weights * (for_weights - (for_weights * weights).sum(-1, keepdim=True)) * call.scale
    heads = call.key.shape[1]
    key, value = for_scores.transpose(-1, -2) @ call.query, weights.transpose(-1, -2) @ gradient
    grouped = (part.unflatten(1, (heads, -1)).sum(2) for part in (key, value))
    return [for_scores @ _repeated(call.key, call.query), *grouped]
