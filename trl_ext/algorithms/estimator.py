"""`AdvantageEstimator`: an advantage function with its options, as an algorithm uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trl_ext.advantages import clip_advantages, function_of, options_of
from trl_ext.settings import ADVANTAGE_SETTINGS


class AdvantageEstimator:
    """An advantage function with its options and a clip of its values.

    Args:
        advantage: a name from `ADVANTAGES`, or your own `f(rewards, group_size, ...) -> [N]`, which receives
            `greedy_rewards` and `lengths` if it has these parameters.
        std_ddof, eps: options of those names; None for the function's defaults.
        options: its other options.
        clip: advantages are clipped to plus and minus this; None for no clip.

    Attributes:
        needs_greedy: whether it reads the reward of a greedy response to each prompt.
        group_relative: whether a group of one response has no signal.

    Raises:
        ValueError: an unknown name, an option that the function does not read or that is out of range, or a function
            that does not return one advantage per reward.
    """

    def __init__(
        self,
        advantage: str | Callable,
        *,
        std_ddof: int | None = None,
        eps: float | None = None,
        options: Mapping[str, Any] | None = None,
        clip: float | None = None,
    ):
        self._function = function_of(advantage)
        self._parameters = options_of(advantage)
        self._options = dict(options or {})
        self.name = getattr(self._function, "__name__", str(advantage))
        self.std_ddof = self._resolve("std_ddof", std_ddof)
        self.eps = self._resolve("advantage_eps", eps)
        self.clip = clip
        if clip is not None:
            ADVANTAGE_SETTINGS["advantage_clip"].check("advantage_clip", clip)
        self.needs_greedy = "greedy_rewards" in self._parameters
        self.group_relative = self._compares_responses()

    def __call__(
        self,
        rewards: Tensor,
        group_size: int,
        *,
        greedy_rewards: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Advantages, [N], of rewards, [N].

        Args:
            rewards: a reward that is not finite marks a response that could not be scored.
            group_size: responses per prompt.
            greedy_rewards: [N / group_size], required if `needs_greedy` (otherwise a ValueError).
            lengths: tokens of each response, [N], for an estimator that weights by length.
        """
        known = {}
        for name, value in (("greedy_rewards", greedy_rewards), ("lengths", lengths)):
            if name in self._parameters:
                if value is None:
                    raise ValueError(f"the advantage {self.name!r} needs {name}, and there are none")
                known[name] = value
        advantages = self._function(rewards, group_size, **known, **self._options)
        return advantages if self.clip is None else clip_advantages(advantages, self.clip)

    def _resolve(self, flag: str, value: float | None) -> float | None:
        setting = ADVANTAGE_SETTINGS[flag]
        parameter = self._parameters.get(setting.option)
        if parameter is None:
            if value is not None:
                raise ValueError(
                    f"--{flag} {value} and --advantage {self.name} contradict each other: this estimator does not "
                    f"read {flag}; leave it out, or use --advantage group_normalized"
                )
            return None
        value = parameter.default if value is None else value
        setting.check(flag, value)
        self._options[setting.option] = value
        return value

    def _compares_responses(self) -> bool:
        """Whether a group of one has no signal, found by calling the function, so user functions work too."""
        rewards = torch.tensor([1.0, 2.0, 4.0, 3.0])
        lengths = torch.tensor([3, 5, 2, 4])
        try:
            advantages = self(rewards, 2, greedy_rewards=torch.zeros(2), lengths=lengths)
        except Exception as error:
            raise ValueError(f"the advantage {self.name!r} fails on groups of two made-up rewards: {error}") from error
        if not isinstance(advantages, Tensor) or advantages.shape != rewards.shape:
            got = f"shape {list(advantages.shape)}" if isinstance(advantages, Tensor) else type(advantages).__name__
            raise ValueError(
                f"the advantage {self.name!r} returned {got} for 4 rewards; it must return one advantage for each"
            )
        try:
            advantages = self(rewards, 1, greedy_rewards=torch.zeros(4), lengths=lengths)
            return not bool(advantages[advantages.isfinite()].any())
        except Exception:
            # For example, it divides by the number of other responses.
            return True
