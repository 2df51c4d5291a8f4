"""`CourseConfig`: `PolicyConfig` with the course's names for batches, baselines and lengths."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.hf_argparser import HfArg

from trl_ext.advantages import options_of
from trl_ext.algorithms import algorithms
from trl_ext.processes import world_size
from trl_ext.trainers import PolicyConfig
from trl_ext.trainers.defaults import check_at_least, check_choice

# The course's name -> the library's name.
SIZES = {
    "group_size": "num_generations",
    "epochs_per_rollout_batch": "num_iterations",
    "rollout_batch_size": "generation_batch_size",
}
ALGORITHMS = {"no_baseline": "reinforce"}
LENGTH_NORMALIZATION = {"masked_mean": "sequence_mean", "masked_normalize": "constant"}
STD_NORMALIZATION = {True: "group_normalized", False: "group_centered"}
# The algorithms of CS336, and its settings for all of them: setting -> the estimator's option and its value.
COURSE_ALGORITHMS = ("grpo", "grpo_no_clip", "dr_grpo", "reinforce_with_baseline", "reinforce")
COURSE_STD = {"std_ddof": ("std_ddof", 1), "advantage_eps": ("eps", 1e-6)}


@dataclass
class CourseConfig(PolicyConfig):
    """`PolicyConfig` with additional names for some settings; each replaces TRL's name for the same setting.

    By default, the course's own algorithms use the sample standard deviation (`std_ddof` 1, `advantage_eps` 1e-6) and
    no KL term (`beta` 0). All others use the values of their papers. `train_batch_size` is given in the course's sense
    and kept in `responses_per_update`; the attribute then has its transformers meaning, the responses in one pass.
    """

    algorithm: str = HfArg(
        default="grpo",
        help="grpo, dr_grpo, reinforce_with_baseline, no_baseline (the same as reinforce), grpo_no_clip, all "
        "five with the sample's standard deviation (std_ddof 1, advantage_eps 1e-6) and beta 0 unless these are "
        "given, or any other that python -m trl_ext.algorithms lists, or your own as file.py:function.",
    )
    rollout_batch_size: int | None = HfArg(
        default=None, help="Responses per rollout, over all processes: generation_batch_size."
    )
    train_batch_size: int | None = HfArg(
        default=None,
        help="Responses per update, over all processes; on-policy where it is rollout_batch_size. It is dealt "
        "out over gradient_accumulation_steps passes of per_device_train_batch_size.",
    )
    epochs_per_rollout_batch: int | None = HfArg(
        default=None, help="How often each rollout is gone through: num_iterations."
    )
    group_size: int | None = HfArg(default=None, help="Responses per prompt: num_generations.")
    n_grpo_steps: int | None = HfArg(
        default=None, help="Rollouts in all: max_steps is so many times the updates of a rollout."
    )
    use_std_normalization: bool | None = HfArg(
        default=None,
        help="Whether the rewards of a group are divided by their standard deviation: advantage "
        "group_normalized or group_centered. Default: the algorithm's own.",
    )
    length_normalization: str | None = HfArg(
        default=None,
        help="masked_mean (over each response: aggregation sequence_mean) or masked_normalize (the sum over a "
        "constant: aggregation constant). Default: the algorithm's own.",
    )

    def __post_init__(self):
        self.algorithm = ALGORITHMS.get(self.algorithm, self.algorithm)
        check_at_least(self, dict.fromkeys((*SIZES, "n_grpo_steps"), 1))
        if self.length_normalization is not None:
            check_choice("length_normalization", self.length_normalization, tuple(LENGTH_NORMALIZATION))
        for word, name in SIZES.items():
            self._same(word, name, getattr(self, word))
        self._same("use_std_normalization", "advantage", STD_NORMALIZATION.get(self.use_std_normalization))
        self._same("length_normalization", "aggregation", LENGTH_NORMALIZATION.get(self.length_normalization))
        if self.algorithm in COURSE_ALGORITHMS:
            self._take_defaults_of_the_course()
        self._split_updates()
        super().__post_init__()
        if self.n_grpo_steps is not None:
            self._same("n_grpo_steps", "max_steps", self.n_grpo_steps * self.updates_per_rollout)

    def set_stop(self, stop: list[str]) -> None:
        """End responses at any of these strings."""
        self.stop = stop
        self._give_generation_limits()

    def _same(self, word: str, name: str, value) -> None:
        """Set a TRL argument from the course's name for it."""
        if value is None:
            return
        given, default = getattr(self, name), type(self).__dataclass_fields__[name].default
        if given not in (default, value):
            raise ValueError(
                f"--{word} means {name} {value}, and {name} is {given}, perhaps in the configuration: give --{name}"
            )
        setattr(self, name, value)

    def _take_defaults_of_the_course(self) -> None:
        read = options_of(self.advantage or algorithms[self.algorithm].advantage)
        for name, (option, value) in COURSE_STD.items():
            if option in read and getattr(self, name) is None:
                setattr(self, name, value)
        if self.beta is None:
            self.beta = 0.0

    def _split_updates(self) -> None:
        """Split the responses of an update into passes of `per_device_train_batch_size`."""
        update = self.responses_per_update
        if update is None:
            return
        if self.generation_batch_size is None:
            self.generation_batch_size = update
        one_pass = self.per_device_train_batch_size * world_size()
        if update < 1 or self.generation_batch_size % update or update % one_pass:
            raise ValueError(
                f"train_batch_size {update} must divide rollout_batch_size {self.generation_batch_size}, and be a "
                f"multiple of per_device_train_batch_size x processes, {one_pass}"
            )
        self._same("train_batch_size", "gradient_accumulation_steps", update // one_pass)


def _set_responses_per_update(config: CourseConfig, value: int | None) -> None:
    config.responses_per_update = value


# transformers has a property of this name: the responses in one pass, from which its trainer builds batches. It keeps
# that meaning when read, even if passes become smaller during a run.
CourseConfig.train_batch_size = PolicyConfig.train_batch_size.setter(_set_responses_per_update)
