"""FLOATER: positions as the path of a learned dynamical system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rope_patch.errors import require
from rope_patch.schemes.base import Scheme, Source
from rope_patch.schemes.rules import Above, AtLeast
from rope_patch.schemes.slots import Checkpoint, ModelShape, Tokens
from rope_patch.schemes.tools.tables import rows_at
from rope_patch.typing import NO_WEIGHTS, Weights


@dataclass(frozen=True)
class FLOATER(Scheme):
    """Carry an initial vector along the positions by a learned flow: p(t) = p(s) + int_s^t h(tau, p).

    The flow h is one small network with two layers, whatever the length of the text. It learns the step from one
    position to the next, so every position has a vector. Here it is W_2 tanh([p, tau] W_1^T + b_1) + b_2. Its speed is
    bounded, so beyond the trained length p grows at most linearly with the text.

    In the paper positions enter every block, all blocks share the flow, and each block has its own initial vector;
    `blocks` selects that. The released code adds the vectors, one each for queries, keys and values, after the
    projections, and keeps the sinusoids or the table at the input; here they are added to the states. That code uses
    ReLU instead of tanh, feeds the time to both layers, takes five solver steps per token, and recomputes the path once
    in 400 updates.

    Every call integrates the path again from 0 to the largest position, step by step (a few evaluations of h per
    position, all kept for the gradients): a text of n tokens takes n steps, and decoding a token at position m takes
    m. `"dopri5"` needs far fewer where the flow is smooth. With `blocks`, every block pays that cost.

    The number of steps depends on the values of the positions, so `torch.compile` leaves the path out of its graph.

    Args:
        width: width of the hidden layer of h; default the hidden size, as released.
        solver: a solver of torchdiffeq: `"euler"`, `"midpoint"` or `"rk4"` with one step per token, or the adaptive
            `"dopri5"` (tolerances 1e-5 relative, 1e-6 absolute). Default `"rk4"`, as released for translation.
        stride: time per token, above 0; default 0.01, as released.
        blocks: add positions to every block; default the first block only.
        initial_std: standard deviation of the initial vectors, and an upper bound for that of the initial h; default
            0.0001, which changes a pretrained model little. With zeros no gradient would reach W_1.
    """

    name = "floater"
    summary = "a learned flow carries the vector of one position to the next"
    equation = "x_m + p(stride m), dp/dtau = h(tau, p; theta)"
    source = Source(
        "Learning to Encode Position for Transformer with Continuous Dynamical Model",
        2020,
        "https://arxiv.org/abs/2003.09229",
        "https://github.com/xuanqing94/FLOATER",
    )
    regime = "fine-tune"
    absolute = True
    breaks_graph = True
    shared = ("initial_positions", "dynamics_in", "dynamics_in_bias", "dynamics_out", "dynamics_out_bias")
    sweep = None  # learned: there is nothing to measure before it is trained

    width: Annotated[int, AtLeast(1)] | None = None
    solver: Literal["euler", "midpoint", "rk4", "dopri5"] = "rk4"
    stride: Annotated[float, Above(0)] = 0.01
    blocks: bool = False
    initial_std: Annotated[float, Above(0)] = 0.0001

    @property
    def every_block(self) -> bool:  # type: ignore[override]
        return self.blocks

    def resolve(self, checkpoint: Checkpoint) -> Scheme:
        _odeint()  # a missing package raises before the model changes
        return self

    def parameters(self, shape: ModelShape, random: torch.Generator) -> dict[str, torch.Tensor]:
        d, width = shape.hidden_size, self.width or shape.hidden_size
        sizes = {
            "initial_positions": ((shape.num_layers if self.blocks else 1, d), self.initial_std),
            "dynamics_in": ((width, d + 1), (d + 1) ** -0.5),
            "dynamics_in_bias": ((width,), 0.0),
            "dynamics_out": ((d, width), self.initial_std * width**-0.5),
            "dynamics_out_bias": ((d,), 0.0),
        }
        return {name: std * torch.randn(size, generator=random) for name, (size, std) in sizes.items()}

    def embedding(self, tokens: Tokens, weights: Weights = NO_WEIGHTS) -> torch.Tensor:
        x = tokens.states
        wide = torch.promote_types(x.dtype, torch.float32)
        initial, *theta = (weights[name].to(wide) for name in self.shared)
        # a compiler would unroll the steps and recompile for every length
        uncompiled = torch.compiler.disable(self._path)
        path = uncompiled(initial[tokens.block if self.blocks else 0], theta, int(tokens.positions.max()))
        return (x + rows_at(path, tokens.positions, self.name)).to(x.dtype)

    def _path(self, start: torch.Tensor, theta: list[torch.Tensor], last: int) -> torch.Tensor:
        """The vectors p at positions 0 to `last`, `(last + 1, hidden)`, from an ODE solver."""
        w_1, b_1, w_2, b_2 = theta

        def velocity(m: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            hidden = torch.nn.functional.linear(torch.cat([p, self.stride * m[None]]), w_1, b_1).tanh()
            return self.stride * torch.nn.functional.linear(hidden, w_2, b_2)

        times = torch.arange(last + 1, dtype=start.dtype, device=start.device)
        return _odeint()(velocity, start, times, rtol=1e-5, atol=1e-6, method=self.solver)


def _odeint() -> Callable[..., torch.Tensor]:
    require("torchdiffeq", "floater")
    from torchdiffeq import odeint

    return odeint
