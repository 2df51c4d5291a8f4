"""Policy losses as loops over rows and tokens in float64, and the plain arithmetic of a policy's update."""

from __future__ import annotations

import math

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_ext.algorithms import Algorithm, algorithms
from trl_ext.losses import PolicyScores


def ragged_batch(seed, rows=5, tokens=6):
    """Random scores in float64: log-probabilities old and new, reference, mask with an empty row, advantages."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * torch.rand(rows, tokens, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
    lengths[0], lengths[-1] = tokens, 0
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    old = uniform(-3.0, -0.1)
    new, reference = old + uniform(-0.6, 0.6), old + uniform(-0.5, 0.5)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    return new, old, reference, mask, advantages


def naive_reduction(rows, kind, constant=None):
    """`rows` are lists of token losses, some of them empty."""
    if kind == "sequence_mean":
        return sum(sum(row) / len(row) for row in rows if row) / len(rows)
    total = sum(sum(row) for row in rows)
    return total / {"token_mean": sum(map(len, rows)), "constant": len(rows) * (constant or 1), "sum": len(rows)}[kind]


def surrogate_by_loops(name, new, old, mask, advantages, options):
    """Token losses of a surrogate, as lists of scalar tensors for each response.

    `new` holds scalar tensors and `advantages` one number for each token. `item()` is where a gradient stops.
    """
    exp, places = torch.exp, [(i, t) for i, row in enumerate(mask) for t, counts in enumerate(row) if counts]
    low, high = options.get("clip_low", 1.0), options.get("clip_high", 1.0)
    losses = [[None] * sum(row) for row in mask]

    def clipped(ratio, advantage):
        if advantage >= 0:
            return -advantage * ratio if ratio.item() <= 1 + high else ratio * 0 - advantage * (1 + high)
        return -advantage * ratio if ratio.item() >= 1 - low else ratio * 0 - advantage * (1 - low)

    for i, t in places:
        lp, advantage, row = new[i][t], advantages[i][t], [s for j, s in places if j == i]
        log_ratios = {s: new[i][s] - old[i][s] for s in row}
        ratio = exp(sum(log_ratios.values()) / len(row) if options.get("ratio") == "sequence" else log_ratios[t])
        if name == "reinforce":
            loss = -advantage * lp
        elif name == "no_clip":
            loss = -advantage * ratio
        elif name == "cispo":
            loss = -advantage * min(ratio.item(), options["ratio_cap"]) * lp
        elif name == "sapo":
            tau = options["temperature_pos" if advantage > 0 else "temperature_neg"]
            loss = -advantage * 4 / tau / (1 + exp(-tau * (ratio - 1)))
        elif name == "gmpo":
            bound, total = options["log_clip"], 0 * lp
            for x in log_ratios.values():
                beyond = x.item() > bound if advantage > 0 else x.item() < -bound
                total = total + (math.copysign(bound, advantage) if beyond else x)
            loss = -advantage * exp(total / len(row))
        elif name == "clip":
            loss, most = clipped(ratio, advantage), -advantage * options.get("dual_clip", math.inf)
            loss = loss * 0 + most if advantage < 0 and loss.item() > most else loss
        losses[i][row.index(t)] = loss
    return losses


# ---- Algorithms on such batches ----


def algorithm(name: str, **settings) -> Algorithm:
    """The algorithm with this name, with other settings."""
    return algorithms.find(name).replace(**settings)


def by_loops(name, aggregation, new, old, mask, advantages, options) -> tuple[float, torch.Tensor]:
    """The loss and its gradient."""
    leaves = [[value.clone().requires_grad_() for value in row] for row in new.detach()]
    shared = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(new)
    rows = surrogate_by_loops(name, leaves, old.tolist(), mask.tolist(), shared.tolist(), options)
    loss = naive_reduction(rows, aggregation, 7.0)
    loss.backward()
    slopes = [torch.stack([v.grad if v.grad is not None else 0 * v.detach() for v in row]) for row in leaves]
    return loss.item(), torch.stack(slopes)


# ---- A trainer's update, from one response at a time ----


class Steps(TrainerCallback):
    """Keeps all weights before each update, and the gradients of those that are trained, by name in float64."""

    def __init__(self):
        self.weights, self.gradients = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = dict(model.named_parameters())
        self.weights.append({name: weight.detach().clone().double() for name, weight in named.items()})
        self.gradients.append({name: w.grad.double() for name, w in named.items() if w.requires_grad})

    def gradient(self, step: int) -> torch.Tensor:
        """Of all parameters of one update, [P]."""
        return torch.cat([gradient.flatten() for gradient in self.gradients[step].values()])


def model_in_float64(policy_path: str, weights: dict | None = None):
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float64)
    if weights is not None:
        model.load_state_dict({name: weight.double() for name, weight in weights.items()})
    return model


def log_probs(model, prompt: list[int], response: list[int], temperature: float = 1.0):
    """Of one response, token by token, without padding."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def rows_of(batch: dict) -> list[tuple[list[int], list[int]]]:
    """Prompt and response ids of a rollout, without padding."""
    keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    return [(p[pm.bool()].tolist(), c[cm.bool()].tolist()) for p, pm, c, cm in zip(*map(batch.get, keys), strict=True)]


def clip(ratio, advantage: float, low: float = 0.05, high: float = 0.05):
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def mean_of_means(losses):
    return sum(row.mean() for row in losses) / len(losses)


def mean_over_tokens(losses):
    return torch.cat(losses).mean()


def mean_of_sums(losses):
    return sum(row.sum() for row in losses) / len(losses)


def over_eight(losses):
    return mean_of_sums(losses) / 8


KL_ESTIMATES = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: torch.exp(-d) - 1 + d}


# ---- Two responses of 3 and 2 tokens, whose losses are worked by hand ----

LOG_RATIO = torch.tensor([[0.3, -0.1, 0.05], [-0.4, 0.2, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = torch.tensor([1.0, -1.0])
NEW = torch.tensor([[-1.0, -0.7, -0.5], [-2.0, -0.3, -0.9]])
OLD = NEW - LOG_RATIO
REFERENCE = NEW + torch.tensor([[0.1, -0.2, 0.05], [0.0, 0.1, 0.0]])
# Rewards of a group.
G = torch.tensor([3.0, 1.0, 0.0, -1.0])


def loss_on_the_batch(algorithm, ref_log_probs=None, **inputs):
    return algorithm.loss(PolicyScores(NEW, OLD, MASK, ADVANTAGES, ref_log_probs=ref_log_probs), **inputs)[0].item()
