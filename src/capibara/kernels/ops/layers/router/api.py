"""route: the public function, and the op behind it."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from capibara.kernels.core.dispatch import run
from capibara.kernels.core.op import Op, register
from capibara.kernels.core.operands import as_array
from capibara.kernels.core.spec import Gradient, Implementation
from capibara.kernels.ops.layers.router import gradient, hopper, mesh, rules, tpu, xla
from capibara.kernels.ops.layers.router.cases import CASES
from capibara.kernels.ops.layers.router.losses import expert_counts
from capibara.kernels.ops.layers.router.peers import PEERS
from capibara.kernels.ops.layers.router.reference import reference

ROUTE = Op(
    "route",
    family="layers",
    reference=reference,
    operands=("logits", "bias"),
    params={"top_k": 1, "gate": "softmax", "normalize": True, "scale": 1.0},
    untuned=("scale",),
    check=rules.check,
    cost=rules.cost,
    tolerance=rules.tolerance,
    gradient=Gradient(gradient.forward, gradient.backward),
    batch=mesh.batch,
    partition=mesh.PARTITION,
    cases=CASES,
    peers=PEERS,
)

ROUTE.implement(
    xla.IMPLEMENTATION,
    tpu.IMPLEMENTATION,
    hopper.IMPLEMENTATION,
    Implementation("reference", reference, ahead_of=xla.sort_is_faster),
)


class Routing(NamedTuple):
    """Each token's experts, best first: their weights and their numbers; and, where asked for, each expert's tokens."""

    weights: Float[Array, "*tokens top_k"]
    indices: Int[Array, "*tokens top_k"]
    counts: Int[Array, " experts"] | None = None


def route(
    logits: Float[Array, "*tokens experts"],
    *,
    top_k: int,
    gate: str = "softmax",
    bias: Float[Array, " experts"] | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    return_counts: bool = False,
    implementation: str | None = None,
    config: Any = None,
) -> Routing:
    """The `top_k` experts of each token with the largest scores, best first, ties to the lowest expert.

    Scores and weights are computed in float32, whatever the logits' type. The gradient flows from the weights to the
    logits; which experts are chosen has none, and neither has the bias. A NaN logit is chosen last and makes all the
    weights of its token NaN; experts are masked out by logits of -inf, and come last with weight 0. A token whose
    chosen experts are all at -inf has NaN weights by the softmax gates and zeros by the sigmoid.

    Args:
      logits: [..., experts], of any float type.
      top_k: how many experts a token goes to.
      gate: what a score is. "softmax": over all experts. "sigmoid": of each logit alone. "softmax_topk": the logit
        itself, and the weights are the softmax over the chosen; the same weights as "softmax" with normalize.
      bias: added to the scores for the choice and not in the weights: balancing without a loss, see `update_bias`.
      normalize: divide a token's weights by their sum.
      scale: multiplies the weights at the end.
      return_counts: also count the tokens of each expert.
      implementation: force one by name ("xla", "pallas_tpu", "hopper", "reference"); a refusal is an error.
      config: that implementation's tuning choices; by default from the tuned table or a rule.

    >>> routing = route(jnp.array([[0.0, 3.0, 3.0, 1.0]]), top_k=2, return_counts=True)
    >>> routing.indices.tolist(), routing.weights.tolist(), routing.counts.tolist()
    ([[1, 2]], [[0.5, 0.5]], [0, 1, 1, 0])
    """
    logits, bias = as_array("route", "logits", logits), as_array("route", "bias", bias, optional=True)
    params = {"top_k": top_k, "gate": gate, "normalize": normalize, "scale": scale}
    weights, indices = run(ROUTE, (logits, bias), params, implementation=implementation, config=config)
    return Routing(weights, indices, expert_counts(indices, logits.shape[-1]) if return_counts else None)


ROUTE.public = route
register(ROUTE)
