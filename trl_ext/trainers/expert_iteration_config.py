"""`ExpertIterationConfig`: `SFTConfig` with what is sampled, kept and fine-tuned on in each round."""

from __future__ import annotations

from dataclasses import dataclass, field

from trl_ext.trainers.defaults import check_at_least
from trl_ext.trainers.sft_config import SFTConfig

_LEAST = {"n_steps": 1, "questions_per_step": 1, "rollouts_per_question": 1, "sft_epochs": 1, "max_per_question": 1}


@dataclass
class ExpertIterationConfig(SFTConfig):
    """Configuration of `ExpertIterationTrainer`: everything of `SFTConfig` but its length, and the fields below.

    Raises:
        ValueError: a value outside its range, or a setting that each round settles itself.
    """

    n_steps: int = field(default=5, metadata={"help": "Rounds of sampling, keeping what is correct, and fine-tuning."})
    questions_per_step: int = field(default=512, metadata={"help": "Questions drawn for each round."})
    rollouts_per_question: int = field(default=4, metadata={"help": "Responses sampled to each question."})
    sft_epochs: int = field(default=1, metadata={"help": "Passes over the kept responses of a round."})
    max_per_question: int | None = field(
        default=None, metadata={"help": "Keep at most so many different correct responses to a question."}
    )
    use_vllm: bool = field(default=False, metadata={"help": "Sample with vLLM; one process, all parameters."})
    vllm_gpu_memory_utilization: float = field(default=0.3, metadata={"help": "Share of the GPU's memory for vLLM."})
    save_strategy: str = field(
        default="no",
        metadata={"help": "Not used: every round ends with a checkpoint, of which save_total_limit stay."},
    )

    def __post_init__(self):
        check_at_least(self, _LEAST)
        if self.max_steps != -1 or self.num_train_epochs not in (3.0, self.sft_epochs):
            raise ValueError(
                "max_steps and num_train_epochs are not used: n_steps and sft_epochs say how long to train"
            )
        if self.save_strategy != "no" or self.load_best_model_at_end:
            raise ValueError(
                "save_strategy and load_best_model_at_end are not used: every round ends with a checkpoint"
            )
        self.num_train_epochs = self.sft_epochs
        super().__post_init__()
