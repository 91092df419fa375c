"""LAMB one tensor at a time in eager PyTorch: what a user has without a fused op.

The algorithm is that of timm's ``Lamb`` (NVLAMB with every tensor adapted): moments with bias correction, decay inside
the update, the ratio |p| / |u| kept on the device. Written from the algorithm; every line is one pass over a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class EagerLamb(torch.optim.Optimizer):
    """LAMB with ``paper`` mode's formula; all states fp32, dense gradients only."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step over all parameters that have a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group)


def _update(parameter: Tensor, state: dict[str, Tensor], group: dict) -> None:
    beta1, beta2 = group["betas"]
    if not state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    mean.lerp_(parameter.grad, 1 - beta1)
    square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
    correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
    denominator = (square.sqrt() / correction2**0.5).add_(group["eps"])
    update = (mean / correction1).div_(denominator)
    if group["weight_decay"]:
        update.add_(parameter, alpha=group["weight_decay"])
    weight_norm, update_norm = parameter.norm(2.0), update.norm(2.0)
    one = torch.ones_like(weight_norm)
    ratio = torch.where(weight_norm > 0, torch.where(update_norm > 0, weight_norm / update_norm, one), one)
    parameter.add_(update.mul_(ratio), alpha=-group["lr"])
